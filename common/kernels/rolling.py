"""Tokens rolled by an offset per sample, and padded with their own opposite sides, in one pass; forward and backward.

A compiler fuses a gather into whatever reads it, which then computes every index again, element by element, and reads
no whole vectors. Here a program moves a part of one row, so that there is an index per token, and layouts stay
channels-last.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd

from .base import AVAILABLE, launch, next_power_of_2, operator

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import wrap

__all__ = ["fits_roll_kernel", "rolled"]


def fits_roll_kernel(x: Tensor) -> bool:
    """Whether ``rolled`` takes these: tokens (B, H, W, C), at most float32, channels beside one another. Other strides
    are free."""
    single = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return single and x.ndim == 4 and x.numel() > 0 and x.stride(3) == 1


if AVAILABLE:

    @triton.jit
    def _part(rows, columns, CHANNELS: tl.constexpr, C: tl.constexpr, T: tl.constexpr):
        """What a program writes: image, row, tokens of that row, channels. Neighbours come one after the other."""
        BLOCKS: tl.constexpr = (CHANNELS + C - 1) // C
        parts = tl.cdiv(columns, T) * BLOCKS
        line, part = tl.program_id(0) // parts, tl.program_id(0) % parts
        tokens, channels = part // BLOCKS * T + tl.arange(0, T), part % BLOCKS * C + tl.arange(0, C)
        return (line // rows).to(tl.int64), line % rows, tokens, channels

    @triton.jit
    def _rolled_forward(x, offset, out, height, width, stride_b, stride_h, stride_w, PAD: tl.constexpr,
                        CHANNELS: tl.constexpr, C: tl.constexpr, T: tl.constexpr):  # fmt: skip
        rows, columns = height + 2 * PAD, width + 2 * PAD
        image, h, w, c = _part(rows, columns, CHANNELS, C, T)
        y = wrap(wrap(h - PAD, height) + tl.load(offset + 2 * image).to(tl.int32), height)
        z = wrap(wrap(w - PAD, width) + tl.load(offset + 2 * image + 1).to(tl.int32), width)
        keep = (w < columns)[:, None] & (c < CHANNELS)[None, :]
        source = x + image * stride_b + y.to(tl.int64) * stride_h
        target = out + (image * rows + h) * columns * CHANNELS
        value = tl.load(source + (z * stride_w)[:, None] + c[None, :], keep)
        tl.store(target + (w * CHANNELS)[:, None] + c[None, :], value, keep)

    @triton.jit
    def _rolled_backward(grad, offset, out, height, width, PAD: tl.constexpr, COPIES: tl.constexpr,
                         CHANNELS: tl.constexpr, C: tl.constexpr, T: tl.constexpr):  # fmt: skip
        """A token's gradient is the sum over the places it went to: a first one, and others a side further on."""
        rows, columns = height + 2 * PAD, width + 2 * PAD
        image, y, z, c = _part(height, width, CHANNELS, C, T)
        h = wrap(wrap(y - tl.load(offset + 2 * image).to(tl.int32), height) + PAD, height)
        w = wrap(wrap(z - tl.load(offset + 2 * image + 1).to(tl.int32), width) + PAD, width)
        keep = (z < width)[:, None] & (c < CHANNELS)[None, :]
        total = tl.zeros([T, C], tl.float32)
        for row in range(h, rows, height):
            source = grad + (image * rows + row) * columns * CHANNELS
            for copy in tl.static_range(COPIES):
                column = w + copy * width
                there = keep & (column < columns)[:, None]
                total += tl.load(source + (column * CHANNELS)[:, None] + c[None, :], there, 0.0).to(tl.float32)
        target = out + (image * height + y) * width * CHANNELS
        tl.store(target + (z * CHANNELS)[:, None] + c[None, :], total.to(out.dtype.element_ty), keep)


@operator("shift_vits::rolled")
def rolled(x: Tensor, offset: Tensor, padding: int) -> Tensor:
    """Tokens rolled by ``offset`` (B, 2) in [0, side], int64, and beyond their sides themselves, contiguous:
    out[b, h, w] = x[b, h - p + offset[b, 0], w - p + offset[b, 1]] on the torus.

    Shapes: x (B, H, W, C) -> (B, H + 2p, W + 2p, C), p = ``padding`` in [0, side].
    """
    b, height, width, channels = x.shape
    if padding < 0 or padding > height or padding > width:
        raise ValueError(f"tokens of {height}x{width} cannot be padded by {padding}: at most by a side")
    rows, columns = height + 2 * padding, width + 2 * padding
    out = torch.empty((b, rows, columns, channels), dtype=x.dtype, device=x.device)
    grid, tile = _split(out)
    launch(_rolled_forward, grid, x, offset.contiguous(), out, height, width, x.stride(0), x.stride(1), x.stride(2),
           PAD=padding, CHANNELS=channels, **tile)  # fmt: skip
    return out


@operator("shift_vits::rolled_backward")
def rolled_backward(grad: Tensor, offset: Tensor, padding: int) -> Tensor:
    """The transpose of ``rolled``, summed in float32: contiguous (B, H + 2p, W + 2p, C) -> (B, H, W, C)."""
    b, rows, columns, channels = grad.shape
    height, width = rows - 2 * padding, columns - 2 * padding
    out = torch.empty((b, height, width, channels), dtype=grad.dtype, device=grad.device)
    grid, tile = _split(out)
    copies = 1 if not padding else 2 if 2 * padding <= width else 3
    launch(_rolled_backward, grid, grad, offset.contiguous(), out, height, width, PAD=padding, COPIES=copies,
           CHANNELS=channels, num_stages=1, **tile)  # fmt: skip
    return out


def _split(out: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Programs that write ``out``, of 128 threads with up to two vectors of 16 bytes each."""
    b, rows, columns, channels = out.shape
    block = math.gcd(channels, 128)
    block = block if block >= 32 else min(next_power_of_2(channels), 128)
    tokens = 2 * 128 * 16 // out.element_size() // block
    while tokens >= 2 * columns:
        tokens //= 2
    return (b * rows * -(-columns // tokens) * -(-channels // block),), {"C": block, "T": tokens, "num_warps": 4}


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, offset, ctx.padding = inputs
    ctx.save_for_backward(offset)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    (offset,) = ctx.saved_tensors
    return rolled_backward(grad.contiguous(), offset, ctx.padding), None, None


def _twice(ctx: Any, grad: Tensor) -> tuple:
    (offset,) = ctx.saved_tensors
    return rolled(grad.contiguous(), offset, ctx.padding), None, None


register_autograd("shift_vits::rolled", _backward, setup_context=_remember)
register_autograd("shift_vits::rolled_backward", _twice, setup_context=_remember)
