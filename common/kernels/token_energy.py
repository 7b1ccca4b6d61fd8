"""Energies of a strided convolution of tokens at every position, summed per phase, from the product of each token with
all taps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import AVAILABLE, launch, next_power_of_2, operator

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import wrap

__all__ = ["fits_token_kernel", "token_energies"]

STRIP = 8  # rows that one program takes; fewer for a few images, to leave no device idle


def fits_token_kernel(x: Tensor, shape: Sequence[int], stride: tuple[int, int]) -> bool:
    """Whether ``token_energies`` takes tokens (B, C, H, W) and weights of this shape: 16 channels or more, 4-64
    outputs, a 2 x 2 or 3 x 3 kernel."""
    r, channels, kh, kw = shape
    small = kh == kw in (2, 3) and stride in ((2, 2), (4, 4))
    fits = channels == x.shape[1] >= 16 and r in (4, 8, 16, 32, 64) and small
    whole = all(side % s == 0 for side, s in zip(x.shape[2:], stride, strict=True))
    return x.dtype != torch.float64 and fits and whole


def _strip(images: int, rows: int, stride: int) -> int:
    return STRIP if images * rows >= 256 * STRIP else stride


if AVAILABLE:

    @triton.jit
    def inverse_deviation(mean, square, EPS: tl.constexpr):
        """1 / std."""
        return 1.0 / tl.sqrt(tl.maximum(square - mean * mean, 0.0) + EPS)

    @triton.jit
    def _token_energies(y, bias, direction, colsum, sums, squares, out, channels, height, width, sm, SIDE: tl.constexpr,
                        PAD: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
                        R: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        """A strip of rows: energy and direction of a convolution at every position, summed per phase."""
        image, strip, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        n, phase = tl.arange(0, R), tl.arange(0, STRIDE)
        w = block * BLOCK + tl.arange(0, BLOCK)
        base = y + image.to(tl.int64) * height * width * WIDE
        add, along = tl.load(bias + n), tl.load(direction + n) * (2.0 / R) ** 0.5
        energies = tl.zeros([STRIDE, BLOCK], tl.float32)
        directions = tl.zeros([STRIDE, BLOCK], tl.float32)
        for step in range(ROWS):
            h = strip * ROWS + step
            valid = w < tl.where(h < height, width, 0)
            t = tl.zeros([BLOCK, R], tl.float32)
            for tap in tl.static_range(SIDE * SIDE):  # each product of a token with a tap is read once
                token = wrap(h + tap // SIDE - PAD, height) * width + wrap(w + (tap % SIDE - PAD), width)
                place = base + token[:, None] * WIDE + tap * R + n[None, :]
                t += tl.load(place, valid[:, None], 0.0).to(tl.float32)
            if NORM:
                mean = tl.zeros([BLOCK], tl.float32)
                square = tl.zeros([BLOCK], tl.float32)
                for tap in tl.static_range(SIDE * SIDE):
                    place = wrap(h + tap // SIDE, height) * width + wrap(w + tap % SIDE, width) + image * sm
                    mean += tl.load(sums + place, valid, 0.0)
                    square += tl.load(squares + place, valid, 0.0)
                mean, square = mean / (SIDE * SIDE * channels), square / (SIDE * SIDE * channels)
                t = (t - mean[:, None] * tl.load(colsum + n)[None, :]) * inverse_deviation(mean, square, EPS)[:, None]
            t += add[None, :]
            keep = valid[None, :] & (phase == step % STRIDE)[:, None]
            energies += tl.where(keep, tl.sum(t * t, 1)[None, :], 0.0)
            directions += tl.where(keep, tl.sum(t * along[None, :], 1)[None, :], 0.0)
        part = (image * tl.num_programs(1) + strip) * tl.num_programs(2) + block
        place = out + part * 2 * STRIDE * STRIDE + phase * STRIDE  # (part, energy or direction, row, column)
        for b in tl.static_range(STRIDE):
            here = (w % STRIDE == b)[None, :]
            tl.store(place + b, tl.sum(tl.where(here, energies, 0.0), 1))
            tl.store(place + STRIDE * STRIDE + b, tl.sum(tl.where(here, directions, 0.0), 1))


@operator("shift_vits::token_energies")
def token_energies(y: Tensor, bias: Tensor, direction: Tensor, colsum: Tensor | None, sums: Tensor | None,
                   squares: Tensor | None, channels: int, side: int, padding: int, stride: int,
                   eps: float) -> Tensor:  # fmt: skip
    """Energy |t|^2 and direction <t, wave> sqrt(2 / r) of a convolution's output t at every position, per phase.

    t is the sum of ``side`` x ``side`` neighbours' products with their taps, plus ``bias`` (r,). With ``colsum`` the
    convolved patch is normalised first, t = (t - mean colsum) / std + bias, by the ``sums`` over the ``channels`` of
    each token and of its ``squares`` (then without padding).

    Shapes: y (B, H, W, side side r or more), taps in rows, contiguous; bias, wave and colsum (r,); sums and squares
    (B, H, W), float32, of equal strides -> (B, parts, 2, stride, stride), to be summed over the parts.
    """
    b, h, w, n = y.shape
    strip, block = _strip(b, h, stride), max(2, min(64, next_power_of_2(w)))
    grid = (b, -(-h // strip), -(-w // block))
    out = torch.empty((b, grid[1] * grid[2], 2, stride, stride), dtype=torch.float32, device=y.device)
    norm = [bias if tensor is None else tensor for tensor in (colsum, sums, squares)]
    launch(_token_energies, grid, y, bias, direction, *norm, out, channels, h, w, 0 if sums is None else sums.stride(0),
           SIDE=side, PAD=padding, STRIDE=stride, NORM=colsum is not None, EPS=eps,
           R=bias.shape[0], WIDE=n, ROWS=strip, BLOCK=block, num_warps=4)  # fmt: skip
    return out
