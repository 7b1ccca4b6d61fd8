"""Sums and their norms in one pass: what torch makes of them in two."""

import pytest
import torch
import torch.nn.functional as F
from conftest import interpreted
from torch import nn

from common import kernels
from common.ops import add_norm, dispatch, norm_ahead
from common.shifts import roll


@interpreted
@pytest.mark.parametrize(("shape", "bias"), [((2, 5, 3, 96), True), ((37, 64), False), ((3, 768), True),
                                             ((2, 3, 80), False)], ids=str)  # fmt: skip
def test_kernel(shape: tuple[int, ...], bias: bool) -> None:
    """Widths in three pieces, in one, and with channels to spare; tokens that are no whole programs."""
    x, update, gain = torch.randn(shape), 3 + torch.randn(shape), torch.rand(shape[-1])
    shift = torch.randn(shape[-1]) if bias else None
    total, normed = kernels.add_norm(x, update, gain, shift, 1e-3, torch.float32, None)
    assert torch.equal(total, x + update)
    assert torch.allclose(normed, F.layer_norm(x + update, shape[-1:], gain, shift, 1e-3), atol=1e-5)
    alone = kernels.add_norm(x + update, None, gain, shift, 1e-3, torch.float32, None)
    assert torch.equal(alone[1], normed)


@interpreted
def test_at_an_origin() -> None:
    """Tokens are read where they are rolled to, each image's at its own place; the update lies where it is."""
    x, update, gain = torch.randn(3, 5, 4, 96), torch.randn(3, 5, 4, 96), torch.rand(96)
    origin = torch.tensor([[0, 3], [4, 0], [2, 1]])
    total, normed = kernels.add_norm(x, update, gain, None, 1e-3, torch.float32, origin)
    expected = roll(x, origin, (1, 2), within=True) + update
    assert torch.equal(total, expected)
    assert torch.allclose(normed, F.layer_norm(expected, (96,), gain, None, 1e-3), atol=1e-5)
    norm = nn.LayerNorm(96)
    assert all(torch.equal(a, b) for a, b in zip(add_norm(x, update, norm, origin), (expected, norm(expected)),
                                                 strict=True))  # fmt: skip


@interpreted
def test_what_is_normalised_is_the_sum_as_it_is_kept() -> None:
    """Lost otherwise: tokens whose norm is not that of what the next layer adds to."""
    x, update, gain = torch.randn(9, 96).half(), torch.randn(9, 96).half(), torch.ones(96)
    total, normed = kernels.add_norm(x, update, gain, None, 1e-5, torch.float32, None)
    assert torch.equal(total, x + update)
    assert torch.allclose(normed, F.layer_norm((x + update).float(), (96,)), atol=1e-6)


def test_only_what_is_compiled_for_inference_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost otherwise: parity with other libraries in float32, and gradients."""
    monkeypatch.setattr(dispatch, "usable", lambda x: True)
    norm, x, update = nn.LayerNorm(8), torch.randn(4, 8), torch.randn(4, 8)
    total, normed = add_norm(x, update, norm)
    assert torch.equal(total, x + update)
    assert torch.equal(normed, norm(x + update))
    assert norm_ahead(x, norm) is None
    half, other = x.bfloat16(), update.bfloat16()
    with torch.no_grad():
        assert not kernels.fits_add_norm(half, other, norm.weight)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not kernels.fits_add_norm(half, other, norm.weight)
    with torch.no_grad():
        assert kernels.fits_add_norm(half, other, norm.weight)
        assert not kernels.fits_add_norm(x, update, norm.weight)
        assert kernels.fits_add_norm(x, other, norm.weight)
        assert not kernels.fits_add_norm(half, update, norm.weight)
        assert not kernels.fits_add_norm(half, other.T.contiguous().T, norm.weight)
        assert not kernels.fits_add_norm(half, other, None)
