"""Energies of a strided convolution of tokens at every position, summed per phase.

- ``token_scores``: in one launch, which reads each token once; and ``best_of_tokens``, which chooses, too.
- ``token_energies``: from the product of each token with all taps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import AVAILABLE, INTERPRETED, launch, next_power_of_2, operator, usable
from .cards import first_tile
from .choices import best_phase

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import wrap

__all__ = ["best_of_tokens", "fits_token_kernel", "fits_token_scores", "in_one_pass", "token_energies", "token_scores"]

STRIP = 8  # rows that one program of ``token_energies`` takes; fewer for a few images, to leave no device idle
LONGEST = 2048  # tokens in a strip of ``token_scores``
PAIRS, PROGRAMS = 64, 128  # of tokens in a program of ``token_scores`` that goes row by row; of these, at least


class Reading(NamedTuple):
    """How ``token_scores`` reads tokens: ``pairs`` of them at a time; all their channels (``chunk`` 0), with the taps
    held in shared memory, or a chunk of each token after the other; ``programs`` at least, more mean shorter strips."""

    pairs: int
    chunk: int
    warps: int
    stages: int
    programs: int


READINGS = {
    32: Reading(64, 0, 4, 3, 256),
    64: Reading(64, 0, 4, 3, 256),
    96: Reading(64, 0, 4, 3, 256),
    128: Reading(64, 0, 4, 2, 256),
    192: Reading(64, 0, 4, 3, 128),
    256: Reading(128, 64, 8, 4, 128),
    384: Reading(128, 64, 4, 4, 128),
}
"""By channels."""


def fits_token_kernel(x: Tensor, shape: Sequence[int], stride: tuple[int, int]) -> bool:
    """Whether ``token_energies`` takes tokens (B, C, H, W) and weights of this shape: 16 channels or more, 4-64
    outputs, a 2 x 2 or 3 x 3 kernel."""
    r, channels, kh, kw = shape
    small = kh == kw in (2, 3) and stride in ((2, 2), (4, 4))
    fits = channels == x.shape[1] >= 16 and r in (4, 8, 16, 32, 64) and small
    whole = all(side % s == 0 for side, s in zip(x.shape[2:], stride, strict=True))
    return usable(x) and x.dtype != torch.float64 and fits and whole


def fits_token_scores(x: Tensor, outputs: int, side: int, padding: int, channels: int = 0) -> bool:
    """Whether ``token_scores`` takes tokens (B, H, W, C), or such with so many channels, for which
    ``fits_token_kernel`` holds: half precision, known channels, 4 outputs, a 2 x 2 kernel without padding or a 3 x 3
    kernel with 1."""
    half = x.dtype in (torch.bfloat16, torch.float16) or INTERPRETED
    dense, c = x.stride()[1:] == (x.shape[2] * x.shape[3], x.shape[3], 1), channels or x.shape[3]
    if not (half and c in READINGS and outputs == 4 and padding == side - 2 and dense):
        return False
    return _reading(x, side, c) is not None


def _reading(x: Tensor, side: int, channels: int = 0) -> Reading | None:
    """How tokens are read, of so many channels: as it was tuned or, where a card has no room for that, in chunks."""
    how = READINGS[channels or x.shape[3]]
    every = how, how._replace(pairs=64, chunk=64, warps=4, stages=2)
    tile = first_tile(x, "_token_scores", *(scores_memory(how, channels or x.shape[3], side) for how in every))
    return every[tile] if tile >= 0 else None


def _row_stages(x: Tensor, side: int) -> int:
    """Of ``_token_rows``: as many as there is room for; 0 if there is none."""
    most = min(6, 384 // x.shape[3])
    tile = first_tile(x, "_token_rows", *(rows_memory(x.shape[3], side, stages) for stages in range(most, 1, -1)))
    return most - tile if tile >= 0 else 0


def scores_memory(how: Reading, channels: int, side: int) -> tuple[int, int, int]:
    """Of a program of ``_token_scores``: bytes of taps and of what threads exchange, bytes of a stage, and stages."""
    n = 32 if side == 2 else 64
    if how.chunk:
        return 0, 2 * how.chunk * (how.pairs + n), how.stages
    return 2 * n * (2 * channels + how.pairs), 4 * how.pairs * channels, how.stages


def rows_memory(channels: int, side: int, stages: int) -> tuple[int, int, int]:
    """The same of ``_token_rows``."""
    n = 32 if side == 2 else 64
    return n * (4 * channels + PAIRS), 4 * PAIRS * channels, stages


def _strip(images: int, rows: int, stride: int) -> int:
    return STRIP if images * rows >= 256 * STRIP else stride


if AVAILABLE:

    @triton.jit
    def _inverse(mean, square, EPS: tl.constexpr):
        """1 / std."""
        return 1.0 / tl.sqrt(tl.maximum(square - mean * mean, 0.0) + EPS)

    @triton.jit
    def _token_energies(y, bias, wave, colsum, sums, squares, out, channels, height, width, sm, SIDE: tl.constexpr,
                        PAD: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
                        R: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
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
                t = (t - mean[:, None] * tl.load(colsum + n)[None, :]) * _inverse(mean, square, EPS)[:, None]
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
    def _chunks(weights, CHUNKS: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
        """Taps in 1 or 3 chunks of K channels."""
        b0 = tl.load(weights)
        b1, b2 = b0, b0
        if CHUNKS > 1:
            b1, b2 = tl.load(weights + K * N), tl.load(weights + 2 * K * N)
        return b0, b1, b2

    @triton.jit
    def _times(line, keep, b0, b1, b2, CHUNKS: tl.constexpr, K: tl.constexpr):
        """Tokens by taps, in 1 or 3 chunks of channels."""
        y = tl.dot(tl.load(line, keep, 0.0), b0)
        if CHUNKS > 1:
            y = tl.dot(tl.load(line + K, keep, 0.0), b1, y)
            y = tl.dot(tl.load(line + 2 * K, keep, 0.0), b2, y)
        return y

    @triton.jit
    def _four_sums(parts, m, step, PARTS: tl.constexpr, P: tl.constexpr):
        """One number for each of m outputs, four of which there are: (PARTS, 4), ``step`` apart, added up."""
        p = tl.arange(0, P)
        return tl.sum(tl.load(parts + (p * step)[:, None] + (m % 4)[None, :], (p < PARTS)[:, None], 0.0), 0)[None, :]

    @triton.jit
    def _token_scores(x, taps, bias, wave, colsum, sums, squares, products, out, strips, stride_b, sm, step,
                      HEIGHT: tl.constexpr, HALF: tl.constexpr, CHANNELS: tl.constexpr, SIDE: tl.constexpr,
                      STRIDE: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, PARTS: tl.constexpr,
                      CHOOSE: tl.constexpr, SIGNED: tl.constexpr, ROWS: tl.constexpr, T: tl.constexpr,
                      CHUNK: tl.constexpr, Q: tl.constexpr, P: tl.constexpr):  # fmt: skip
        """A strip of rows and those that its windows reach into, in pairs of tokens, HALF in a row.

        First the product of each pair with its taps, see ``in_one_pass``, is put where this program alone reads it:
        for each row of the kernel, what goes to the pair on the right and what stays, each for two positions. Then
        positions collect what is theirs. Those of a pair are its first token's and the one's before it: so all that
        moves moves to the right. A strip that is a whole image can CHOOSE, as ``best_phase`` does.
        """
        WHOLE: tl.constexpr = ROWS == HEIGHT  # no rows beyond the strip: the torus closes in it
        COUNT: tl.constexpr = (ROWS if WHOLE else ROWS + SIDE - 1) * HALF
        PAD: tl.constexpr = SIDE - 2
        N: tl.constexpr = 32 if SIDE == 2 else 64
        CHUNKS: tl.constexpr = 3 if CHANNELS % 3 == 0 else 1
        K: tl.constexpr = 2 * CHANNELS // CHUNKS
        image, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
        i, n = tl.arange(0, T), tl.arange(0, N)
        start, known = x + image.to(tl.int64) * stride_b, image * sm
        first = (strip * ROWS - (0 if WHOLE else PAD)) * HALF
        y_here = products + tl.program_id(0).to(tl.int64) * (COUNT * 16 * SIDE)
        if CHUNK == 0:
            k = tl.arange(0, K)
            b0, b1, b2 = _chunks(taps + k[:, None] * N + n[None, :], CHUNKS, K, N)
            for tile in range((COUNT + T - 1) // T):
                at = tile * T + i
                keep = (at < COUNT)[:, None]
                line = start + (wrap(first + at, HEIGHT * HALF) * (2 * CHANNELS))[:, None] + k[None, :]
                y = _times(line, keep, b0, b1, b2, CHUNKS, K)
                y_place = y_here + (at * 8)[:, None] + (n // 8 * (COUNT * 8) + n % 8)[None, :]
                tl.store(y_place, y.to(products.dtype.element_ty), keep & (n < 16 * SIDE)[None, :])
        else:
            k = tl.arange(0, CHUNK)
            weights = taps + k[:, None] * N + n[None, :]
            for tile in range((COUNT + T - 1) // T):
                at = tile * T + i
                keep = (at < COUNT)[:, None]
                line = start + (wrap(first + at, HEIGHT * HALF) * (2 * CHANNELS))[:, None] + k[None, :]
                y = tl.zeros([T, N], tl.float32)
                for c in range(0, 2 * CHANNELS, CHUNK):
                    y = tl.dot(tl.load(line + c, keep, 0.0), tl.load(weights + c * N), y)
                y_place = y_here + (at * 8)[:, None] + (n // 8 * (COUNT * 8) + n % 8)[None, :]
                tl.store(y_place, y.to(products.dtype.element_ty), keep & (n < 16 * SIDE)[None, :])
        tl.debug_barrier()
        PHASE: tl.constexpr = Q // STRIDE  # positions of one phase of the rows, side by side
        j, m = tl.arange(0, Q), tl.arange(0, 8)  # m: which of a pair's two positions, and which output
        add, fold = _four_sums(bias, m, step, PARTS, P), _four_sums(colsum, m, step, PARTS, P)
        toward = tl.load(wave + m % 4)[None, :] * (2.0 / 4) ** 0.5
        energy, direction = tl.zeros([Q, 8], tl.float32), tl.zeros([Q, 8], tl.float32)
        for piece in tl.static_range((ROWS // STRIDE * HALF + PHASE - 1) // PHASE):
            at = piece * PHASE + j % PHASE
            valid, row = at < ROWS // STRIDE * HALF, at // HALF
            column, row = at - row * HALF, row * STRIDE + j // PHASE
            left = tl.where(column == 0, HALF - 1, column - 1)
            t = tl.zeros([Q, 8], tl.float32)
            for v in tl.static_range(SIDE):
                above = (wrap(row + v - PAD, HEIGHT) if WHOLE else row + v) * HALF + 2 * v * COUNT
                t += tl.load(y_here + ((above + left) * 8)[:, None] + m[None, :], valid[:, None], 0.0)
                t += tl.load(y_here + ((above + column + COUNT) * 8)[:, None] + m[None, :], valid[:, None], 0.0)
            if NORM:
                s0, s1 = tl.zeros([Q], tl.float32), tl.zeros([Q], tl.float32)
                q0, q1 = tl.zeros([Q], tl.float32), tl.zeros([Q], tl.float32)
                for v in tl.static_range(2):
                    above = known + wrap(strip * ROWS + row + v, HEIGHT) * (2 * HALF)
                    s = tl.load(sums + (above + 2 * column), valid, 0.0)
                    q = tl.load(squares + (above + 2 * column), valid, 0.0)
                    s0 += s + tl.load(sums + (above + 2 * column + 1), valid, 0.0)
                    q0 += q + tl.load(squares + (above + 2 * column + 1), valid, 0.0)
                    s1 += s + tl.load(sums + (above + 2 * left + 1), valid, 0.0)
                    q1 += q + tl.load(squares + (above + 2 * left + 1), valid, 0.0)
                early, mean, other = m[None, :] < 4, s0 * (0.25 / CHANNELS), s1 * (0.25 / CHANNELS)
                inverse = _inverse(mean, q0 * (0.25 / CHANNELS), EPS)[:, None]
                t -= tl.where(early, mean[:, None], other[:, None]) * fold
                t *= tl.where(early, inverse, _inverse(other, q1 * (0.25 / CHANNELS), EPS)[:, None])
            t = tl.where(valid[:, None], t + add, 0.0)
            energy += t * t
            direction += t
        energy = _by_phase(energy, STRIDE, PHASE, STRIDE)
        direction = _by_phase(direction * toward, STRIDE, PHASE, STRIDE)
        n = tl.arange(0, STRIDE)
        column = (n - n % 2 * 2 + STRIDE) % STRIDE  # the second position is the one before the first
        phase = tl.arange(0, STRIDE)[:, None] * STRIDE + column[None, :]
        if CHOOSE:
            score = tl.reshape(energy.to(tl.float64), [STRIDE * STRIDE])
            if SIGNED:
                level = 0.01 * tl.sqrt(tl.sum(score, 0) / (HEIGHT * HALF * 2))
                score += level * tl.reshape(direction.to(tl.float64), [STRIDE * STRIDE])
            phase = tl.reshape(phase, [STRIDE * STRIDE])
            best = tl.min(tl.where(score == tl.max(score, 0), phase, STRIDE * STRIDE - 1), 0)
            tl.store(out + 2 * image, (best // STRIDE).to(tl.int64))
            tl.store(out + 2 * image + 1, (best % STRIDE).to(tl.int64))
        else:
            place = out + tl.program_id(0) * (2 * STRIDE * STRIDE) + phase
            tl.store(place, energy)
            tl.store(place + STRIDE * STRIDE, direction)

    @triton.jit
    def _halves(t, T: tl.constexpr, N: tl.constexpr):
        """The first half of N columns, and the second."""
        return tl.split(tl.permute(tl.reshape(t, [T, 2, N // 2]), [0, 2, 1]))

    @triton.jit
    def _token_rows(x, taps, bias, wave, out, images, parts, stride_b, step, HEIGHT: tl.constexpr, HALF: tl.constexpr,
                    CHANNELS: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, PARTS: tl.constexpr,
                    ROWS: tl.constexpr, SLOT: tl.constexpr, T: tl.constexpr, P: tl.constexpr):  # fmt: skip
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
        b0, b1, b2 = _chunks(taps + k[:, None] * N + n[None, :], CHUNKS, K, N)
        add, energies, directions = _four_sums(bias, m, step, PARTS, P), (), ()
        for _ in tl.static_range(STRIDE):
            energies = energies + (tl.zeros([T, 8], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
            directions = directions + (tl.zeros([T, 8], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        t1, t2 = tl.zeros([T, 16], tl.float32), tl.zeros([T, 16], tl.float32)  # of the next rows, so far
        for row in range(first - (SIDE - 2), first + ROWS + 1):
            here = line + wrap(row, HEIGHT) * (2 * HALF * CHANNELS)
            top, below = _halves(_times(here, True, b0, b1, b2, CHUNKS, K), T, N)
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
        toward = tl.load(wave + m % 4)[None, :] * (2.0 / 4) ** 0.5
        image, n = group * IMAGES + tl.arange(0, IMAGES), tl.arange(0, STRIDE)
        place = out + ((image * parts + tl.program_id(0) % parts) * (2 * STRIDE * STRIDE))[:, None]
        place += ((n - n % 2 * 2 + STRIDE) % STRIDE)[None, :]  # the second position is the one before the first
        for phase in tl.static_range(STRIDE):
            energy = _by_phase(energies[phase], IMAGES, SLOT, STRIDE)
            direction = _by_phase(directions[phase] * toward, IMAGES, SLOT, STRIDE)
            tl.store(place + phase * STRIDE, energy, (image < images)[:, None])
            tl.store(place + (STRIDE + phase) * STRIDE, direction, (image < images)[:, None])

    @triton.jit
    def _by_phase(score, GROUPS: tl.constexpr, SLOT: tl.constexpr, STRIDE: tl.constexpr):
        """Sums per group of SLOT pairs and phase: of pairs, which alternate at stride 4, and of their two positions."""
        ALTERNATE: tl.constexpr = STRIDE // 2
        score = tl.sum(tl.reshape(score, [GROUPS, SLOT // ALTERNATE, ALTERNATE * 8]), 1)
        return tl.sum(tl.reshape(score, [GROUPS, STRIDE, 4]), 2)


@operator("shift_vits::token_energies")
def token_energies(y: Tensor, bias: Tensor, wave: Tensor, colsum: Tensor | None, sums: Tensor | None,
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
    launch(_token_energies, grid, y, bias, wave, *norm, out, channels, h, w, 0 if sums is None else sums.stride(0),
           SIDE=side, PAD=padding, STRIDE=stride, NORM=colsum is not None, EPS=eps,
           R=bias.shape[0], WIDE=n, ROWS=strip, BLOCK=block, num_warps=4)  # fmt: skip
    return out


@operator("shift_vits::token_scores")
def token_scores(x: Tensor, taps: Tensor, bias: Tensor, wave: Tensor, colsum: Tensor | None, sums: Tensor | None,
                 squares: Tensor | None, side: int, stride: int, eps: float) -> Tensor:  # fmt: skip
    """What ``token_energies`` makes of the products of tokens with taps, without these being a tensor of their own.

    With ``colsum`` the convolved patch is normalised.

    Shapes: x (B, H, W, C), each sample contiguous; taps (2 C, 32 or 64), see ``in_one_pass``; wave (4,); bias and
    colsum (4,) or, to be summed, (n, 4), of equal strides; sums and squares (B, H, W), float32
    -> (B, parts, 2, stride, stride), to be summed over the parts.
    """
    if colsum is None and x.shape[3] <= 128 and x.shape[2] <= 2 * PAIRS and _row_stages(x, side):
        return _by_rows(x, taps, bias, wave, side, stride)
    return _score(x, taps, bias, wave, colsum, sums, squares, side, stride, eps, False, False)


def best_of_tokens(x: Tensor, taps: Tensor, bias: Tensor, wave: Tensor, colsum: Tensor | None, sums: Tensor | None,
                   squares: Tensor | None, side: int, stride: int, eps: float, signed: bool) -> Tensor:  # fmt: skip
    """The ``best_phase`` (B, 2) of ``token_scores``: by the same kernel, where its programs have a whole image each."""
    given = x, taps, bias, wave, colsum, sums, squares, side, stride, eps
    if _rows(x, side, stride) == x.shape[1]:
        return token_choice(*given, signed)
    return best_phase(token_scores(*given), stride, x.shape[1] * x.shape[2], signed)


@operator("shift_vits::token_choice")
def token_choice(x: Tensor, taps: Tensor, bias: Tensor, wave: Tensor, colsum: Tensor | None, sums: Tensor | None,
                 squares: Tensor | None, side: int, stride: int, eps: float, signed: bool) -> Tensor:  # fmt: skip
    """``best_of_tokens``, where one program has a whole image."""
    return _score(x, taps, bias, wave, colsum, sums, squares, side, stride, eps, True, signed)


def _rows(x: Tensor, side: int, stride: int) -> int:
    """Of one strip of ``_token_scores``: all if they are one product."""
    (b, h, w, _), how = x.shape, _reading(x, side) or READINGS[x.shape[3]]
    return h if h * w <= 2 * how.pairs else _cut(h, stride, b, how.programs, LONGEST // w)


def _cut(height: int, stride: int, strips: int, programs: int, most: int) -> int:
    """Rows of a strip, whole strides of them: as many as leave enough programs, of so many strips side by side."""
    rows = range(min(height, most) // stride * stride, stride, -stride)
    return next((n for n in rows if height % n == 0 and strips * height // n >= programs), stride)


def _score(x: Tensor, taps: Tensor, bias: Tensor, wave: Tensor, colsum: Tensor | None, sums: Tensor | None,
           squares: Tensor | None, side: int, stride: int, eps: float, choose: bool,
           signed: bool) -> Tensor:  # fmt: skip
    (b, h, w, c), how, rows = x.shape, _reading(x, side) or READINGS[x.shape[3]], _rows(x, side, stride)
    strips, read = h // rows, rows if rows == h else rows + side - 1
    shape, dtype = ((b, 2), torch.int64) if choose else ((b, strips, 2, stride, stride), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    products = torch.empty((b * strips, read * w // 2, 16 * side), dtype=x.dtype, device=x.device)
    if sums is not None and squares is not None and (sums.stride() != squares.stride() or sums.stride()[1:] != (w, 1)):
        sums, squares = sums.contiguous(), squares.contiguous()
    given = [bias if tensor is None else tensor for tensor in (colsum, sums, squares)]
    parts = bias.numel() // 4
    launch(_token_scores, (b * strips,), x, taps, bias, wave, *given, products, out, strips, x.stride(0),
           0 if sums is None else sums.stride(0), bias.stride(0), HEIGHT=h, HALF=w // 2, CHANNELS=c, SIDE=side,
           STRIDE=stride, NORM=colsum is not None, EPS=eps, PARTS=parts, CHOOSE=choose, SIGNED=signed, ROWS=rows,
           T=how.pairs, CHUNK=how.chunk, Q=32 * how.warps, P=next_power_of_2(parts), num_warps=how.warps,
           num_stages=how.stages)  # fmt: skip
    return out


def _by_rows(x: Tensor, taps: Tensor, bias: Tensor, wave: Tensor, side: int, stride: int) -> Tensor:
    """``token_scores`` of a few channels without a norm."""
    b, h, w, c = x.shape
    slot, parts = next_power_of_2(w // 2), bias.numel() // 4
    groups = -(-b * slot // PAIRS)
    rows = _cut(h, stride, groups, PROGRAMS, h)
    out = torch.empty((b, h // rows, 2, stride, stride), dtype=torch.float32, device=x.device)
    launch(_token_rows, (groups * h // rows,), x, taps, bias, wave, out, b, h // rows, x.stride(0), bias.stride(0),
           HEIGHT=h, HALF=w // 2, CHANNELS=c, SIDE=side, STRIDE=stride, PARTS=parts, ROWS=rows, SLOT=slot, T=PAIRS,
           P=next_power_of_2(parts), num_warps=4, num_stages=_row_stages(x, side))  # fmt: skip
    return out


def in_one_pass(weight: Tensor) -> Tensor:
    """Weights (4, C, k, k) as ``token_scores`` reads them: (2 C, taps), of a pair of tokens.

    A tap is one of 2 or 4 rows, one of 4 positions, and an output. The first two positions are the next pair's, or
    rather its first token and the one before, which is this pair's second; the last two are this pair's.
    """
    k = weight.shape[3]
    weight = F.pad(weight, (4 - k, 1, 0, k - 2)).unfold(3, 4, 1)  # 4, C, row, token, position
    return weight.permute(3, 1, 2, 4, 0).flatten(2).flatten(0, 1).contiguous()
