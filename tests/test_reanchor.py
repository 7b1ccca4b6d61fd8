"""Anchors that leave a grid alone where earlier ones have settled where a layer begins."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import interpreted, randomize

from common import adapt, create_model, from_pretrained, ops
from common.anchors import Anchor
from common.evaluation.equivariance import anchored, assert_shift_equivariant, shift_error
from common.grid import Grid
from common.models.classifier import Classifier

SMALL = {
    "a_swin_tiny": {"embed_dim": 24, "depths": (2, 2, 2, 2), "num_heads": (1, 1, 2, 2)},
    "a_swinv2_tiny": {"embed_dim": 24, "depths": (2, 2, 2, 2), "num_heads": (1, 1, 2, 2)},
    "a_cvt_13": {"embed_dims": (16, 32, 48), "depths": (1, 1, 1), "num_heads": (1, 1, 1)},
    "a_mvitv2_tiny": {"embed_dim": 16, "depths": (1, 2, 2, 2)},
}
"""Full-size grids of narrow tokens."""
NEEDED = {
    "a_swin_tiny": ["Conv", "Window", "Merge", "Merge", "Merge"],  # windows of 7: odd, so mergings keep their choice
    "a_swinv2_tiny": ["Conv", "Window", "Window", "Window", "Window"],  # windows of 8: even, so they settle mergings
    "a_cvt_13": ["Conv", "Projection", "Projection", "Projection"],
    "a_mvitv2_tiny": ["Conv", "Projection", "Projection"],
}
MICRO = [("a_swin_micro", {}), ("a_swin_micro", {"window_size": 3, "img_size": (96, 48)}), ("a_swinv2_micro", {}),
         ("a_cvt_micro", {}), ("a_mvitv2_micro", {})]  # fmt: skip


def build(name: str, **arguments: object) -> Classifier:
    model = create_model(name, reanchor=False, drop_path_rate=0.0, num_classes=10, **arguments)
    assert isinstance(model, Classifier)
    return randomize(model).eval()


@pytest.mark.parametrize("name", SMALL)
def test_few_anchors_make_a_model_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64, canonical anchor off: half of the paper's anchors are enough."""
    model, chosen, choose = build(name, canonical=False, **SMALL[name]).double(), [], Anchor.choose

    def note(self: Anchor, *args: object, **kwargs: object) -> torch.Tensor:
        chosen.append(type(self).__name__.removesuffix("Anchor"))
        return choose(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Anchor, "choose", note)
    x = torch.randn(1, 3, *model.img_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model(x)
    assert chosen == NEEDED[name]
    assert_shift_equivariant(model, x, [(1, 0), (3, 50), (28, 57), (-5, 223)])


@pytest.mark.parametrize(("name", "arguments"), MICRO)
def test_micro_models_are_exact_in_every_stage(name: str, arguments: dict[str, object]) -> None:
    model = build(name, canonical=False, **arguments).double()
    x = torch.randn(2, 3, *model.img_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shifts = [(1, 0), (0, 3), (7, 18), (16, 17), (-5, 33)]
    assert_shift_equivariant(model, x, shifts)
    for i, info in enumerate(model.feature_info):

        def stage(x: torch.Tensor, i: int = i) -> tuple[torch.Tensor, torch.Tensor]:
            return model.forward_intermediates(x, [i], stop_early=True, intermediates_only=True, return_offsets=True)[0]

        assert_shift_equivariant(stage, x, shifts, anchored(info["reduction"]))


@pytest.mark.parametrize("name", ["a_swin_micro", "a_cvt_micro", "a_mvitv2_micro"])
def test_bits_are_kept_behind_the_canonical_anchor(name: str) -> None:
    model = build(name)
    x = torch.rand(3, 3, *model.img_size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for precision in (None, torch.bfloat16):
            with torch.autocast("cpu", precision, enabled=precision is not None):
                assert torch.equal(model(x), model(x.roll((5, 19), (2, 3))))


@pytest.mark.parametrize(("pixels", "stride", "side", "found"), [
    (1, 1, 4, 4),  # an image
    (28, 4, 2, 56),  # windows of 7, then a merging: both
    (32, 8, 8, 64),  # tokens anchored modulo 4 among windows of 8
    (32, 8, 6, 48),  # neither divides the other, nor are they coprime: the later choice alone
    (6, 4, 2, 6),  # tokens of 4 pixels themselves do not follow: nothing is gained
])  # fmt: skip
def test_a_choice_keeps_what_was_anchored(pixels: int, stride: int, side: int, found: int) -> None:
    tokens, zero = torch.zeros(side, 48 * 7, 48 * 7, 1), torch.zeros(side, 2, dtype=torch.long)
    start = zero + 3 * pixels // math.gcd(pixels, stride)  # any place that follows the content modulo these pixels
    grid = Grid(tokens, zero, stride, (pixels, pixels), start=start)
    chosen = torch.arange(side)[:, None].expand(side, 2)
    begun = grid.begin_at(chosen, (side, side), keep=True)
    assert begun.anchored == (found, found)
    assert torch.equal(begun.origin % side, chosen)  # it is the phase that was chosen
    if found % pixels == 0 and found > stride * side:
        assert not ((begun.origin - start) * stride % pixels).any()  # and follows as before
    assert torch.equal(grid.begin_at(chosen, (side, side), keep=False).origin, chosen)


def test_models_saved_before_anchor_as_they_did(tmp_path: Path) -> None:
    model = adapt(create_model("cvt_micro"), reanchor=False)
    model.save_pretrained(tmp_path)
    assert not any(anchor.reanchor for anchor in anchors_of(from_pretrained(str(tmp_path))))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("reanchor") is False
    (tmp_path / "config.json").write_text(json.dumps(config))
    anchors = anchors_of(from_pretrained(str(tmp_path)))
    assert anchors
    assert all(anchor.reanchor for anchor in anchors)


def anchors_of(model: torch.nn.Module) -> list[Anchor]:
    return [module for module in model.modules() if isinstance(module, Anchor)]


@interpreted
@pytest.mark.parametrize(("name", "arguments"), MICRO)
def test_kernels_that_leave_tokens_in_place_begin_where_the_grid_does(name: str, arguments: dict[str, object]) -> None:
    """Where kernels read windows from an origin, tokens stay where they were, and a layer must still begin there."""
    model = build(name, canonical=False, **arguments)
    x = torch.randn(1, 3, *model.img_size, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        by_kernels = model(x)
        with ops.reference():
            assert (model(x) - by_kernels).norm() < 1e-5 * by_kernels.norm()
    assert shift_error(model, x, (7, 18)) < 1e-5
