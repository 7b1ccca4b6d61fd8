"""Energies of a strided convolution of tokens at every position, summed per phase: ``token_scores``, in one launch,
which reads each token once; and ``best_of_tokens``, which chooses, too."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import AVAILABLE, INTERPRETED, launch, next_power_of_2, operator
from .cards import first_tile
from .choices import best_phase
from .token_rows import PAIRS, cut_rows, row_stages, scores_by_rows

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import wrap
    from .token_energy import inverse_deviation
    from .token_rows import four_sums, sum_by_phase, taps_in_chunks, times_taps

__all__ = ["best_of_tokens", "fits_token_scores", "in_one_pass", "token_scores"]

LONGEST = 2048  # tokens in a strip of ``token_scores``


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


def scores_memory(how: Reading, channels: int, side: int) -> tuple[int, int, int]:
    """Of a program of ``_token_scores``: bytes of taps and of what threads exchange, bytes of a stage, and stages."""
    n = 32 if side == 2 else 64
    if how.chunk:
        return 0, 2 * how.chunk * (how.pairs + n), how.stages
    return 2 * n * (2 * channels + how.pairs), 4 * how.pairs * channels, how.stages


if AVAILABLE:

    @triton.jit
    def _token_scores(x, taps, bias, direction, colsum, sums, squares, products, out, strips, stride_b, sm, step,
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
            b0, b1, b2 = taps_in_chunks(taps + k[:, None] * N + n[None, :], CHUNKS, K, N)
            for tile in range((COUNT + T - 1) // T):
                at = tile * T + i
                keep = (at < COUNT)[:, None]
                line = start + (wrap(first + at, HEIGHT * HALF) * (2 * CHANNELS))[:, None] + k[None, :]
                y = times_taps(line, keep, b0, b1, b2, CHUNKS, K)
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
        add, fold = four_sums(bias, m, step, PARTS, P), four_sums(colsum, m, step, PARTS, P)
        along = tl.load(direction + m % 4)[None, :] * (2.0 / 4) ** 0.5
        energy, tie_break = tl.zeros([Q, 8], tl.float32), tl.zeros([Q, 8], tl.float32)
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
                inverse = inverse_deviation(mean, q0 * (0.25 / CHANNELS), EPS)[:, None]
                t -= tl.where(early, mean[:, None], other[:, None]) * fold
                t *= tl.where(early, inverse, inverse_deviation(other, q1 * (0.25 / CHANNELS), EPS)[:, None])
            t = tl.where(valid[:, None], t + add, 0.0)
            energy += t * t
            tie_break += t
        energy = sum_by_phase(energy, STRIDE, PHASE, STRIDE)
        tie_break = sum_by_phase(tie_break * along, STRIDE, PHASE, STRIDE)
        n = tl.arange(0, STRIDE)
        column = (n - n % 2 * 2 + STRIDE) % STRIDE  # the second position is the one before the first
        phase = tl.arange(0, STRIDE)[:, None] * STRIDE + column[None, :]
        if CHOOSE:
            score = tl.reshape(energy.to(tl.float64), [STRIDE * STRIDE])
            if SIGNED:
                level = 0.01 * tl.sqrt(tl.sum(score, 0) / (HEIGHT * HALF * 2))
                score += level * tl.reshape(tie_break.to(tl.float64), [STRIDE * STRIDE])
            phase = tl.reshape(phase, [STRIDE * STRIDE])
            best = tl.min(tl.where(score == tl.max(score, 0), phase, STRIDE * STRIDE - 1), 0)
            tl.store(out + 2 * image, (best // STRIDE).to(tl.int64))
            tl.store(out + 2 * image + 1, (best % STRIDE).to(tl.int64))
        else:
            place = out + tl.program_id(0) * (2 * STRIDE * STRIDE) + phase
            tl.store(place, energy)
            tl.store(place + STRIDE * STRIDE, tie_break)


@operator("shift_vits::token_scores")
def token_scores(x: Tensor, taps: Tensor, bias: Tensor, direction: Tensor, colsum: Tensor | None, sums: Tensor | None,
                 squares: Tensor | None, side: int, stride: int, eps: float) -> Tensor:  # fmt: skip
    """What ``token_energies`` makes of the products of tokens with taps, without these being a tensor of their own.

    With ``colsum`` the convolved patch is normalised.

    Shapes: x (B, H, W, C), each sample contiguous; taps (2 C, 32 or 64), see ``in_one_pass``; wave (4,); bias and
    colsum (4,) or, to be summed, (n, 4), of equal strides; sums and squares (B, H, W), float32
    -> (B, parts, 2, stride, stride), to be summed over the parts.
    """
    if colsum is None and x.shape[3] <= 128 and x.shape[2] <= 2 * PAIRS and row_stages(x, side):
        return scores_by_rows(x, taps, bias, direction, side, stride)
    return _score(x, taps, bias, direction, colsum, sums, squares, side, stride, eps, False, False)


def best_of_tokens(x: Tensor, taps: Tensor, bias: Tensor, direction: Tensor, colsum: Tensor | None, sums: Tensor | None,
                   squares: Tensor | None, side: int, stride: int, eps: float, signed: bool) -> Tensor:  # fmt: skip
    """The ``best_phase`` (B, 2) of ``token_scores``: by the same kernel, where its programs have a whole image each."""
    given = x, taps, bias, direction, colsum, sums, squares, side, stride, eps
    if _rows(x, side, stride) == x.shape[1]:
        return token_choice(*given, signed)
    return best_phase(token_scores(*given), stride, x.shape[1] * x.shape[2], signed)


@operator("shift_vits::token_choice")
def token_choice(x: Tensor, taps: Tensor, bias: Tensor, direction: Tensor, colsum: Tensor | None, sums: Tensor | None,
                 squares: Tensor | None, side: int, stride: int, eps: float, signed: bool) -> Tensor:  # fmt: skip
    """``best_of_tokens``, where one program has a whole image."""
    return _score(x, taps, bias, direction, colsum, sums, squares, side, stride, eps, True, signed)


def _rows(x: Tensor, side: int, stride: int) -> int:
    """Of one strip of ``_token_scores``: all if they are one product."""
    (b, h, w, _), how = x.shape, _reading(x, side) or READINGS[x.shape[3]]
    return h if h * w <= 2 * how.pairs else cut_rows(h, stride, b, how.programs, LONGEST // w)


def _score(x: Tensor, taps: Tensor, bias: Tensor, direction: Tensor, colsum: Tensor | None, sums: Tensor | None,
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
    launch(_token_scores, (b * strips,), x, taps, bias, direction, *given, products, out, strips, x.stride(0),
           0 if sums is None else sums.stride(0), bias.stride(0), HEIGHT=h, HALF=w // 2, CHANNELS=c, SIDE=side,
           STRIDE=stride, NORM=colsum is not None, EPS=eps, PARTS=parts, CHOOSE=choose, SIGNED=signed, ROWS=rows,
           T=how.pairs, CHUNK=how.chunk, Q=32 * how.warps, P=next_power_of_2(parts), num_warps=how.warps,
           num_stages=how.stages)  # fmt: skip
    return out


def in_one_pass(weight: Tensor) -> Tensor:
    """Weights (4, C, k, k) as ``token_scores`` reads them: (2 C, taps), of a pair of tokens.

    A tap is one of 2 or 4 rows, one of 4 positions, and an output. The first two positions are the next pair's, or
    rather its first token and the one before, which is this pair's second; the last two are this pair's.
    """
    k = weight.shape[3]
    weight = F.pad(weight, (4 - k, 1, 0, k - 2)).unfold(3, 4, 1)  # 4, C, row, token, position
    return weight.permute(3, 1, 2, 4, 0).flatten(2).flatten(0, 1).contiguous()
