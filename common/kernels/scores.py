"""What anchors choose by: energies of a strided convolution at every position, or of windows, summed per phase without
writing any of them out.

- ``token_energies``: a small convolution of tokens. Every row of tokens is read once per column of the kernel.
- ``image_energies``: a convolution of an image that is rolled by an offset of its own, read where it lies.
- ``best_phase``: the offset of the largest score, from partial sums of either.
- ``window_energies``: squared means of windows, at every phase of their rows and every first column.
- ``best_window``: the offset of the best partition, from these.
- ``token_moments``: what the scores need of each token, in one pass; a compiler fuses it with what comes before.
"""

import torch
from torch import Tensor
from torch.library import triton_op

from .base import AVAILABLE, launch, power, usable

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["best_phase", "best_window", "fits_image_kernel", "fits_token_kernel", "fits_window_scores",
           "image_energies", "token_energies", "token_moments", "window_energies"]  # fmt: skip

STRIP = 8  # rows that one program takes; fewer for a few images, which would leave most of a device idle


def fits_token_kernel(x: Tensor, weight: Tensor, stride: tuple[int, int]) -> bool:
    """Whether ``token_energies`` takes these: 16 channels or more, 16-64 outputs, a 2 x 2 or 3 x 3 kernel."""
    r, channels, kh, kw = weight.shape
    fits = channels == x.shape[1] >= 16 and r in (16, 32, 64) and kh == kw in (2, 3) and stride in ((2, 2), (4, 4))
    return usable(x) and x.dtype != torch.float64 and fits and _whole(x, stride)


def fits_image_kernel(x: Tensor, weight: Tensor, stride: tuple[int, int]) -> bool:
    """Whether ``image_energies`` takes these: few channels, 4 outputs (64 with all phases), patches of 4 to 13."""
    r, channels, kh, kw = weight.shape
    fits = channels == x.shape[1] < 16 and r == 4 and kh == kw and 4 <= kh <= 13 and stride == (4, 4)
    return usable(x) and x.dtype != torch.float64 and fits and _whole(x, stride)


def fits_window_scores(strength: Tensor, window: tuple[int, int]) -> bool:
    """Whether ``window_energies`` takes these: float32, at most 64 windows below each other."""
    return usable(strength) and strength.dtype == torch.float32 and strength.shape[1] // window[0] <= 64


def _strip(images: int, rows: int, stride: int) -> int:
    return STRIP if images * rows >= 256 * STRIP else stride


def _whole(x: Tensor, stride: tuple[int, int]) -> bool:
    return all(side % s == 0 for side, s in zip(x.shape[2:], stride, strict=True))


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
    def _token_energies(x, weight, bias, wave, colsum, sums, squares, out, channels, height, width, sm, sb, sc, sh, sw,
                        SIDE: tl.constexpr, PAD: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr,
                        EPS: tl.constexpr, R: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
                        BLOCK: tl.constexpr):  # fmt: skip
        """A strip of rows: energy and direction of a convolution at every position, summed per phase.

        An input row adds to SIDE output rows: what is begun is carried on to the next row, nothing is read twice.
        """
        image, strip, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        k, n, phase = tl.arange(0, K), tl.arange(0, R), tl.arange(0, STRIDE)
        w = block * BLOCK + tl.arange(0, BLOCK)
        real = w < width
        base = x + image.to(tl.int64) * sb
        add, toward = tl.load(bias + n), tl.load(wave + n) * (2.0 / R) ** 0.5
        begun = tl.zeros([BLOCK, R], tl.float32)  # an output row with its first input row, and with its first two
        half = tl.zeros([BLOCK, R], tl.float32)
        energies = tl.zeros([STRIDE, BLOCK], tl.float32)
        directions = tl.zeros([STRIDE, BLOCK], tl.float32)
        for step in range(ROWS + SIDE - 1):
            row = (strip * ROWS + step - PAD + height) % height
            q0 = tl.zeros([BLOCK, R], tl.float32)
            q1 = tl.zeros([BLOCK, R], tl.float32)
            q2 = tl.zeros([BLOCK, R], tl.float32)
            for first in range(0, channels, K):
                c = first + k
                inside = c < channels
                for dx in tl.static_range(SIDE):
                    column = (tl.where(real, w, 0) + (dx - PAD) + width) % width
                    a = tl.load(base + row * sh + (column * sw)[:, None] + (c * sc)[None, :], inside[None, :], 0.0)
                    place = weight + (dx * channels + c)[:, None] * R + n[None, :]  # (row, column, channel, output)
                    line = SIDE * channels * R
                    m0 = tl.load(place, inside[:, None], 0.0)
                    m1 = tl.load(place + line, inside[:, None], 0.0)
                    q0 = tl.dot(a.to(m0.dtype), m0, q0, input_precision="ieee")
                    q1 = tl.dot(a.to(m0.dtype), m1, q1, input_precision="ieee")
                    if SIDE == 3:
                        m2 = tl.load(place + 2 * line, inside[:, None], 0.0)
                        q2 = tl.dot(a.to(m0.dtype), m2, q2, input_precision="ieee")
            if SIDE == 3:
                t = half + q2
                half = begun + q1
            else:
                t = begun + q1
            begun = q0
            done = step - (SIDE - 1)  # the row of the strip that this input row completes
            h = tl.where(real, strip * ROWS + done, -1)
            valid = (h >= strip * ROWS) & (h < height)
            if NORM:
                mean = tl.zeros([BLOCK], tl.float32)
                square = tl.zeros([BLOCK], tl.float32)
                for tap in tl.static_range(SIDE * SIDE):
                    place = (h + tap // SIDE) % height * width + (w + tap % SIDE) % width
                    place += image * sm
                    mean += tl.load(sums + place, valid, 0.0)
                    square += tl.load(squares + place, valid, 0.0)
                mean, square = mean / (SIDE * SIDE * channels), square / (SIDE * SIDE * channels)
                inverse = 1.0 / tl.sqrt(tl.maximum(square - mean * mean, 0.0) + EPS)
                t = (t - mean[:, None] * tl.load(colsum + n)[None, :]) * inverse[:, None]
            t += add[None, :]
            keep = valid[None, :] & (phase == done % STRIDE)[:, None]
            energies += tl.where(keep, tl.sum(t * t, 1)[None, :], 0.0)
            directions += tl.where(keep, tl.sum(t * toward[None, :], 1)[None, :], 0.0)
        parts = tl.num_programs(1) * tl.num_programs(2)
        part = image * parts + strip * tl.num_programs(2) + block
        place = out + part * 2 * STRIDE * STRIDE + phase * STRIDE  # (part, energy or direction, row, column)
        for b in tl.static_range(STRIDE):
            here = (w % STRIDE == b)[None, :]
            tl.store(place + b, tl.sum(tl.where(here, energies, 0.0), 1))
            tl.store(place + STRIDE * STRIDE + b, tl.sum(tl.where(here, directions, 0.0), 1))

    @triton.jit
    def _image_energies(x, offset, weight, bias, out, height, width, sb, sc, sh, sw, CHANNELS: tl.constexpr,
                        STRIDE: tl.constexpr, PAD: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
                        N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        """A strip of rows of cells: squares and sums of a convolution at all its phases, N outputs in all."""
        image, strip, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        k, n = tl.arange(0, 32), tl.arange(0, N)
        cell = block * BLOCK + tl.arange(0, BLOCK)
        real = cell * STRIDE < width
        base = x + image.to(tl.int64) * sb
        down, right = tl.load(offset + 2 * image).to(tl.int32), tl.load(offset + 2 * image + 1).to(tl.int32)
        column = tl.where(real, cell, 0)[:, None] * STRIDE + (k % COLUMNS)[None, :] + (right - PAD + width)
        column = column % width
        add = tl.load(bias + n)
        squares = tl.zeros([N], tl.float32)
        sums = tl.zeros([N], tl.float32)
        for step in range(ROWS):
            line = (strip * ROWS + step) * STRIDE + down - PAD + height
            t = tl.zeros([BLOCK, N], tl.float32)
            for c in tl.static_range(CHANNELS):
                for first in range(0, LINES, 32 // COLUMNS):
                    row = (line + first + k // COLUMNS) % height
                    a = tl.load(base + c * sc + (row * sh)[None, :] + column * sw)
                    m = tl.load(weight + ((c * LINES + first) * COLUMNS + k)[:, None] * N + n[None, :])
                    t = tl.dot(a.to(m.dtype), m, t, input_precision="ieee")
            keep = real[:, None] & ((strip * ROWS + step) * STRIDE < height)
            t = tl.where(keep, t + add[None, :], 0.0)
            squares += tl.sum(t * t, 0)
            sums += tl.sum(t, 0)
        part = (image * tl.num_programs(1) + strip) * tl.num_programs(2) + block
        tl.store(out + part * 2 * N + n, squares)
        tl.store(out + part * 2 * N + N + n, sums)

    @triton.jit
    def _best_phase(parts, wave, out, count, area, STRIDE: tl.constexpr, R: tl.constexpr, SIGNED: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
        """Add up an image's partial sums (part, energy or direction, phase, R), and choose."""
        image, phase, p = tl.program_id(0), tl.arange(0, STRIDE * STRIDE), tl.arange(0, BLOCK)
        energy = tl.zeros([STRIDE * STRIDE], tl.float64)
        toward = tl.zeros([STRIDE * STRIDE], tl.float64)
        for first in range(0, count, BLOCK):
            part = first + p
            for r in tl.static_range(R):
                place = parts + ((image * count + part)[:, None] * 2 * STRIDE * STRIDE + phase[None, :]) * R + r
                keep = (part < count)[:, None]
                scale = tl.load(wave + r).to(tl.float64) * (2.0 / R) ** 0.5 if R > 1 else 1.0
                energy += tl.sum(tl.load(place, keep, 0.0).to(tl.float64), 0)
                toward += scale * tl.sum(tl.load(place + STRIDE * STRIDE * R, keep, 0.0).to(tl.float64), 0)
        if SIGNED:
            energy += 0.01 * tl.sqrt(tl.sum(energy, 0) / area) * toward
        best = tl.min(tl.where(energy == tl.max(energy, 0), phase, STRIDE * STRIDE - 1), 0)
        tl.store(out + 2 * image, (best // STRIDE).to(tl.int64))
        tl.store(out + 2 * image + 1, (best % STRIDE).to(tl.int64))

    @triton.jit
    def _window_energies(strength, taps, out, height, width, WH: tl.constexpr, WW: tl.constexpr, K: tl.constexpr,
                         BLOCK: tl.constexpr):  # fmt: skip
        """Windows whose first row has one phase: their weighted means at every first column, squared and summed."""
        image, phase = tl.program_id(0), tl.program_id(1)
        k, w = tl.arange(0, K), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        keep = (k * WH < height)[:, None] & (w < width)[None, :]
        base = strength + image.to(tl.int64) * height * width
        v = tl.zeros([K, BLOCK], tl.float32)
        for i in range(WH):
            row = (k * WH + phase + i) % height
            line = tl.zeros([K, BLOCK], tl.float32)
            for j in tl.static_range(WW):
                column = (w + j) % width
                line += tl.load(taps + j) * tl.load(base + row[:, None] * width + column[None, :], keep, 0.0)
            v += tl.load(taps + i) * line
        v = v / (WH * WW)
        tl.store(out + (image * WH + phase) * width + w, tl.sum(v * v, 0), w < width)

    @triton.jit
    def _best_window(energies, out, width, WH: tl.constexpr, WW: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
        """Add up an image's energies (phase of the rows, first column) per phase of the columns, and choose."""
        image, a, b = tl.program_id(0), tl.arange(0, A), tl.arange(0, B)
        keep = (a < WH)[:, None] & (b < WW)[None, :]
        place = energies + (image * WH + a)[:, None] * width + b[None, :]
        score = tl.zeros([A, B], tl.float64)
        for first in range(0, width, WW):
            score += tl.load(place + first, keep, 0.0).to(tl.float64)
        score = tl.where(keep, score, -1.0)  # energies are positive
        highest = tl.max(tl.max(score, 1), 0)
        index = tl.where((score == highest) & keep, a[:, None] * WW + b[None, :], WH * WW - 1)
        best = tl.min(tl.min(index, 1), 0)
        tl.store(out + 2 * image, (best // WW).to(tl.int64))
        tl.store(out + 2 * image + 1, (best % WW).to(tl.int64))


@triton_op("shift_vits::token_energies", mutates_args={})
def token_energies(x: Tensor, weight: Tensor, bias: Tensor, wave: Tensor, colsum: Tensor | None, sums: Tensor | None,
                   squares: Tensor | None, padding: int, stride: int, eps: float) -> Tensor:  # fmt: skip
    """Energy |t|^2 and direction <t, wave> sqrt(2 / r) of a convolution's output t at every position, per phase.

    With ``colsum`` the convolved patch is normalised first, t = (t - mean colsum) / std + bias, by the ``sums`` over
    channels of each token and of its ``squares`` (then without padding).

    Shapes: x (B, C, H, W), any strides; weight (k, k, C, r); bias, wave and colsum (r,); sums and squares (B, H, W),
    float32, equal strides -> (B, parts, 2, stride, stride), to be summed over the parts.
    """
    (b, c, h, w), (side, _, _, r) = x.shape, weight.shape
    strip, block = _strip(b, h, stride), max(16, min(64, power(w)))
    strips, blocks = -(-h // strip), -(-w // block)
    out = torch.empty((b, strips * blocks, 2, stride, stride), dtype=torch.float32, device=x.device)
    norm = [bias if tensor is None else tensor for tensor in (colsum, sums, squares)]
    launch(_token_energies, (b, strips, blocks), x, weight, bias, wave, *norm, out, c, h, w,
           0 if sums is None else sums.stride(0), *x.stride(),
           SIDE=side, PAD=padding, STRIDE=stride, NORM=colsum is not None, EPS=eps, R=r, K=16 if c == 16 else 32,
           ROWS=strip, BLOCK=block, num_warps=4, num_stages=2)  # fmt: skip
    return out


@triton_op("shift_vits::image_energies", mutates_args={})
def image_energies(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, padding: int, stride: int) -> Tensor:
    """Squares and sums of a convolution's outputs at every phase, for an image rolled by its ``offset`` in [0, side).

    Shapes: x (B, C, H, W), any strides; offset (B, 2); weight (C, lines, columns, N): the kernel at all phases, on a
    canvas of lines x columns pixels that begins ``padding`` before the first pixel of a cell, columns 8 or 16 and lines
    a multiple of 32 / columns; bias (N,) -> (B, parts, 2, N), to be summed over the parts.
    """
    (b, _, h, w), (c, lines, columns, n) = x.shape, weight.shape
    rows, cells = h // stride, w // stride
    strip, block = _strip(b, rows, 1), max(16, min(64, power(cells)))
    grid = (b, -(-rows // strip), -(-cells // block))
    out = torch.empty((b, grid[1] * grid[2], 2, n), dtype=torch.float32, device=x.device)
    launch(_image_energies, grid, x, offset, weight, bias, out, h, w, *x.stride(), CHANNELS=c, STRIDE=stride,
           PAD=padding, LINES=lines, COLUMNS=columns, N=n, ROWS=strip, BLOCK=block, num_warps=4)  # fmt: skip
    return out


@triton_op("shift_vits::best_phase", mutates_args={})
def best_phase(parts: Tensor, wave: Tensor, stride: int, area: int, signed: bool) -> Tensor:
    """Offsets (B, 2) of the largest score: energy or, ``signed``, energy + 0.01 rms direction; ``area`` is H W.

    Shapes: parts (B, parts, 2, ...) from ``token_energies``, or from ``image_energies`` with phases before outputs
    (then ``wave`` (r,) weighs the sums, as there).
    """
    b, count = parts.shape[:2]
    r = parts[0, 0, 0].numel() // stride**2
    out = torch.empty((b, 2), dtype=torch.int64, device=parts.device)
    launch(_best_phase, (b,), parts, wave, out, count, area, STRIDE=stride, R=r, SIGNED=signed,
           BLOCK=max(2, min(32, power(count))), num_warps=1)  # fmt: skip
    return out


@triton_op("shift_vits::window_energies", mutates_args={})
def window_energies(strength: Tensor, taps: Tensor, window: list[int]) -> Tensor:
    """Squares of the windows' weighted means, summed over windows below each other: strength (B, H, W), taps (n,)
    -> (B, phase of the rows, first column W)."""
    b, h, w = strength.shape
    out = torch.empty((b, window[0], w), dtype=torch.float32, device=strength.device)
    block = max(16, min(64, power(w)))
    below = max(2, power(h // window[0]))
    launch(_window_energies, (b, window[0], -(-w // block)), strength, taps, out, h, w, WH=window[0], WW=window[1],
           K=below, BLOCK=block, num_warps=2 if below <= 8 else 8)  # fmt: skip
    return out


@triton_op("shift_vits::best_window", mutates_args={})
def best_window(energies: Tensor, window: list[int]) -> Tensor:
    """Offsets (B, 2) of the partition whose window means have the largest norm, from ``window_energies``."""
    b, _, w = energies.shape
    out = torch.empty((b, 2), dtype=torch.int64, device=energies.device)
    launch(_best_window, (b,), energies, out, w, WH=window[0], WW=window[1], A=max(2, power(window[0])),
           B=max(2, power(window[1])), num_warps=1)  # fmt: skip
    return out


@triton_op("shift_vits::token_moments", mutates_args={})
def token_moments(x: Tensor, wave: Tensor) -> Tensor:
    """Sums over channels of each token, of its square, and of its product with ``wave``: (B, H, W, C), contiguous
    -> (B, 3, H, W), float32."""
    b, h, w, c = x.shape
    out = torch.empty((b, 3, h, w), dtype=torch.float32, device=x.device)
    block = max(1, min(32, 4096 // power(c)))
    launch(_token_moments, (-(-b * h * w // block),), x, wave, out, b * h * w, h * w, c, K=power(c), BLOCK=block,
           num_warps=4)  # fmt: skip
    return out
