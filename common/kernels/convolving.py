"""A convolution of a few hundred channels at stride 2, of tokens that begin where the anchor says: a matrix product of
windows that are gathered as they are multiplied, without a rolled and padded copy. No gradient."""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .base import AVAILABLE, INTERPRETED, launch, next_power_of_2, operator
from .cards import holds

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import wrap
    from .merging import patch_at

__all__ = ["convolved", "fits_convolved"]

FEW, MANY = {"T": 128, "K": 32, "num_warps": 8, "num_stages": 4}, {"T": 64, "K": 64, "num_warps": 4, "num_stages": 3}
"""Tokens and channels of a product, of up to 128 channels and of more."""
CHANNELS, OUTPUTS = 192, 384  # at most: of these cuDNN takes 50 us and this 58, but a rolled copy 20
BLOCK = 256  # outputs of a program at most


def fits_convolved(x: Tensor, weight: Tensor, stride: int, padding: int) -> bool:
    """Whether ``convolved`` takes tokens (B, H, W, C) and a convolution's weights: half precision, 16-192 channels in
    sixteens, at most 384 outputs, 3 x 3 at stride 2 with padding 1, even sides, no gradient at all."""
    half = x.dtype in (torch.bfloat16, torch.float16) or (INTERPRETED and x.dtype == torch.float32)
    known = tuple(weight.shape[2:]) == (3, 3) and (stride, padding) == (2, 1) and not isinstance(weight, DTensor)
    few = weight.shape[1] == x.shape[3] <= CHANNELS and x.shape[3] % 16 == 0
    few = few and len(weight) <= OUTPUTS and len(weight) % -(-len(weight) // BLOCK) == 0
    even = x.shape[1] % 2 == 0 and x.shape[2] % 2 == 0 and x.numel() > 0
    if not (half and known and few and even) or not x.is_contiguous() or torch.is_grad_enabled():
        return False
    return holds(x, "_convolved", *convolved_memory(x.shape[3], len(weight)))


def convolved_memory(channels: int, outputs: int) -> tuple[int, int, int]:
    """Of a program of ``_convolved``: bytes held, bytes of a stage, tokens and weights, and stages."""
    tile = FEW if channels <= 128 else MANY
    return 0, 2 * tile["K"] * (tile["T"] + next_power_of_2(-(-outputs // -(-outputs // BLOCK)))), tile["num_stages"]


if AVAILABLE:

    @triton.jit
    def _of_three(which, first, second, third):
        return tl.where(which == 0, first, tl.where(which == 1, second, third))

    @triton.jit
    def _store_tokens(out, y, bias, n, limit, T: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
                      BIAS: tl.constexpr):  # fmt: skip
        i = tl.arange(0, T)
        if BIAS:
            y += tl.load(bias + n, n < WIDE, 0.0).to(tl.float32)[None, :]
        keep = (i < limit)[:, None] & (n < WIDE)[None, :]
        tl.store(out + (i[:, None] * D + n[None, :]), y.to(out.dtype.element_ty), keep)

    @triton.jit
    def _convolved(x, offset, weight, bias, out, height, width, count, steps, BIAS: tl.constexpr,
                   CHANNELS: tl.constexpr, D: tl.constexpr, BLOCKS: tl.constexpr, N: tl.constexpr, REST: tl.constexpr,
                   T: tl.constexpr, K: tl.constexpr):  # fmt: skip
        """T tokens by N + REST outputs, of which there are BLOCKS: 192 are no power of two. A step is K channels of one
        place of the windows; the compiler is not told how many there are, or it would unroll them."""
        WIDE: tl.constexpr = D // BLOCKS
        start, block = tl.program_id(0) // BLOCKS * T, tl.program_id(0) % BLOCKS * WIDE
        weight, bias, out = weight + block * (9 * CHANNELS), bias + block, out + block
        begin = start // (height // 2 * (width // 2))
        image, row, column = patch_at(tl.minimum(start + tl.arange(0, T), count - 1), height, width)
        top = wrap(row - 1 + tl.load(offset + 2 * image).to(tl.int32), height)
        left = wrap(column - 1 + tl.load(offset + 2 * image + 1).to(tl.int32), width)
        middle, centre = wrap(top + 1, height), wrap(left + 1, width)
        below, right = wrap(middle + 1, height), wrap(centre + 1, width)
        first = (image - begin) * height  # in 32 bits: of the images that these tokens are in
        top, middle, below = (first + top) * width, (first + middle) * width, (first + below) * width
        x += begin.to(tl.int64) * (height * width * CHANNELS)
        k, n, m = tl.arange(0, K), tl.arange(0, N), N + tl.arange(0, REST if REST else 1)
        y, z = tl.zeros([T, N], tl.float32), tl.zeros([T, REST if REST else 1], tl.float32)
        for step in range(steps):
            place = step // (CHANNELS // K)
            token = _of_three(place // 3, top, middle, below) + _of_three(place % 3, left, centre, right)
            channel = (step - place * (CHANNELS // K)) * K
            a = tl.load(x + (token * CHANNELS + channel)[:, None] + k[None, :])
            b = tl.load(weight + step * K + (k[:, None] + n[None, :] * (9 * CHANNELS)), (n < WIDE)[None, :], 0.0)
            y = tl.dot(a, b, y)
            if REST:
                c = tl.load(weight + step * K + (k[:, None] + m[None, :] * (9 * CHANNELS)), (m < WIDE)[None, :], 0.0)
                z = tl.dot(a, c, z)
        out += start.to(tl.int64) * D
        if REST:
            _store_tokens(out, z, bias, m, count - start, T, D, WIDE, BIAS)
        _store_tokens(out, y, bias, n, count - start, T, D, WIDE, BIAS)


@operator("shift_vits::convolved")
def convolved(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A 3 x 3 convolution at stride 2 of tokens on a torus, which begin at ``offset`` (B, 2) in [0, side): x
    (B, H, W, C), contiguous; weight (D, 3, 3, C), contiguous, of x's type; bias (D,) -> (B, H/2, W/2, D)."""
    offset, (b, h, w, c), d = offset.contiguous(), x.shape, len(weight)
    tile, blocks, count = FEW if c <= 128 else MANY, -(-d // BLOCK), b * (h // 2) * (w // 2)
    k = math.gcd(c, tile["K"])
    out = torch.empty((b, h // 2, w // 2, d), dtype=x.dtype, device=x.device)
    n = max(16, next_power_of_2(d // blocks))
    n, rest = (n // 2, n // 4) if n // 2 < d // blocks <= 3 * n // 4 and n >= 64 else (n, 0)
    launch(_convolved, (-(-count // tile["T"]) * blocks,), x, offset, weight, weight if bias is None else bias, out, h,
           w, count, 9 * c // k, BIAS=bias is not None, CHANNELS=c, D=d, BLOCKS=blocks, N=n, REST=rest,
           **{**tile, "K": k})  # fmt: skip
    return out
