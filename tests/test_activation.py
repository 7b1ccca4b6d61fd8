"""GELU by a logistic function: as near as half precision can tell, and by the kernel what it is in torch."""

import pytest
import torch
import torch.nn.functional as F
from conftest import interpreted

from common import kernels
from common.kernels.activation import LIMIT, logistic_gelu
from common.models.activation import GELU
from common.ops import dispatch
from common.ops.gelu import _Gelu, gelu


def test_as_near_as_it_says() -> None:
    """Lost otherwise: digits that half precision shows."""
    x = torch.linspace(-12, 12, 200_001)
    exact = x.double() * torch.special.ndtr(x.double())
    error = (logistic_gelu(x) - exact).abs()
    near = x >= -LIMIT
    assert (error[near] <= 2e-5 * exact[near].abs()).all()
    assert error[~near].max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_numbers_are_rounded_another_way(dtype: torch.dtype) -> None:
    """And then to the next number. Torch's own, in float32, has lost these digits below -4."""
    x = torch.linspace(-5, 8, 100_001).to(dtype)
    found, expected = logistic_gelu(x), (x.double() * torch.special.ndtr(x.double())).to(dtype)
    assert (found != expected).float().mean() < 0.05
    assert torch.allclose(found.float(), expected.float(), rtol=torch.finfo(dtype).eps, atol=1e-7)


@interpreted
@pytest.mark.parametrize("shape", [(3, 5), (2, 7, 800)])
def test_kernel(shape: tuple[int, ...]) -> None:
    x = 4 * torch.randn(shape)
    assert torch.allclose(kernels.gelu(x), logistic_gelu(x), rtol=1e-5, atol=1e-7)


def test_only_what_is_compiled_for_inference_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost otherwise: parity with other libraries in float32, and gradients."""
    monkeypatch.setattr(dispatch, "usable", lambda x: True)
    x = torch.randn(4, 8)
    assert torch.equal(GELU()(x), F.gelu(x))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    half = x.bfloat16()
    assert not kernels.fits_gelu_kernel(half)
    with torch.no_grad():
        assert kernels.fits_gelu_kernel(half)
        assert not kernels.fits_gelu_kernel(x)
        assert not kernels.fits_gelu_kernel(half.T)


def test_the_gradient_on_a_cpu_is_torchs() -> None:
    x = torch.linspace(-12, 12, 4001)
    ours, theirs = (torch.autograd.grad(f(t := x.clone().requires_grad_()).sum(), t)[0] for f in (gelu, F.gelu))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    assert torch.autograd.gradgradcheck(_Gelu.apply, torch.randn(5, dtype=torch.float64, requires_grad=True))
