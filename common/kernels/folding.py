"""Weights of depthwise convolutions with the norms behind them folded in."""

import torch
from torch import Tensor

from .base import AVAILABLE, launch, operator

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["normed_taps"]


if AVAILABLE:

    @triton.jit
    def _normed_taps(weight, gain, shift, mean, variance, out, EPS: tl.constexpr, CHANNELS: tl.constexpr,
                     C: tl.constexpr):  # fmt: skip
        c = tl.program_id(0) * C + tl.arange(0, C)
        keep = c < CHANNELS
        scale = tl.load(variance + c, keep, 0.0).to(tl.float32) + EPS
        scale = tl.load(gain + c, keep, 0.0).to(tl.float32) / tl.sqrt(scale)
        for tap in tl.static_range(9):
            value = tl.load(weight + c * 9 + tap, keep, 0.0).to(tl.float32)
            tl.store(out + tap * CHANNELS + c, value * scale, keep)
        added = tl.load(shift + c, keep, 0.0).to(tl.float32) - tl.load(mean + c, keep, 0.0).to(tl.float32) * scale
        tl.store(out + 9 * CHANNELS + c, added, keep)

    @triton.jit
    def _three_normed_taps(w0, w1, w2, g0, g1, g2, s0, s1, s2, m0, m1, m2, v0, v1, v2, out, EPS: tl.constexpr,
                           CHANNELS: tl.constexpr, C: tl.constexpr):  # fmt: skip
        if tl.program_id(1) == 0:
            _normed_taps(w0, g0, s0, m0, v0, out, EPS, CHANNELS, C)
        elif tl.program_id(1) == 1:
            _normed_taps(w1, g1, s1, m1, v1, out + 10 * CHANNELS, EPS, CHANNELS, C)
        else:
            _normed_taps(w2, g2, s2, m2, v2, out + 20 * CHANNELS, EPS, CHANNELS, C)


@operator("shift_vits::normed_taps")
def normed_taps(weights: list[Tensor], gains: list[Tensor], shifts: list[Tensor], means: list[Tensor],
                variances: list[Tensor], eps: float) -> Tensor:  # fmt: skip
    """Of three depthwise convolutions (C, 1, 3, 3), each with a norm behind it, and what that has learnt, (C,), all
    contiguous: taps, scaled, and what is added: (3, 10, C), float32."""
    c = len(weights[0])
    out = torch.empty((3, 10, c), dtype=torch.float32, device=weights[0].device)
    launch(_three_normed_taps, (-(-c // 64), 3), *weights, *gains, *shifts, *means, *variances, out, EPS=eps,
           CHANNELS=c, C=64, num_warps=2)  # fmt: skip
    return out
