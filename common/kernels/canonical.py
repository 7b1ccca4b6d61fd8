"""The place that the canonical anchor chooses, from the image to its offset: the image is read once, sums are exact."""

import torch
from torch import Tensor

from .base import AVAILABLE, launch, operator, power, usable
from .pixels import is_packed, packed

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import around

__all__ = ["BASE", "HALF", "PRIME", "canonical_offset", "fits_canonical_kernel"]

PRIME, BASE = 2039, 37  # integers modulo the prime are exact in float16; 37 generates half of them at least
HALF = PRIME // 2
COPIES = 8  # of the rings: numbers per load
TILES = {"read": 1024, "read warps": 8, "steps": 8, "choose warps": 8, "side": 256}
"""Pixels per program of ``_read``; loads under way in ``_turn``; rows and columns at a time of ``_choose``."""


def fits_canonical_kernel(x: Tensor) -> bool:
    """Whether ``canonical_offset`` takes these images: floating point, at most 16 channels."""
    return usable(x) and x.is_floating_point() and 0 < x.shape[1] <= 16 and x.numel() > 0


if AVAILABLE:

    @triton.jit
    def _number(copy, n, T: tl.constexpr):
        """Which entries of a kernel a copy of its ring holds: k[-t] for t < 2n, from t = copy on; -1 for none.

        A circulant k[i - j] needs no other table: n - i numbers along the ring begins its row i. The copies each begin
        one step further, so that wherever a thread starts, its next few numbers lie together and aligned in one."""
        t = tl.arange(0, 2 * T) + copy
        inside = t < 2 * n
        t = tl.where(t < n, t, t - n)
        return tl.where(inside, tl.where(t == 0, 0, n - t), -1)

    @triton.jit
    def _place(t, T: tl.constexpr, COPIES: tl.constexpr):
        """Where number t of a ring is the first of a few that lie together and aligned."""
        return (t % COPIES) * (2 * T) + t // COPIES * COPIES

    @triton.jit
    def _read(x, kernel, g, d, pixels, fine, images, length, height, width, sb, sc, sh, sw, PRIME: tl.constexpr,
              BASE: tl.constexpr, CHANNELS: tl.constexpr, PACK: tl.constexpr, COPIES: tl.constexpr, TH: tl.constexpr,
              TW: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr):  # fmt: skip
        """N pixels of some rows as integers and, to PACK them, as they are, three or four channels side by side; and
        the sum of each row's integers. In further programs, a copy of the rings of y and z.

        Instructions that round and convert are slow. So whole numbers below 2^22 become integers through the bits of
        3 * 2^22 + t, and integers below 2^23 become floats through those of 2^23 + t."""
        image, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        if image < images:
            first, i, j = block * ROWS, tl.arange(0, ROWS * N) // N, part * N + tl.arange(0, ROWS * N) % N
            keep = (i < height - first) & (j < width)
            pixel = x + image.to(tl.int64) * sb + first.to(tl.int64) * sh + (i * sh + j * sw)
            a = tl.zeros([ROWS * N], tl.int32)
            for c in tl.static_range(CHANNELS):
                t = tl.load(pixel + c * sc, keep, 0.0, eviction_policy="evict_first")
                if PACK:
                    value = t.to(pixels.dtype.element_ty)
                    if c == 0:
                        even = value
                    elif c == 1:
                        odd = value
                    elif c == 2:
                        even = tl.join(even, value)
                    else:
                        odd = tl.join(odd, value)
                t = t.to(tl.float32)
                t = tl.where(tl.abs(t) < float("inf"), t, 0.0)
                t -= tl.floor(t * 0.00390625 + 0.5) * 256.0
                t = tl.floor(t * 1024.0 + 0.5)
                if c > 2:  # three levels, from -2^18 to 2^17, fit before a remainder
                    a = (a + 180900 * PRIME) % PRIME  # of what is not negative, here and below
                a = BASE * a + ((t + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000)
            a = (a + 180900 * PRIME) % PRIME
            place = image.to(tl.int64) * height * width + first * width
            t = (a + 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + PRIME // 2)
            tl.store(g + place + (i * width + j), t.to(tl.float16), keep)
            row = first + tl.arange(0, ROWS)
            total = tl.sum(tl.reshape(tl.where(keep, a, 0), [ROWS, N]), 1)
            tl.store(d + (image * tl.num_programs(2) + part) * height + row, total, row < height)
            if PACK:
                if CHANNELS == 3:
                    odd = tl.join(odd, tl.zeros_like(odd))
                i, j = tl.arange(0, 4 * ROWS * N) // (4 * N), part * (4 * N) + tl.arange(0, 4 * ROWS * N) % (4 * N)
                keep = (i < height - first) & (j < 4 * width)
                value = tl.reshape(tl.join(even, odd), [4 * ROWS * N])
                tl.store(pixels + 4 * place + (i * (4 * width) + j), value, keep)
        else:
            copy = ((image - images) * tl.num_programs(1) + block) * tl.num_programs(2) + part
            if copy < COPIES:
                i, j = _number(copy, height, TH), _number(copy, width, TW)
                y = tl.load(kernel + i, i >= 0, 1) - 1
                tl.store(fine + copy * (2 * TH) + tl.arange(0, 2 * TH), y.to(tl.int16))
                z = tl.load(kernel + length + j, j >= 0, 1) - 1
                tl.store(fine + 2 * COPIES * TH + copy * (2 * TW) + tl.arange(0, 2 * TW), z.to(tl.int16))

    @triton.jit
    def _turn(a, ring, n, T: tl.constexpr, FEW: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr,
              WIDE: tl.constexpr, COPIES: tl.constexpr):  # fmt: skip
        """sum_j a[j] (k[j - w] - 1) at each place w < n. The 1 moves all sums alike and saves a bit.

        With t = n - j, that of k[j - w] is number t + w of the ring. Numbers a of 32 bits are not negative, and are the
        sum of PARTS; of others (WIDE), the upper 32 bits follow in a second row. Sums are exact modulo 2^64, and end
        below 2^63."""
        w = tl.arange(0, T)
        MANY: tl.constexpr = T // FEW if T < STEPS * FEW else STEPS
        low, high = tl.zeros([FEW, T], tl.uint64), tl.zeros([FEW, T], tl.int32)
        for start in range(0, n, MANY * FEW):
            for step in tl.static_range(MANY):  # whose loads are under way at once
                t = 1 + step * FEW + tl.arange(0, FEW)
                place, inside = (n - start) - t, t <= n - start
                k = tl.load(ring + start + _place(t, T, COPIES)[:, None] + w[None, :])  # COPIES divides ``start``
                k, b = k.to(tl.uint16), tl.load(a + place, inside, 0)
                for part in tl.static_range(1, PARTS):
                    b += tl.load(a + part * n + place, inside, 0)
                low += b.to(tl.uint32).to(tl.uint64)[:, None] * k.to(tl.uint64)
                if WIDE:
                    high += tl.load(a + n + place, inside, 0)[:, None] * k.to(tl.int32)
        score = tl.sum(low.to(tl.int64) + (high.to(tl.int64) << 32), 0) if WIDE else tl.sum(low.to(tl.int64), 0)
        return tl.where(w < n, score, -0x7FFFFFFFFFFFFFFF)

    @triton.jit
    def _tile(pixels, i, j, height, width):
        """Pixels in rows i and columns j, zero beyond the last."""
        return tl.load(pixels + i[:, None] * width + j[None, :], (i < height)[:, None] & (j < width)[None, :], 0.0)

    @triton.jit
    def _repeats(pixels, rows, height, width, N: tl.constexpr):
        """Whether an image is the same so many rows further down."""
        different = 0
        for start in range(0, height, 16):
            i = start + tl.arange(0, 16)
            there = tl.where(i < height, around(i + rows, height), height)
            for left in range(0, width, N):
                j = left + tl.arange(0, N)
                same = _tile(pixels, i, j, height, width) == _tile(pixels, there, j, height, width)
                different += tl.sum(tl.sum((~same).to(tl.int32), 1), 0)
        return different == 0

    @triton.jit
    def _choose(d, g, kernel, fine, s, out, height, width, TH: tl.constexpr, TW: tl.constexpr, PARTS: tl.constexpr,
                COPIES: tl.constexpr, FEW: tl.constexpr, STEPS: tl.constexpr, N: tl.constexpr,
                K: tl.constexpr):  # fmt: skip
        """Row and column of one image. As a rule one row is the best; of several the best place is taken, but not
        twice of an image that repeats.

        The sums over its rows are taken on matrix units, two bits of y at a time: their products with g sum up below
        3 * 1019 * 2048 < 2^23, exact in float32. An image of one tile is on its way while the row is being found."""
        image, h, w = tl.program_id(0), tl.arange(0, TH), tl.arange(0, TW)
        pixels, sums = g + image.to(tl.int64) * height * width, s + image * (2 * width)
        if TH <= K and TW <= N:
            tile = _tile(pixels, tl.arange(0, K), tl.arange(0, N), height, width)
        score = _turn(d + image * (PARTS * height), fine, height, TH, FEW, STEPS, PARTS, False, COPIES)
        rows = tl.where(score == tl.max(score, 0), h, height)
        first = tl.min(rows, 0)
        row, down, right, most = first, first, first * 0, first.to(tl.int64) * 0 - 0x7FFFFFFFFFFFFFFF
        while row < height:
            bit = 2 * tl.arange(0, 16)  # y has 16 bits at most: the last eight digits are zeros
            for left in range(0, TW, N):
                j = left + tl.arange(0, N)
                total = tl.zeros([N, 16], tl.float32)
                for start in range(0, TH, K):
                    i = start + tl.arange(0, K)
                    y = tl.load(kernel + tl.where(i < row, i - row + height, i - row), i < height, 0)
                    digit = ((y[:, None] >> bit[None, :]) & 3).to(tl.float16)
                    if TH <= K and TW <= N:
                        total = tl.dot(tl.trans(tile), digit, total)
                    else:
                        total = tl.dot(tl.trans(_tile(pixels, i, j, height, width)), digit, total)
                number = tl.sum(total.to(tl.int32).to(tl.int64) << bit.to(tl.int64)[None, :], 1)
                tl.store(sums + j, number.to(tl.int32), j < width)
                tl.store(sums + width + j, (number >> 32).to(tl.int32), j < width)
            tl.debug_barrier()  # other threads read these sums
            places = _turn(sums, fine + 2 * COPIES * TH, width, TW, FEW, STEPS, 1, True, COPIES)
            best = tl.max(places, 0)
            column = tl.min(tl.where(places == best, w, width), 0)
            down, right = tl.where(best > most, row, down), tl.where(best > most, column, right)
            most = tl.maximum(best, most)
            row = tl.min(tl.where(rows > row, rows, height), 0)
            if row < height:
                row = tl.where(_repeats(pixels, row - first, height, width, N), height, row)
            tl.debug_barrier()  # before they are written again
        tl.store(out + 2 * image, down.to(tl.int64))
        tl.store(out + 2 * image + 1, right.to(tl.int64))


def canonical_offset(x: Tensor, kernel: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Offsets (B, 2) of the canonical anchor: ``Canonical.offset``, to the bit; and x or, with ``dtype``, what
    ``packed`` makes of it. Images of three or four channels are packed as they are read.

    Shapes: x (B, C, H, W), any strides; kernel (2, length), int32, y and z: from 1 to 2^15, with length at least
    H and W.
    """
    few = dtype is not None and x.shape[1] in (3, 4) and not (x.dtype == dtype and is_packed(x))
    offset, pixels = canonical_place(x, kernel, dtype if few else None)
    if dtype is None:
        return offset, x
    return offset, pixels.permute(0, 3, 1, 2)[:, : x.shape[1]] if few else packed(x, dtype)


@operator("shift_vits::canonical_place")
def canonical_place(x: Tensor, kernel: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Offsets (B, 2), and pixels (B, H, W, 4) of the type given, zeros behind the last channel: none without a type."""
    b, c, h, w = x.shape
    down, across = max(16, power(h)), max(16, power(w))
    n = min(TILES["read"], across)
    rows, parts, side = min(TILES["read"] // n, down), -(-w // n), max(down, across)
    g = torch.empty((b, h, w), dtype=torch.float16, device=x.device)
    d = torch.empty((b, parts, h), dtype=torch.int32, device=x.device)
    fine = torch.empty(2 * COPIES * (down + across), dtype=torch.int16, device=x.device)
    pixels = torch.empty((0 if dtype is None else b, h, w, 4), dtype=dtype or x.dtype, device=x.device)
    blocks, common = -(-h // rows), {"COPIES": COPIES, "TH": down, "TW": across}
    launch(_read, (b + -(-COPIES // (blocks * parts)), blocks, parts), x, kernel, g, d, pixels, fine, b,
           kernel.shape[1], h, w, *x.stride(), PRIME=PRIME, BASE=BASE, CHANNELS=c, PACK=dtype is not None, ROWS=rows,
           N=n, **common, num_warps=TILES["read warps"])  # fmt: skip
    s = torch.empty((b, 2, w), dtype=torch.int32, device=x.device)
    out = torch.empty((b, 2), dtype=torch.int64, device=x.device)
    launch(_choose, (b,), d, g, kernel, fine, s, out, h, w, PARTS=parts, FEW=4096 // max(256, side),
           STEPS=TILES["steps"], N=min(TILES["side"], across), K=min(TILES["side"], down), **common,
           num_warps=TILES["choose warps"] if side > 64 else 4, num_stages=1)  # fmt: skip
    return out, pixels
