"""Keys and values of pooled attention in one pass, for inference: every head pooled by a depthwise 3 x 3 convolution,
normalised, and with what else attention reads of each token beside it."""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .base import AVAILABLE, INTERPRETED, launch, operator, pieces, power
from .depthwise import fits_depthwise_kernel

if AVAILABLE:
    import triton
    import triton.language as tl

    from .depthwise import _grid, _source

__all__ = ["fits_pooled", "pooled"]

TOKENS = 16  # of a program


def fits_pooled(x: Tensor, weight: Tensor, gain: Tensor | None) -> bool:
    """Whether ``pooled`` takes these: half precision, what a depthwise kernel takes, at most 256 channels a head, and
    no gradient."""
    half = x.dtype in (torch.bfloat16, torch.float16) or INTERPRETED
    plain = half and gain is not None and not isinstance(gain, DTensor) and not torch.is_grad_enabled()
    return plain and weight.shape[2] <= 256 and fits_depthwise_kernel(x, weight)


if AVAILABLE:

    @triton.jit
    def _normed(t, mean, scale, gain, shift, c, keep):
        weight, bias = tl.load(gain + c, keep, 0.0).to(tl.float32), tl.load(shift + c, keep, 0.0).to(tl.float32)
        return (t - mean[:, None]) * scale[:, None] * weight[None, :] + bias[None, :]

    @triton.jit
    def _pooled(x, weight, gain, shift, tail, out, height, width, rows, columns, count, stride_b, stride_h, stride_w,
                HEADS: tl.constexpr, CHANNELS: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
                TAIL: tl.constexpr, STRIDE: tl.constexpr, CIRCULAR: tl.constexpr, BAND: tl.constexpr,
                EPS: tl.constexpr, C: tl.constexpr, E: tl.constexpr, T: tl.constexpr):  # fmt: skip
        """T outputs of one head, whose channels are one piece of C, or three: 96 are three of 32."""
        head, t, c = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS * T + tl.arange(0, T), tl.arange(0, C)
        image, h, w = _grid(t, rows, columns, BAND)
        real = c < CHANNELS // PIECES
        x += head * CHANNELS
        t0, t1, t2 = tl.zeros([T, C], tl.float32), tl.zeros([T, C], tl.float32), tl.zeros([T, C], tl.float32)
        for i in tl.static_range(3):
            y, in_rows = _source(h, i, 0, height, STRIDE, CIRCULAR, False)
            for j in tl.static_range(3):
                z, in_columns = _source(w, j, 0, width, STRIDE, CIRCULAR, False)
                keep = ((t < count) & in_rows & in_columns)[:, None] & real[None, :]
                place = x + (image * stride_b + y * stride_h + z * stride_w)[:, None] + c[None, :]
                tap = weight + (3 * i + j) * CHANNELS + c
                t0 += tl.load(place, keep, 0.0).to(tl.float32) * tl.load(tap, real, 0.0).to(tl.float32)[None, :]
                if PIECES == 3:
                    t1 += tl.load(place + C, keep, 0.0).to(tl.float32) * tl.load(tap + C).to(tl.float32)[None, :]
                    tap += 2 * C
                    t2 += tl.load(place + 2 * C, keep, 0.0).to(tl.float32) * tl.load(tap).to(tl.float32)[None, :]
        mean = tl.sum(t0 + t1 + t2, 1) / CHANNELS
        d0 = tl.where(real[None, :], t0 - mean[:, None], 0.0)
        square = d0 * d0
        if PIECES == 3:
            d1, d2 = t1 - mean[:, None], t2 - mean[:, None]
            square += d1 * d1 + d2 * d2
        scale = 1.0 / tl.sqrt(tl.sum(square, 1) / CHANNELS + EPS)
        token = h * columns + w
        place = out + (((image * HEADS + head) * (rows * columns) + token) * (CHANNELS + WIDTH))[:, None]
        keep = (t < count)[:, None]
        t0 = _normed(t0, mean, scale, gain, shift, c, real)
        tl.store(place + c[None, :], t0.to(out.dtype.element_ty), keep & real[None, :])
        if PIECES == 3:
            t1 = _normed(t1, mean, scale, gain + C, shift + C, c, real)
            t2 = _normed(t2, mean, scale, gain + 2 * C, shift + 2 * C, c, real)
            tl.store(place + (C + c)[None, :], t1.to(out.dtype.element_ty), keep)
            tl.store(place + (2 * C + c)[None, :], t2.to(out.dtype.element_ty), keep)
        if WIDTH:
            e = tl.arange(0, E)
            beside, keep = tl.zeros([T, E], tl.float32), keep & (e < WIDTH)[None, :]
            if TAIL:
                beside = tl.load(tail + (token * WIDTH)[:, None] + e[None, :], keep, 0.0)
            tl.store(place + (CHANNELS + e)[None, :], beside.to(out.dtype.element_ty), keep)


@operator("shift_vits::pooled")
def pooled(x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, eps: float, stride: int, circular: bool,
           width: int, tail: Tensor | None) -> Tensor:  # fmt: skip
    """Every head of x (B, H, W, heads d) convolved with ``weight`` (3, 3, d), contiguous, as by ``depthwise``, and
    normalised as by a LayerNorm of d; beside each token its row of ``tail`` (H/s W/s, width), or zeros
    -> (B, heads, H/s W/s, d + width)."""
    (b, h, w, channels), d = x.shape, weight.shape[2]
    rows, columns, heads = -(-h // stride), -(-w // stride), channels // d
    out = torch.empty((b, heads, rows * columns, d + width), dtype=x.dtype, device=x.device)
    parts, count = pieces(d), b * rows * columns
    launch(_pooled, (-(-count // TOKENS) * heads,), x, weight, gain, shift, weight if tail is None else tail, out, h, w,
           rows, columns, count, *x.stride()[:3], HEADS=heads, CHANNELS=d, PIECES=parts, WIDTH=width,
           TAIL=tail is not None, STRIDE=stride, CIRCULAR=circular, BAND=math.gcd(rows, 4), EPS=eps,
           C=max(16, power(d // parts)), E=max(2, power(width)), T=TOKENS, num_warps=4)  # fmt: skip
    return out
