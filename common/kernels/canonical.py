"""The place that the canonical anchor chooses, from the image to its offset: the image is read once, sums are exact."""

import torch
from torch import Tensor

from .base import AVAILABLE, launch, operator, power, usable

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["BASE", "HALF", "PRIME", "canonical_offset", "fits_canonical_kernel", "peak"]

PRIME, BASE = 2039, 37  # integers modulo the prime are exact in float16; 37 generates half of them at least
HALF = PRIME // 2
COPIES = 4  # of the rings of y and z: numbers per load


def peak(n: int) -> int:
    """The largest entry of a kernel of length n whose products with [-1019, 1019] sum up below 2^23.

    Float32 holds whole numbers up to 2^24; the last bit is not relied on."""
    return min(HALF, (2**23 - 1) // (HALF * n))


def fits_canonical_kernel(x: Tensor) -> bool:
    """Whether ``canonical_offset`` takes these images: floating point, at most 16 channels."""
    return usable(x) and x.is_floating_point() and 0 < x.shape[1] <= 16 and x.numel() > 0


if AVAILABLE:

    @triton.jit
    def _write_ring(ring, k, copy, n, T: tl.constexpr):
        """The numbers k[-t] - 1, t < 2n, from t = copy on, in a row of 2 T; see ``_turn``."""
        place = tl.arange(0, 2 * T)
        t = place + copy
        inside = t < 2 * n
        t = tl.where(t < n, t, t - n)
        number = tl.load(k + tl.where(t == 0, 0, n - t), inside, 1) - 1
        tl.store(ring + copy * (2 * T) + place, number.to(tl.int16))

    @triton.jit
    def _read(x, kernel, g, rows, columns, rings, images, line, length, height, width, sb, sc, sh, sw,
              PRIME: tl.constexpr, BASE: tl.constexpr, CHANNELS: tl.constexpr, ROW_PEAK: tl.constexpr,
              COLUMN_PEAK: tl.constexpr, COPIES: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr,
              N: tl.constexpr):  # fmt: skip
        """N pixels of a line as integers; in further programs, row i of two circulants u[j - i] and v[i - j], and a
        copy of the rings of y and z.

        Instructions that round and convert are slow. So whole numbers below 2^22 become integers through the bits of
        3 * 2^22 + t, and integers below 2^23 become floats through those of 2^23 + t."""
        image, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        if image < images:
            k = part * N + tl.arange(0, N)
            pixel = x + image.to(tl.int64) * sb + row.to(tl.int64) * sh + k * sw
            a = tl.zeros([N], tl.int32)
            for c in tl.static_range(CHANNELS):
                t = tl.load(pixel + c * sc, k < line, 0.0).to(tl.float32)
                t = tl.where(tl.abs(t) < float("inf"), t, 0.0) * 0.00390625
                t = tl.floor((t - tl.floor(t + 0.5)) * 262144.0 + 0.5)
                if c > 2:  # three levels, from -2^18 to 2^17, fit before a remainder
                    a = (a + 180900 * PRIME) % PRIME  # of what is not negative, here and below
                a = BASE * a + ((t + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000)
            a = (a + 180900 * PRIME) % PRIME
            t = (a + 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + PRIME // 2)
            place = image.to(tl.int64) * height * width + row * width
            tl.store(g + place + k, t.to(tl.float16), k < line)
        else:
            i = ((image - images) * tl.num_programs(1) + row) * tl.num_programs(2) + part
            if i < height:
                j = tl.arange(0, TH)
                u = tl.load(kernel + tl.where(j < i, j - i + height, j - i), j < height, 0)
                tl.store(rows + i * height + j, (u % (2 * ROW_PEAK + 1) - ROW_PEAK).to(tl.float16), j < height)
            if i < width:
                j = tl.arange(0, TW)
                v = tl.load(kernel + length + tl.where(i < j, i - j + width, i - j), j < width, 0)
                v = v % (2 * COLUMN_PEAK + 1) - COLUMN_PEAK
                tl.store(columns + i * width + j, v.to(tl.float16), j < width)
            if i < COPIES:
                _write_ring(rings, kernel + 2 * length, i, height, TH)
                _write_ring(rings + 2 * COPIES * TH, kernel + 3 * length, i, width, TW)

    @triton.jit
    def _residue(t, PRIME: tl.constexpr):
        """Whole numbers up to 2^23 modulo the prime, less half of it, by sums and products alone.

        Adding 3 * 2^22 rounds a quotient. The first, rounded before, leaves up to half a prime and a little more; the
        second is then 0, 1 or -1, and clear."""
        t -= PRIME // 2
        for _ in tl.static_range(2):
            t -= (t * (1 / PRIME) + 12582912.0 - 12582912.0) * PRIME
        return t

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
        tl.store(r + place + w[None, :], _residue(total, PRIME).to(tl.float16), real & inside)

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
    def _turn(a, ring, n, T: tl.constexpr, FEW: tl.constexpr, WIDE: tl.constexpr, COPIES: tl.constexpr):
        """The first place w < n where sum_j a[j] (k[j - w] - 1) is largest. The 1 moves all sums alike and saves a bit.

        The ring, k[-t] - 1 for t < 2n, is there in copies that each begin one step further: wherever a thread starts,
        its next few numbers lie together and aligned in one of them. With t = n - j, that of k[j - w] is number t + w.
        Sums are exact modulo 2^64, and end below 2^63: one wide product each for a below 2^31, else (WIDE) two."""
        w = tl.arange(0, T)
        low, high = tl.zeros([FEW, T], tl.int64), tl.zeros([FEW, T], tl.int32)
        for start in range(0, n, 4 * FEW):
            for step in tl.static_range(4):  # loads of four steps are under way at once
                t = 1 + step * FEW + tl.arange(0, FEW)
                place = (t % COPIES) * (2 * T) + t // COPIES * COPIES  # ``start`` is a multiple of COPIES
                inside = t <= n - start
                b = tl.load(a + (n - start) - t, inside, 0)
                k = tl.load(ring + start + place[:, None] + w[None, :], inside[:, None], 0)
                if WIDE:
                    k = k.to(tl.uint16)
                    low += (b.to(tl.uint32).to(tl.uint64)[:, None] * k.to(tl.uint64)).to(tl.int64)
                    high += (b >> 32).to(tl.int32)[:, None] * k.to(tl.int32)
                else:
                    low += b.to(tl.int32).to(tl.int64)[:, None] * k.to(tl.int64)
        score = tl.sum(low + (high.to(tl.int64) << 32), 0) if WIDE else tl.sum(low, 0)
        score = tl.where(w < n, score, -0x7FFFFFFFFFFFFFFF)
        return tl.min(tl.where(score == tl.max(score, 0), w, n), 0)

    @triton.jit
    def _choose(d, g, kernel, rings, s, out, length, height, width, TH: tl.constexpr, TW: tl.constexpr,
                COPIES: tl.constexpr, FEW: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # fmt: skip
        """Row and column of one image.

        The sums over its rows are taken on matrix units, two bits of y at a time: their products with g sum up below
        3 * 1019 * 2048 < 2^23, exact in float32."""
        image = tl.program_id(0)
        row = _turn(d + image * height, rings, height, TH, FEW, False, COPIES)
        bit = 2 * tl.arange(0, 16)  # y has 16 bits at most: the last eight digits are zeros
        pixels, sums = g + image.to(tl.int64) * height * width, s + image * width
        for first in range(0, width, N):
            j = first + tl.arange(0, N)
            total = tl.zeros([16, N], tl.float32)
            for start in range(0, height, K):
                i = start + tl.arange(0, K)
                y = tl.load(kernel + 2 * length + tl.where(i < row, i - row + height, i - row), i < height, 0)
                digit = ((y[None, :] >> bit[:, None]) & 3).to(tl.float16)
                inside = (i < height)[:, None] & (j < width)[None, :]
                total = tl.dot(digit, tl.load(pixels + i[:, None] * width + j[None, :], inside, 0.0), total)
            tl.store(sums + j, tl.sum(total.to(tl.int32).to(tl.int64) << bit.to(tl.int64)[:, None], 0), j < width)
        tl.debug_barrier()  # other threads read these sums
        column = _turn(sums, rings + 2 * COPIES * TH, width, TW, FEW, True, COPIES)
        tl.store(out + 2 * image, row.to(tl.int64))
        tl.store(out + 2 * image + 1, column.to(tl.int64))


@operator("shift_vits::canonical_offset")
def canonical_offset(x: Tensor, kernel: Tensor) -> Tensor:
    """Offsets (B, 2) of the canonical anchor: ``Canonical.offset``, to the bit.

    Shapes: x (B, C, H, W), any strides; kernel (4, length), int32, with length at least H and W. Its last two rows, y
    and z, are from 1 to 2^15.
    """
    b, c, h, w = x.shape
    rows, columns = (torch.empty((n, n), dtype=torch.float16, device=x.device) for n in (h, w))
    g, r = (torch.empty((b, h, w), dtype=torch.float16, device=x.device) for _ in range(2))
    d = torch.empty((b, h), dtype=torch.float32, device=x.device)
    s, out = (torch.empty((b, n), dtype=torch.int64, device=x.device) for n in (w, 2))
    length, down, across = kernel.shape[1], max(16, power(h)), max(16, power(w))
    tile = {"M": min(128, down), "N": min(256, across), "K": 32 if min(h, w) > 16 else 16, "num_warps": 8}
    rings = torch.empty(2 * COPIES * (down + across), dtype=torch.int16, device=x.device)
    m, (sb, sc, sh, sw) = tile["M"], x.stride()
    lines, line = (1, h * w) if sh == w * sw and h * w * sw < 2**31 else (h, w)  # an image is one line, as a rule
    n = min(1024, max(16, power(line)))
    parts = -(-line // n)
    others = -(-max(COPIES, h, w) // (lines * parts))
    launch(_read, (b + others, lines, parts), x, kernel, g, rows, columns, rings, b, line, length, h, w, sb, sc, sh, sw,
           PRIME=PRIME, BASE=BASE, CHANNELS=c, ROW_PEAK=peak(h), COLUMN_PEAK=peak(w), COPIES=COPIES, TH=down, TW=across,
           N=n, num_warps=8)  # fmt: skip
    launch(_mix_columns, (-(-b * h // m), -(-w // tile["N"])), g, columns, r, b * h, w, PRIME=PRIME, **tile)
    launch(_describe, (b, -(-h // m)), r, rows, d, h, w, **tile)
    side = max(down, across)
    launch(_choose, (b,), d, g, kernel, rings, s, out, length, h, w, TH=down, TW=across, COPIES=COPIES,
           FEW=4096 // max(256, side), N=tile["N"], K=64 if h > 32 else tile["K"], num_warps=16 if side > 64 else 4,
           num_stages=4)  # fmt: skip
    return out
