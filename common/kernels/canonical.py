"""The place that the canonical anchor chooses, from the image to its offset: the image is read once, sums are exact."""

import torch
from torch import Tensor
from torch.library import triton_op

from .base import AVAILABLE, launch, power, usable

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["BASE", "HALF", "PRIME", "canonical_offset", "fits_canonical_kernel", "peak"]

PRIME, BASE = 2039, 37  # integers modulo the prime are exact in float16; 37 generates half of them at least
HALF = PRIME // 2


def peak(n: int) -> int:
    """The largest entry of a kernel of length n whose products with [-1019, 1019] sum up below 2^23.

    Float32 holds whole numbers up to 2^24; the last bit is not relied on."""
    return min(HALF, (2**23 - 1) // (HALF * n))


def fits_canonical_kernel(x: Tensor) -> bool:
    """Whether ``canonical_offset`` takes these images: floating point, at most 16 channels."""
    return usable(x) and x.is_floating_point() and 0 < x.shape[1] <= 16 and x.numel() > 0


if AVAILABLE:

    @triton.jit
    def _read(x, kernel, g, rows, columns, count, length, height, width, sb, sc, sh, sw, PRIME: tl.constexpr,
              BASE: tl.constexpr, CHANNELS: tl.constexpr, ROW_PEAK: tl.constexpr, COLUMN_PEAK: tl.constexpr,
              M: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr):  # fmt: skip
        """M rows of pixels as integers; in the programs after them, row i of two circulants u[j - i] and v[i - j]."""
        part, w = tl.program_id(0), tl.arange(0, TW)
        parts = (count + M - 1) // M
        if part < parts:
            row = part * M + tl.arange(0, M)
            inside = (row < count)[:, None] & (w < width)[None, :]
            pixel = x + ((row // height).to(tl.int64) * sb + (row % height) * sh)[:, None] + (w * sw)[None, :]
            a = tl.zeros([M, TW], tl.int32)
            for c in tl.static_range(CHANNELS):
                t = tl.load(pixel + c * sc, inside, 0.0).to(tl.float32) * 0.00390625
                t = tl.floor((t - tl.floor(t + 0.5)) * 262144.0 + 0.5)
                level = tl.where(t >= -262144.0, t, 0.0).to(tl.int32)  # 18 bits: three of them fit before a remainder
                if c > 2:
                    a = (a + 90700 * PRIME) % PRIME  # of what is not negative, here and below
                a = BASE * a + level
            a = (a + 90700 * PRIME) % PRIME - PRIME // 2
            tl.store(g + row.to(tl.int64)[:, None] * width + w[None, :], a.to(tl.float16), inside)
        else:
            i = part - parts
            if i < height:
                j = tl.arange(0, TH)
                u = tl.load(kernel + (j - i + height) % height)
                tl.store(rows + i * height + j, (u % (2 * ROW_PEAK + 1) - ROW_PEAK).to(tl.float16), j < height)
            if i < width:
                v = tl.load(kernel + length + (i - w + TW * width) % width)
                v = v % (2 * COLUMN_PEAK + 1) - COLUMN_PEAK
                tl.store(columns + i * width + w, v.to(tl.float16), w < width)

    @triton.jit
    def _mix_columns(g, columns, r, count, width, PRIME: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                     K: tl.constexpr):  # fmt: skip
        """M rows of pixels times a circulant, modulo the prime."""
        row, w = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
        place = row.to(tl.int64)[:, None] * width
        real, inside = (row < count)[:, None], (w < width)[None, :]
        total = tl.zeros([M, N], tl.float32)
        for start in range(0, width, K):
            j = start + tl.arange(0, K)
            a = tl.load(g + place + j[None, :], real & (j < width)[None, :], 0.0)
            b = tl.load(columns + j[:, None] * width + w[None, :], (j < width)[:, None] & inside, 0.0)
            total = tl.dot(a, b, total)
        t = (total.to(tl.int32) + 4120 * PRIME) % PRIME - PRIME // 2  # again of what is not negative
        tl.store(r + place + w[None, :], t.to(tl.float16), real & inside)

    @triton.jit
    def _describe(r, rows, d, height, width, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
        """The largest entry of M rows of a circulant's product with an image."""
        image, h = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M)
        base = r + image.to(tl.int64) * height * width
        best = tl.full([M], float("-inf"), tl.float32)
        for first in range(0, width, N):
            w = first + tl.arange(0, N)
            total = tl.zeros([M, N], tl.float32)
            for start in range(0, height, K):
                i = start + tl.arange(0, K)
                a = tl.load(rows + h[:, None] * height + i[None, :], (h < height)[:, None] & (i < height)[None, :], 0.0)
                b = tl.load(base + i[:, None] * width + w[None, :], (i < height)[:, None] & (w < width)[None, :], 0.0)
                total = tl.dot(a, b, total)
            best = tl.maximum(best, tl.max(tl.where((w < width)[None, :], total, float("-inf")), 1))
        tl.store(d + image * height + h, best, h < height)

    @triton.jit
    def _first_of_best(score, place, n):
        """Where ``score`` is largest among the first n, the first of them."""
        score = tl.where(place < n, score, -0x7FFFFFFFFFFFFFFF)
        return tl.min(tl.where(score == tl.max(score, 0), place, n), 0)

    @triton.jit
    def _choose(d, g, kernel, out, length, height, width, TH: tl.constexpr, TW: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
        """Row and column of one image, in 64 bits."""
        image, h, w, k = tl.program_id(0), tl.arange(0, TH), tl.arange(0, TW), tl.arange(0, BLOCK)
        score = tl.zeros([TH, BLOCK], tl.int64)
        for start in range(0, height, BLOCK):
            i = start + k
            a = tl.load(d + image * height + i, i < height, 0.0).to(tl.int64)
            ahead = i[None, :] - h[:, None]
            ahead = tl.where(ahead < 0, ahead + height, ahead)
            inside = (i < height)[None, :] & (h < height)[:, None]
            y = tl.load(kernel + 2 * length + ahead, inside, 0).to(tl.int64)
            score += a[None, :] * y
        row = _first_of_best(tl.sum(score, 1), h, height)

        below = tl.where(h < row, h - row + height, h - row)
        weight = tl.load(kernel + 2 * length + below, h < height, 0).to(tl.int64)
        pixels = g + image.to(tl.int64) * height * width
        score = tl.zeros([TW, BLOCK], tl.int64)
        for start in range(0, width, BLOCK):
            j = start + k
            inside = (h < height)[:, None] & (j < width)[None, :]
            a = tl.load(pixels + h[:, None] * width + j[None, :], inside, 0.0).to(tl.int64)
            s = tl.sum(a * weight[:, None], 0)
            ahead = j[None, :] - w[:, None]
            ahead = tl.where(ahead < 0, ahead + width, ahead)
            z = tl.load(kernel + 3 * length + ahead, (j < width)[None, :] & (w < width)[:, None], 0).to(tl.int64)
            score += s[None, :] * z
        column = _first_of_best(tl.sum(score, 1), w, width)
        tl.store(out + 2 * image, row.to(tl.int64))
        tl.store(out + 2 * image + 1, column.to(tl.int64))


@triton_op("shift_vits::canonical_offset", mutates_args={})
def canonical_offset(x: Tensor, kernel: Tensor) -> Tensor:
    """Offsets (B, 2) of the canonical anchor: ``Canonical.offset``, to the bit.

    Shapes: x (B, C, H, W), any strides; kernel (4, length), int32, with length at least H and W.
    """
    b, c, h, w = x.shape
    rows, columns = (torch.empty((n, n), dtype=torch.float16, device=x.device) for n in (h, w))
    g, r = (torch.empty((b, h, w), dtype=torch.float16, device=x.device) for _ in range(2))
    d = torch.empty((b, h), dtype=torch.float32, device=x.device)
    out = torch.empty((b, 2), dtype=torch.int64, device=x.device)
    length, down, across = kernel.shape[1], max(16, power(h)), max(16, power(w))
    tile = {"M": min(128, down), "N": min(256, across), "K": 32 if min(h, w) > 16 else 16, "num_warps": 8}
    m, few = tile["M"], max(1, 1024 // across)
    launch(_read, (-(-b * h // few) + max(h, w),), x, kernel, g, rows, columns, b * h, length, h, w, *x.stride(),
           PRIME=PRIME, BASE=BASE, CHANNELS=c, ROW_PEAK=peak(h), COLUMN_PEAK=peak(w), M=few, TH=down, TW=across,
           num_warps=4)  # fmt: skip
    launch(_mix_columns, (-(-b * h // m), -(-w // tile["N"])), g, columns, r, b * h, w, PRIME=PRIME, **tile)
    launch(_describe, (b, -(-h // m)), r, rows, d, h, w, **tile)
    side = max(256, down, across)
    launch(_choose, (b,), d, g, kernel, out, length, h, w, TH=down, TW=across, BLOCK=8192 // side,
           num_warps=16 if side == 256 else 8)  # fmt: skip
    return out
