"""Prepare weights for anchors: a few fixed combinations of their rows, laid out for the kernels that score.

In a compiled graph weights are ordinary inputs, so they are prepared in every forward: one launch each.

- ``sketched``: of any weights and the bias that goes with them.
- ``convolution_taps``: of those of a convolution.
- ``depthwise_taps``, ``pooled_taps``: of depthwise convolutions, without and with a projection before them.

Taps are (2 C, n) with ``paired``, for ``token_scores``: see ``in_one_pass``. Else they are (n, C), a tap being a row, a
column and an output, with zeros up to a multiple of eight.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .base import AVAILABLE, launch, next_power_of_2, operator

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = [
    "Pooled",
    "convolution_taps",
    "depthwise_taps",
    "fits_sketch",
    "new_sketch",
    "pooled_taps",
    "shape_of_taps",
    "sketched",
]

COLUMNS, POOLED = 8, 4  # of weights that one program mixes, and of those that are pooled
CHANNELS = 64  # of one tap that a program mixes


def fits_sketch(projection: Tensor | None, *weights: Tensor) -> bool:
    """Whether the functions here take these: at most 2048 rows mixed, contiguous, of at most float32, not sharded."""
    if projection is None or projection.stride(1) != 1 or projection.shape[1] > 2048:
        return False
    single = all(t.dtype != torch.float64 and not isinstance(t, DTensor) for t in (projection, *weights))
    here = all(weight.device == projection.device for weight in weights)
    return here and single and all(weight.is_contiguous() for weight in weights)


def _new_taps(like: Tensor, r: int, channels: int, side: int, dtype: torch.dtype, paired: bool) -> Tensor:
    return torch.empty(shape_of_taps(r, channels, side, paired), dtype=dtype, device=like.device)


def shape_of_taps(r: int, channels: int, side: int, paired: bool) -> tuple[int, int]:
    return (2 * channels, 32 if side == 2 else 64) if paired else (-(-r * side * side // 8) * 8, channels)


if AVAILABLE:

    @triton.jit
    def _place(r, row, column, c, channels, COUNT: tl.constexpr, SIDE: tl.constexpr):
        """Where in taps (row, column, output, channel) a weight lies."""
        return ((row * SIDE + column) * COUNT + r) * channels + c

    @triton.jit
    def _of_pair(token, r, row, position, c, channels, SIDE: tl.constexpr):
        """Where in taps (token of a pair, channel, row, position, output) a weight lies. Column j of a kernel is of the
        first token for position j + 4 - SIDE, and of the second for the position before."""
        ROWS: tl.constexpr = 2 if SIDE == 2 else 4
        return ((token * channels + c) * ROWS + row) * 16 + position * 4 + r

    @triton.jit
    def store_taps(taps, value, r, row, column, c, keep, channels, COUNT: tl.constexpr, SIDE: tl.constexpr,
                   PAIRED: tl.constexpr):  # fmt: skip
        """Store weights of one output, and zeros in places that are none's, of which each has a few to care for."""
        tap, value = row * SIDE + column, value.to(taps.dtype.element_ty)
        none = tl.zeros_like(value)
        if PAIRED:
            position = column + (4 - SIDE)
            tl.store(taps + _of_pair(0, r, row, position, c, channels, SIDE), value, keep)
            tl.store(taps + _of_pair(1, r, row, position - 1, c, channels, SIDE), value, keep)
            if SIDE == 2:
                tl.store(taps + _of_pair(0, r, row, column, c, channels, SIDE), none, keep)
                tl.store(taps + _of_pair(1, r, row, 3 * column, c, channels, SIDE), none, keep)
            else:
                end = column // 2  # the first position of a row, or the last
                tl.store(taps + _of_pair(end, r, row, 3 * end, c, channels, SIDE), none, keep & (column != 1))
                tl.store(taps + _of_pair(tap // 4, r, 3, tap % 4, c, channels, SIDE), none, keep & (tap < 8))
        else:
            tl.store(taps + _place(r, row, column, c, channels, COUNT, SIDE), value, keep)
            if SIDE == 3 and COUNT == 4:  # a tenth tap
                tl.store(taps + _place(r, 3, 0 * tap, c, channels, COUNT, SIDE), none, keep & (tap == 0))

    @triton.jit
    def _row(projection, r, d, ms, rows, COUNT: tl.constexpr):
        """What combination r takes of so many rows d: (n, 1)."""
        return tl.load(projection + r * ms + d, d < tl.where(r < COUNT, rows, 0), 0.0).to(tl.float32)[:, None]

    @triton.jit
    def four(projection, w, r, d, ms, COUNT: tl.constexpr, rows):
        """Combinations r to r + 3 of so many rows of w (n, J), all added up in one pass: (J, 2, 2), see ``which``."""
        m0, m1 = _row(projection, r, d, ms, rows, COUNT) * w, _row(projection, r + 1, d, ms, rows, COUNT) * w
        m2, m3 = _row(projection, r + 2, d, ms, rows, COUNT) * w, _row(projection, r + 3, d, ms, rows, COUNT) * w
        return tl.sum(tl.join(tl.join(m0, m1), tl.join(m2, m3)), 0)

    @triton.jit
    def which(r):
        """Which of four combinations is where: (2, 2). Takes no pointer, like all that says where something is stored:
        the compiler would take it for written to."""
        return r + tl.arange(0, 2)[:, None] + 2 * tl.arange(0, 2)[None, :]

    @triton.jit
    def columns(weight, bias, d, j, width, rows, BIAS: tl.constexpr):
        """Columns j of weights, rows d of which there are so many; bias is one more column."""
        w = tl.load(weight + d[:, None] * width + j[None, :], (d < rows)[:, None] & (j < width)[None, :], 0.0)
        w = w.to(tl.float32)
        if BIAS:
            last = tl.load(bias + d[:, None] + 0 * j[None, :], (d < rows)[:, None] & (j == width)[None, :], 0.0)
            w += last.to(tl.float32)
        return w

    @triton.jit
    def mix(program, projection, weight, bias, out, constant, ms, WIDTH: tl.constexpr, D: tl.constexpr,
            COUNT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, J: tl.constexpr):  # fmt: skip
        """Four combinations of all rows of J columns, one of which may be bias: see ``sketched``."""
        GROUPS: tl.constexpr = (COUNT + 3) // 4
        r, d, j = program % GROUPS * 4, tl.arange(0, ROWS), program // GROUPS * J + tl.arange(0, J)
        mixed = four(projection, columns(weight, bias, d, j, WIDTH, D, BIAS), r, d, ms, COUNT, D)
        j, r = j[:, None, None], which(r)[None, :, :]
        tl.store(out + r * WIDTH + j, mixed, (j < WIDTH) & (r < COUNT))
        if BIAS:
            tl.store(constant + (r + j - WIDTH), mixed, (j == WIDTH) & (r < COUNT))

    @triton.jit
    def _sketched(projection, weight, bias, out, constant, ms, WIDTH: tl.constexpr, D: tl.constexpr,
                  COUNT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, J: tl.constexpr):  # fmt: skip
        mix(tl.program_id(0), projection, weight, bias, out, constant, ms, WIDTH, D, COUNT, BIAS, ROWS, J)

    @triton.jit
    def _convolution_taps(projection, weight, bias, out, constant, ms, WIDTH: tl.constexpr, D: tl.constexpr,
                          COUNT: tl.constexpr, BIAS: tl.constexpr, SIDE: tl.constexpr, PAIRED: tl.constexpr,
                          ROWS: tl.constexpr, J: tl.constexpr):  # fmt: skip
        """Four combinations of all rows of J columns, which are read at once; there is one more column, bias or
        zero."""
        AREA: tl.constexpr = SIDE * SIDE
        r, d, j = tl.program_id(1) * 4, tl.arange(0, ROWS), tl.program_id(0) * J + tl.arange(0, J)
        mixed = four(projection, columns(weight, bias, d, j, WIDTH, D, BIAS), r, d, ms, COUNT, D)
        j, r = j[:, None, None], which(r)[None, :, :]
        at, keep = j % AREA, (j < WIDTH) & (r < COUNT)
        store_taps(out, mixed, r, at // SIDE, at % SIDE, j // AREA, keep, WIDTH // AREA, COUNT, SIDE, PAIRED)
        tl.store(constant + (r + j - WIDTH), mixed, (j == WIDTH) & (r < COUNT))

    @triton.jit
    def _of_five(n, a, b, c, d, e):
        """The n-th of five pointers."""
        if n == 1:
            a = b
        if n == 2:
            a = c
        if n == 3:
            a = d
        if n == 4:
            a = e
        return a

    @triton.jit
    def _number(n, a, b, c, d, e):
        """The n-th of five numbers."""
        return tl.where(n == 0, a, tl.where(n == 1, b, tl.where(n == 2, c, tl.where(n == 3, d, e))))

    @triton.jit
    def _pooled_taps(projection, w0, w1, w2, w3, w4, b0, b1, b2, b3, b4, q0, q1, q2, q3, q4, k0, k1, k2, k3, k4, v0, v1,
                     v2, v3, v4, taps, constant, ms, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr,
                     C3: tl.constexpr, C4: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
                     D3: tl.constexpr, D4: tl.constexpr, DIM0: tl.constexpr, DIM1: tl.constexpr, DIM2: tl.constexpr,
                     DIM3: tl.constexpr, DIM4: tl.constexpr, COUNT: tl.constexpr, HEAD: tl.constexpr,
                     PAIRED: tl.constexpr, EACH: tl.constexpr, POOLS: tl.constexpr, HEADS: tl.constexpr,
                     E: tl.constexpr, J: tl.constexpr):  # fmt: skip
        """Four combinations of pooled rows of J columns, at all taps of the pooling; one more column is bias. Up to
        five projections in one launch, with C columns and D rows, DIM to a pooling; results lie one after another, EACH
        numbers to a column. POOLS is the most that one has: compilers fail at a condition that never holds."""
        GROUPS: tl.constexpr = (COUNT + 3) // 4
        N1: tl.constexpr = C0 // J + 1
        N2: tl.constexpr = N1 + C1 // J + 1
        N3: tl.constexpr = N2 + C2 // J + 1
        N4: tl.constexpr = N3 + C3 // J + 1
        block, r = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS * 4
        n = (block >= N1).to(tl.int32) + (block >= N2) + (block >= N3) + (block >= N4)
        block -= _number(n, 0, N1, N2, N3, N4)
        width, rows = _number(n, C0, C1, C2, C3, C4), _number(n, D0, D1, D2, D3, D4)
        dim = _number(n, DIM0, DIM1, DIM2, DIM3, DIM4)
        taps += _number(n, 0, C0, C0 + C1, C0 + C1 + C2, C0 + C1 + C2 + C3) * EACH
        weight, bias = _of_five(n, w0, w1, w2, w3, w4), _of_five(n, b0, b1, b2, b3, b4)
        e, j, tap = tl.arange(0, E), block * J + tl.arange(0, J), tl.arange(0, 16)[:, None]
        column, mixed = tl.arange(0, 4 * J)[None, :], tl.zeros([16, 4 * J], tl.float32)
        for pool in tl.static_range(POOLS):
            if pool * dim < rows:
                m0, m1 = tl.zeros([E, J], tl.float32), tl.zeros([E, J], tl.float32)
                m2, m3 = tl.zeros([E, J], tl.float32), tl.zeros([E, J], tl.float32)
                for head in tl.static_range(HEADS):  # rows that are pooled alike, first
                    d = tl.where(e < tl.where(head * HEAD < dim, HEAD, 0), pool * dim + head * HEAD + e, rows)
                    w = columns(weight, bias, d, j, width, rows, True)
                    m0 += _row(projection, r, d, ms, rows, COUNT) * w
                    m1 += _row(projection, r + 1, d, ms, rows, COUNT) * w
                    m2 += _row(projection, r + 2, d, ms, rows, COUNT) * w
                    m3 += _row(projection, r + 3, d, ms, rows, COUNT) * w
                pools = _of_five(n, q0, q1, q2, q3, q4)
                if pool == 1:
                    pools = _of_five(n, k0, k1, k2, k3, k4)
                if pool == 2:
                    pools = _of_five(n, v0, v1, v2, v3, v4)
                p = tl.load(pools + e[None, :] * 9 + tap, (e < HEAD)[None, :] & (tap < 9), 0.0).to(tl.float32)
                w = tl.reshape(tl.join(tl.join(m0, m1), tl.join(m2, m3)), [E, 4 * J])
                mixed = tl.dot(p, w, mixed, input_precision="tf32x3")
        one, j = r + column % 4 // 2 + column % 2 * 2, block * J + column // 4
        keep = (one < COUNT) & (tap < 9)
        store_taps(taps, mixed, one, tap // 3, tap % 3, j, keep & (j < width), width, COUNT, 3, PAIRED)
        tl.store(constant + ((n * 9 + tap) * COUNT + one + j - width), mixed, keep & (j == width))

    @triton.jit
    def _depthwise_taps(projection, first, second, taps, constant, ms, CHANNELS: tl.constexpr, COUNT: tl.constexpr,
                        PAIRED: tl.constexpr, C: tl.constexpr):  # fmt: skip
        """One output's tap of two depthwise kernels (C, 3, 3), which has no bias: its constant is zero."""
        r, tap = tl.program_id(0) // 9, tl.program_id(0) % 9
        c = tl.program_id(1) * C + tl.arange(0, C)
        keep, projection = c < CHANNELS, projection + r * ms + c
        a, b = tl.load(first + c * 9 + tap, keep, 0.0), tl.load(second + c * 9 + tap, keep, 0.0)
        mixed = tl.load(projection, keep, 0.0).to(tl.float32) * a.to(tl.float32)
        mixed += tl.load(projection + CHANNELS, keep, 0.0).to(tl.float32) * b.to(tl.float32)
        at = tap + 0 * c
        store_taps(taps, mixed, r, at // 3, at % 3, c, keep, CHANNELS, COUNT, 3, PAIRED)
        tl.store(constant + r + c, tl.zeros_like(mixed), c + tap == 0)


def _sketch_warps(rows: int) -> int:
    return max(2, min(8, rows * COLUMNS // 1024))


@operator("shift_vits::sketched")
def sketched(projection: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Combinations ``projection`` (r, D) of rows of weights (D, n), and of ``bias`` (D,), in float32: (r, n), and (r,)
    or nothing."""
    mixed, constant, programs, constants = new_sketch(projection, weight, bias)
    launch(_sketched, (programs,), projection, weight, weight if bias is None else bias, mixed, constant,
           projection.stride(0), **constants, num_warps=_sketch_warps(constants["ROWS"]))  # fmt: skip
    return mixed, constant


def new_sketch(projection: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, int, dict[str, int]]:
    """Where ``mix`` stores combinations of these, in how many programs, and what they have to know."""
    r, (d, n), last = len(projection), weight.shape, int(bias is not None)
    mixed, constant = (torch.empty(shape, dtype=torch.float32, device=weight.device) for shape in ((r, n), (r * last,)))
    return mixed, constant, -(-(n + last) // COLUMNS) * -(-r // 4), {
        "WIDTH": n, "D": d, "COUNT": r, "BIAS": last, "ROWS": next_power_of_2(d), "J": COLUMNS,
    }  # fmt: skip


@operator("shift_vits::convolution_taps")
def convolution_taps(projection: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype,
                     paired: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Combinations ``projection`` (r, D) of a convolution's weights (D, C, k, k), as taps of type ``dtype``, and of its
    bias (D,), or zeros: (r,), float32."""
    r, (d, c, side, _) = len(projection), weight.shape
    taps, constant = _new_taps(weight, r, c, side, dtype, paired), weight.new_empty(r, dtype=torch.float32)
    n, rows = c * side * side, next_power_of_2(d)
    launch(_convolution_taps, (n // COLUMNS + 1, -(-r // 4)), projection, weight, weight if bias is None else bias,
           taps, constant, projection.stride(0), WIDTH=n, D=d, COUNT=r, BIAS=bias is not None, SIDE=side, PAIRED=paired,
           ROWS=rows, J=COLUMNS, num_warps=_sketch_warps(rows))  # fmt: skip
    return taps, constant


@operator("shift_vits::depthwise_taps")
def depthwise_taps(projection: Tensor, first: Tensor, second: Tensor, dtype: torch.dtype,
                   paired: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Combinations ``projection`` (r, 2C) of two depthwise convolutions (C, 1, 3, 3): taps of type ``dtype``, and what
    is added to the sum of all, zeros (r,), float32."""
    r, c = len(projection), len(first)
    taps, constant = _new_taps(first, r, c, 3, dtype, paired), first.new_empty(r, dtype=torch.float32)
    launch(_depthwise_taps, (9 * r, -(-c // CHANNELS)), projection, first, second, taps, constant, projection.stride(0),
           CHANNELS=c, COUNT=r, PAIRED=paired, C=CHANNELS, num_warps=2)  # fmt: skip
    return taps, constant


class Pooled(NamedTuple):
    """Outputs of a projection, weight (D, C) and bias (D,), each head of which is pooled by one to three depthwise
    convolutions (d, 1, 3, 3), one after another."""

    weight: Tensor
    bias: Tensor
    pools: list[Tensor]


def pooled_taps(projection: Tensor, projections: Sequence[Pooled], dtype: torch.dtype,
                paired: bool) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """Combinations ``projection`` (r, D or more) of pooled projections, of five in one launch: taps of type ``dtype``,
    and what is added to the sum of all, (r,), or with ``paired`` in parts, (9, r), float32."""
    prepared: list[tuple[Tensor, Tensor]] = []
    for first in range(0, len(projections), 5):
        five = projections[first : first + 5]
        pools = [p.pools[min(i, len(p.pools) - 1)] for i in range(3) for p in five]
        taps, constants = pooled_taps_of_five(projection, [p.weight for p in five], [p.bias for p in five], pools,
                                              [len(p.pools) for p in five], dtype, paired)  # fmt: skip
        shapes = [shape_of_taps(len(projection), p.weight.shape[1], 3, paired) for p in five]
        each = taps.split([a * b for a, b in shapes])
        constants = constants if paired else constants.sum(1)
        prepared += [(t.view(shape), c) for t, shape, c in zip(each, shapes, constants.unbind(), strict=True)]
    return prepared


@operator("shift_vits::pooled_taps")
def pooled_taps_of_five(projection: Tensor, weights: list[Tensor], biases: list[Tensor], pools: list[Tensor],
                        poolings: list[int], dtype: torch.dtype, paired: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``pooled_taps`` of n, at most five, each with so many poolings; pools are the first of all, the second of all and
    the third, or any. Taps one after another, and what is added, (n, 9, r)."""
    r, n, d, c = len(projection), len(weights), [len(w) for w in weights], [w.shape[1] for w in weights]
    size, head = prod(shape_of_taps(r, 1, 3, paired)), len(pools[0])
    taps = torch.empty(sum(c) * size, dtype=dtype, device=projection.device)
    constants = torch.empty((n, 9, r), dtype=torch.float32, device=projection.device)
    given = [[*each, *(5 - n) * each[:1]] for each in (weights, biases, pools[:n], pools[n : 2 * n], pools[2 * n :])]
    dims = [rows // parts for rows, parts in zip(d, poolings, strict=True)]
    numbers = {"C": c, "D": d, "DIM": dims}.items()
    sizes = {f"{name}{i}": value for name, each in numbers for i, value in enumerate([*each, *(5 - n) * [1]])}
    launch(_pooled_taps, (sum(width // POOLED + 1 for width in c) * -(-r // 4),), projection,
           *(tensor for tensors in given for tensor in tensors), taps, constants, projection.stride(0), **sizes,
           COUNT=r, HEAD=head, PAIRED=paired, EACH=size, POOLS=max(poolings), HEADS=next_power_of_2(max(dims) // head),
           E=max(16, next_power_of_2(head)), J=POOLED, num_warps=4)  # fmt: skip
    return taps, constants
