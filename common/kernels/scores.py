"""What anchors choose by: energies of a strided convolution at every position, or of windows, summed per phase without
writing any of them out.

- ``token_scores``: of a small convolution of tokens, which are read once.
- ``token_energies``: the same, from the product of each token with all taps.
- ``best_phase``: the offset of the largest score, from partial sums of these or of ``image_phases``.
- ``best_window``: the offset of the partition into windows whose means have the largest norm.
- ``token_moments``: what the scores need of each token, in one pass; a compiler fuses it with what comes before.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import AVAILABLE, INTERPRETED, launch, operator, power, usable

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import around

__all__ = ["best_phase", "best_window", "fits_token_kernel", "fits_token_scores", "fits_window_scores", "in_one_pass",
           "token_energies", "token_moments", "token_scores"]  # fmt: skip

STRIP = 8  # rows that one program takes; fewer for a few images, which would leave most of a device idle
CHUNKS = {32: (32, 3), 64: (64, 3), 96: (32, 3), 128: (64, 3), 192: (64, 2), 256: (128, 2), 384: (128, 2)}
"""Of ``token_scores``, by channels: how many are multiplied at a time, and how many rows are on their way."""
PROGRAMS = 400  # of ``token_scores`` at least: three on each of 132 processors; more mean shorter strips
TOKENS = 64  # in a program of ``token_scores``
WINDOWS = {16: ("ieee", 4), 32: ("ieee", 4), 64: ("tf32x3", 4)}  # by the longer side: how to multiply, with what warps


def fits_token_kernel(x: Tensor, weight: Tensor, stride: tuple[int, int]) -> bool:
    """Whether ``token_energies`` takes these: 16 channels or more, 4-64 outputs, a 2 x 2 or 3 x 3 kernel."""
    r, channels, kh, kw = weight.shape
    small = kh == kw in (2, 3) and stride in ((2, 2), (4, 4))
    fits = channels == x.shape[1] >= 16 and r in (4, 8, 16, 32, 64) and small
    whole = all(side % s == 0 for side, s in zip(x.shape[2:], stride, strict=True))
    return usable(x) and x.dtype != torch.float64 and fits and whole


def fits_token_scores(x: Tensor, weight: Tensor) -> bool:
    """Whether ``token_scores`` takes tokens (B, H, W, C) for which ``fits_token_kernel`` holds: half precision, rows of
    at most 64, channels known to ``CHUNKS``, 4 outputs."""
    half = x.dtype in (torch.bfloat16, torch.float16) or INTERPRETED
    return half and x.shape[2] <= TOKENS and x.shape[3] in CHUNKS and len(weight) == 4 and x.is_contiguous()


def fits_window_scores(square: Tensor, window: tuple[int, int]) -> bool:
    """Whether ``best_window`` takes these: float32, at most 64 windows below each other."""
    return usable(square) and square.dtype == torch.float32 and square.shape[1] // window[0] <= 64


def _strip(images: int, rows: int, stride: int) -> int:
    return STRIP if images * rows >= 256 * STRIP else stride


if AVAILABLE:

    @triton.jit
    def _token_moments(x, wave, out, tokens, area, channels, K: tl.constexpr, BLOCK: tl.constexpr):
        i, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, K)
        keep = (i < tokens)[:, None] & (k < channels)[None, :]
        t = tl.load(x + i.to(tl.int64)[:, None] * channels + k[None, :], keep, 0.0).to(tl.float32)
        toward = tl.load(wave + k, k < channels, 0.0).to(tl.float32)
        place = out + i // area * 3 * area + i % area
        tl.store(place, tl.sum(t, 1), i < tokens)
        tl.store(place + area, tl.sum(t * t, 1), i < tokens)
        tl.store(place + 2 * area, tl.sum(t * toward[None, :], 1), i < tokens)

    @triton.jit
    def _token_energies(y, bias, wave, scale, colsum, sums, squares, out, channels, height, width, sm,
                        SIDE: tl.constexpr, PAD: tl.constexpr, STRIDE: tl.constexpr, SCALE: tl.constexpr,
                        NORM: tl.constexpr, EPS: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
                        BLOCK: tl.constexpr):  # fmt: skip
        """A strip of rows: energy and direction of a convolution at every position, summed per phase."""
        image, strip, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        n, phase = tl.arange(0, R), tl.arange(0, STRIDE)
        w = block * BLOCK + tl.arange(0, BLOCK)
        base = y + image.to(tl.int64) * height * width * WIDE
        add, toward = tl.load(bias + n), tl.load(wave + n) * (2.0 / R) ** 0.5
        energies = tl.zeros([STRIDE, BLOCK], tl.float32)
        directions = tl.zeros([STRIDE, BLOCK], tl.float32)
        for step in range(ROWS):
            h = strip * ROWS + step
            valid = w < tl.where(h < height, width, 0)
            t = tl.zeros([BLOCK, R], tl.float32)
            for tap in tl.static_range(SIDE * SIDE):  # each product of a token with a tap is read once
                token = around(h + tap // SIDE - PAD, height) * width + around(w + (tap % SIDE - PAD), width)
                place = base + token[:, None] * WIDE + tap * R + n[None, :]
                product = tl.load(place, valid[:, None], 0.0).to(tl.float32)
                if SCALE:
                    product *= tl.load(scale + image * (height * width) + token, valid, 0.0)[:, None]
                t += product
            if NORM:
                mean = tl.zeros([BLOCK], tl.float32)
                square = tl.zeros([BLOCK], tl.float32)
                for tap in tl.static_range(SIDE * SIDE):
                    place = around(h + tap // SIDE, height) * width + around(w + tap % SIDE, width) + image * sm
                    mean += tl.load(sums + place, valid, 0.0)
                    square += tl.load(squares + place, valid, 0.0)
                mean, square = mean / (SIDE * SIDE * channels), square / (SIDE * SIDE * channels)
                inverse = 1.0 / tl.sqrt(tl.maximum(square - mean * mean, 0.0) + EPS)
                t = (t - mean[:, None] * tl.load(colsum + n)[None, :]) * inverse[:, None]
            t += add[None, :]
            keep = valid[None, :] & (phase == step % STRIDE)[:, None]
            energies += tl.where(keep, tl.sum(t * t, 1)[None, :], 0.0)
            directions += tl.where(keep, tl.sum(t * toward[None, :], 1)[None, :], 0.0)
        part = (image * tl.num_programs(1) + strip) * tl.num_programs(2) + block
        place = out + part * 2 * STRIDE * STRIDE + phase * STRIDE  # (part, energy or direction, row, column)
        for b in tl.static_range(STRIDE):
            here = (w % STRIDE == b)[None, :]
            tl.store(place + b, tl.sum(tl.where(here, energies, 0.0), 1))
            tl.store(place + STRIDE * STRIDE + b, tl.sum(tl.where(here, directions, 0.0), 1))

    @triton.jit
    def _token_scores(x, taps, bias, wave, colsum, sums, squares, out, lanes, strips, sm, HEIGHT: tl.constexpr,
                      WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SIDE: tl.constexpr, PAD: tl.constexpr,
                      STRIDE: tl.constexpr, SCALE: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
                      ROWS: tl.constexpr, WIDE: tl.constexpr, T: tl.constexpr, K: tl.constexpr):  # fmt: skip
        """A row of tokens at a time, of as many strips of rows as T tokens hold (``lanes``), each WIDE.

        Its product y with all taps is split by columns of the kernel, and each part moved to the token that it counts
        for by a product with a permutation. Their sum z is split by rows of the kernel, and added to what is above as
        that is left behind: ``above`` has had one row, ``higher`` two. Taps are in the order (high bit of the row,
        column, output, low bit of the row): so both splits are of what one thread has anyway.
        """
        J: tl.constexpr = 2 if SIDE == 2 else 4
        CHUNKS: tl.constexpr = CHANNELS // K
        LIMIT: tl.constexpr = 6e4 if x.dtype.element_ty == tl.float16 else 3e38
        i, k, r = tl.arange(0, T), tl.arange(0, K), tl.arange(0, 4)
        lane, w = tl.program_id(0) * (T // WIDE) + i // WIDE, i % WIDE
        valid, image, right = (w < WIDTH) & (lane < lanes), lane // strips, around(w + 1, WIDTH)
        place = (w * CHANNELS)[:, None] + k[None, :]
        top = (lane - image * strips) * ROWS - PAD
        start, known = x + image.to(tl.int64) * (HEIGHT * WIDTH * CHANNELS), image * sm
        same = (i // WIDE)[:, None] == (i // WIDE)[None, :]
        after = (same & (right[:, None] == w[None, :])).to(x.dtype.element_ty)
        before = (same & (around(w - 1, WIDTH)[:, None] == w[None, :])).to(x.dtype.element_ty)
        weights = taps + k[:, None] * (16 * J) + tl.arange(0, 16 * J)[None, :]
        b0 = tl.load(weights)
        if CHUNKS > 1:
            b1 = tl.load(weights + K * 16 * J)
        if CHUNKS > 2:
            b2 = tl.load(weights + 2 * K * 16 * J)
        none, zero = tl.zeros([T], tl.float32), tl.zeros([T, 4], tl.float32)
        e0, e1, e2, e3, d0, d1, d2, d3 = zero, zero, zero, zero, zero, zero, zero, zero
        above, higher, total, square = zero, zero, none, none
        add, fold = tl.load(bias + r)[None, :], tl.load(colsum + r)[None, :]
        for step in range(ROWS + SIDE - 1):
            row = around(top + step, HEIGHT) * WIDTH
            if SCALE or NORM:
                s = tl.load(sums + (known + row + w), valid, 0.0)
                q = tl.load(squares + (known + row + w), valid, 0.0)
            if NORM:
                s += tl.load(sums + (known + row + right), valid, 0.0)
                q += tl.load(squares + (known + row + right), valid, 0.0)
            line = (start + row * CHANNELS)[:, None] + place
            y = tl.dot(tl.load(line, valid[:, None], 0.0), b0)
            if CHUNKS > 1:
                y = tl.dot(tl.load(line + K, valid[:, None], 0.0), b1, y)
            if CHUNKS > 2:
                y = tl.dot(tl.load(line + 2 * K, valid[:, None], 0.0), b2, y)
            if SCALE:
                mean = s * (1.0 / CHANNELS)
                y *= (1.0 / tl.sqrt(tl.maximum(q * (1.0 / CHANNELS) - mean * mean, 0.0) + EPS))[:, None]
            if WIDE < T:  # what is no number in one strip would be none in others: a permutation multiplies it by 0
                y = tl.minimum(tl.maximum(y, -LIMIT), LIMIT)
            if SIDE == 3:
                even, odd = tl.split(tl.permute(tl.reshape(y.to(after.dtype), [T, 2, 2, 2, 8]), (0, 1, 4, 2, 3)))
                y0, y2 = tl.split(even)
                y1, _ = tl.split(odd)
                z = tl.dot(before, tl.reshape(y0, [T, 16]), tl.reshape(y1, [T, 16]).to(tl.float32))
                z = tl.dot(after, tl.reshape(y2, [T, 16]), z)
            else:
                y0, y1 = tl.split(tl.permute(tl.reshape(y.to(after.dtype), [T, 2, 2, 8]), (0, 1, 3, 2)))
                z = tl.dot(after, tl.reshape(y1, [T, 16]), tl.reshape(y0, [T, 16]).to(tl.float32))
            even, odd = tl.split(tl.permute(tl.reshape(z, [T, 2, 4, 2]), (0, 2, 1, 3)))
            z0, z2 = tl.split(even)
            z1, _ = tl.split(odd)
            if SIDE == 3:
                t = higher + z2
                higher = above + z1
            else:
                t = above + z1
            above = z0
            if NORM:
                mean = (total + s) * (1.0 / (4 * CHANNELS))
                variance = (square + q) * (1.0 / (4 * CHANNELS)) - mean * mean
                t = (t - mean[:, None] * fold) * (1.0 / tl.sqrt(tl.maximum(variance, 0.0) + EPS))[:, None]
                total, square = s, q
            t = tl.where(valid[:, None], t + add, 0.0)
            e, phase = t * t, tl.where(step < SIDE - 1, STRIDE, (step + (STRIDE - SIDE + 1)) % STRIDE)
            e0 += tl.where(phase == 0, e, 0.0)
            d0 += tl.where(phase == 0, t, 0.0)
            e1 += tl.where(phase == 1, e, 0.0)
            d1 += tl.where(phase == 1, t, 0.0)
            if STRIDE == 4:
                e2 += tl.where(phase == 2, e, 0.0)
                d2 += tl.where(phase == 2, t, 0.0)
                e3 += tl.where(phase == 3, e, 0.0)
                d3 += tl.where(phase == 3, t, 0.0)
        toward = (tl.load(wave + r) * (2.0 / 4) ** 0.5)[None, :]
        _store_scores(out, e0, d0 * toward, lanes, T, WIDE, STRIDE)
        _store_scores(out + STRIDE, e1, d1 * toward, lanes, T, WIDE, STRIDE)
        if STRIDE == 4:
            _store_scores(out + 2 * STRIDE, e2, d2 * toward, lanes, T, WIDE, STRIDE)
            _store_scores(out + 3 * STRIDE, e3, d3 * toward, lanes, T, WIDE, STRIDE)

    @triton.jit
    def _store_scores(out, energy, direction, lanes, T: tl.constexpr, WIDE: tl.constexpr, STRIDE: tl.constexpr):
        """Energies and directions (tokens, outputs) of rows of one phase, summed per strip and phase of the columns."""
        e = tl.sum(tl.reshape(tl.sum(energy, 1), [T // WIDE, WIDE // STRIDE, STRIDE]), 1)
        d = tl.sum(tl.reshape(tl.sum(direction, 1), [T // WIDE, WIDE // STRIDE, STRIDE]), 1)
        lane = tl.program_id(0) * (T // WIDE) + tl.arange(0, T // WIDE)
        place = out + lane[:, None] * (2 * STRIDE * STRIDE) + tl.arange(0, STRIDE)[None, :]
        tl.store(place, e, (lane < lanes)[:, None])
        tl.store(place + STRIDE * STRIDE, d, (lane < lanes)[:, None])

    @triton.jit
    def _best_phase(parts, at, out, count, area, width, STRIDE: tl.constexpr, SIGNED: tl.constexpr,
                    PLACED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        """Add up an image's partial sums (part, energy or direction, phase), and choose."""
        image, phase, p = tl.program_id(0), tl.arange(0, STRIDE * STRIDE), tl.arange(0, BLOCK)
        energies = tl.zeros([BLOCK, STRIDE * STRIDE], tl.float64)
        directions = tl.zeros([BLOCK, STRIDE * STRIDE], tl.float64)
        for first in range(0, count, BLOCK):
            keep = (first + p < count)[:, None]
            place = parts + (image * count + first + p)[:, None] * 2 * STRIDE * STRIDE + phase[None, :]
            energies += tl.load(place, keep, 0.0).to(tl.float64)
            directions += tl.load(place + STRIDE * STRIDE, keep, 0.0).to(tl.float64)
        energy = tl.sum(energies, 0)
        if SIGNED:
            energy += 0.01 * tl.sqrt(tl.sum(energy, 0) / area) * tl.sum(directions, 0)
        best = tl.min(tl.where(energy == tl.max(energy, 0), phase, STRIDE * STRIDE - 1), 0)
        row, column = best // STRIDE, best % STRIDE
        if PLACED:
            row = around(row + tl.load(at + 2 * image).to(tl.int32), area // width)
            column = around(column + tl.load(at + 2 * image + 1).to(tl.int32), width)
        tl.store(out + 2 * image, row.to(tl.int64))
        tl.store(out + 2 * image + 1, column.to(tl.int64))

    @triton.jit
    def _along(taps, place, first, side, WINDOW: tl.constexpr):
        """Weights of places in the windows that begin at ``first``, on the torus: zero in others, and where either is
        beyond the side."""
        ahead = tl.where(place < first, place - first + side, place - first)
        return tl.load(taps + ahead, (ahead < WINDOW) & (place < side) & (first < side), 0.0)

    @triton.jit
    def _best_window(square, toward, taps, out, sm, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GAIN: tl.constexpr,
                     WH: tl.constexpr, WW: tl.constexpr, A: tl.constexpr, B: tl.constexpr, DOWN: tl.constexpr,
                     ACROSS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
        """An image: weighted means of all windows, as two products with matrices of taps, in the order (phase, window)
        along both axes. Their squares are summed per phase, and the best is chosen."""
        image, h, w = tl.program_id(0), tl.arange(0, H), tl.arange(0, W)
        keep, place = (h < HEIGHT)[:, None] & (w < WIDTH)[None, :], h[:, None] * WIDTH + w[None, :]
        strength = tl.sqrt(tl.load(square + image.to(tl.int64) * sm + place, keep, 0.0))
        if GAIN != 0.0:
            strength += GAIN * tl.load(toward + image.to(tl.int64) * sm + place, keep, 0.0)
        m, n, a, b = tl.arange(0, A * DOWN), tl.arange(0, B * ACROSS), tl.arange(0, A), tl.arange(0, B)
        row, column = m % DOWN * WH + m // DOWN, n % ACROSS * WW + n // ACROSS  # where windows begin
        v = tl.dot(strength, _along(taps, w[:, None], column[None, :], WIDTH, WW), input_precision=PRECISION)
        v = tl.dot(_along(taps, h[None, :], row[:, None], HEIGHT, WH), v, input_precision=PRECISION)
        energy = tl.sum(tl.reshape(v * v, [A, DOWN, B * ACROSS]), 1)
        score = tl.sum(tl.reshape(energy, [A, B, ACROSS]).to(tl.float64), 2)
        keep = (a < WH)[:, None] & (b < WW)[None, :]
        score = tl.where(keep, score, -1.0)  # energies are positive
        highest = tl.max(tl.max(score, 1), 0)
        index = tl.where((score == highest) & keep, a[:, None] * WW + b[None, :], WH * WW - 1)
        best = tl.min(tl.min(index, 1), 0)
        tl.store(out + 2 * image, (best // WW).to(tl.int64))
        tl.store(out + 2 * image + 1, (best % WW).to(tl.int64))

    @triton.jit
    def _window_energies(square, toward, taps, out, sm, height, width, GAIN: tl.constexpr, WH: tl.constexpr,
                         WW: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        """Windows whose first row has one phase: their weighted means at every first column, squared and summed."""
        image, phase = tl.program_id(0), tl.program_id(1)
        k, w = tl.arange(0, K), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        keep = (k * WH < height)[:, None] & (w < width)[None, :]
        v = tl.zeros([K, BLOCK], tl.float32)
        for i in range(WH):
            row = around(k * WH + phase + i, height)
            line = tl.zeros([K, BLOCK], tl.float32)
            for j in tl.static_range(WW):
                place = image.to(tl.int64) * sm + row[:, None] * width + around(w + j, width)[None, :]
                strength = tl.sqrt(tl.load(square + place, keep, 0.0))
                if GAIN != 0.0:
                    strength += GAIN * tl.load(toward + place, keep, 0.0)
                line += tl.load(taps + j) * strength
            v += tl.load(taps + i) * line
        tl.store(out + (image * WH + phase) * width + w, tl.sum(v * v, 0), w < width)

    @triton.jit
    def _best_energy(energies, out, width, WH: tl.constexpr, WW: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
        """Add up an image's energies (phase of the rows, first column) per phase of the columns, and choose."""
        image, a, b = tl.program_id(0), tl.arange(0, A), tl.arange(0, B)
        keep = (a < WH)[:, None] & (b < WW)[None, :]
        place = energies + (image * WH + a)[:, None] * width + b[None, :]
        score = tl.zeros([A, B], tl.float64)
        for first in range(0, width, WW):
            score += tl.load(place + first, keep, 0.0).to(tl.float64)
        score = tl.where(keep, score, -1.0)
        highest = tl.max(tl.max(score, 1), 0)
        index = tl.where((score == highest) & keep, a[:, None] * WW + b[None, :], WH * WW - 1)
        best = tl.min(tl.min(index, 1), 0)
        tl.store(out + 2 * image, (best // WW).to(tl.int64))
        tl.store(out + 2 * image + 1, (best % WW).to(tl.int64))


@operator("shift_vits::token_energies")
def token_energies(y: Tensor, bias: Tensor, wave: Tensor, scale: Tensor | None, colsum: Tensor | None,
                   sums: Tensor | None, squares: Tensor | None, channels: int, side: int, padding: int, stride: int,
                   eps: float) -> Tensor:  # fmt: skip
    """Energy |t|^2 and direction <t, wave> sqrt(2 / r) of a convolution's output t at every position, per phase.

    t is the sum of ``side`` x ``side`` neighbours' products with their taps, each token multiplied by its ``scale``
    first if that is given, plus ``bias`` (r,). With ``colsum`` the convolved patch is normalised first,
    t = (t - mean colsum) / std + bias, by the ``sums`` over the ``channels`` of each token and of its ``squares`` (then
    without padding).

    Shapes: y (B, H, W, side side r or more), taps in rows, contiguous; bias, wave and colsum (r,); scale (B, H, W),
    float32; sums and squares the same, of equal strides -> (B, parts, 2, stride, stride), to be summed over the parts.
    """
    b, h, w, n = y.shape
    strip, block = _strip(b, h, stride), max(2, min(64, power(w)))
    grid = (b, -(-h // strip), -(-w // block))
    out = torch.empty((b, grid[1] * grid[2], 2, stride, stride), dtype=torch.float32, device=y.device)
    scale = None if scale is None else scale.contiguous()
    norm = [bias if tensor is None else tensor for tensor in (scale, colsum, sums, squares)]
    launch(_token_energies, grid, y, bias, wave, *norm, out, channels, h, w, 0 if sums is None else sums.stride(0),
           SIDE=side, PAD=padding, STRIDE=stride, SCALE=scale is not None, NORM=colsum is not None, EPS=eps,
           R=bias.shape[0], WIDE=n, ROWS=strip, BLOCK=block, num_warps=4)  # fmt: skip
    return out


@operator("shift_vits::token_scores")
def token_scores(x: Tensor, taps: Tensor, bias: Tensor, wave: Tensor, colsum: Tensor | None, sums: Tensor | None,
                 squares: Tensor | None, side: int, padding: int, stride: int, eps: float) -> Tensor:  # fmt: skip
    """What ``token_energies`` makes of the products of tokens with taps, without these ever being written.

    With ``colsum`` the convolved patch is normalised, with ``sums`` and ``squares`` alone each token, but for its mean,
    which the taps leave out.

    Shapes: x (B, H, W, C), contiguous; taps (C, 32 or 64), see ``in_one_pass``; bias, wave and colsum (4,); sums and
    squares (B, H, W), float32 -> (B, parts, 2, stride, stride), to be summed over the parts.
    """
    (b, h, w, c), wide = x.shape, max(4, power(x.shape[2]))
    lanes = TOKENS // wide  # strips that a program goes down at once
    rows = max((n for n in range(stride, h + 1, stride) if not h % n and b * h // n >= lanes * PROGRAMS),
               default=stride)  # fmt: skip
    strips, (chunk, stages) = h // rows, CHUNKS[c]
    out = torch.empty((b, strips, 2, stride, stride), dtype=torch.float32, device=x.device)
    if sums is not None and squares is not None and (sums.stride() != squares.stride() or sums.stride()[1:] != (w, 1)):
        sums, squares = sums.contiguous(), squares.contiguous()
    given = [bias if tensor is None else tensor for tensor in (colsum, sums, squares)]
    launch(_token_scores, (-(-b * strips // lanes),), x, taps, bias, wave, *given, out, b * strips, strips,
           0 if sums is None else sums.stride(0), HEIGHT=h, WIDTH=w, CHANNELS=c, SIDE=side, PAD=padding, STRIDE=stride,
           SCALE=sums is not None and colsum is None, NORM=colsum is not None, EPS=eps, ROWS=rows, WIDE=wide, T=TOKENS,
           K=chunk, num_warps=TOKENS // 16, num_stages=stages)  # fmt: skip
    return out


def in_one_pass(weight: Tensor) -> Tensor:
    """Weights (4, C, k, k) as ``token_scores`` reads them: (C, taps), a tap being the high bit of its row, its column,
    its output and the low bit of its row, of 4 rows and of 2 or 4 columns."""
    k = weight.shape[3]
    weight = F.pad(weight, (0, 0 if k == 2 else 4 - k, 0, 4 - k)).unflatten(2, (2, 2))
    return weight.permute(1, 2, 4, 0, 3).flatten(1).contiguous()


@operator("shift_vits::best_phase")
def best_phase(parts: Tensor, stride: int, area: int, signed: bool, at: Tensor | None = None, width: int = 0) -> Tensor:
    """Offsets (B, 2) of the largest score: energy or, ``signed``, energy + 0.01 rms direction; ``area`` is H W.

    With ``at`` (B, 2), places in [0, side) on a torus of this ``width``: where the offsets lead to from there.

    Shapes: parts (B, parts, 2, s, s) from ``token_scores``, ``token_energies`` or ``image_phases``.
    """
    b, count = parts.shape[:2]
    out = torch.empty((b, 2), dtype=torch.int64, device=parts.device)
    launch(_best_phase, (b,), parts, out if at is None else at.contiguous(), out, count, area, width, STRIDE=stride,
           SIGNED=signed, PLACED=at is not None, BLOCK=max(2, min(64, power(count))),
           num_warps=1 if count <= 32 else 4)  # fmt: skip
    return out


@operator("shift_vits::best_window")
def best_window(square: Tensor, toward: Tensor, taps: Tensor, window: list[int], gain: float) -> Tensor:
    """Offsets (B, 2) of the partition whose windows' weighted means have the largest norm.

    A token counts with the root of its ``square`` and ``gain`` times ``toward``, a place in a window with the tap of
    its row times that of its column.

    Shapes: square and toward (B, H, W), taps (n,), all float32.
    """
    (b, h, w), (down, across) = square.shape, window
    out = torch.empty((b, 2), dtype=torch.int64, device=square.device)
    if square.stride() != toward.stride() or square.stride()[1:] != (w, 1):
        square, toward = square.contiguous(), toward.contiguous()
    below, beside, phases = max(2, power(h // down)), max(2, power(w // across)), (power(down), power(across))
    longest = max(16, power(h), power(w), phases[0] * below, phases[1] * beside)
    given = (square, toward, taps)
    if longest in WINDOWS:
        precision, warps = WINDOWS[longest]
        launch(_best_window, (b,), *given, out, square.stride(0), HEIGHT=h, WIDTH=w, GAIN=gain, WH=down, WW=across,
               A=phases[0], B=phases[1], DOWN=below, ACROSS=beside, H=max(16, power(h)), W=max(16, power(w)),
               PRECISION=precision, num_warps=warps)  # fmt: skip
        return out
    energies = torch.empty((b, down, w), dtype=torch.float32, device=square.device)
    block = max(16, min(64, power(w)))
    launch(_window_energies, (b, down, -(-w // block)), *given, energies, square.stride(0), h, w, GAIN=gain, WH=down,
           WW=across, K=below, BLOCK=block, num_warps=2 if below <= 8 else 8)  # fmt: skip
    launch(_best_energy, (b,), energies, out, w, WH=down, WW=across, A=max(2, phases[0]), B=max(2, phases[1]),
           num_warps=1)  # fmt: skip
    return out


@operator("shift_vits::token_moments")
def token_moments(x: Tensor, wave: Tensor) -> Tensor:
    """Sums over channels of each token, of its square, and of its product with ``wave``: (B, H, W, C), contiguous
    -> (B, 3, H, W), float32."""
    b, h, w, c = x.shape
    out = torch.empty((b, 3, h, w), dtype=torch.float32, device=x.device)
    block = max(1, min(32, 4096 // power(c)))
    launch(_token_moments, (-(-b * h * w // block),), x, wave, out, b * h * w, h * w, c, K=power(c), BLOCK=block,
           num_warps=4)  # fmt: skip
    return out
