"""What anchors make of weights: a few fixed combinations of their rows, as the kernels that score read them.

In a compiled graph weights are inputs like others, and all this is done in every forward: one launch each.

- ``sketched``: of any weights and the bias that goes with them.
- ``convolution_taps``: of those of a convolution.
- ``depthwise_taps``, ``pooled_taps``: of depthwise convolutions, without and with a projection before them.
- ``merging_weights``: of those of patch mergings, with the norms before them; and what ``merged_product`` takes.

Taps are (2 C, n) with ``once``, for ``token_scores``: see ``in_one_pass``. Else they are (n, C), a tap being a row, a
column and an output, with zeros up to a multiple of eight.
"""

from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .base import AVAILABLE, launch, operator, power, usable

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["convolution_taps", "depthwise_taps", "fits_sketch", "merging_weights", "pooled_taps", "sketched"]

COLUMNS, POOLED, MERGED = 8, 16, 16  # of weights that one program mixes: 32 bytes of each row, or 64
SCALED = 4  # rows of weights that one program scales
CHANNELS = 64  # of one tap that a program mixes


def fits_sketch(mixing: Tensor | None, *weights: Tensor) -> bool:
    """Whether the functions here take these: at most 2048 rows mixed, contiguous, of at most float32, not sharded."""
    if mixing is None or mixing.stride(1) != 1 or mixing.shape[1] > 2048:
        return False
    single = all(t.dtype != torch.float64 and not isinstance(t, DTensor) for t in (mixing, *weights))
    return usable(weights[0]) and single and all(weight.is_contiguous() for weight in weights)


def _new_taps(like: Tensor, r: int, channels: int, side: int, dtype: torch.dtype, once: bool) -> Tensor:
    return torch.empty(_shape_of_taps(r, channels, side, once), dtype=dtype, device=like.device)


def _shape_of_taps(r: int, channels: int, side: int, once: bool) -> tuple[int, int]:
    return (2 * channels, 32 if side == 2 else 64) if once else (-(-r * side * side // 8) * 8, channels)


if AVAILABLE:

    @triton.jit
    def _place(r, row, column, c, CHANNELS: tl.constexpr, COUNT: tl.constexpr, SIDE: tl.constexpr):
        """Where in taps (row, column, output, channel) a weight lies."""
        return ((row * SIDE + column) * COUNT + r) * CHANNELS + c

    @triton.jit
    def _of_pair(token, r, row, position, c, CHANNELS: tl.constexpr, SIDE: tl.constexpr):
        """Where in taps (token of a pair, channel, row, position, output) a weight lies. Column j of a kernel is of the
        first token for position j + 4 - SIDE, and of the second for the position before."""
        ROWS: tl.constexpr = 2 if SIDE == 2 else 4
        return ((token * CHANNELS + c) * ROWS + row) * 16 + position * 4 + r

    @triton.jit
    def _store(taps, value, r, row, column, c, keep, CHANNELS: tl.constexpr, COUNT: tl.constexpr, SIDE: tl.constexpr,
               ONCE: tl.constexpr):  # fmt: skip
        """Store weights of one output, and zeros in places that are none's, of which each has a few to care for."""
        tap, value = row * SIDE + column, value.to(taps.dtype.element_ty)
        none = tl.zeros_like(value)
        if ONCE:
            position = column + (4 - SIDE)
            tl.store(taps + _of_pair(0, r, row, position, c, CHANNELS, SIDE), value, keep)
            tl.store(taps + _of_pair(1, r, row, position - 1, c, CHANNELS, SIDE), value, keep)
            if SIDE == 2:
                tl.store(taps + _of_pair(0, r, row, column, c, CHANNELS, SIDE), none, keep)
                tl.store(taps + _of_pair(1, r, row, 3 * column, c, CHANNELS, SIDE), none, keep)
            else:
                end = column // 2  # the first position of a row, or the last
                tl.store(taps + _of_pair(end, r, row, 3 * end, c, CHANNELS, SIDE), none, keep & (column != 1))
                tl.store(taps + _of_pair(tap // 4, r, 3, tap % 4, c, CHANNELS, SIDE), none, keep & (tap < 8))
        else:
            tl.store(taps + _place(r, row, column, c, CHANNELS, COUNT, SIDE), value, keep)
            if SIDE == 3 and COUNT == 4:  # a tenth tap
                tl.store(taps + _place(r, 3, 0, c, CHANNELS, COUNT, SIDE), none, keep & (tap == 0))

    @triton.jit
    def _four(mixing, w, r, d, ms, COUNT: tl.constexpr, D: tl.constexpr):
        """Combinations r to r + 3 of D rows of w (rows, J), all added up in one pass: (J, 2, 2), see ``_which``."""
        mixing += r * ms + d
        m0 = tl.load(mixing, d < tl.where(r < COUNT, D, 0), 0.0).to(tl.float32)[:, None] * w
        m1 = tl.load(mixing + ms, d < tl.where(r + 1 < COUNT, D, 0), 0.0).to(tl.float32)[:, None] * w
        m2 = tl.load(mixing + 2 * ms, d < tl.where(r + 2 < COUNT, D, 0), 0.0).to(tl.float32)[:, None] * w
        m3 = tl.load(mixing + 3 * ms, d < tl.where(r + 3 < COUNT, D, 0), 0.0).to(tl.float32)[:, None] * w
        return tl.sum(tl.join(tl.join(m0, m1), tl.join(m2, m3)), 0)

    @triton.jit
    def _which(r):
        """Which of four combinations is where: (2, 2). Takes no pointer, like all that says where something is stored:
        the compiler would take it for written to."""
        return r + tl.arange(0, 2)[:, None] + 2 * tl.arange(0, 2)[None, :]

    @triton.jit
    def _columns(weight, bias, d, j, WIDTH: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr):
        """Columns j of weights, rows d of which there are D; bias is one more column."""
        w = tl.load(weight + d[:, None] * WIDTH + j[None, :], (d < D)[:, None] & (j < WIDTH)[None, :], 0.0)
        w = w.to(tl.float32)
        if BIAS:
            last = tl.load(bias + d[:, None] + 0 * j[None, :], (d < D)[:, None] & (j == WIDTH)[None, :], 0.0)
            w += last.to(tl.float32)
        return w

    @triton.jit
    def mix(program, mixing, weight, bias, out, constant, ms, WIDTH: tl.constexpr, D: tl.constexpr,
            COUNT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, J: tl.constexpr):  # fmt: skip
        """Four combinations of all rows of J columns, one of which may be bias: see ``sketched``."""
        GROUPS: tl.constexpr = (COUNT + 3) // 4
        r, d, j = program % GROUPS * 4, tl.arange(0, ROWS), program // GROUPS * J + tl.arange(0, J)
        mixed = _four(mixing, _columns(weight, bias, d, j, WIDTH, D, BIAS), r, d, ms, COUNT, D)
        j, r = j[:, None, None], _which(r)[None, :, :]
        tl.store(out + r * WIDTH + j, mixed, (j < WIDTH) & (r < COUNT))
        if BIAS:
            tl.store(constant + (r + j - WIDTH), mixed, (j == WIDTH) & (r < COUNT))

    @triton.jit
    def _sketched(mixing, weight, bias, out, constant, ms, WIDTH: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr,
                  BIAS: tl.constexpr, ROWS: tl.constexpr, J: tl.constexpr):  # fmt: skip
        mix(tl.program_id(0), mixing, weight, bias, out, constant, ms, WIDTH, D, COUNT, BIAS, ROWS, J)

    @triton.jit
    def _mixed_taps(mixing, weight, bias, p0, p1, p2, out, constant, ms, WIDTH: tl.constexpr, D: tl.constexpr,
              COUNT: tl.constexpr, BIAS: tl.constexpr, TAPS: tl.constexpr, DIM: tl.constexpr, HEAD: tl.constexpr,
              SIDE: tl.constexpr, ONCE: tl.constexpr, ROWS: tl.constexpr, J: tl.constexpr):  # fmt: skip
        """Four combinations of all rows of J columns, which are read at once; there is one more column, bias or zero.
        With TAPS > 1 rows are pooled first: this is one tap of that, DIM rows to a pooling, HEAD to a head."""
        block, tap, d = tl.program_id(0), tl.program_id(1) % TAPS, tl.arange(0, ROWS)
        r, j = tl.program_id(1) // TAPS * 4, block * J + tl.arange(0, J)
        w = _columns(weight, bias, d, j, WIDTH, D, BIAS)
        if TAPS > 1:
            at = d % DIM % HEAD * TAPS + tap
            p = tl.load(p0 + at, d < DIM, 0.0).to(tl.float32)
            if D > DIM:
                p += tl.load(p1 + at, (d >= DIM) & (d < 2 * DIM), 0.0).to(tl.float32)
            if D > 2 * DIM:
                p += tl.load(p2 + at, (d >= 2 * DIM) & (d < D), 0.0).to(tl.float32)
            w *= p[:, None]
        mixed = _four(mixing, w, r, d, ms, COUNT, D)
        j, r = j[:, None, None], _which(r)[None, :, :]
        keep = (j < WIDTH) & (r < COUNT)
        if TAPS > 1:
            at = tap + 0 * j
            _store(out, mixed, r, at // SIDE, at % SIDE, j, keep, WIDTH, COUNT, SIDE, ONCE)
        else:
            c, at = j // (SIDE * SIDE), j % (SIDE * SIDE)
            _store(out, mixed, r, at // SIDE, at % SIDE, c, keep, WIDTH // (SIDE * SIDE), COUNT, SIDE, ONCE)
        tl.store(constant + (tap * COUNT + r + j - WIDTH), mixed, (j == WIDTH) & (r < COUNT))

    @triton.jit
    def _depthwise_taps(mixing, first, second, taps, constant, ms, CHANNELS: tl.constexpr, COUNT: tl.constexpr,
                        ONCE: tl.constexpr, C: tl.constexpr):  # fmt: skip
        """One output's tap of two depthwise kernels (C, 3, 3), which has no bias: its constant is zero."""
        r, tap = tl.program_id(0) // 9, tl.program_id(0) % 9
        c = tl.program_id(1) * C + tl.arange(0, C)
        keep, mixing = c < CHANNELS, mixing + r * ms + c
        a, b = tl.load(first + c * 9 + tap, keep, 0.0), tl.load(second + c * 9 + tap, keep, 0.0)
        mixed = tl.load(mixing, keep, 0.0).to(tl.float32) * a.to(tl.float32)
        mixed += tl.load(mixing + CHANNELS, keep, 0.0).to(tl.float32) * b.to(tl.float32)
        at = tap + 0 * c
        _store(taps, mixed, r, at // 3, at % 3, c, keep, CHANNELS, COUNT, 3, ONCE)
        tl.store(constant + r + c, tl.zeros_like(mixed), c + tap == 0)

    @triton.jit
    def _scale_rows(weight, gain, bias, scaled, folded, first, WIDTH: tl.constexpr, D: tl.constexpr,
                    NORM: tl.constexpr, BIAS: tl.constexpr, L: tl.constexpr, K: tl.constexpr):  # fmt: skip
        """L rows times gain, their sums, as rounded, and those of their products with bias."""
        n, k = first + tl.arange(0, L), tl.arange(0, K)
        place, keep = n[:, None] * WIDTH + k[None, :], (n < D)[:, None] & (k < WIDTH)[None, :]
        row = tl.load(weight + place, keep, 0.0).to(tl.float32)
        if NORM:
            shift = tl.load(bias + k, (k < WIDTH) & BIAS, 0.0).to(tl.float32)
            tl.store(folded + D + n, tl.sum(row * shift[None, :], 1), n < D)
            row *= tl.load(gain + k, k < WIDTH, 0.0).to(tl.float32)[None, :]
        row = row.to(scaled.dtype.element_ty)
        tl.store(scaled + place, row, keep)
        if NORM:
            tl.store(folded + n, tl.sum(row.to(tl.float32), 1), n < D)

    @triton.jit
    def _merging(program, mixing, weight, gain, bias, taps, parts, scaled, folded, ms, WIDTH: tl.constexpr,
                 D: tl.constexpr, COUNT: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ONCE: tl.constexpr,
                 ROWS: tl.constexpr, J: tl.constexpr, K: tl.constexpr, L: tl.constexpr):  # fmt: skip
        """The first programs make four combinations of all rows of J columns, which are read at once, and leave a sum
        over these columns in parts; the others scale L rows each."""
        BLOCKS: tl.constexpr = (WIDTH + J - 1) // J
        GROUPS: tl.constexpr = (COUNT + 3) // 4
        if program < BLOCKS * GROUPS:
            block, r, d = program // GROUPS, program % GROUPS * 4, tl.arange(0, ROWS)
            j = block * J + tl.arange(0, J)
            w = _columns(weight, weight, d, j, WIDTH, D, False)
            mixed, one = _four(mixing, w, r, d, ms, COUNT, D), _which(r)
            j, r = j[:, None, None], one[None, :, :]
            if NORM:
                scale, shift = tl.load(gain + j, j < WIDTH, 0.0), tl.load(bias + j, (j < WIDTH) & BIAS, 0.0)
                place = parts + block * (2 * COUNT) + one
                tl.store(place + COUNT, tl.sum(mixed * shift.to(tl.float32), 0), one < COUNT)
                mixed *= scale.to(tl.float32)
                tl.store(place, tl.sum(mixed, 0), one < COUNT)
            token = j // (WIDTH // 4)  # of a patch, as (column, row)
            _store(taps, mixed, r, token % 2, token // 2, j % (WIDTH // 4), (j < WIDTH) & (r < COUNT), WIDTH // 4,
                   COUNT, 2, ONCE)  # fmt: skip
        else:
            _scale_rows(weight, gain, bias, scaled, folded, (program - BLOCKS * GROUPS) * L, WIDTH, D, NORM, BIAS, L, K)

    @triton.jit
    def _merging_weights(mixing, weight0, weight1, weight2, gain0, gain1, gain2, bias0, bias1, bias2, taps, parts,
                         scaled, folded, ms, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
                         D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, LINES0: tl.constexpr,
                         LINES1: tl.constexpr, LINES2: tl.constexpr, TAPS0: tl.constexpr, TAPS1: tl.constexpr,
                         TAPS2: tl.constexpr, ONCE0: tl.constexpr, ONCE1: tl.constexpr, ONCE2: tl.constexpr,
                         ROWS0: tl.constexpr, ROWS1: tl.constexpr, ROWS2: tl.constexpr, K0: tl.constexpr,
                         K1: tl.constexpr, K2: tl.constexpr, COUNT: tl.constexpr, NORM: tl.constexpr,
                         BIAS: tl.constexpr, J: tl.constexpr, L: tl.constexpr):  # fmt: skip
        """Up to three mergings in one launch, the last, which is the largest, first; results lie one after another."""
        GROUPS: tl.constexpr = (COUNT + 3) // 4
        PARTS1: tl.constexpr = (WIDTH0 + J - 1) // J * 2 * COUNT
        PARTS2: tl.constexpr = PARTS1 + (WIDTH1 + J - 1) // J * 2 * COUNT
        FIRST: tl.constexpr = (WIDTH2 + J - 1) // J * GROUPS + (LINES2 + L - 1) // L
        SECOND: tl.constexpr = FIRST + (WIDTH1 + J - 1) // J * GROUPS + (LINES1 + L - 1) // L
        program = tl.program_id(0)
        if program < FIRST:
            if D2 > 0:
                _merging(program, mixing, weight2, gain2, bias2, taps + (TAPS0 + TAPS1), parts + PARTS2,
                         scaled + (LINES0 * WIDTH0 + LINES1 * WIDTH1), folded + 2 * (LINES0 + LINES1), ms, WIDTH2, D2,
                         COUNT, NORM, BIAS, ONCE2, ROWS2, J, K2, L)  # fmt: skip
        elif program < SECOND:
            if D1 > 0:
                _merging(program - FIRST, mixing, weight1, gain1, bias1, taps + TAPS0, parts + PARTS1,
                         scaled + LINES0 * WIDTH0, folded + 2 * LINES0, ms, WIDTH1, D1, COUNT, NORM, BIAS, ONCE1,
                         ROWS1, J, K1, L)  # fmt: skip
        else:
            _merging(program - SECOND, mixing, weight0, gain0, bias0, taps, parts, scaled, folded, ms, WIDTH0, D0,
                     COUNT, NORM, BIAS, ONCE0, ROWS0, J, K0, L)  # fmt: skip


def _sketch_warps(rows: int, columns: int = COLUMNS) -> int:
    return max(2, min(8, rows * columns // 1024))


@operator("shift_vits::sketched")
def sketched(mixing: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Combinations ``mixing`` (r, D) of rows of weights (D, n), and of ``bias`` (D,), in float32: (r, n), and (r,) or
    nothing."""
    mixed, constant, programs, constants = new_sketch(mixing, weight, bias)
    launch(_sketched, (programs,), mixing, weight, weight if bias is None else bias, mixed, constant, mixing.stride(0),
           **constants, num_warps=_sketch_warps(constants["ROWS"]))  # fmt: skip
    return mixed, constant


def new_sketch(mixing: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, int, dict[str, int]]:
    """Where ``mix`` stores combinations of these, in how many programs, and what they have to know."""
    r, (d, n), last = len(mixing), weight.shape, int(bias is not None)
    mixed, constant = (torch.empty(shape, dtype=torch.float32, device=weight.device) for shape in ((r, n), (r * last,)))
    return mixed, constant, -(-(n + last) // COLUMNS) * -(-r // 4), {
        "WIDTH": n, "D": d, "COUNT": r, "BIAS": last, "ROWS": power(d), "J": COLUMNS,
    }  # fmt: skip


@operator("shift_vits::convolution_taps")
def convolution_taps(mixing: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype,
                     once: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Combinations ``mixing`` (r, D) of a convolution's weights (D, C, k, k), as taps of type ``dtype``, and of its
    bias (D,), or zeros: (r,), float32."""
    r, (d, c, side, _) = len(mixing), weight.shape
    taps, constant = _new_taps(weight, r, c, side, dtype, once), weight.new_empty(r, dtype=torch.float32)
    n, rows = c * side * side, power(d)
    given = [weight if bias is None else bias, weight, weight, weight]
    launch(_mixed_taps, (n // COLUMNS + 1, -(-r // 4)), mixing, weight, *given, taps, constant, mixing.stride(0),
           WIDTH=n, D=d, COUNT=r, BIAS=bias is not None, TAPS=1, DIM=d, HEAD=d, SIDE=side, ONCE=once, ROWS=rows,
           J=COLUMNS, num_warps=_sketch_warps(rows))  # fmt: skip
    return taps, constant


@operator("shift_vits::depthwise_taps")
def depthwise_taps(mixing: Tensor, first: Tensor, second: Tensor, dtype: torch.dtype,
                   once: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Combinations ``mixing`` (r, 2C) of two depthwise convolutions (C, 1, 3, 3): taps of type ``dtype``, and what is
    added to the sum of all, zeros (r,), float32."""
    r, c = len(mixing), len(first)
    taps, constant = _new_taps(first, r, c, 3, dtype, once), first.new_empty(r, dtype=torch.float32)
    launch(_depthwise_taps, (9 * r, -(-c // CHANNELS)), mixing, first, second, taps, constant, mixing.stride(0),
           CHANNELS=c, COUNT=r, ONCE=once, C=CHANNELS, num_warps=2)  # fmt: skip
    return taps, constant


@operator("shift_vits::pooled_taps")
def pooled_taps(mixing: Tensor, weight: Tensor, bias: Tensor, pools: list[Tensor], dtype: torch.dtype,
                once: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Combinations ``mixing`` (r, D) of a projection's outputs, weight (D, C) and bias (D,), each head of which is
    pooled by one to three depthwise convolutions (d, 1, 3, 3), one after another: taps of type ``dtype``, and what is
    added to the sum of all, (r,), or with ``once`` in parts, (9, r), float32."""
    r, (d, c), rows = len(mixing), weight.shape, power(len(weight))
    taps, constant = _new_taps(weight, r, c, 3, dtype, once), weight.new_empty((9, r), dtype=torch.float32)
    given = [pools[min(i, len(pools) - 1)] for i in range(3)]
    launch(_mixed_taps, (c // POOLED + 1, -(-r // 4) * 9), mixing, weight, bias, *given, taps, constant,
           mixing.stride(0), WIDTH=c, D=d, COUNT=r, BIAS=True, TAPS=9, DIM=d // len(pools), HEAD=len(pools[0]), SIDE=3,
           ONCE=once, ROWS=rows, J=POOLED, num_warps=_sketch_warps(rows, POOLED))  # fmt: skip
    return taps, constant if once else constant.sum(0)


def merging_weights(weights: list[Tensor], mixing: Tensor | None, gains: list[Tensor], biases: list[Tensor],
                    dtype: torch.dtype, scale: torch.dtype | None, scaled: list[bool],
                    once: list[bool]) -> list[tuple[Tensor, ...]]:  # fmt: skip
    """What anchors and ``merged_product`` need of the weights (D, 4C) of mergings, of three in one launch. Each follows
    a norm with a gain and, where given, a bias (4C,), or none does. Of each merging:

    - of the rows' combinations ``mixing`` (r, D or more), or none: taps of type ``dtype``, times gain; and partial sums
      (parts, 2, r) of these over all columns, before they are rounded, and of their products with bias, without gain;
    - where it is to be ``scaled``, the weights times gain (D, 4C), of type ``scale``; and their sums over columns, as
      rounded, so that what is taken off for a mean is what it adds, and their products with bias: (2, D).
    """
    made: list[tuple[Tensor, ...]] = []
    r = 0 if mixing is None else len(mixing)
    for i in range(0, len(weights), 3):
        some = slice(i, i + 3)
        flat = merging_weights_of_three(weights[some], mixing, gains[some], biases[some], dtype, scale, scaled[some],
                                        once[some])  # fmt: skip
        at = [0, 0, 0, 0]
        for weight, line, one in zip(weights[some], scaled[some], once[some], strict=True):
            shapes = _merging_shapes(weight, r, line, one, len(gains) > 0)
            made.append(tuple(t[a : a + prod(n)].view(n) for t, a, n in zip(flat, at, shapes, strict=True)))
            at = [a + prod(n) for a, n in zip(at, shapes, strict=True)]
    return made


def _merging_shapes(weight: Tensor, r: int, scaled: bool, once: bool, norm: bool) -> list[tuple[int, ...]]:
    """Of what ``merging_weights`` makes of one."""
    wide, lines = weight.shape[1], len(weight) * scaled
    return [_shape_of_taps(r, wide // 4, 2, once) if r else (0, wide // 4), (-(-wide // MERGED) * norm, 2, r),
            (lines, wide), (2, lines * norm)]  # fmt: skip


@operator("shift_vits::merging_weights")
def merging_weights_of_three(weights: list[Tensor], mixing: Tensor | None, gains: list[Tensor], biases: list[Tensor],
                             dtype: torch.dtype, scale: torch.dtype | None, scaled: list[bool],
                             once: list[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``merging_weights`` of at most three, each kind of results one after another."""
    like, r, norm = weights[0], 0 if mixing is None else len(mixing), len(gains) > 0
    shapes = [_merging_shapes(*each, norm) for each in zip(weights, len(weights) * [r], scaled, once, strict=True)]
    kinds = zip(*([prod(n) for n in each] for each in shapes), strict=True)
    dtypes = dtype, torch.float32, scale or dtype, torch.float32
    out = [torch.empty(sum(n), dtype=of, device=like.device) for n, of in zip(kinds, dtypes, strict=True)]
    d, wide = [len(weight) for weight in weights], [weight.shape[1] for weight in weights]
    lines, blocks = [each[2][0] for each in shapes], sum(-(-n // MERGED) for n in wide)
    given = [[*tensors, *(3 - len(tensors)) * [like]] for tensors in (weights, gains, biases)]
    each: dict[str, list[int]] = {
        "WIDTH": wide, "D": d, "LINES": lines, "TAPS": [prod(taps) for taps, *_ in shapes],
        "ONCE": [int(one) for one in once], "ROWS": [power(n) for n in d], "K": [power(n) for n in wide],
    }  # fmt: skip
    constants = {f"{name}{i}": n for name, values in each.items() for i, n in enumerate([*values, 0, 0][:3])}
    programs = blocks * -(-r // 4) + sum(-(-n // SCALED) for n in lines)
    launch(_merging_weights, (programs,), like if mixing is None else mixing,
           *(tensor for tensors in given for tensor in tensors), *out, 0 if mixing is None else mixing.stride(0),
           **constants, COUNT=r, NORM=norm, BIAS=len(biases) > 0, J=MERGED, L=SCALED, num_warps=4)  # fmt: skip
    return out[0], out[1], out[2], out[3]
