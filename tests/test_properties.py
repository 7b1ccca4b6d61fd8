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
def build(name: str, score: str, canonical: bool, size: tuple[int, int]) -> Any:
    return randomize(create_model(name, score=score, canonical=canonical, img_size=size)).eval()


def repeated(tile: Tensor, height: int, width: int) -> Tensor:
    """Cut where it does not fit: then the image has a seam, and is periodic elsewhere."""
    down, across = tile.shape[2:]
    return tile.repeat(1, 1, -(-height // down), -(-width // across))[:, :, :height, :width].contiguous()


@st.composite
def images(draw: Any, tied: bool) -> Tensor:
    """Noise, or what is made to tie: periodic, checkered, symmetric, saturated, constant, one bright pixel, phases that
    differ in one pixel by two of the steps in which the canonical anchor reads."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = height, width = draw(st.sampled_from([(32, 32), (32, 64), (64, 32), (96, 32)]))
    x = torch.randn(draw(st.integers(1, 3)), 3, *size, generator=generator)
    if not tied:
        return x
    kind = draw(st.sampled_from(["periodic", "near", "checkered", "symmetric", "saturated", "constant", "pixel"]))
    if kind == "periodic":
        down, across = draw(st.integers(1, 32)), draw(st.integers(1, 32))
        return repeated(x[:, :, :down, :across], *size)
    if kind == "near":
        side = draw(st.sampled_from([2, 4, 8, 16]))
        x = repeated(x[:, :, :side, :side], *size)
        x[:, :, draw(st.integers(0, 31)), draw(st.integers(0, 31))] += 2 / 1024
        return x
    if kind == "checkered":
        side = draw(st.sampled_from([1, 2, 4, 8, 16]))
        rows, columns = torch.arange(height) // side, torch.arange(width) // side
        return ((rows[:, None] + columns) % 2).float().expand_as(x).contiguous()
    if kind == "symmetric":
        return x + x.flip(3) + x.flip(2) + x.flip((2, 3))
    if kind == "pixel":
        return torch.zeros_like(x).index_put((torch.tensor(0), torch.tensor(1), torch.tensor(3), torch.tensor(9)),
                                             torch.tensor(5.0))  # fmt: skip
    return x.sign() * 3 if kind == "saturated" else torch.full_like(x, 0.4)


def laid_out(x: Tensor, channels_last: bool) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


@settings(max_examples=60, **SETTINGS)
@given(models, images(tied=False), shifts, st.sampled_from(sorted(SCORES)), st.booleans())
def test_equivariant_by_itself(name: str, x: Tensor, shift: tuple[int, int], score: str, channels_last: bool) -> None:
    """In float64, without the canonical anchor, whatever the score and the layout."""
    model, x = build(name, score, False, tuple(x.shape[2:])).double(), x.double()
    with torch.no_grad():
        still, moved = (model(laid_out(image, channels_last)) for image in (x, x.roll(shift, (2, 3))))
    assert (still - moved).norm() <= 1e-10 * still.norm()


@settings(max_examples=120, **SETTINGS)
@given(models, st.one_of(images(tied=False), images(tied=True)), shifts,
       st.sampled_from([None, torch.bfloat16, torch.float16]), st.booleans())  # fmt: skip
def test_the_same_bits(
    name: str, x: Tensor, shift: tuple[int, int], dtype: torch.dtype | None, channels_last: bool
) -> None:
    """With it, in any precision and layout, also of images that look the same from several places."""
    model = build(name, "signed", True, tuple(x.shape[2:])).float()
    with torch.no_grad(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        still, moved = (model(laid_out(image, channels_last)) for image in (x, x.roll(shift, (2, 3))))
    assert torch.equal(still, moved)


@settings(max_examples=30, **SETTINGS)
@given(models, st.sampled_from([2, 4, 8, 16]), st.sampled_from([1e-4, 1e-7]), shifts, st.integers(0, 2**31))
def test_what_the_canonical_anchor_cannot_tell_apart_differs_by_rounding(
    name: str, period: int, least: float, shift: tuple[int, int], seed: int
) -> None:
    """Repeats that differ by less than it reads: the documented exception, and no more than equivariance gives."""
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    x = repeated(x[:, :, :period, :period], 32, 32) + least * x
    model = build(name, "signed", True, (32, 32)).float()
    with torch.no_grad():
        still, moved = model(x), model(x.roll(shift, (2, 3)))
    assert (still - moved).abs().max() <= 1e-5 * still.abs().max()


@settings(max_examples=20, **SETTINGS)
@given(models, st.integers(2, 5), st.integers(0, 2**31))
def test_neighbours_do_not_matter(name: str, batch: int, seed: int) -> None:
    """An image has the logits that it has at the same place among others: its anchors are its own."""
    generator = torch.Generator().manual_seed(seed)
    x, others = (torch.randn(batch, 3, 32, 32, generator=generator) for _ in range(2))
    others[seed % batch] = x[seed % batch]
    model = build(name, "signed", True, (32, 32)).float()
    with torch.no_grad():
        assert torch.equal(model(x)[seed % batch], model(others)[seed % batch])
