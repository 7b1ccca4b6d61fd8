"""GELU in one memory-bound pass: an error function takes some forty instructions per number, and a compiled model
spends a fifth of its time on them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import AVAILABLE, launch, operator

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["fits_gelu_kernel", "gelu", "logistic_gelu"]

LIMIT = 5.0  # beyond, the normal distribution has less than a millionth left
COEFFICIENTS = (1.5957196075568107, 7.274137723617478e-2, -9.472531717819053e-5, -1.068623250037371e-4,
                7.969160982322109e-6, -3.0539256924058336e-7, 6.243089715703959e-9,
                -5.3596427649032475e-11)  # fmt: skip
"""Of (log Phi(x) - log Phi(-x)) / x as a polynomial in x^2 up to the limit, fitted for the least relative error of
Phi, the normal distribution."""
BLOCK, WARPS = 2048, 4


def fits_gelu_kernel(x: Tensor) -> bool:
    """Whether ``gelu`` takes x: half precision, contiguous, in a graph that is compiled, and no gradient. Elsewhere one
    of torch's own is launched sooner."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return half and torch.compiler.is_compiling() and not torch.is_grad_enabled() and x.is_contiguous()


def logistic_gelu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x p(x^2))): GELU to 2e-5 of its value, and below -5 to 1e-6."""
    t = x.float()
    square, p = t.square().clamp(max=LIMIT**2), torch.zeros_like(t)
    for coefficient in reversed(COEFFICIENTS):
        p = p * square + coefficient
    return (t * F.sigmoid(t * p)).to(x.dtype)


if AVAILABLE:

    @triton.jit
    def _gelu(x, out, count, LIMIT: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr,
              C3: tl.constexpr, C4: tl.constexpr, C5: tl.constexpr, C6: tl.constexpr, C7: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        t = tl.load(x + i, i < count, 0.0).to(tl.float32)
        s = tl.minimum(t * t, LIMIT * LIMIT)
        p = ((((((C7 * s + C6) * s + C5) * s + C4) * s + C3) * s + C2) * s + C1) * s + C0
        tl.store(out + i, (t / (1.0 + tl.exp(-t * p))).to(out.dtype.element_ty), i < count)


@operator("shift_vits::gelu")
def gelu(x: Tensor) -> Tensor:
    """``logistic_gelu`` of x, contiguous."""
    out = torch.empty_like(x)
    c0, c1, c2, c3, c4, c5, c6, c7 = COEFFICIENTS
    launch(_gelu, (-(-x.numel() // BLOCK),), x, out, x.numel(), LIMIT=LIMIT, C0=c0, C1=c1, C2=c2, C3=c3, C4=c4, C5=c5,
           C6=c6, C7=c7, BLOCK=BLOCK, num_warps=WARPS)  # fmt: skip
    return out
