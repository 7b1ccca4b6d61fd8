"""Anchors in float64: whatever they choose, the tokens they return are the same tokens, at the place they say."""

import pytest
import torch
from conftest import ALL_PHASES, awkward_images, randomize
from torch import Tensor, nn

from common import create_model
from common.anchors import (
    ConvAnchor,
    KeysAndValues,
    MergeAnchor,
    PooledProjections,
    ProjectionAnchor,
    WindowAnchor,
    best_offset,
    phase_scores,
    token_energy,
)
from common.evaluation.equivariance import anchored, assert_shift_equivariant, dense, invariant, shift_error
from common.models.upsample import unpool
from common.ops import merge_patches
from common.ops.projection_energy import Pooling
from common.shifts import roll

SHIFTS = [*ALL_PHASES, (9, -7), (-30, 41), (56, 28)]
SIZES = [(28, 28), (28, 56)]


def image(size: tuple[int, int], channels: int = 3, batch: int = 2) -> Tensor:
    return torch.randn(batch, channels, *size, dtype=torch.float64)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("conv", [
    nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(3, 8, 7, stride=4, padding=2), nn.Conv2d(3, 8, 7, stride=4, padding=3),
    nn.Conv2d(3, 3, 3, stride=2, padding=1, groups=3, bias=False),
], ids=["patch", "k7p2", "k7p3", "depthwise"])  # fmt: skip
@pytest.mark.parametrize("score", ["signed", "energy"])
def test_strided_convolution_after_its_anchor(conv: nn.Conv2d, size: tuple[int, int], score: str) -> None:
    circular = nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding,
                         groups=conv.groups, bias=conv.bias is not None, padding_mode="circular").double()  # fmt: skip
    anchor = ConvAnchor(score=score)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        x, offset = anchor(x, circular)
        return circular(x), offset

    assert_shift_equivariant(f, image(size), SHIFTS, anchored(conv.stride[0]))
    unanchored = lambda x: (circular(x), torch.zeros(2, 2, dtype=torch.long))  # noqa: E731
    with pytest.raises(AssertionError):
        assert_shift_equivariant(unanchored, image(size), [(1, 0)], anchored(conv.stride[0]))


def test_conv_anchor_picks_the_phase_of_most_energy() -> None:
    conv = nn.Conv2d(3, 8, 4, stride=4).double()
    nn.init.normal_(conv.bias)
    x = image((28, 28), batch=32)
    energy = torch.stack([
        conv(roll(x, torch.tensor(phase).expand(32, 2))).square().sum((1, 2, 3)) for phase in ALL_PHASES
    ], 1)  # fmt: skip
    expected = torch.tensor(ALL_PHASES)[energy.argmax(1)]
    assert torch.equal(ConvAnchor(score="energy").offset(x, conv), expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("normed", [True, False])
def test_patch_merging_after_its_anchor(size: tuple[int, int], normed: bool) -> None:
    norm, reduction = nn.LayerNorm(12).double(), nn.Linear(12, 6, bias=False).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    anchor = MergeAnchor()

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        x, offset = anchor(x.permute(0, 2, 3, 1), reduction, norm if normed else None)
        return reduction(norm(merge_patches(x))), offset

    assert_shift_equivariant(f, image(size), SHIFTS, anchored(2, dims=(1, 2)))


def test_folded_layer_norm_scores_as_the_stock_merging_does() -> None:
    norm, reduction = nn.LayerNorm(12).double(), nn.Linear(12, 6, bias=False).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = image((28, 56), batch=32).permute(0, 2, 3, 1) + 1
    phases = [(0, 0), (0, 1), (1, 0), (1, 1)]
    energy = torch.stack([
        reduction(norm(merge_patches(roll(x, torch.tensor(p).expand(32, 2), (1, 2))))).square().sum((1, 2, 3))
        for p in phases
    ], 1)  # fmt: skip
    expected = torch.tensor(phases)[energy.argmax(1)]
    assert torch.equal(MergeAnchor(score="energy").offset(x, reduction, norm), expected)


@pytest.mark.parametrize("size", [(28, 28), (28, 56), (7, 7), (14, 7), (7, 21)], ids=str)
@pytest.mark.parametrize("score", ["signed", "energy"])
def test_windows_after_their_anchor_hold_the_same_tokens(size: tuple[int, int], score: str) -> None:
    """A single window (7 x 7), and a single window on one axis, have no partition to choose: they must not tie."""
    anchor = WindowAnchor(score=score)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        x, offset = anchor(x.permute(0, 2, 3, 1), (7, 7))
        windows = x.reshape(2, size[0] // 7, 7, size[1] // 7, 7, 3).permute(0, 1, 3, 2, 4, 5)
        return windows.flatten(3), offset  # one row per window: equal only if its tokens stand in the same order

    shifts = [(h, w) for h in range(7) for w in range(7)] + [(-9, 40), (70, -3)]
    assert_shift_equivariant(f, image(size), shifts, anchored(7, dims=(1, 2)))


def test_window_anchor_follows_the_papers_score() -> None:
    x = image((14, 21), batch=16).permute(0, 2, 3, 1)
    norms, best = x.norm(dim=-1), []
    for sample in norms:
        scores = {}
        for h in range(7):
            for w in range(7):
                windows = sample.roll((-h, -w), (0, 1)).view(2, 7, 3, 7).mean((1, 3))
                scores[h, w] = windows.square().sum().sqrt().item()
        best.append(max(scores, key=lambda key: scores[key]))
    assert WindowAnchor(score="energy").offset(x, (7, 7)).tolist() == [list(b) for b in best]


def test_signed_score_tells_a_token_from_its_negative() -> None:
    """Stripes of +-1, two pixels wide, under a convolution without bias: equal energies, different content."""
    conv = nn.Conv2d(3, 8, 4, stride=4, bias=False).double()
    stripes = awkward_images(28)["stripes"].double()

    def f(score: str, x: Tensor) -> Tensor:
        return conv(ConvAnchor(score=score)(x, conv)[0]).mean((2, 3))  # rows are equal: any row offset will do

    assert_shift_equivariant(lambda x: f("signed", x), stripes, SHIFTS)
    errors = [shift_error(lambda x: f("energy", x), stripes, shift) for shift in SHIFTS]
    assert max(errors) > 0.1  # the paper's score does tie here: the option exists, and this is its price


@pytest.mark.parametrize("kind", ["one bright token", "levelled norms"])
def test_windows_do_not_tie_where_the_papers_score_does(kind: str) -> None:
    x = torch.zeros(1, 3, 14, 14, dtype=torch.float64)
    x[0, :, 3, 5] = 1
    if kind == "levelled norms":
        x = torch.nn.functional.normalize(torch.randn_like(x), dim=1)

    def f(score: str, x: Tensor) -> tuple[Tensor, Tensor]:
        x, offset = WindowAnchor(score=score)(x.permute(0, 2, 3, 1), (7, 7))
        return x.reshape(1, 2, 7, 2, 7, 3).permute(0, 1, 3, 2, 4, 5).flatten(3), offset

    shifts = [(h, w) for h in range(7) for w in range(7)]
    assert_shift_equivariant(lambda x: f("signed", x), x, shifts, anchored(7, dims=(1, 2)))
    with pytest.raises(AssertionError):
        assert_shift_equivariant(lambda x: f("energy", x), x, shifts, anchored(7, dims=(1, 2)))


def test_scores_are_taken_in_full_precision_outside_autocast() -> None:
    conv, x = nn.Conv2d(3, 8, 4, stride=4), torch.randn(8, 3, 28, 28)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ConvAnchor().offset(x, conv), ConvAnchor().offset(x.double(), conv.double()))


def test_phase_scores_and_energy() -> None:
    energy = torch.arange(16.0).view(1, 4, 4)
    scores = phase_scores(energy, (2, 2))
    assert scores.tolist() == [[[20, 24], [36, 40]]]
    assert scores.dtype == torch.float64  # near ties are decided by what float32 would round away
    assert best_offset(scores).tolist() == [[1, 1]]
    assert token_energy(torch.tensor([[3.0, 4.0]]).view(1, 2, 1, 1), "energy", 1).item() == 25
    with pytest.raises(ValueError, match="does not divide into phases"):
        phase_scores(energy, (3, 2))


class MergeClassifier(nn.Module):
    """The paper's first example (appendix, A-pmerge usage): adaptive merging, mean over the grid, a linear layer."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)
        self.anchor, self.head = MergeAnchor(), nn.Linear(2 * dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.anchor(x.permute(0, 2, 3, 1), self.reduction, self.norm)
        return self.head(self.reduction(self.norm(merge_patches(x))).mean((1, 2)))


def test_papers_merging_classifier_is_invariant() -> None:
    model = MergeClassifier(dim=3, num_classes=4).double().eval()
    shifts = [(h, w) for h in range(-3, 4) for w in range(-3, 4)]
    assert_shift_equivariant(model, image((8, 8)), shifts, invariant)


class EncoderDecoder(nn.Module):
    """The paper's second example (appendix, simple encoder-decoder): merge, choose windows, unpool to where it was."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)
        self.merge_anchor, self.window_anchor = MergeAnchor(), WindowAnchor()

    def forward(self, x: Tensor) -> Tensor:
        x, merged = self.merge_anchor(x.permute(0, 2, 3, 1), self.reduction, self.norm)
        x, windowed = self.window_anchor(self.reduction(self.norm(merge_patches(x))), (7, 7))
        return roll(unpool(x.permute(0, 3, 1, 2), 2), -(merged + 2 * windowed))


def test_papers_encoder_decoder_moves_with_its_input() -> None:
    model = EncoderDecoder(dim=3).double().eval()
    shifts = [(h, w) for h in range(-6, 7, 3) for w in range(-6, 7)]
    assert_shift_equivariant(model, image((28, 28)), shifts, dense)


def test_the_helper_fails_what_is_not_equivariant() -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1).double()  # zero padding: wrong at the border only
    with pytest.raises(AssertionError, match="not shift-equivariant"):
        assert_shift_equivariant(conv, image((28, 28)), [(1, 0)], dense)
    nan = lambda x: x.mean((1, 2, 3)) * float("nan")  # noqa: E731
    with pytest.raises(AssertionError, match="not shift-equivariant"):
        assert_shift_equivariant(nan, image((28, 28)), [(1, 0)])
    with pytest.raises(AssertionError, match="do not lie on one grid"):
        shift_error(lambda x: (x, torch.zeros(2, 2, dtype=torch.long)), image((28, 28)), (1, 0), anchored(2))
    with pytest.raises(ValueError, match="no shift"):
        assert_shift_equivariant(conv, image((28, 28)), [])


def depthwise(channels: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False, padding_mode="circular").double()


@pytest.mark.parametrize("kind", ["keys and values", "pooled at two strides"])
@torch.no_grad()
def test_projection_anchor_picks_the_phase_of_most_energy(kind: str) -> None:
    """Any invariant score is equivariant: only the definition tells whether it is the paper's."""
    norm, qkv, x = nn.LayerNorm(8).double(), nn.Linear(8, 24).double(), image((16, 16), 8).permute(0, 2, 3, 1) * 3 + 1
    for tensor in (norm.weight, norm.bias):
        nn.init.normal_(tensor)
    two, four, other = depthwise(8, 2), depthwise(8, 4), depthwise(8, 4)
    layer: KeysAndValues | PooledProjections = KeysAndValues(norm, four, other)
    if kind == "pooled at two strides":
        poolings = [Pooling(qkv, slice(0, 8), [two], 1), Pooling(qkv, slice(8, 24), [four, other], 1)]
        layer = PooledProjections(norm, (4, 4), poolings)
    energies = []
    for phase in ALL_PHASES:
        y = norm(roll(x, torch.tensor(phase).expand(2, 2), (1, 2)))
        parts = [y, y] if isinstance(layer, KeysAndValues) else qkv(y).split(8, -1)
        convs = [four, other] if isinstance(layer, KeysAndValues) else [two, four, other]
        outputs = [conv(part.permute(0, 3, 1, 2)) for conv, part in zip(convs, parts, strict=True)]
        energies.append(torch.stack([output.square().sum((1, 2, 3)) for output in outputs]).sum(0))
    expected = torch.tensor(ALL_PHASES)[torch.stack(energies, 1).argmax(1)]
    assert torch.equal(ProjectionAnchor(score="energy").offset(x, layer), expected)


def test_pooled_projections_are_scored_as_two_layers_or_as_one() -> None:
    """With as many combinations as outputs, of which each is one output, both forms say the same."""
    block = randomize(create_model("a_mvitv2_micro")).double().stages[1].blocks[0]  # type: ignore[index, union-attr]
    x = torch.randn(3, 8, 8, block.norm1.normalized_shape[0], dtype=torch.float64)
    plain = ProjectionAnchor(score="energy")
    one = ProjectionAnchor(score="energy", sketch=4)
    outputs = block.pooled.poolings[0].outputs
    count = outputs.stop - outputs.start
    one.sketch, one.directions = count - 1, torch.eye(count, 4096, dtype=torch.float64)
    assert torch.allclose(one.scores(x, block.pooled), plain.scores(x, block.pooled))
