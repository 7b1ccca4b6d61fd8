"""What adaptive models are compared with must be what its name says."""

from pathlib import Path

import pytest
import torch
from conftest import randomize

from common import create_model, from_pretrained
from swin.model import Swin
from swin.recipes import RECIPES


def pair() -> tuple[Swin, Swin]:
    plain, blurred = create_model("swin_micro"), create_model("swin_micro", antialias=True)
    blurred.load_state_dict(randomize(plain).state_dict())
    return plain.eval(), blurred.eval()


@torch.no_grad()
def test_blurred_tokens_move_less() -> None:
    """By a pixel, of noise, where aliasing is worst; the weights are the same."""
    x = torch.randn(4, 3, 32, 32)
    errors = []
    for model in pair():
        first, second = (model.forward_features(t) for t in (x, x.roll(1, 3)))
        errors.append(((first - second).norm() / first.norm()).item())
    assert errors[1] < 0.8 * errors[0]


@torch.no_grad()
def test_a_constant_image_stays_as_it_is() -> None:
    """A blur adds up to one: what has no detail passes, also at the border."""
    plain, blurred = pair()
    x = torch.full((1, 3, 32, 32), 0.7)
    torch.testing.assert_close(plain(x), blurred(x), atol=1e-5, rtol=1e-4)


def test_it_is_stored_and_not_for_adaptive_models(tmp_path: Path) -> None:
    _, blurred = pair()
    blurred.save_pretrained(tmp_path)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(from_pretrained(tmp_path).eval()(x), blurred(x))
    with pytest.raises(ValueError, match="antialias=True is for default models"):
        create_model("a_swin_micro", antialias=True)
    assert RECIPES["cifar10_antialiased"].model_args == {"antialias": True}
