"""What anchors choose by: energies of a strided convolution at every position, or of windows, summed per phase without
writing any of them out.

- ``token_energies``: of a small convolution of tokens, from the product of each token with all taps.
- ``best_phase``: the offset of the largest score, from partial sums of these or of ``image_phases``.
- ``window_energies``: squared means of windows, at every phase of their rows and every first column.
- ``best_window``: the offset of the best partition, from these.
- ``token_moments``: what the scores need of each token, in one pass; a compiler fuses it with what comes before.
"""

import torch
from torch import Tensor

from .base import AVAILABLE, launch, operator, power, usable

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import around

__all__ = ["best_phase", "best_window", "fits_token_kernel", "fits_window_scores", "token_energies",
           "token_moments", "window_energies"]  # fmt: skip

STRIP = 8  # rows that one program takes; fewer for a few images, which would leave most of a device idle


def fits_token_kernel(x: Tensor, weight: Tensor, stride: tuple[int, int]) -> bool:
    """Whether ``token_energies`` takes these: 16 channels or more, 4-64 outputs, a 2 x 2 or 3 x 3 kernel."""
    r, channels, kh, kw = weight.shape
    small = kh == kw in (2, 3) and stride in ((2, 2), (4, 4))
    fits = channels == x.shape[1] >= 16 and r in (4, 8, 16, 32, 64) and small
    whole = all(side % s == 0 for side, s in zip(x.shape[2:], stride, strict=True))
    return usable(x) and x.dtype != torch.float64 and fits and whole


def fits_window_scores(strength: Tensor, window: tuple[int, int]) -> bool:
    """Whether ``window_energies`` takes these: float32, at most 64 windows below each other."""
    return usable(strength) and strength.dtype == torch.float32 and strength.shape[1] // window[0] <= 64


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
    def _best_phase(parts, out, count, area, STRIDE: tl.constexpr, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
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


@operator("shift_vits::best_phase")
def best_phase(parts: Tensor, stride: int, area: int, signed: bool) -> Tensor:
    """Offsets (B, 2) of the largest score: energy or, ``signed``, energy + 0.01 rms direction; ``area`` is H W.

    Shapes: parts (B, parts, 2, s, s) from ``token_energies`` or ``image_phases``.
    """
    b, count = parts.shape[:2]
    out = torch.empty((b, 2), dtype=torch.int64, device=parts.device)
    launch(_best_phase, (b,), parts, out, count, area, STRIDE=stride, SIGNED=signed,
           BLOCK=max(2, min(64, power(count))), num_warps=1 if count <= 32 else 4)  # fmt: skip
    return out


@operator("shift_vits::window_energies")
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


@operator("shift_vits::best_window")
def best_window(energies: Tensor, window: list[int]) -> Tensor:
    """Offsets (B, 2) of the partition whose window means have the largest norm, from ``window_energies``."""
    b, _, w = energies.shape
    out = torch.empty((b, 2), dtype=torch.int64, device=energies.device)
    launch(_best_window, (b,), energies, out, w, WH=window[0], WW=window[1], A=max(2, power(window[0])),
           B=max(2, power(window[1])), num_warps=1)  # fmt: skip
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
