"""Any model, any image, any shift: what is promised holds for what nobody thought of. Else a user finds it out."""

from functools import cache
from typing import Any

import torch
from conftest import randomize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from common import create_model
from common.anchors import SCORES
from common.models.registry import list_models

MODELS = list_models("a_*_micro", exclude_filters="upernet_*")
SETTINGS: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "derandomize": True}
models, shifts = st.sampled_from(MODELS), st.tuples(st.integers(-500, 500), st.integers(-500, 500))


@cache
def build(name: str, score: str, canonical: bool) -> Any:
    return randomize(create_model(name, score=score, canonical=canonical)).eval()


@st.composite
def images(draw: Any, tied: bool) -> Tensor:
    """Noise, or what is made to tie: periodic, checkered, symmetric, saturated, constant, one bright pixel."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(draw(st.integers(1, 3)), 3, 32, 32, generator=generator)
    if not tied:
        return x
    kind = draw(st.sampled_from(["periodic", "checkered", "symmetric", "saturated", "constant", "pixel"]))
    if kind == "periodic":
        down, across = (draw(st.sampled_from([1, 2, 4, 8, 16, 32])) for _ in range(2))
        return x[:, :, :down, :across].repeat(1, 1, 32 // down, 32 // across)
    if kind == "checkered":
        side = draw(st.sampled_from([1, 2, 4, 8, 16]))
        place = torch.arange(32) // side
        return ((place[:, None] + place) % 2).float().expand_as(x).contiguous()
    if kind == "symmetric":
        return x + x.flip(3) + x.flip(2) + x.flip((2, 3))
    if kind == "pixel":
        return torch.zeros_like(x).index_put((torch.tensor(0), torch.tensor(1), torch.tensor(3), torch.tensor(9)),
                                             torch.tensor(5.0))  # fmt: skip
    return x.sign() * 3 if kind == "saturated" else torch.full_like(x, 0.4)


@settings(max_examples=60, **SETTINGS)
@given(models, images(tied=False), shifts, st.sampled_from(sorted(SCORES)), st.booleans())
def test_equivariant_by_itself(name: str, x: Tensor, shift: tuple[int, int], score: str, channels_last: bool) -> None:
    """In float64, without the canonical anchor, whatever the score and the layout."""
    model, x = build(name, score, False).double(), x.double()
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    with torch.no_grad():
        still, moved = model(x), model(x.roll(shift, (2, 3)))
    assert (still - moved).norm() <= 1e-10 * still.norm()


@settings(max_examples=80, **SETTINGS)
@given(models, st.one_of(images(tied=False), images(tied=True)), shifts, st.sampled_from([None, torch.bfloat16]))
def test_the_same_bits(name: str, x: Tensor, shift: tuple[int, int], dtype: torch.dtype | None) -> None:
    """With it, in any precision, also of images that look the same from several places."""
    model = build(name, "signed", True).float()
    with torch.no_grad(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        assert torch.equal(model(x), model(x.roll(shift, (2, 3))))


@settings(max_examples=20, **SETTINGS)
@given(models, st.integers(2, 5), st.integers(0, 2**31))
def test_neighbours_do_not_matter(name: str, batch: int, seed: int) -> None:
    """An image has the logits that it has at the same place among others: its anchors are its own."""
    generator = torch.Generator().manual_seed(seed)
    x, others = (torch.randn(batch, 3, 32, 32, generator=generator) for _ in range(2))
    others[seed % batch] = x[seed % batch]
    model = build(name, "signed", True).float()
    with torch.no_grad():
        assert torch.equal(model(x)[seed % batch], model(others)[seed % batch])
