"""The place that the canonical anchor chooses, from the image to its offset: the image is read once, sums are exact."""

import torch
from torch import Tensor

from .base import AVAILABLE, launch, operator, power, usable
from .pixels import is_packed, packed

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["BASE", "HALF", "PRIME", "canonical_offset", "fits_canonical_kernel", "peak"]

PRIME, BASE = 2039, 37  # integers modulo the prime are exact in float16; 37 generates half of them at least
HALF = PRIME // 2
COPIES = 8  # of the rings: numbers per load
TILES = {"read": 1024, "read warps": 8, "pack read": 512, "pack read warps": 8, "places": 128, "rows": 32, "side": 512,
         "programs": 64, "steps": 8, "choose warps": 8}  # fmt: skip
"""Pixels per program of ``_read``, two of them per thread if they are packed, which are 16 bytes; M and K of
``_describe`` up to 256 x 256 pixels, up to what side it makes r itself, and programs that M is halved for; loads
under way in ``_turn``."""


def peak(n: int) -> int:
    """The largest entry of a kernel of length n whose products with [-1019, 1019] sum up below 2^23.

    Float32 holds whole numbers up to 2^24; the last bit is not relied on."""
    return min(HALF, (2**23 - 1) // (HALF * n))


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
    def _read(x, kernel, g, pixels, coarse, fine, images, line, length, height, width, sb, sc, sh, sw,
              PRIME: tl.constexpr, BASE: tl.constexpr, CHANNELS: tl.constexpr, PACK: tl.constexpr,
              ROW_PEAK: tl.constexpr, COLUMN_PEAK: tl.constexpr, COPIES: tl.constexpr, TH: tl.constexpr,
              TW: tl.constexpr, N: tl.constexpr):  # fmt: skip
        """N pixels of a line as integers and, to PACK them, as they are, three or four channels side by side; in
        further programs, a copy of the rings of u, v, y and z.

        Instructions that round and convert are slow. So whole numbers below 2^22 become integers through the bits of
        3 * 2^22 + t, and integers below 2^23 become floats through those of 2^23 + t."""
        image, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        if image < images:
            k = part * N + tl.arange(0, N)
            pixel = x + image.to(tl.int64) * sb + row.to(tl.int64) * sh + k * sw
            a = tl.zeros([N], tl.int32)
            for c in tl.static_range(CHANNELS):
                t = tl.load(pixel + c * sc, k < line, 0.0, eviction_policy="evict_first")
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
            t = (a + 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + PRIME // 2)
            place = image.to(tl.int64) * height * width + row * width
            tl.store(g + place + k, t.to(tl.float16), k < line)
            if PACK:
                if CHANNELS == 3:
                    odd = tl.join(odd, tl.zeros_like(odd))
                k = part * (4 * N) + tl.arange(0, 4 * N)
                tl.store(pixels + 4 * place + k, tl.reshape(tl.join(even, odd), [4 * N]), k < 4 * line)
        else:
            copy = ((image - images) * tl.num_programs(1) + row) * tl.num_programs(2) + part
            if copy < COPIES:
                i, j = _number(copy, height, TH), _number(copy, width, TW)
                u = tl.load(kernel + i, i >= 0, 0) % (2 * ROW_PEAK + 1) - ROW_PEAK
                tl.store(coarse + copy * (2 * TH) + tl.arange(0, 2 * TH), u.to(tl.float16))
                y = tl.load(kernel + 2 * length + i, i >= 0, 1) - 1
                tl.store(fine + copy * (2 * TH) + tl.arange(0, 2 * TH), y.to(tl.int16))
                place = 2 * COPIES * TH + copy * (2 * TW) + tl.arange(0, 2 * TW)
                v = tl.load(kernel + length + j, j >= 0, 0) % (2 * COLUMN_PEAK + 1) - COLUMN_PEAK
                tl.store(coarse + place, v.to(tl.float16))
                z = tl.load(kernel + 3 * length + j, j >= 0, 1) - 1
                tl.store(fine + place, z.to(tl.int16))

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
    def _mix(g, coarse, r, height, width, PRIME: tl.constexpr, COPIES: tl.constexpr, TH: tl.constexpr,
             TW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # fmt: skip
        """r of M rows at N places, where that is too much for ``_describe`` to make again for all it needs it for."""
        image, i, w = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M), tl.program_id(2) * N + tl.arange(0, N)
        j, line = tl.arange(0, K), image.to(tl.int64) * height * width + i[:, None] * width
        pixel, place = g + line + j[None, :], 2 * COPIES * TH + _place(width - j, TW, COPIES)[:, None] + w[None, :]
        total = tl.zeros([M, N], tl.float32)
        for start in range(0, width, K):  # COPIES divides K
            real = start + j < width
            a = tl.load(pixel + start, (i < height)[:, None] & real[None, :], 0.0)
            total = tl.dot(a, tl.load(coarse + (place - start), real[:, None], 0.0), total)  # v[j - w]
        keep = (i < height)[:, None] & (w < width)[None, :]
        tl.store(r + line + w[None, :], _residue(total, PRIME).to(tl.float16), keep)

    @triton.jit
    def _describe(g, coarse, d, height, width, MIXED: tl.constexpr, PRIME: tl.constexpr, COPIES: tl.constexpr,
                  TH: tl.constexpr, TW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # fmt: skip
        """The image as seen from N rows: the largest of every 16 among M places.

        It is attention without a softmax: r, transposed, is made K rows at a time, M places each, and stays in
        registers, where the second product wants it. The rings of u and v fit into the nearest cache, so all that comes
        from afar is the image: its next rows are on their way during both products. With MIXED, g is r."""
        image, part, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * N
        w, h, j = part * M + tl.arange(0, M), first + tl.arange(0, N), tl.arange(0, TW)
        if MIXED:
            j = w
        else:
            place = 2 * COPIES * TH + _place(width - j, TW, COPIES)[:, None] + w[None, :]
            v = tl.load(coarse + place, (j < width)[:, None], 0.0)  # v[j - w]
        i = tl.arange(0, K)
        pixels, pixel = g + image.to(tl.int64) * height * width, i[:, None] * width + j[None, :]
        place = _place(height - i, TH, COPIES)[:, None] + h[None, :]
        a = tl.load(pixels + pixel, (i < height)[:, None] & (j < width)[None, :], 0.0)
        u = tl.load(coarse + place, (i < height)[:, None], 0.0)  # u[i - h]
        total = tl.zeros([M, N], tl.float32)
        for start in range(K, height + K, K):  # COPIES divides K
            real = (start + i < height)[:, None]
            next_a = tl.load(pixels + (start * width + pixel), real & (j < width)[None, :], 0.0)
            next_u = tl.load(coarse + (place - start), real, 0.0)
            r = tl.trans(a) if MIXED else _residue(tl.dot(tl.trans(v), tl.trans(a)), PRIME).to(tl.float16)
            total = tl.dot(r, u, total)
            a, u = next_a, next_u
        best = tl.reshape(tl.where((w < width)[:, None], total, float("-inf")), [M // 16, 16, N])
        row = (image * tl.num_programs(1) + part) * (M // 16) + tl.arange(0, M // 16)
        tl.store(d + row[:, None] * height + h[None, :], tl.max(best, 1), (h < height)[None, :])

    @triton.jit
    def _turn(a, ring, n, T: tl.constexpr, FEW: tl.constexpr, STEPS: tl.constexpr, WIDE: tl.constexpr,
              COPIES: tl.constexpr):  # fmt: skip
        """The first place w < n where sum_j a[j] (k[j - w] - 1) is largest. The 1 moves all sums alike and saves a bit.

        With t = n - j, that of k[j - w] is number t + w of the ring. Numbers a of 32 bits are not negative; of others
        (WIDE), the upper 32 bits follow in a second row. Sums are exact modulo 2^64, and end below 2^63."""
        w = tl.arange(0, T)
        MANY: tl.constexpr = T // FEW if T < STEPS * FEW else STEPS
        low, high = tl.zeros([FEW, T], tl.uint64), tl.zeros([FEW, T], tl.int32)
        for start in range(0, n, MANY * FEW):
            for step in tl.static_range(MANY):  # whose loads are under way at once
                t = 1 + step * FEW + tl.arange(0, FEW)
                place, inside = (n - start) - t, t <= n - start
                k = tl.load(ring + start + _place(t, T, COPIES)[:, None] + w[None, :])  # COPIES divides ``start``
                k, b = k.to(tl.uint16), tl.load(a + place, inside, 0)
                low += b.to(tl.uint32).to(tl.uint64)[:, None] * k.to(tl.uint64)
                if WIDE:
                    high += tl.load(a + n + place, inside, 0)[:, None] * k.to(tl.int32)
        score = tl.sum(low.to(tl.int64) + (high.to(tl.int64) << 32), 0) if WIDE else tl.sum(low.to(tl.int64), 0)
        score = tl.where(w < n, score, -0x7FFFFFFFFFFFFFFF)
        return tl.min(tl.where(score == tl.max(score, 0), w, n), 0)

    @triton.jit
    def _choose(d, g, kernel, fine, s, out, length, height, width, TH: tl.constexpr, TW: tl.constexpr,
                PARTS: tl.constexpr, COPIES: tl.constexpr, FEW: tl.constexpr, STEPS: tl.constexpr, N: tl.constexpr,
                K: tl.constexpr):  # fmt: skip
        """Row and column of one image.

        The sums over its rows are taken on matrix units, two bits of y at a time: their products with g sum up below
        3 * 1019 * 2048 < 2^23, exact in float32. An image of one tile is on its way while the row is being found."""
        image = tl.program_id(0)
        pixels, scores = g + image.to(tl.int64) * height * width, s + image * (height + 2 * width)
        h, d = tl.arange(0, TH), d + image * PARTS * height
        best = tl.load(d + h, h < height, 0.0)
        for part in tl.static_range(1, PARTS):
            best = tl.maximum(best, tl.load(d + part * height + h, h < height, 0.0))
        i, j = tl.arange(0, K), tl.arange(0, N)
        tile = tl.load(pixels + i[:, None] * width + j[None, :], (i < height)[:, None] & (j < width)[None, :], 0.0)
        tl.store(scores + h, best.to(tl.int32) + 0x800000, h < height)  # raised to where none is negative
        tl.debug_barrier()  # other threads read them
        row = _turn(scores, fine, height, TH, FEW, STEPS, False, COPIES)
        sums = scores + height
        if row >= 0:  # always, which the compiler does not know: it would wait for the tile where that is loaded
            bit = 2 * tl.arange(0, 16)  # y has 16 bits at most: the last eight digits are zeros
            for first in range(0, TW, N):
                j = first + tl.arange(0, N)
                total = tl.zeros([N, 16], tl.float32)
                for start in range(0, TH, K):
                    i = start + tl.arange(0, K)
                    y = tl.load(kernel + 2 * length + tl.where(i < row, i - row + height, i - row), i < height, 0)
                    digit = ((y[:, None] >> bit[None, :]) & 3).to(tl.float16)
                    if TH > K or TW > N:
                        inside = (i < height)[:, None] & (j < width)[None, :]
                        tile = tl.load(pixels + i[:, None] * width + j[None, :], inside, 0.0)
                    total = tl.dot(tl.trans(tile), digit, total)
                number = tl.sum(total.to(tl.int32).to(tl.int64) << bit.to(tl.int64)[None, :], 1)
                tl.store(sums + j, number.to(tl.int32), j < width)
                tl.store(sums + width + j, (number >> 32).to(tl.int32), j < width)
        tl.debug_barrier()  # other threads read these sums
        column = _turn(sums, fine + 2 * COPIES * TH, width, TW, FEW, STEPS, True, COPIES)
        tl.store(out + 2 * image, row.to(tl.int64))
        tl.store(out + 2 * image + 1, column.to(tl.int64))


def canonical_offset(x: Tensor, kernel: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Offsets (B, 2) of the canonical anchor: ``Canonical.offset``, to the bit; and x or, with ``dtype``, what
    ``packed`` makes of it. Images of three or four channels are packed as they are read.

    Shapes: x (B, C, H, W), any strides; kernel (4, length), int32, with length at least H and W. Its last two rows, y
    and z, are from 1 to 2^15.
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
    g = torch.empty((b, h, w), dtype=torch.float16, device=x.device)
    coarse, fine = (torch.empty(2 * COPIES * (down + across), dtype=kind, device=x.device)
                    for kind in (torch.float16, torch.int16))  # fmt: skip
    (sb, sc, sh, sw), length = x.stride(), kernel.shape[1]
    lines, line = (1, h * w) if sh == w * sw and h * w * sw < 2**31 else (h, w)  # an image is one line, as a rule
    pack = "" if dtype is None else "pack "
    n, warps = min(TILES[pack + "read"], max(16, power(line))), TILES[pack + "read warps"]
    parts = -(-line // n)
    pixels = torch.empty((0 if dtype is None else b, h, w, 4), dtype=dtype or x.dtype, device=x.device)
    launch(_read, (b + -(-COPIES // (lines * parts)), lines, parts), x, kernel, g, pixels, coarse, fine, b, line,
           length, h, w, sb, sc, sh, sw, PRIME=PRIME, BASE=BASE, CHANNELS=c, PACK=dtype is not None, ROW_PEAK=peak(h),
           COLUMN_PEAK=peak(w), COPIES=COPIES, TH=down, TW=across, N=n, num_warps=warps)  # fmt: skip
    side = max(down, across)
    mixed, common = side > TILES["side"], {"PRIME": PRIME, "COPIES": COPIES, "TH": down, "TW": across}
    m, n, k = min(TILES["places"], across), min(256, down), min(TILES["rows"], max(16, down // 2))
    r = g
    if mixed:
        r, tall = torch.empty_like(g), min(128, down)
        launch(_mix, (b, -(-h // tall), -(-w // m)), g, coarse, r, h, w, M=tall, N=m, K=min(64, across), **common,
               num_warps=8 if tall * m > 64**2 else 4, num_stages=3)  # fmt: skip
    else:  # v stays in shared memory, m places for every pixel of a row, beside k rows of pixels
        m, k = min(m, 2**15 // across), max(16, min(k, TILES["rows"] * 256 // across))
        while m > 16 and b * -(-w // m) < TILES["programs"]:  # a few images: their time is that of one program
            m, n = m // 2, min(n, 128)
    tiles = -(-w // m)
    seen = tiles * m // 16
    d = torch.empty((b, seen, h), dtype=torch.float32, device=x.device)
    launch(_describe, (b, tiles, -(-h // n)), r, coarse, d, h, w, MIXED=mixed, M=m, N=n, K=k, **common,
           num_warps=max(4, m // 16, 0 if mixed else across // 128), num_stages=1)  # fmt: skip
    s = torch.empty((b, h + 2 * w), dtype=torch.int32, device=x.device)
    out = torch.empty((b, 2), dtype=torch.int64, device=x.device)
    launch(_choose, (b,), d, g, kernel, fine, s, out, length, h, w, TH=down, TW=across, PARTS=seen, COPIES=COPIES,
           FEW=4096 // max(256, side), STEPS=TILES["steps"], N=min(256, across), K=min(256, down),
           num_warps=TILES["choose warps"] if side > 64 else 4, num_stages=1)  # fmt: skip
    return out, pixels
