"""What anchors choose by: energies of a strided convolution at every position, and of windows, summed per phase without
writing any of them out."""

import torch
from torch import Tensor
from torch.library import triton_op

from .base import AVAILABLE, launch, power, usable

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["fits_offset_kernel", "fits_phase_kernel", "phase_energies", "window_offset"]


def fits_phase_kernel(x: Tensor, weight: Tensor, stride: tuple[int, int]) -> bool:
    """Whether ``phase_energies`` takes these: a sketch of 16-64 directions, a square kernel, stride 2 or 4."""
    r, _, kh, kw = weight.shape
    whole = all(side % s == 0 for side, s in zip(x.shape[2:], stride, strict=True))
    fits = r in (16, 32, 64) and kh == kw and stride in ((2, 2), (4, 4)) and whole
    return usable(x) and x.dtype != torch.float64 and fits


def fits_offset_kernel(strength: Tensor) -> bool:
    """Whether ``window_offset`` takes this: at most 64 tokens a side."""
    return usable(strength) and max(strength.shape[1:]) <= 64


if AVAILABLE:

    @triton.jit
    def _phase_energies(x, weight, bias, direction, colsum, out, channels, height, width, sb, sc, sh, sw,
                        SIDE: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, STRIDE: tl.constexpr,
                        NORM: tl.constexpr, EPS: tl.constexpr, R: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr,
                        BLOCK: tl.constexpr):  # fmt: skip
        """One row of positions: energy and direction of convolutions there, summed per phase of the columns.

        ``GROUPS`` convolutions of R outputs each are summed apart, and GROUPS R columns of the weight taken at a time.
        """
        image, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        n, k = part * GROUPS * R + tl.arange(0, GROUPS * R), tl.arange(0, K)
        columns = tl.num_programs(2) * GROUPS * R
        base = x + image.to(tl.int64) * sb
        add, toward = tl.load(bias + n), tl.load(direction + n)
        energies = tl.zeros([STRIDE * GROUPS], tl.float32)
        directions = tl.zeros([STRIDE * GROUPS], tl.float32)
        for start in range(0, width, BLOCK):
            w = start + tl.arange(0, BLOCK)
            real = w < width
            t = tl.zeros([BLOCK, GROUPS * R], tl.float32)
            total = tl.zeros([BLOCK, K], tl.float32)
            squares = tl.zeros([BLOCK, K], tl.float32)
            for tap in range(SIDE * SIDE):
                row = (h + tap // SIDE - PAD_H + height) % height
                column = (tl.where(real, w, 0) + (tap % SIDE - PAD_W) + width) % width
                place = base + row * sh + (column * sw)[:, None]
                for first in range(0, channels, K):
                    c = first + k
                    inside = c < channels
                    a = tl.load(place + (c * sc)[None, :], inside[None, :], 0.0)
                    m = tl.load(weight + (tap * channels + c)[:, None] * columns + n[None, :], inside[:, None], 0.0)
                    t = tl.dot(a.to(m.dtype), m, t, input_precision="ieee")
                    if NORM:
                        wide = a.to(tl.float32)
                        total += wide
                        squares += wide * wide
            if NORM:
                size = SIDE * SIDE * channels
                mean = tl.sum(total, 1) / size
                inverse = 1.0 / tl.sqrt(tl.maximum(tl.sum(squares, 1) / size - mean * mean, 0.0) + EPS)
                t = (t - mean[:, None] * tl.load(colsum + n)[None, :]) * inverse[:, None]
            t = tl.where(real[:, None], t + add[None, :], 0.0)
            e = tl.sum(tl.reshape(t * t, [BLOCK // STRIDE, STRIDE, GROUPS * R]), 0)
            f = tl.sum(tl.reshape(t * toward[None, :], [BLOCK // STRIDE, STRIDE, GROUPS * R]), 0)
            energies += tl.sum(tl.reshape(e, [STRIDE * GROUPS, R]), 1)
            directions += tl.sum(tl.reshape(f, [STRIDE * GROUPS, R]), 1)
        s = tl.arange(0, STRIDE * GROUPS)  # (phase of the column, convolution)
        place = out + (image * height + h) * 2 * STRIDE * (columns // R) + part * GROUPS
        place += (s // GROUPS) * (columns // R) + s % GROUPS
        tl.store(place, energies)
        tl.store(place + STRIDE * (columns // R), directions)

    @triton.jit
    def _mean_over_window(n, SIDE: tl.constexpr, UNEVEN: tl.constexpr, T: tl.constexpr):
        i = tl.arange(0, T)
        ahead = (i[None, :] - i[:, None] + n) % n
        weight = tl.full([T, T], 1.0, tl.float32)
        if UNEVEN:
            weight += 0.1 * tl.sin(2.0 + 7.31 * ahead.to(tl.float32))
        return tl.where((ahead < SIDE) & (i[:, None] < n) & (i[None, :] < n), weight / SIDE, 0.0)

    @triton.jit
    def _phases(n, SIDE: tl.constexpr, T: tl.constexpr):
        i = tl.arange(0, T)
        return tl.where((i[None, :] % SIDE == i[:, None]) & (i[None, :] < n), 1.0, 0.0)

    @triton.jit
    def _window_offset(strength, out, height, width, WH: tl.constexpr, WW: tl.constexpr, UNEVEN: tl.constexpr,
                       T: tl.constexpr):  # fmt: skip
        image, i = tl.program_id(0), tl.arange(0, T)
        inside = (i < height)[:, None] & (i < width)[None, :]
        s = tl.load(strength + image * height * width + i[:, None] * width + i[None, :], inside, 0.0)
        rows, columns = _mean_over_window(height, WH, UNEVEN, T), _mean_over_window(width, WW, UNEVEN, T)
        v = tl.dot(tl.dot(rows, s, input_precision="tf32x3"), tl.trans(columns), input_precision="tf32x3")
        e = tl.dot(_phases(height, WH, T), v * v, input_precision="tf32x3")
        e = tl.dot(e, tl.trans(_phases(width, WW, T)), input_precision="tf32x3")
        e = tl.where((i < WH)[:, None] & (i < WW)[None, :], e, float("-inf"))
        best = tl.argmax(tl.reshape(e, [T * T]), 0)
        tl.store(out + 2 * image, (best // T).to(tl.int64))
        tl.store(out + 2 * image + 1, (best % T).to(tl.int64))


@triton_op("shift_vits::phase_energies", mutates_args={})
def phase_energies(x: Tensor, weight: Tensor, bias: Tensor, direction: Tensor, colsum: Tensor | None,
                   padding: list[int], stride: int, rank: int, eps: float) -> Tensor:  # fmt: skip
    """Energy |t|^2 and direction <t, direction> of g convolutions of ``rank`` outputs each, at every position, summed
    per row and phase of the columns.

    With ``colsum`` the convolved patch is normalised first: t = (t - mean colsum) / std + bias.

    Shapes: x (B, C, H, W), any strides; weight (k k C, g rank) for patches as (row, column, channel); bias, direction
    and colsum (g rank,) -> (B, H, 2, stride, g).
    """
    b, c, h, w = x.shape
    side, groups = round((weight.shape[0] // c) ** 0.5), weight.shape[1] // rank
    out = torch.empty((b, h, 2, stride, groups), dtype=torch.float32, device=x.device)
    together = min(groups, max(1, 64 // rank))
    launch(_phase_energies, (b, h, groups // together), x, weight, bias, direction, bias if colsum is None else colsum,
            out, c, h, w, *x.stride(), SIDE=side, PAD_H=padding[0], PAD_W=padding[1], STRIDE=stride,
            NORM=colsum is not None, EPS=eps, R=rank, GROUPS=together, K=64 if c in (48, 64) else 32, BLOCK=64,
            num_warps=4)  # fmt: skip
    return out


@triton_op("shift_vits::window_offset", mutates_args={})
def window_offset(strength: Tensor, window: list[int], uneven: bool) -> Tensor:
    """Offsets (B, 2) of the partition whose window means have the largest norm; strength (B, H, W), sides up to 64."""
    b, h, w = strength.shape
    out = torch.empty((b, 2), dtype=torch.int64, device=strength.device)
    launch(_window_offset, (b,), strength, out, h, w, WH=window[0], WW=window[1], UNEVEN=uneven,
            T=max(16, power(max(h, w))), num_warps=8)  # fmt: skip
    return out
