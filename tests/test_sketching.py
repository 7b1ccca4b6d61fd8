"""What anchors make of weights by kernels against the torch forms: combinations of rows, in every layout."""

from collections.abc import Callable

import pytest
import torch
from conftest import both, interpreted, launches, randomize
from torch import Tensor, nn

from common import kernels
from common.anchors import ConvAnchor, KeysAndValues, MergeAnchor, PooledProjections, ProjectionAnchor
from common.ops.energy import ConvEnergy, affine_combined, plain_taps
from common.ops.merge_energy import MergeEnergy, Merging, Mergings
from common.ops.projection_energy import pooled_taps
from mvitv2.model import PoolingAttention

pytestmark = pytest.mark.as_on_gpu("weights")


@interpreted
@pytest.mark.parametrize(
    ("shape", "sketch"), [((32, 3, 4, 4), 4), ((40, 16, 3, 3), 8), ((17, 5, 1, 1), 3), ((9, 8), 4)]
)
@pytest.mark.parametrize("biased", [True, False])
def test_sketched_weights(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], sketch: int, biased: bool) -> None:
    """A few combinations of all rows, of a bias in the same launch: whole blocks of columns and others."""
    anchor, weight, bias = ConvAnchor(sketch=sketch), torch.randn(shape), torch.randn(shape[0]) if biased else None
    fast, plain = both(monkeypatch, lambda: affine_combined(anchor, weight, bias))
    assert fast[0].shape == plain[0].shape == (sketch, *shape[1:])
    assert torch.allclose(fast[0], plain[0], atol=1e-5, rtol=1e-5)
    assert (fast[1] is None) == (bias is None)
    assert bias is None or torch.allclose(fast[1], plain[1], atol=1e-5, rtol=1e-5)


Taps = Callable[[bool], tuple[Tensor, ...]]


def assert_same_taps(monkeypatch: pytest.MonkeyPatch, prepared: Taps | None, plain: Taps, paired: bool,
                     calls: list[str]) -> None:  # fmt: skip
    """That these kernels make all of what the readable code makes: memory is no number before it is written."""
    launched = launches(monkeypatch, "sketching", "merge_weights")
    assert prepared is not None
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        results = prepared(paired)
    finally:
        torch.use_deterministic_algorithms(False)
    assert launched == calls
    monkeypatch.setattr(kernels.base, "ENABLED", False)
    for found, expected in zip(results, plain(paired), strict=True):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


LAYOUTS = pytest.mark.parametrize(("paired", "sketch"), [(True, 4), (False, 4), (False, 8)])


@interpreted
@LAYOUTS
@pytest.mark.parametrize(("kernel", "channels", "biased"), [(2, 16, True), (3, 24, True), (3, 5, False)])
@torch.no_grad()
def test_taps_of_a_convolution(monkeypatch: pytest.MonkeyPatch, kernel: int, channels: int, biased: bool, paired: bool,
                               sketch: int) -> None:  # fmt: skip
    anchor, conv = ConvAnchor(sketch=sketch), nn.Conv2d(channels, 40, kernel, 2, bias=biased)
    energy = ConvEnergy(conv, anchor)
    weight, bias = energy.combined(torch.float32)
    assert_same_taps(monkeypatch, lambda paired: kernels.convolution_taps(energy.projection(), conv.weight, conv.bias,
                                                                        torch.float32, paired),
                     lambda paired: plain_taps(weight, bias, torch.float32, paired), paired,
                     ["_convolution_taps"])  # fmt: skip


@interpreted
@LAYOUTS
@pytest.mark.parametrize("channels", [32, 20])
@torch.no_grad()
def test_taps_of_keys_and_values(monkeypatch: pytest.MonkeyPatch, channels: int, paired: bool, sketch: int) -> None:
    anchor = ProjectionAnchor(sketch=sketch)
    key, value = (nn.Conv2d(channels, channels, 3, 2, 1, groups=channels, bias=False) for _ in range(2))
    (projection,) = KeysAndValues(nn.LayerNorm(channels), key, value).projections(anchor)
    directions = anchor.directions[:, : 2 * channels]
    assert_same_taps(monkeypatch, lambda paired: kernels.depthwise_taps(directions, key.weight, value.weight,
                                                                        torch.float32, paired),
                     lambda paired: plain_taps(projection.weight, None, torch.float32, paired), paired,
                     ["_depthwise_taps"])  # fmt: skip


@interpreted
@LAYOUTS
@pytest.mark.parametrize(("stride_q", "stride_kv", "stride"), [(2, 2, 2), (1, 4, 4), (2, 1, 2)])
@torch.no_grad()
def test_taps_of_poolings(monkeypatch: pytest.MonkeyPatch, stride_q: int, stride_kv: int, stride: int, paired: bool,
                          sketch: int) -> None:  # fmt: skip
    """Of queries, keys and values, of keys and values, and of queries alone: with projection and heads. What is added
    is left in nine parts to a kernel that adds them up."""
    attn = randomize(PoolingAttention(dim=20, out_dim=24, size=(8, 8), num_heads=2, stride_q=stride_q, circular=True,
                                      stride_kv=stride_kv, padding_mode="circular"))  # fmt: skip
    anchor, layer = (
        ProjectionAnchor(sketch=sketch),
        PooledProjections(nn.LayerNorm(20), (stride, stride), attn.poolings()),
    )
    (projection,), pooling = layer.projections(anchor), layer.pooling()

    def prepared(paired: bool) -> tuple[Tensor, ...]:
        ((taps, parts),) = pooled_taps([pooling], anchor, torch.float32, paired)
        return taps, parts.sum(0) if paired else parts

    assert_same_taps(monkeypatch, prepared,
                     lambda paired: plain_taps(projection.weight, projection.bias, torch.float32, paired), paired,
                     ["_pooled_taps"])  # fmt: skip


@interpreted
@LAYOUTS
@torch.no_grad()
def test_taps_of_several_poolings(monkeypatch: pytest.MonkeyPatch, paired: bool, sketch: int) -> None:
    """Five in one launch, of other widths, heads and poolings each, and what is left in another."""
    anchor, layers = ProjectionAnchor(sketch=sketch), []
    for dim, heads, strides, stride in ((20, 1, (1, 4), 4), (8, 2, (2, 2), 2), (24, 2, (1, 2), 2), (17, 3, (2, 1), 2),
                                        (32, 1, (2, 2), 2), (16, 1, (2, 1), 2)):  # fmt: skip
        attn = PoolingAttention(dim=dim, out_dim=24 * heads, size=(8, 8), num_heads=heads, stride_q=strides[0],
                                stride_kv=strides[1], circular=True, padding_mode="circular")  # fmt: skip
        layers.append(PooledProjections(nn.LayerNorm(dim), (stride, stride), randomize(attn).poolings()))
    kept = [projection for layer in layers for projection in layer.projections(anchor)]

    def prepared(paired: bool) -> tuple[Tensor, ...]:
        found = pooled_taps([layer.pooling() for layer in layers], anchor, torch.float32, paired)
        return tuple(t for taps, parts in found for t in (taps, parts.sum(0) if paired else parts))

    def plain(paired: bool) -> tuple[Tensor, ...]:
        return tuple(t for one in kept for t in plain_taps(one.weight, one.bias, torch.float32, paired))

    assert_same_taps(monkeypatch, prepared, plain, paired, ["_pooled_taps", "_pooled_taps"])


@interpreted
@pytest.mark.parametrize("normalised", [True, False])
@LAYOUTS
@torch.no_grad()
def test_taps_of_a_merging(monkeypatch: pytest.MonkeyPatch, normalised: bool, paired: bool, sketch: int) -> None:
    anchor, reduction, norm = MergeAnchor(sketch=sketch), nn.Linear(80, 40, bias=False), randomize(nn.LayerNorm(80))
    given, x = norm if normalised else None, torch.randn(1, 4, 4, 20)

    def prepared(paired: bool) -> tuple[Tensor, ...]:
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "fits_token_scores", lambda *args: paired)
            patch.setattr(kernels, "fits_merged_product", lambda *args: False)
            found = Mergings(x, [Merging(reduction, given)], anchor).take(reduction)
        assert found is not None
        whole = [] if found.sums is None else [t.sum(0) if paired else t for t in (found.sums, found.constant)]
        return found.taps.flatten(0, -2), *whole

    def plain(paired: bool) -> tuple[Tensor, ...]:
        kernel, sums, constant = MergeEnergy(reduction, given, anchor).combined()
        return plain_taps(kernel, None, torch.float32, paired)[0], *([] if sums is None else [sums, constant])

    assert_same_taps(monkeypatch, prepared, plain, paired, ["_merging_weights"])
