"""What anchors choose by: scores of phases and of windows.

- ``best_phase``: the offset of the largest score, from partial sums of ``token_scores`` or of ``image_phases``.
- ``best_window``: the offset of the partition into windows whose means have the largest norm, or of the strongest
  token.
- ``token_moments``: what the scores need of each token, in one pass; a compiler fuses it with what comes before.
"""

from typing import Any

import torch
from torch import Tensor

from .base import AVAILABLE, launch, next_power_of_2, operator

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import wrap

__all__ = ["best_phase", "best_window", "fits_window_scores", "rows_apart", "token_moments", "window_constants"]

WINDOWS = {16: ("ieee", 4), 32: ("ieee", 4), 64: ("tf32x3", 4)}  # by the longer side: how to multiply, with what warps


def fits_window_scores(square: Tensor, window: tuple[int, int]) -> bool:
    """Whether ``best_window`` takes these: float32, at most 64 windows below each other; or one window of at most 4096
    tokens. Not a single row or column of windows."""
    (_, h, w), (down, across) = square.shape, window
    several, one = h > down and w > across and h // down <= 64, (h, w) == (down, across) and h * w <= 4096
    return square.dtype == torch.float32 and (several or one)


if AVAILABLE:

    @triton.jit
    def _token_moments(x, direction, out, tokens, area, channels, K: tl.constexpr, BLOCK: tl.constexpr):
        i, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, K)
        keep = (i < tokens)[:, None] & (k < channels)[None, :]
        t = tl.load(x + i.to(tl.int64)[:, None] * channels + k[None, :], keep, 0.0).to(tl.float32)
        along = tl.load(direction + k, k < channels, 0.0).to(tl.float32)
        place = out + i // area * 3 * area + i % area
        tl.store(place, tl.sum(t, 1), i < tokens)
        tl.store(place + area, tl.sum(t * t, 1), i < tokens)
        tl.store(place + 2 * area, tl.sum(t * along[None, :], 1), i < tokens)

    @triton.jit
    def _best_phase(parts, at, out, count, area, width, STRIDE: tl.constexpr, SIGNED: tl.constexpr,
                    PLACED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        """Add up an image's partial sums (part, energy or direction, phase), and choose."""
        S: tl.constexpr = STRIDE * STRIDE
        image, phase, p, n = tl.program_id(0), tl.arange(0, S), tl.arange(0, BLOCK), tl.arange(0, 2 * S)
        total = tl.zeros([BLOCK, 2 * S], tl.float64)
        for first in range(0, count, BLOCK):
            place = parts + (image * count + first + p)[:, None] * (2 * S) + n[None, :]
            total += tl.load(place, (first + p < count)[:, None], 0.0).to(tl.float64)
        energy, tie_break = tl.split(tl.trans(tl.reshape(tl.sum(total, 0), [2, S])))
        if SIGNED:
            energy += 0.01 * tl.sqrt(tl.sum(energy, 0) / area) * tie_break
        best = tl.min(tl.where(energy == tl.max(energy, 0), phase, S - 1), 0)
        row, column = best // STRIDE, best % STRIDE
        if PLACED:
            row = wrap(row + tl.load(at + 2 * image).to(tl.int32), area // width)
            column = wrap(column + tl.load(at + 2 * image + 1).to(tl.int32), width)
        tl.store(out + 2 * image, row.to(tl.int64))
        tl.store(out + 2 * image + 1, column.to(tl.int64))

    @triton.jit
    def _along(taps, place, first, side, WINDOW: tl.constexpr):
        """Weights of places in the windows that begin at ``first``, on the torus: zero in others, and where either is
        beyond the side."""
        ahead = tl.where(place < first, place - first + side, place - first)
        return tl.load(taps + ahead, (ahead < WINDOW) & (place < side) & (first < side), 0.0)

    @triton.jit
    def _best_of(score, a, b, WH: tl.constexpr, WW: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
        """The first of WH x WW phases with the largest score, which is positive."""
        keep = (a < WH)[:, None] & (b < WW)[None, :]
        score = tl.reshape(tl.where(keep, score, -1.0), [A * B])
        phase = tl.reshape(tl.where(keep, a[:, None] * WW + b[None, :], WH * WW - 1), [A * B])
        return tl.min(tl.where(score == tl.max(score, 0), phase, WH * WW - 1), 0)

    @triton.jit
    def choose_window(image, square, along, taps, out, sm, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
                      GAIN: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
                      DOWN: tl.constexpr, ACROSS: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
                      PRECISION: tl.constexpr):  # fmt: skip
        """An image: weighted means of all windows, as two products with matrices of taps, in the order (phase, window)
        along both axes. Their squares are summed per phase, and the best is chosen."""
        h, w = tl.arange(0, H), tl.arange(0, W)
        keep, place = (h < HEIGHT)[:, None] & (w < WIDTH)[None, :], h[:, None] * WIDTH + w[None, :]
        strength = tl.sqrt(tl.load(square + image.to(tl.int64) * sm + place, keep, 0.0))
        if GAIN != 0.0:
            strength += GAIN * tl.load(along + image.to(tl.int64) * sm + place, keep, 0.0)
        m, n, a, b = tl.arange(0, A * DOWN), tl.arange(0, B * ACROSS), tl.arange(0, A), tl.arange(0, B)
        row, column = m % DOWN * WH + m // DOWN, n % ACROSS * WW + n // ACROSS  # where windows begin
        v = tl.dot(strength, _along(taps, w[:, None], column[None, :], WIDTH, WW), input_precision=PRECISION)
        v = tl.dot(_along(taps, h[None, :], row[:, None], HEIGHT, WH), v, input_precision=PRECISION)
        energy = tl.sum(tl.reshape(v * v, [A, DOWN, B * ACROSS]), 1)
        score = tl.sum(tl.reshape(energy, [A, B, ACROSS]).to(tl.float64), 2)
        best = _best_of(score, a, b, WH, WW, A, B)
        tl.store(out + 2 * image, (best // WW).to(tl.int64))
        tl.store(out + 2 * image + 1, (best % WW).to(tl.int64))

    @triton.jit
    def _best_window(square, along, taps, out, sm, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GAIN: tl.constexpr,
                     WH: tl.constexpr, WW: tl.constexpr, A: tl.constexpr, B: tl.constexpr, DOWN: tl.constexpr,
                     ACROSS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
        choose_window(tl.program_id(0), square, along, taps, out, sm, HEIGHT, WIDTH, GAIN, WH, WW, A, B, DOWN, ACROSS,
                      H, W, PRECISION)  # fmt: skip

    @triton.jit
    def _best_token(square, along, out, sm, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GAIN: tl.constexpr,
                    N: tl.constexpr):  # fmt: skip
        """The strongest token of an image that is one window."""
        image, n = tl.program_id(0), tl.arange(0, N)
        strength = tl.sqrt(tl.load(square + image.to(tl.int64) * sm + n, n < HEIGHT * WIDTH, 0.0))
        if GAIN != 0.0:
            strength += GAIN * tl.load(along + image.to(tl.int64) * sm + n, n < HEIGHT * WIDTH, 0.0)
        strength = tl.where(n < HEIGHT * WIDTH, strength, float("-inf"))
        best = tl.min(tl.where(strength == tl.max(strength, 0), n, HEIGHT * WIDTH - 1), 0)
        tl.store(out + 2 * image, (best // WIDTH).to(tl.int64))
        tl.store(out + 2 * image + 1, (best % WIDTH).to(tl.int64))

    @triton.jit
    def _window_energies(square, along, taps, out, sm, height, width, GAIN: tl.constexpr, WH: tl.constexpr,
                         WW: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        """Windows whose first row has one phase: their weighted means at every first column, squared and summed."""
        image, phase = tl.program_id(0), tl.program_id(1)
        k, w = tl.arange(0, K), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        keep = (k * WH < height)[:, None] & (w < width)[None, :]
        v = tl.zeros([K, BLOCK], tl.float32)
        for i in range(WH):
            row = wrap(k * WH + phase + i, height)
            line = tl.zeros([K, BLOCK], tl.float32)
            for j in tl.static_range(WW):
                place = image.to(tl.int64) * sm + row[:, None] * width + wrap(w + j, width)[None, :]
                strength = tl.sqrt(tl.load(square + place, keep, 0.0))
                if GAIN != 0.0:
                    strength += GAIN * tl.load(along + place, keep, 0.0)
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
        best = _best_of(score, a, b, WH, WW, A, B)
        tl.store(out + 2 * image, (best // WW).to(tl.int64))
        tl.store(out + 2 * image + 1, (best % WW).to(tl.int64))


@operator("shift_vits::best_phase")
def best_phase(parts: Tensor, stride: int, area: int, signed: bool, at: Tensor | None = None, width: int = 0) -> Tensor:
    """Offsets (B, 2) of the largest score: energy or, ``signed``, energy + 0.01 rms direction; ``area`` is H W.

    With ``at`` (B, 2), places in [0, side) on a torus of this ``width``: where the offsets lead to from there.

    Shapes: parts (B, parts, 2, s, s) from ``token_scores``, ``token_energies`` or ``image_phases``.
    """
    b, count = parts.shape[:2]
    out = torch.empty((b, 2), dtype=torch.int64, device=parts.device)
    launch(_best_phase, (b,), parts, out if at is None else at.contiguous(), out, count, area, width, STRIDE=stride,
           SIGNED=signed, PLACED=at is not None, BLOCK=max(2, min(128, next_power_of_2(count))),
           num_warps=1 if count <= 32 else 4 if count <= 64 else 8)  # fmt: skip
    return out


@operator("shift_vits::best_window")
def best_window(square: Tensor, along: Tensor, taps: Tensor, window: list[int], gain: float) -> Tensor:
    """Offsets (B, 2) of the partition whose windows' weighted means have the largest norm. Of a single window, that of
    the strongest token.

    A token counts with the root of its ``square`` and ``gain`` times ``along``, a place in a window with the tap of
    its row times that of its column.

    Shapes: square and along (B, H, W), taps (n,), all float32.
    """
    (b, h, w), (down, across) = square.shape, window
    out = torch.empty((b, 2), dtype=torch.int64, device=square.device)
    square, along = rows_apart(square, along)
    if (h, w) == (down, across):
        launch(_best_token, (b,), square, along, out, square.stride(0), HEIGHT=h, WIDTH=w, GAIN=gain,
               N=next_power_of_2(h * w), num_warps=1 if h * w <= 256 else 4)  # fmt: skip
        return out
    given, known = (square, along, taps), window_constants(square, window)
    if known is not None:
        constants, warps = known
        launch(_best_window, (b,), *given, out, square.stride(0), GAIN=gain, **constants, num_warps=warps)
        return out
    below, phases = max(2, next_power_of_2(h // down)), (next_power_of_2(down), next_power_of_2(across))
    energies = torch.empty((b, down, w), dtype=torch.float32, device=square.device)
    block = max(16, min(64, next_power_of_2(w)))
    launch(_window_energies, (b, down, -(-w // block)), *given, energies, square.stride(0), h, w, GAIN=gain, WH=down,
           WW=across, K=below, BLOCK=block, num_warps=2 if below <= 8 else 8)  # fmt: skip
    launch(_best_energy, (b,), energies, out, w, WH=down, WW=across, A=max(2, phases[0]), B=max(2, phases[1]),
           num_warps=1)  # fmt: skip
    return out


def window_constants(square: Tensor, window: list[int]) -> tuple[dict[str, Any], int] | None:
    """What a program that chooses windows of a whole image has to know, and its warps; None where it can not."""
    (_, h, w), (down, across) = square.shape, window
    below, beside = max(2, next_power_of_2(h // down)), max(2, next_power_of_2(w // across))
    phases = next_power_of_2(down), next_power_of_2(across)
    longest = max(16, next_power_of_2(h), next_power_of_2(w), phases[0] * below, phases[1] * beside)
    if (h, w) == (down, across) or longest not in WINDOWS:
        return None
    precision, warps = WINDOWS[longest]
    return {
        "HEIGHT": h, "WIDTH": w, "WH": down, "WW": across, "A": phases[0], "B": phases[1], "DOWN": below,
        "ACROSS": beside, "H": max(16, next_power_of_2(h)), "W": max(16, next_power_of_2(w)), "PRECISION": precision,
    }, warps  # fmt: skip


def rows_apart(square: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the same strides and whole rows one after another, as they are or copied."""
    if square.stride() == along.stride() and square.stride()[1:] == (square.shape[2], 1):
        return square, along
    return square.contiguous(), along.contiguous()


@operator("shift_vits::token_moments")
def token_moments(x: Tensor, direction: Tensor) -> Tensor:
    """Sums over channels of each token, of its square, and of its product with ``direction``: (B, H, W, C), contiguous
    -> (B, 3, H, W), float32."""
    b, h, w, c = x.shape
    out = torch.empty((b, 3, h, w), dtype=torch.float32, device=x.device)
    block = max(1, min(32, 4096 // next_power_of_2(c)))
    launch(_token_moments, (-(-b * h * w // block),), x, direction, out, b * h * w, h * w, c, K=next_power_of_2(c),
           BLOCK=block, num_warps=4)  # fmt: skip
    return out
