"""A fifth architecture from the public pieces alone: if it needs more, the primitives are none."""

import pytest
import timm
import torch
from conftest import LARGE_SHIFTS, randomize
from pvtv2 import PVTv2
from torch import Tensor

from common.anchors import SCORES
from common.evaluation.equivariance import anchored, assert_shift_equivariant, shift_error

MICRO = {"img_size": 64, "num_classes": 10, "embed_dims": (16, 32), "depths": (2, 2), "num_heads": (1, 2),
         "reductions": (4, 2), "mlp_ratios": (2, 2)}  # fmt: skip


def test_it_is_timms_pvt_v2_b0() -> None:
    other = randomize(timm.create_model("pvt_v2_b0")).eval()
    model = PVTv2().eval()
    state = {name.replace("head.", "head.fc.") if name.startswith("head.") else name: t
             for name, t in other.state_dict().items()}  # fmt: skip
    model.load_state_dict(state)
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.allclose(model(x), other(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("score", SCORES)
def test_it_is_equivariant_by_itself(score: str) -> None:
    model = randomize(PVTv2(**MICRO, adaptive=True, canonical=False, score=score)).double().eval()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    assert_shift_equivariant(model, x, [(1, 0), (3, 2), *LARGE_SHIFTS])
    for i, info in enumerate(model.feature_info):

        def stage(x: Tensor, i: int = i) -> tuple[Tensor, Tensor]:
            return model.forward_intermediates(x, [i], stop_early=True, intermediates_only=True, return_offsets=True)[0]

        assert_shift_equivariant(stage, x, [(1, 0), (-5, 23)], anchored(info["reduction"]))


def test_it_keeps_its_bits_with_the_canonical_anchor_and_the_default_does_not() -> None:
    x = torch.randn(2, 3, 64, 64)
    adaptive = randomize(PVTv2(**MICRO, adaptive=True)).eval()
    with torch.no_grad():
        assert all(torch.equal(adaptive(x), adaptive(x.roll(shift, (2, 3)))) for shift in LARGE_SHIFTS)
    assert shift_error(randomize(PVTv2(**MICRO)).eval(), x, (1, 0)) > 1e-3
