"""Patch merging in one product, without the patches: kernels, what they make of weights, models that run on them."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from conftest import interpreted, launches, lively, pairs
from torch import nn

from common import kernels
from common.anchors import MergeAnchor, WindowAnchor
from common.models.registry import create_model
from common.ops import merge_patches, reduce_patches
from common.ops.choice import best_partition
from common.ops.merge_energy import MergeEnergy, Merging, Mergings

PHASES = [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the merging kernels that ran, in turn."""
    return launches(monkeypatch, "merging", "merge_product")


@interpreted
@pytest.mark.parametrize(("channels", "outputs", "kind", "fewest"), [
    (96, 192, "norm", 0), (20, 40, "norm", 0), (32, 256, "norm", 0), (16, 300, "norm", 0), (20, 384, "norm", 0),
    (64, 384, "norm", 0), (20, 40, "norm without bias", 0), (96, 192, "no norm", 0), (16, 300, "no norm", 0),
    (64, 384, "no norm", 0), (96, 192, "norm", 96), (20, 40, "no norm", 96), (128, 300, "norm", 96),
])  # fmt: skip
@torch.no_grad()
def test_merged_product(monkeypatch: pytest.MonkeyPatch, launched: list[str], channels: int, outputs: int, kind: str,
                        fewest: int) -> None:  # fmt: skip
    """Inference in one kernel gives what the three steps give: whole blocks and others, a block that begins inside an
    image, every phase and whole turns less one, a mean far from zero; cut as for many images, or as for these."""
    monkeypatch.setattr(kernels.merge_product, "FEWEST", fewest)
    norm = None if kind == "no norm" else lively(nn.LayerNorm(4 * channels, bias=kind == "norm"))
    reduction = nn.Linear(4 * channels, outputs, bias=False)
    x = torch.randn(6, 14, 10, channels) + torch.tensor([0.0, 30.0, -30.0, 1.0, 3.0, 0.0]).view(6, 1, 1, 1)
    offset = torch.tensor([*PHASES, (13, 9), (6, 9)])
    ((fast, plain),) = pairs(monkeypatch, lambda: [reduce_patches(x, offset, norm, reduction)[0]])
    assert launched == ["_merged_product"]
    assert torch.allclose(fast, plain, atol=2e-4, rtol=1e-4)


@interpreted
@pytest.mark.parametrize(("outputs", "known"), [(192, True), (40, True), (384, False)])
@torch.no_grad()
def test_moments_of_a_merged_product(monkeypatch: pytest.MonkeyPatch, outputs: int, known: bool) -> None:
    """What a pass of its own would find; left to one where no program has all outputs of a token."""
    monkeypatch.setattr(kernels.merge_product, "FEWEST", 0)
    norm, reduction = lively(nn.LayerNorm(80)), nn.Linear(80, outputs, bias=False)
    x, offset, direction = torch.randn(4, 6, 14, 20), torch.tensor(PHASES), torch.randn(outputs + 3)
    tokens, moments = reduce_patches(x, offset, norm, reduction, direction=direction)
    assert torch.equal(tokens, reduce_patches(x, offset, norm, reduction)[0])
    assert (moments is not None) == known
    if moments is not None:
        assert torch.allclose(moments, kernels.token_moments(tokens, direction), atol=1e-4, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("normalised", [True, False])
@torch.no_grad()
def test_merged_product_in_half_precision(normalised: bool) -> None:
    """Weights are rounded and so is the result; the mean, here twenty deviations, costs no precision beyond that."""
    norm = lively(nn.LayerNorm(4 * 32)) if normalised else None
    x, offset = (20 * normalised + torch.randn(2, 4, 6, 32)).half(), torch.tensor([(1, 3), (0, 4)])
    weight = torch.randn(64, 128) / 128**0.5
    gains, biases = ([], []) if norm is None else ([norm.weight], [norm.bias])
    sums, squares = (None, None) if norm is None else (x.float().sum(-1), x.float().square().sum(-1))
    given = kernels.Mergings([weight], None, gains, biases, x.dtype, x.dtype, [True], [False])
    _, _, scaled, folded = kernels.merging_weights(given)[0]
    out, _ = kernels.merged_product(x, offset, scaled, folded if normalised else None, sums, squares, 1e-5)
    expected = merge_patches(x.double(), offset, None if norm is None else deepcopy(norm).double()) @ weight.double().T
    assert out.dtype == torch.half
    assert torch.allclose(out.double(), expected, atol=2e-3, rtol=1e-3)


@interpreted
@torch.no_grad()
def test_merged_product_of_sums_that_lie_anywhere() -> None:
    """Tokens' sums are parts of one tensor, or two tensors, or transposed: the same result to the bit."""
    x, offset, weight = torch.randn(3, 4, 6, 16), torch.tensor([(1, 1), (0, 1), (3, 5)]), torch.randn(32, 64)
    gain, both_sums = torch.randn(64), torch.stack([x.sum(-1), x.square().sum(-1)], 1)
    sums, squares = both_sums.unbind(1)
    alone = kernels.Mergings([weight], None, [gain], [], x.dtype, x.dtype, [True], [False])
    _, _, scaled, folded = kernels.merging_weights(alone)[0]
    out, _ = kernels.merged_product(x, offset, scaled, folded, sums, squares, 1e-5)
    for total, square in [
        (sums.contiguous(), squares), (sums.contiguous(), squares.contiguous()),
        (sums.mT.contiguous().mT, squares.mT.contiguous().mT),
    ]:  # fmt: skip
        assert torch.equal(kernels.merged_product(x, offset, scaled, folded, total, square, 1e-5)[0], out)


@interpreted
@pytest.mark.as_on_gpu("weights")
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(
    ("channels", "outputs", "sketch"), [(24, 48, 4), (20, 33, 16), (7, 12, 3), (8, 24, 17), (16, 32, 0)]
)
@torch.no_grad()
def test_weights_of_a_merging(channels: int, outputs: int, sketch: int, normalised: bool) -> None:
    """One launch makes what the anchor scores and what the product takes; they are what the readable code makes."""
    norm, reduction = lively(nn.LayerNorm(4 * channels)), nn.Linear(4 * channels, outputs, bias=False)
    anchor, x = MergeAnchor(sketch=sketch), torch.randn(1, 4, 4, channels)
    given = norm if normalised else None
    prepared = Mergings(x, [Merging(reduction, given)], anchor).take(reduction)
    assert prepared is not None
    assert prepared.scaled is not None
    assert (prepared.taps is not None) == (sketch > 0)
    kernel, sums, constant = MergeEnergy(reduction, given, anchor).combined()
    if prepared.taps is not None and not prepared.paired:
        taps = prepared.taps.unflatten(0, (2, 2)).permute(2, 3, 0, 1)
        assert torch.allclose(taps, kernel, atol=1e-5, rtol=1e-5)
        if normalised:
            assert torch.allclose(prepared.sums, sums, atol=1e-4, rtol=1e-5)
            assert torch.allclose(prepared.constant, constant, atol=1e-4, rtol=1e-5)
    if normalised:
        assert torch.allclose(prepared.folded[0], (reduction.weight * norm.weight).sum(1), atol=1e-5)
        assert torch.allclose(prepared.folded[1], reduction.weight @ norm.bias, atol=1e-5)
    assert torch.equal(prepared.scaled, reduction.weight * norm.weight if normalised else reduction.weight)
    offset = torch.tensor([[1, 3]])
    out, _ = reduce_patches(x, offset, given, reduction, prepared)
    assert torch.equal(out, reduce_patches(x, offset, given, reduction)[0])
    known = anchor.choose(x, reduction, given, low_precision=True, prepared=prepared)
    assert torch.equal(known, anchor.choose(x, reduction, given, low_precision=True))


def several(count: int, normalised: bool) -> list[Merging]:
    """Some for one pass (32 and 64 channels are known), some not."""
    mergings = []
    for i, channels in enumerate((32, 24, 64, 40)[:count]):
        norm, reduction = lively(nn.LayerNorm(4 * channels)), nn.Linear(4 * channels, 2 * channels + i, bias=False)
        mergings.append(Merging(reduction, norm if normalised else None))
    return mergings


@interpreted
@pytest.mark.as_on_gpu("weights")
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4])
@torch.no_grad()
def test_weights_of_several_mergings(monkeypatch: pytest.MonkeyPatch, count: int,
                                     normalised: bool) -> None:  # fmt: skip
    """Those of each by itself, to the bit, from one launch for three."""
    anchor, x, mergings = MergeAnchor(sketch=4), torch.randn(1, 4, 4, 8), several(count, normalised)
    launched = launches(monkeypatch, "merge_weights")
    plan = Mergings(x, mergings, anchor)
    together = [plan.take(merging.reduction) for merging in mergings]
    assert launched == ["_merging_weights"] * (1 if count < 4 else 2)
    assert [weights.paired for weights in together] == [True, False, True, False][:count]
    for merging, weights in zip(mergings, together, strict=True):
        alone = Mergings(x, [merging], anchor).take(merging.reduction)
        for one, other in zip(weights, alone, strict=True):
            assert (one is None) == (other is None)
            assert one is None or isinstance(one, bool) or torch.equal(one, other)


@interpreted
@pytest.mark.as_on_gpu("weights")
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("size", "window"), [((14, 14), (7, 7)), ((12, 24), (4, 6))])
@torch.no_grad()
def test_windows_beside_weights(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], window: tuple[int, int],
                                normalised: bool) -> None:  # fmt: skip
    """One launch chooses windows of several images and makes the weights of mergings: both as by themselves."""
    windows, anchor, x = WindowAnchor(), MergeAnchor(sketch=4), torch.randn(3, *size, 8)
    mergings = several(2, normalised)
    offset, apart = windows.offset(x, window, low_precision=True), Mergings(x, mergings, anchor)
    _, square, along = kernels.token_moments(x, windows.direction).unbind(1)
    launched, plan = launches(monkeypatch, "merge_weights", "choices"), Mergings(x, mergings, anchor)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    chosen = best_partition(square, along, windows.window_weights, window, 2, 0.1 * (2 / 8) ** 0.5, None, plan)
    monkeypatch.undo()
    assert launched == ["_merging_weights"]
    assert torch.equal(chosen, offset)
    for merging in mergings:
        for one, other in zip(plan.take(merging.reduction), apart.take(merging.reduction), strict=True):
            assert one is None or isinstance(one, bool) or torch.equal(one, other)


@interpreted
@torch.no_grad()
def test_tokens_in_float32_are_scored_as_they_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast leaves the sum behind a norm in float32. Lost otherwise: one pass for the score, on a GPU."""
    anchor, reduction = MergeAnchor(sketch=4), nn.Linear(4 * 32, 64, bias=False)
    x = torch.randn(2, 6, 8, 32)
    weights = Mergings(x.half(), [Merging(reduction, None)], anchor).take(reduction)
    launched = launches(monkeypatch, "token_energy", "token_rows", "token_scores")
    offset = anchor.choose(x, reduction, None, low_precision=True, prepared=weights)
    assert launched in (["_token_rows"], ["_token_scores"])
    assert torch.equal(offset, anchor.choose(x.half(), reduction, None, low_precision=True, prepared=weights))


@interpreted
@pytest.mark.parametrize("name", ["a_swin_micro", "a_swinv2_micro"])
@torch.no_grad()
def test_models_infer_through_the_merged_product(monkeypatch: pytest.MonkeyPatch, launched: list[str],
                                                 name: str) -> None:  # fmt: skip
    """Every merging of a model in inference is one product, and the logits are those of the separate steps."""
    model: Any = create_model(name, sketch=4).eval()
    x, merges = torch.randn(1, 3, 32, 32), len(model.layers) - 1
    fast = model(x)
    assert launched.count("_merged_product") == merges > 0
    assert "_rolled_merge" not in launched
    monkeypatch.setattr(kernels, "fits_merged_product", lambda x, weight, dtype: False)
    assert torch.allclose(fast, model(x), atol=1e-4, rtol=1e-3)
    assert launched.count("_rolled_merge") == merges


@pytest.mark.parametrize(("images", "side", "channels", "block"), [
    (1, 56, 96, (64, 32, 32)), (4, 56, 96, (64, 128, 32)), (16, 56, 96, (128, 192, 32)), (1, 28, 192, (32, 32, 64)),
    (8, 28, 192, (64, 128, 64)), (128, 28, 192, (192, 192, 64)), (1, 14, 384, (64, 32, 128)),
    (32, 14, 384, (64, 128, 64)), (128, 14, 384, (192, 192, 64)),
])  # fmt: skip
def test_a_merged_product_of_few_patches_is_cut_small(images: int, side: int, channels: int,
                                                      block: tuple[int, int, int]) -> None:  # fmt: skip
    """Patches, outputs and columns at a time. A few programs take as long as a hundred: a single image would wait for
    them."""
    tiles = kernels.merge_product._tiles(images * (side // 2) ** 2, channels, 2 * channels)
    assert (tiles["T"] + tiles["MORE"], tiles["N"] + tiles["REST"], tiles["K"]) == block


@interpreted
def test_what_the_merged_product_leaves_to_others() -> None:
    """Gradients, more outputs than one reading of the patches serves, a reduction or a norm that is not plain."""
    x, offset, norm = torch.randn(2, 4, 6, 8), torch.ones(2, 2, dtype=torch.long), nn.LayerNorm(32)
    weight = torch.randn(16, 32)
    assert not kernels.fits_merged_product(x, weight, x.dtype)  # gradients are on
    learned = nn.Linear(32, 16, bias=False)
    assert reduce_patches(x, offset, norm, learned)[0].requires_grad
    with torch.no_grad():
        assert kernels.fits_merged_product(x, weight, x.dtype)
        assert not kernels.fits_merged_product(x, torch.randn(769, 32), x.dtype)
        assert not kernels.fits_merged_product(x.double(), weight.double(), torch.float64)
        assert not kernels.fits_merged_product(x[:, :3], weight, x.dtype)
        biased, plain = nn.Linear(32, 16), nn.LayerNorm(32, elementwise_affine=False)
        for n, r in [(norm, biased), (plain, learned), (None, biased)]:
            assert torch.equal(reduce_patches(x, offset, n, r)[0], r(merge_patches(x, offset, n)))
        assert torch.equal(reduce_patches(x, None, norm, learned)[0], learned(merge_patches(x, None, norm)))
