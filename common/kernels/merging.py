"""Patch merging where the anchor says: 2 x 2 tokens gathered, normalised if the model does; forward and backward."""

from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd

from .base import AVAILABLE, launch, next_power_of_2, operator

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["fits_merge_kernel", "rolled_merge"]

PROGRAMS = 528  # of a backward pass with a norm: four on each of 132 processors, and each leaves one sum per weight


def fits_merge_kernel(x: Tensor) -> bool:
    """Whether ``rolled_merge`` takes these tokens: even sides, at most float32, at most 2048 channels."""
    single = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    even = x.shape[1] % 2 == 0 and x.shape[2] % 2 == 0 and x.shape[3] <= 2048
    return single and even and x.numel() > 0 and x.is_contiguous()


if AVAILABLE:

    @triton.jit
    def patch_at(i, height, width):
        """Image of patches i, and the row and column where they begin in it, before it is rolled."""
        across = width // 2
        area = height // 2 * across
        image = i // area
        row = (i - image * area) // across
        return image, 2 * row, 2 * (i - image * area - row * across)

    @triton.jit
    def corners_of(image, top, left, height, width, CHANNELS: tl.constexpr):
        """Where in x the four tokens of patches begin, as (column, row); remainders by subtraction, since an offset is
        less than a side. Takes no pointer: what a function has read from, the compiler takes for written to by all
        that is stored where the function says."""
        top, left = tl.where(top >= height, top - height, top), tl.where(left >= width, left - width, left)
        below, right = tl.where(top + 1 == height, 0, top + 1), tl.where(left + 1 == width, 0, left + 1)
        first = image.to(tl.int64) * height
        top, below = (first + top) * width, (first + below) * width
        return (top + left) * CHANNELS, (below + left) * CHANNELS, (top + right) * CHANNELS, (below + right) * CHANNELS

    @triton.jit
    def _read(x, place, c, keep):
        return tl.load(x + place[:, None] + c[None, :], keep, 0.0).to(tl.float32)

    @triton.jit
    def _write(out, place, c, value, keep):
        tl.store(out + place[:, None] + c[None, :], value.to(out.dtype.element_ty), keep)

    @triton.jit
    def _row(weight, c, CHANNELS: tl.constexpr):
        return tl.load(weight + c, c < CHANNELS, 0.0).to(tl.float32)[None, :]

    @triton.jit
    def _mean(a0, a1, a2, a3, CHANNELS: tl.constexpr):
        return (tl.sum(a0 + a1 + a2 + a3, 1) / (4 * CHANNELS))[:, None]

    @triton.jit
    def _rolled_merge(x, offset, gain, bias, out, height, width, count, CHANNELS: tl.constexpr, NORM: tl.constexpr,
                      BIAS: tl.constexpr, EPS: tl.constexpr, C: tl.constexpr, T: tl.constexpr):  # fmt: skip
        i, c = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, C)
        keep = (i < count)[:, None] & (c < CHANNELS)[None, :]
        image, top, left = patch_at(tl.minimum(i, count - 1), height, width)
        top += tl.load(offset + 2 * image).to(tl.int32)
        left += tl.load(offset + 2 * image + 1).to(tl.int32)
        p0, p1, p2, p3 = corners_of(image, top, left, height, width, CHANNELS)
        a0, a1, a2, a3 = _read(x, p0, c, keep), _read(x, p1, c, keep), _read(x, p2, c, keep), _read(x, p3, c, keep)
        if NORM:
            mean = _mean(a0, a1, a2, a3, CHANNELS)
            a0, a1 = tl.where(keep, a0 - mean, 0.0), tl.where(keep, a1 - mean, 0.0)
            a2, a3 = tl.where(keep, a2 - mean, 0.0), tl.where(keep, a3 - mean, 0.0)
            scale = 1.0 / tl.sqrt(_mean(a0 * a0, a1 * a1, a2 * a2, a3 * a3, CHANNELS) + EPS)
            zero = tl.zeros([T], tl.int32)  # weights are read once per patch: a row for all would wait for every thread
            a0 = a0 * scale * _read(gain, zero, c, keep)
            a1 = a1 * scale * _read(gain + CHANNELS, zero, c, keep)
            a2 = a2 * scale * _read(gain + 2 * CHANNELS, zero, c, keep)
            a3 = a3 * scale * _read(gain + 3 * CHANNELS, zero, c, keep)
            if BIAS:
                a0 += _read(bias, zero, c, keep)
                a1 += _read(bias + CHANNELS, zero, c, keep)
                a2 += _read(bias + 2 * CHANNELS, zero, c, keep)
                a3 += _read(bias + 3 * CHANNELS, zero, c, keep)
        place = i.to(tl.int64) * (4 * CHANNELS)
        _write(out, place, c, a0, keep)
        _write(out, place + CHANNELS, c, a1, keep)
        _write(out, place + 2 * CHANNELS, c, a2, keep)
        _write(out, place + 3 * CHANNELS, c, a3, keep)

    @triton.jit
    def _rolled_merge_backward(grad, offset, x, gain, grad_x, sums, height, width, count, CHANNELS: tl.constexpr,
                               NORM: tl.constexpr, EPS: tl.constexpr, C: tl.constexpr, T: tl.constexpr):  # fmt: skip
        """Each token is in one patch, so its gradient is stored and not added. With n = (x - mean) scale and
        d = gain grad, it is scale (d - mean(d) - n mean(d n)); gain and bias get the sums of grad n and of grad."""
        c = tl.arange(0, C)
        if NORM:
            w0, w1 = _row(gain, c, CHANNELS), _row(gain + CHANNELS, c, CHANNELS)
            w2, w3 = _row(gain + 2 * CHANNELS, c, CHANNELS), _row(gain + 3 * CHANNELS, c, CHANNELS)
        zero = tl.zeros([T, C], tl.float32)
        s0, s1, s2, s3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
        part, parts = tl.program_id(0), tl.num_programs(0)
        for start in range(part * T, count, parts * T):  # many patches, one sum: no atomics, the same bits always
            i = start + tl.arange(0, T)
            keep = (i < count)[:, None] & (c < CHANNELS)[None, :]
            place = i.to(tl.int64) * (4 * CHANNELS)
            g0, g1 = _read(grad, place, c, keep), _read(grad, place + CHANNELS, c, keep)
            g2, g3 = _read(grad, place + 2 * CHANNELS, c, keep), _read(grad, place + 3 * CHANNELS, c, keep)
            image, top, left = patch_at(tl.minimum(i, count - 1), height, width)
            top += tl.load(offset + 2 * image).to(tl.int32)
            left += tl.load(offset + 2 * image + 1).to(tl.int32)
            p0, p1, p2, p3 = corners_of(image, top, left, height, width, CHANNELS)
            if NORM:
                n0, n1 = _read(x, p0, c, keep), _read(x, p1, c, keep)
                n2, n3 = _read(x, p2, c, keep), _read(x, p3, c, keep)
                d0, d1, d2, d3 = g0 * w0, g1 * w1, g2 * w2, g3 * w3
                mean, level = _mean(n0, n1, n2, n3, CHANNELS), _mean(d0, d1, d2, d3, CHANNELS)
                n0, n1 = tl.where(keep, n0 - mean, 0.0), tl.where(keep, n1 - mean, 0.0)
                n2, n3 = tl.where(keep, n2 - mean, 0.0), tl.where(keep, n3 - mean, 0.0)
                scale = 1.0 / tl.sqrt(_mean(n0 * n0, n1 * n1, n2 * n2, n3 * n3, CHANNELS) + EPS)
                along = _mean(d0 * n0, d1 * n1, d2 * n2, d3 * n3, CHANNELS) * scale
                n0, n1, n2, n3 = n0 * scale, n1 * scale, n2 * scale, n3 * scale
                s0, s1, s2, s3 = s0 + g0 * n0, s1 + g1 * n1, s2 + g2 * n2, s3 + g3 * n3
                b0, b1, b2, b3 = b0 + g0, b1 + g1, b2 + g2, b3 + g3
                g0, g1 = (d0 - level - n0 * along) * scale, (d1 - level - n1 * along) * scale
                g2, g3 = (d2 - level - n2 * along) * scale, (d3 - level - n3 * along) * scale
            _write(grad_x, p0, c, g0, keep)
            _write(grad_x, p1, c, g1, keep)
            _write(grad_x, p2, c, g2, keep)
            _write(grad_x, p3, c, g3, keep)
        if NORM:
            sums += part * (8 * CHANNELS) + c
            tl.store(sums, tl.sum(s0, 0), c < CHANNELS)
            tl.store(sums + CHANNELS, tl.sum(s1, 0), c < CHANNELS)
            tl.store(sums + 2 * CHANNELS, tl.sum(s2, 0), c < CHANNELS)
            tl.store(sums + 3 * CHANNELS, tl.sum(s3, 0), c < CHANNELS)
            tl.store(sums + 4 * CHANNELS, tl.sum(b0, 0), c < CHANNELS)
            tl.store(sums + 5 * CHANNELS, tl.sum(b1, 0), c < CHANNELS)
            tl.store(sums + 6 * CHANNELS, tl.sum(b2, 0), c < CHANNELS)
            tl.store(sums + 7 * CHANNELS, tl.sum(b3, 0), c < CHANNELS)


@operator("shift_vits::rolled_merge")
def rolled_merge(x: Tensor, offset: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float,
                 dtype: torch.dtype) -> Tensor:  # fmt: skip
    """2 x 2 tokens of x (B, H, W, C), rolled by ``offset`` (B, 2) in [0, side), side by side as (column, row, channel);
    with ``gain`` and ``bias`` (4C,) normalised as by a LayerNorm -> (B, H/2, W/2, 4C) of the type given."""
    offset = offset.contiguous()
    b, h, w, c = x.shape
    out = torch.empty((b, h // 2, w // 2, 4 * c), dtype=dtype, device=x.device)
    count, wide = b * (h // 2) * (w // 2), next_power_of_2(c)
    tokens = max(1, 1024 // wide)
    launch(_rolled_merge, (-(-count // tokens),), x, offset, offset if gain is None else gain,
           offset if bias is None else bias, out, h, w, count, CHANNELS=c, NORM=gain is not None,
           BIAS=bias is not None, EPS=eps, C=wide, T=tokens, num_warps=max(4, wide // 256))  # fmt: skip
    return out


@operator("shift_vits::rolled_merge_backward")
def rolled_merge_backward(grad: Tensor, offset: Tensor, x: Tensor | None, gain: Tensor | None, eps: float,
                          dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradient of the tokens, of the type given, and sums (programs, 2, 4C) of those of gain and bias, if x and gain
    are given."""
    offset = offset.contiguous()
    b, h, w, c = grad.shape[0], 2 * grad.shape[1], 2 * grad.shape[2], grad.shape[3] // 4
    grad_x = torch.empty((b, h, w, c), dtype=dtype, device=grad.device)
    count, wide = b * (h // 2) * (w // 2), next_power_of_2(c)
    tokens = max(1, 512 // wide)  # half of what the forward takes: x, gradients and sums are all in registers
    tiles = -(-count // tokens)
    parts = tiles if gain is None else min(tiles, PROGRAMS)
    sums = torch.empty((0 if gain is None else parts, 2, 4 * c), dtype=torch.float32, device=grad.device)
    launch(_rolled_merge_backward, (parts,), grad, offset, grad if x is None else x, grad if gain is None else gain,
           grad_x, sums, h, w, count, CHANNELS=c, NORM=gain is not None, EPS=eps, C=wide, T=tokens,
           num_warps=max(4, wide // 128), num_stages=1)  # fmt: skip
    return grad_x, sums


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, offset, gain, bias, ctx.eps, _ = inputs
    ctx.dtype, ctx.bias = x.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(offset, *(() if gain is None else (x, gain)))  # a plain gather needs no x


def _backward(ctx: Any, grad: Tensor) -> tuple:
    offset, x, gain = (*ctx.saved_tensors, None, None)[:3]
    grad_x, sums = rolled_merge_backward(grad.contiguous(), offset, x, gain, ctx.eps, ctx.dtype)
    if gain is None:
        return grad_x, None, None, None, None, None
    of_gain, of_bias = sums.sum(0).unbind()
    return grad_x, None, of_gain.to(gain.dtype), None if ctx.bias is None else of_bias.to(ctx.bias), None, None


register_autograd("shift_vits::rolled_merge", _backward, setup_context=_remember)
