"""The place that the canonical anchor chooses, from the image to its offset: the image is read once, sums are exact."""

import torch
from torch import Tensor

from .base import AVAILABLE, launch, next_power_of_2, operator
from .cards import first_tile
from .pixels import is_packed, packed
from .sketching import new_sketch

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import wrap
    from .sketching import mix

__all__ = ["BASE", "HALF", "PRIME", "canonical_offset", "fits_canonical_kernel"]

PRIME, BASE = 2039, 37  # integers modulo the prime are exact in float16; 37 generates half of them at least
HALF = PRIME // 2
TILES = {"read": 1024, "read warps": 8, "choose warps": 8, "side": 256, "hash": 4096}
"""Pixels per program of ``_read``; rows and columns at a time of ``_choose``, and products of a hash."""


def fits_canonical_kernel(x: Tensor) -> bool:
    """Whether ``canonical_offset`` takes these images: floating point, at most 16 channels, of which a tile fits."""
    few = x.is_floating_point() and 0 < x.shape[1] <= 16 and x.numel() > 0
    return few and _side(x) > 0


def _side(x: Tensor) -> int:
    """Rows and columns at a time of ``_choose``: as many as the card has room for; 0 if it has for none."""
    sides = [TILES["side"] >> i for i in range(3)]
    down, across = (max(16, next_power_of_2(side)) for side in x.shape[2:])
    tile = first_tile(x, "_choose", *((choose_memory(min(side, across), min(side, down)), 0, 1) for side in sides))
    return sides[tile] if tile >= 0 else 0


def choose_memory(n: int, k: int) -> int:
    """Bytes of a program of ``_choose``: a tile of pixels and its digits, and what is added up among its threads."""
    return 2 * k * (n + 16) + 16_384


if AVAILABLE:

    @triton.jit
    def _read(x, g, d, pixels, height, width, sb, sc, sh, sw, PRIME: tl.constexpr, BASE: tl.constexpr,
              CHANNELS: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr):  # fmt: skip
        """N pixels of some rows as integers and, to PACK them, as they are, three or four channels side by side; and
        the sum of each row's integers.

        Instructions that round and convert are slow. So whole numbers below 2^22 become integers through the bits of
        3 * 2^22 + t, and integers below 2^23 become floats through those of 2^23 + t."""
        image, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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

    @triton.jit
    def _numbers(a, j, keep, n, PARTS: tl.constexpr):
        """Numbers j of n that are the sum of PARTS."""
        number = tl.load(a + j, keep, 0)
        for part in tl.static_range(1, PARTS):
            number += tl.load(a + part * n + j, keep, 0)
        return number.to(tl.int64)

    @triton.jit
    def _steps(a, n, T: tl.constexpr, PARTS: tl.constexpr):
        """By how much each of n numbers on a ring is more than the one before; beyond them by -2^50."""
        j = tl.arange(0, T)
        step = _numbers(a, j, j < n, n, PARTS) - _numbers(a, tl.where(j == 0, n - 1, j - 1), j < n, n, PARTS)
        return tl.where(j < n, step, -0x4000000000000)

    @triton.jit
    def _hash(a, kernel, n, T: tl.constexpr, FEW: tl.constexpr, PARTS: tl.constexpr):
        """sum_j a[j] k[j - w] at each place w < n, exact: it is below 2^63."""
        w = tl.arange(0, T)
        total = tl.zeros([FEW, T], tl.int64)
        for start in range(0, n, FEW):
            j = start + tl.arange(0, FEW)
            keep = (j < n)[:, None] & (w < n)[None, :]
            k = tl.load(kernel + wrap(j[:, None] - w[None, :], n), keep, 0)
            total += _numbers(a, j, j < n, n, PARTS)[:, None] * k.to(tl.int64)
        return tl.sum(total, 0)

    @triton.jit
    def _steepest(step, T: tl.constexpr):
        """The largest step, below 2^50 either way, and the first and the last place of such: all from one maximum."""
        place = tl.arange(0, T)
        first, last = tl.split(tl.max(tl.join(step * 4096 + (4095 - place), step * 4096 + place), 0))
        return first >> 12, 4095 - (first & 4095).to(tl.int32), (last & 4095).to(tl.int32)

    @triton.jit
    def _largest(score, among, n, LEAST: tl.constexpr):
        """Of places below n, others being n or more, those with the largest score, others n; and that score."""
        score = tl.where(among < n, score, LEAST)
        most = tl.max(score, 0)
        return tl.where(score == most, among, n), most

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
            there = tl.where(i < height, wrap(i + rows, height), height)
            for left in range(0, width, N):
                j = left + tl.arange(0, N)
                same = _tile(pixels, i, j, height, width) == _tile(pixels, there, j, height, width)
                different += tl.sum(tl.sum((~same).to(tl.int32), 1), 0)
        return different == 0

    @triton.jit
    def _place(image, d, g, kernel, s, out, length, height, width, TH: tl.constexpr, TW: tl.constexpr,
               PARTS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, N: tl.constexpr,
               K: tl.constexpr):  # fmt: skip
        """Row and column of one image. As a rule one row is the best, and one column: hashes tell several apart, of
        which not two are looked at if the image repeats.

        The sums over its rows are taken on matrix units, two bits of y at a time: their products with g sum up below
        3 * 1019 * 2048 < 2^23, exact in float32. An image of one tile is on its way while the row is being found."""
        LEAST: tl.constexpr = -0x7FFFFFFFFFFFFFFF
        h, w = tl.arange(0, TH), tl.arange(0, TW)
        pixels, sums, d = g + image.to(tl.int64) * height * width, s + image * width, d + image * (PARTS * height)
        if TH <= K and TW <= N:
            tile = _tile(pixels, tl.arange(0, K), tl.arange(0, N), height, width)
        step = _steps(d, height, TH, PARTS)
        highest, first, last = _steepest(step, TH)
        rows = tl.where(step == highest, h, height)
        if first < last:
            rows, _most = _largest(_hash(d, kernel, height, TH, DOWN, PARTS), rows, height, LEAST)
            first, last = tl.min(rows, 0), tl.max(tl.where(rows < height, rows, 0), 0)
        row, down, right = first, first, first * 0
        most = highest * 0 + LEAST
        best = most
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
                tl.store(sums + j, number, j < width)
            tl.debug_barrier()  # other threads read these sums
            step, told = _steps(sums, width, TW, 1), most * 0
            highest, column, other = _steepest(step, TW)
            if (first < last) | (column < other):
                columns = tl.where(step == highest, w, width)
                columns, told = _largest(_hash(sums, kernel + length, width, TW, ACROSS, 1), columns, width, LEAST)
                column = tl.min(columns, 0)
            better = (highest > most) | ((highest == most) & (told > best))
            down, right = tl.where(better, row, down), tl.where(better, column, right)
            most, best = tl.where(better, highest, most), tl.where(better, told, best)
            before, row = row, height + 0 * row
            if before < last:
                row = tl.min(tl.where(rows > before, rows, height), 0)
                row = tl.where(_repeats(pixels, row - first, height, width, N), height, row)
            tl.debug_barrier()  # before they are written again
        tl.store(out + 2 * image, down.to(tl.int64))
        tl.store(out + 2 * image + 1, right.to(tl.int64))

    @triton.jit
    def _choose(d, g, kernel, s, out, projection, weight, bias, mixed, constant, images, length, height, width, ms,
                TH: tl.constexpr, TW: tl.constexpr, PARTS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
                N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr,
                BIAS: tl.constexpr, ROWS: tl.constexpr, J: tl.constexpr):  # fmt: skip
        """A program for each image, and some that mix weights meanwhile: of a few images most processors are idle."""
        program = tl.program_id(0)
        if program < images:
            _place(program, d, g, kernel, s, out, length, height, width, TH, TW, PARTS, DOWN, ACROSS, N, K)
        elif COUNT > 0:
            mix(program - images, projection, weight, bias, mixed, constant, ms, WIDTH, D, COUNT, BIAS, ROWS, J)


def canonical_offset(x: Tensor, kernel: Tensor, dtype: torch.dtype | None = None,
                     sketch: list[Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Offsets (B, 2) of the canonical anchor: ``Canonical.offset``, to the bit; and x or, with ``dtype``, what
    ``packed`` makes of it. Images of three or four channels are packed as they are read. Also, with ``sketch``, what
    ``sketched`` makes of these: else two tensors of nothing.

    Shapes: x (B, C, H, W), any strides; kernel (2, length), int32, y and z: from 1 to 2^15, with length at least
    H and W.
    """
    few = dtype is not None and x.shape[1] in (3, 4) and not (x.dtype == dtype and is_packed(x))
    offset, pixels, *sketched = canonical_place(x, kernel, dtype if few else None, sketch or [])
    if dtype is not None:
        x = pixels.permute(0, 3, 1, 2)[:, : x.shape[1]] if few else packed(x, dtype)
    return offset, x, sketched[0], sketched[1]


@operator("shift_vits::canonical_place")
def canonical_place(x: Tensor, kernel: Tensor, dtype: torch.dtype | None,
                    sketch: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Offsets (B, 2), and pixels (B, H, W, 4) of the type given, zeros behind the last channel: none without a type;
    and what ``sketched`` makes of the three tensors of a ``sketch``, if there is one."""
    b, c, h, w = x.shape
    down, across = max(16, next_power_of_2(h)), max(16, next_power_of_2(w))
    n = min(TILES["read"], across)
    rows, parts = min(TILES["read"] // n, down), -(-w // n)
    g = torch.empty((b, h, w), dtype=torch.float16, device=x.device)
    d = torch.empty((b, parts, h), dtype=torch.int32, device=x.device)
    pixels = torch.empty((0 if dtype is None else b, h, w, 4), dtype=dtype or x.dtype, device=x.device)
    launch(_read, (b, -(-h // rows), parts), x, g, d, pixels, h, w, *x.stride(), PRIME=PRIME, BASE=BASE, CHANNELS=c,
           PACK=dtype is not None, ROWS=rows, N=n, num_warps=TILES["read warps"])  # fmt: skip
    s, side = torch.empty((b, w), dtype=torch.int64, device=x.device), _side(x)
    out = torch.empty((b, 2), dtype=torch.int64, device=x.device)
    if sketch:
        mixed, constant, programs, constants = new_sketch(sketch[0], sketch[1], sketch[2])
    else:
        mixed, constant = (torch.empty(0, dtype=torch.float32, device=x.device) for _ in range(2))
        programs, constants = 0, dict.fromkeys(("WIDTH", "D", "COUNT", "BIAS", "ROWS", "J"), 0)
    given = sketch or [d, d, d]
    launch(_choose, (b + programs,), d, g, kernel, s, out, *given, mixed, constant, b, kernel.shape[1], h, w,
           given[0].stride(0), TH=down, TW=across, PARTS=parts, DOWN=TILES["hash"] // down,
           ACROSS=TILES["hash"] // across, N=min(side, across), K=min(side, down), **constants,
           num_warps=TILES["choose warps"] if max(down, across) > 64 else 4, num_stages=1)  # fmt: skip
    return out, pixels, mixed, constant
