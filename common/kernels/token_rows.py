"""``token_scores`` of few channels, row by row: a program holds the taps and goes down several images at once."""

import torch
from torch import Tensor

from .base import AVAILABLE, launch, next_power_of_2
from .cards import first_tile

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import wrap

__all__ = ["PAIRS", "cut_rows", "row_stages", "scores_by_rows"]

PAIRS, PROGRAMS = 64, 128  # of tokens in a program; programs, at least


def row_stages(x: Tensor, side: int) -> int:
    """Of ``_token_rows``: as many as there is room for; 0 if there is none."""
    most = min(6, 384 // x.shape[3])
    tile = first_tile(x, "_token_rows", *(rows_memory(x.shape[3], side, stages) for stages in range(most, 1, -1)))
    return most - tile if tile >= 0 else 0


def rows_memory(channels: int, side: int, stages: int) -> tuple[int, int, int]:
    """The same of ``_token_rows``."""
    n = 32 if side == 2 else 64
    return n * (4 * channels + PAIRS), 4 * PAIRS * channels, stages


if AVAILABLE:

    @triton.jit
    def taps_in_chunks(weights, CHUNKS: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
        """Taps in 1 or 3 chunks of K channels."""
        b0 = tl.load(weights)
        b1, b2 = b0, b0
        if CHUNKS > 1:
            b1, b2 = tl.load(weights + K * N), tl.load(weights + 2 * K * N)
        return b0, b1, b2

    @triton.jit
    def times_taps(line, keep, b0, b1, b2, CHUNKS: tl.constexpr, K: tl.constexpr):
        """Tokens by taps, in 1 or 3 chunks of channels."""
        y = tl.dot(tl.load(line, keep, 0.0), b0)
        if CHUNKS > 1:
            y = tl.dot(tl.load(line + K, keep, 0.0), b1, y)
            y = tl.dot(tl.load(line + 2 * K, keep, 0.0), b2, y)
        return y

    @triton.jit
    def four_sums(parts, m, step, PARTS: tl.constexpr, P: tl.constexpr):
        """One number for each of m outputs, four of which there are: (PARTS, 4), ``step`` apart, added up."""
        p = tl.arange(0, P)
        return tl.sum(tl.load(parts + (p * step)[:, None] + (m % 4)[None, :], (p < PARTS)[:, None], 0.0), 0)[None, :]

    @triton.jit
    def _halves(t, T: tl.constexpr, N: tl.constexpr):
        """The first half of N columns, and the second."""
        return tl.split(tl.permute(tl.reshape(t, [T, 2, N // 2]), [0, 2, 1]))

    @triton.jit
    def _token_rows(x, taps, bias, direction, out, images, parts, stride_b, step, HEIGHT: tl.constexpr,
                    HALF: tl.constexpr, CHANNELS: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr,
                    PARTS: tl.constexpr, ROWS: tl.constexpr, SLOT: tl.constexpr, T: tl.constexpr,
                    P: tl.constexpr):  # fmt: skip
        """The same without a norm, row by row: T pairs are a row, HALF of SLOT, of as many images as there is room for.
        What rows above have added to a sum is taken along, what goes to the right changes hands: nothing is put
        anywhere."""
        N: tl.constexpr = 32 if SIDE == 2 else 64
        CHUNKS: tl.constexpr = 3 if CHANNELS % 3 == 0 else 1
        K: tl.constexpr = 2 * CHANNELS // CHUNKS
        IMAGES: tl.constexpr = T // SLOT
        group, first = tl.program_id(0) // parts, tl.program_id(0) % parts * ROWS
        i, k, m, n = tl.arange(0, T), tl.arange(0, K), tl.arange(0, 8), tl.arange(0, N)
        image, column = group * IMAGES + i // SLOT, tl.minimum(i % SLOT, HALF - 1)
        there, image = (image < images) & (i % SLOT < HALF), tl.minimum(image, images - 1)
        left = i - i % SLOT + tl.where(column == 0, HALF - 1, column - 1)
        left = left[:, None] + tl.zeros([T, 8], tl.int32)
        line = x + image.to(tl.int64)[:, None] * stride_b + (column * (2 * CHANNELS))[:, None] + k[None, :]
        b0, b1, b2 = taps_in_chunks(taps + k[:, None] * N + n[None, :], CHUNKS, K, N)
        add, energies, directions = four_sums(bias, m, step, PARTS, P), (), ()
        for _ in tl.static_range(STRIDE):
            energies = energies + (tl.zeros([T, 8], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
            directions = directions + (tl.zeros([T, 8], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        t1, t2 = tl.zeros([T, 16], tl.float32), tl.zeros([T, 16], tl.float32)  # of the next rows, so far
        for row in range(first - (SIDE - 2), first + ROWS + 1):
            here = line + wrap(row, HEIGHT) * (2 * HALF * CHANNELS)
            top, below = _halves(times_taps(here, True, b0, b1, b2, CHUNKS, K), T, N)
            if SIDE == 3:
                top, middle = _halves(top, T, 32)
                below, _none = _halves(below, T, 32)
                t, t1, t2 = t1 + below, t2 + middle, top
            else:
                t, t1 = t1 + below, top
            right, stays = _halves(t, T, 16)
            t = stays + tl.gather(right, left, 0) + add
            for phase in tl.static_range(STRIDE):  # of the row before, which is complete
                keep = (there & (row > first) & ((row - 1) % STRIDE == phase))[:, None]
                value = tl.where(keep, t, 0.0)
                energies = energies[1:] + (energies[0] + value * value,)  # type: ignore[assignment, misc]  # noqa: RUF005
                directions = directions[1:] + (directions[0] + value,)  # type: ignore[assignment, misc]  # noqa: RUF005
        along = tl.load(direction + m % 4)[None, :] * (2.0 / 4) ** 0.5
        image, n = group * IMAGES + tl.arange(0, IMAGES), tl.arange(0, STRIDE)
        place = out + ((image * parts + tl.program_id(0) % parts) * (2 * STRIDE * STRIDE))[:, None]
        place += ((n - n % 2 * 2 + STRIDE) % STRIDE)[None, :]  # the second position is the one before the first
        for phase in tl.static_range(STRIDE):
            energy = sum_by_phase(energies[phase], IMAGES, SLOT, STRIDE)
            tie_break = sum_by_phase(directions[phase] * along, IMAGES, SLOT, STRIDE)
            tl.store(place + phase * STRIDE, energy, (image < images)[:, None])
            tl.store(place + (STRIDE + phase) * STRIDE, tie_break, (image < images)[:, None])

    @triton.jit
    def sum_by_phase(score, GROUPS: tl.constexpr, SLOT: tl.constexpr, STRIDE: tl.constexpr):
        """Sums per group of SLOT pairs and phase: of pairs, which alternate at stride 4, and of their two positions."""
        ALTERNATE: tl.constexpr = STRIDE // 2
        score = tl.sum(tl.reshape(score, [GROUPS, SLOT // ALTERNATE, ALTERNATE * 8]), 1)
        return tl.sum(tl.reshape(score, [GROUPS, STRIDE, 4]), 2)


def cut_rows(height: int, stride: int, strips: int, programs: int, most: int) -> int:
    """Rows of a strip, whole strides of them: as many as leave enough programs, of so many strips side by side."""
    rows = range(min(height, most) // stride * stride, stride, -stride)
    return next((n for n in rows if height % n == 0 and strips * height // n >= programs), stride)


def scores_by_rows(x: Tensor, taps: Tensor, bias: Tensor, direction: Tensor, side: int, stride: int) -> Tensor:
    """``token_scores`` of a few channels without a norm."""
    b, h, w, c = x.shape
    slot, parts = next_power_of_2(w // 2), bias.numel() // 4
    groups = -(-b * slot // PAIRS)
    rows = cut_rows(h, stride, groups, PROGRAMS, h)
    out = torch.empty((b, h // rows, 2, stride, stride), dtype=torch.float32, device=x.device)
    launch(_token_rows, (groups * h // rows,), x, taps, bias, direction, out, b, h // rows, x.stride(0), bias.stride(0),
           HEIGHT=h, HALF=w // 2, CHANNELS=c, SIDE=side, STRIDE=stride, PARTS=parts, ROWS=rows, SLOT=slot, T=PAIRS,
           P=next_power_of_2(parts), num_warps=4, num_stages=row_stages(x, side))  # fmt: skip
    return out
