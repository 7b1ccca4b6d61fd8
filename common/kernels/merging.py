"""Patch merging where the anchor says: 2 x 2 tokens gathered, normalised if the model does, and written once."""

import torch
from torch import Tensor
from torch.library import triton_op

from .base import AVAILABLE, launch, power, usable

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["fits_merge_kernel", "rolled_merge"]


def fits_merge_kernel(x: Tensor) -> bool:
    """Whether ``rolled_merge`` takes these tokens: even sides, no gradient."""
    even = x.shape[1] % 2 == 0 and x.shape[2] % 2 == 0 and x.shape[3] <= 2048
    return usable(x) and x.dtype != torch.float64 and even and not torch.is_grad_enabled() and x.is_contiguous()


if AVAILABLE:

    @triton.jit
    def _rolled_merge(x, offset, gain, bias, out, height, width, count, CHANNELS: tl.constexpr, NORM: tl.constexpr,
                      EPS: tl.constexpr, C: tl.constexpr, T: tl.constexpr):  # fmt: skip
        i, c = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, C)
        keep = (i < count)[:, None] & (c < CHANNELS)[None, :]
        across = width // 2
        area = height // 2 * across
        image = tl.where(i < count, i, 0) // area
        h = i % area // across * 2 + tl.load(offset + 2 * image).to(tl.int32)
        w = i % across * 2 + tl.load(offset + 2 * image + 1).to(tl.int32)
        top, left = image.to(tl.int64) * height + h % height, w % width
        below, right = image.to(tl.int64) * height + (h + 1) % height, (w + 1) % width
        a0 = tl.load(x + (top * width + left)[:, None] * CHANNELS + c[None, :], keep, 0.0).to(tl.float32)
        a1 = tl.load(x + (below * width + left)[:, None] * CHANNELS + c[None, :], keep, 0.0).to(tl.float32)
        a2 = tl.load(x + (top * width + right)[:, None] * CHANNELS + c[None, :], keep, 0.0).to(tl.float32)
        a3 = tl.load(x + (below * width + right)[:, None] * CHANNELS + c[None, :], keep, 0.0).to(tl.float32)
        if NORM:
            mean = (tl.sum(a0 + a1 + a2 + a3, 1) / (4 * CHANNELS))[:, None]
            a0, a1 = tl.where(keep, a0 - mean, 0.0), tl.where(keep, a1 - mean, 0.0)
            a2, a3 = tl.where(keep, a2 - mean, 0.0), tl.where(keep, a3 - mean, 0.0)
            square = tl.sum(a0 * a0 + a1 * a1 + a2 * a2 + a3 * a3, 1) / (4 * CHANNELS)
            scale = (1.0 / tl.sqrt(square + EPS))[:, None]
            inside = c < CHANNELS
            g = gain + c
            b = bias + c
            a0 = a0 * scale * tl.load(g, inside, 0.0)[None, :] + tl.load(b, inside, 0.0)[None, :]
            g += CHANNELS
            b += CHANNELS
            a1 = a1 * scale * tl.load(g, inside, 0.0)[None, :] + tl.load(b, inside, 0.0)[None, :]
            g += CHANNELS
            b += CHANNELS
            a2 = a2 * scale * tl.load(g, inside, 0.0)[None, :] + tl.load(b, inside, 0.0)[None, :]
            g += CHANNELS
            b += CHANNELS
            a3 = a3 * scale * tl.load(g, inside, 0.0)[None, :] + tl.load(b, inside, 0.0)[None, :]
        place = out + i.to(tl.int64)[:, None] * (4 * CHANNELS) + c[None, :]
        tl.store(place, a0.to(out.dtype.element_ty), keep)
        tl.store(place + CHANNELS, a1.to(out.dtype.element_ty), keep)
        tl.store(place + 2 * CHANNELS, a2.to(out.dtype.element_ty), keep)
        tl.store(place + 3 * CHANNELS, a3.to(out.dtype.element_ty), keep)


@triton_op("shift_vits::rolled_merge", mutates_args={})
def rolled_merge(x: Tensor, offset: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float,
                 dtype: torch.dtype) -> Tensor:  # fmt: skip
    """2 x 2 tokens of x (B, H, W, C), rolled by ``offset`` (B, 2) in [0, side), side by side as (column, row, channel);
    with ``gain`` and ``bias`` (4C,) normalised as by a LayerNorm -> (B, H/2, W/2, 4C) of the type given."""
    b, h, w, c = x.shape
    out = torch.empty((b, h // 2, w // 2, 4 * c), dtype=dtype, device=x.device)
    count, wide = b * (h // 2) * (w // 2), power(c)
    tokens = max(1, 1024 // wide)
    launch(_rolled_merge, (-(-count // tokens),), x, offset, offset if gain is None else gain,
           offset if bias is None else bias, out, h, w, count, CHANNELS=c, NORM=gain is not None, EPS=eps, C=wide,
           T=tokens, num_warps=4)  # fmt: skip
    return out
