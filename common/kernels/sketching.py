"""What anchors make of weights: a few fixed combinations of their rows, as the kernels that score read them.

In a compiled graph weights are inputs like others, and all this is done in every forward: one launch each.

- ``sketched``: of any weights and the bias that goes with them.
- ``convolution_taps``: of those of a convolution.
- ``depthwise_taps``, ``pooled_taps``: of depthwise convolutions, without and with a projection before them.

Taps are (2 C, n) with ``once``, for ``token_scores``: see ``in_one_pass``. Else they are (n, C), a tap being a row, a
column and an output, with zeros up to a multiple of eight.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .base import AVAILABLE, launch, operator, power, usable

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = [
    "convolution_taps",
    "depthwise_taps",
    "fits_sketch",
    "new_sketch",
    "pooled_taps",
    "shape_of_taps",
    "sketched",
]

COLUMNS, POOLED = 8, 16  # of weights that one program mixes: 32 bytes of each row, or 64
CHANNELS = 64  # of one tap that a program mixes


def fits_sketch(mixing: Tensor | None, *weights: Tensor) -> bool:
    """Whether the functions here take these: at most 2048 rows mixed, contiguous, of at most float32, not sharded."""
    if mixing is None or mixing.stride(1) != 1 or mixing.shape[1] > 2048:
        return False
    single = all(t.dtype != torch.float64 and not isinstance(t, DTensor) for t in (mixing, *weights))
    return usable(weights[0]) and single and all(weight.is_contiguous() for weight in weights)


def _new_taps(like: Tensor, r: int, channels: int, side: int, dtype: torch.dtype, once: bool) -> Tensor:
    return torch.empty(shape_of_taps(r, channels, side, once), dtype=dtype, device=like.device)


def shape_of_taps(r: int, channels: int, side: int, once: bool) -> tuple[int, int]:
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
    def store_taps(taps, value, r, row, column, c, keep, CHANNELS: tl.constexpr, COUNT: tl.constexpr,
                   SIDE: tl.constexpr, ONCE: tl.constexpr):  # fmt: skip
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
    def four(mixing, w, r, d, ms, COUNT: tl.constexpr, D: tl.constexpr):
        """Combinations r to r + 3 of D rows of w (rows, J), all added up in one pass: (J, 2, 2), see ``which``."""
        mixing += r * ms + d
        m0 = tl.load(mixing, d < tl.where(r < COUNT, D, 0), 0.0).to(tl.float32)[:, None] * w
        m1 = tl.load(mixing + ms, d < tl.where(r + 1 < COUNT, D, 0), 0.0).to(tl.float32)[:, None] * w
        m2 = tl.load(mixing + 2 * ms, d < tl.where(r + 2 < COUNT, D, 0), 0.0).to(tl.float32)[:, None] * w
        m3 = tl.load(mixing + 3 * ms, d < tl.where(r + 3 < COUNT, D, 0), 0.0).to(tl.float32)[:, None] * w
        return tl.sum(tl.join(tl.join(m0, m1), tl.join(m2, m3)), 0)

    @triton.jit
    def which(r):
        """Which of four combinations is where: (2, 2). Takes no pointer, like all that says where something is stored:
        the compiler would take it for written to."""
        return r + tl.arange(0, 2)[:, None] + 2 * tl.arange(0, 2)[None, :]

    @triton.jit
    def columns(weight, bias, d, j, WIDTH: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr):
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
        mixed = four(mixing, columns(weight, bias, d, j, WIDTH, D, BIAS), r, d, ms, COUNT, D)
        j, r = j[:, None, None], which(r)[None, :, :]
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
        w = columns(weight, bias, d, j, WIDTH, D, BIAS)
        if TAPS > 1:
            at = d % DIM % HEAD * TAPS + tap
            p = tl.load(p0 + at, d < DIM, 0.0).to(tl.float32)
            if D > DIM:
                p += tl.load(p1 + at, (d >= DIM) & (d < 2 * DIM), 0.0).to(tl.float32)
            if D > 2 * DIM:
                p += tl.load(p2 + at, (d >= 2 * DIM) & (d < D), 0.0).to(tl.float32)
            w *= p[:, None]
        mixed = four(mixing, w, r, d, ms, COUNT, D)
        j, r = j[:, None, None], which(r)[None, :, :]
        keep = (j < WIDTH) & (r < COUNT)
        if TAPS > 1:
            at = tap + 0 * j
            store_taps(out, mixed, r, at // SIDE, at % SIDE, j, keep, WIDTH, COUNT, SIDE, ONCE)
        else:
            c, at = j // (SIDE * SIDE), j % (SIDE * SIDE)
            store_taps(out, mixed, r, at // SIDE, at % SIDE, c, keep, WIDTH // (SIDE * SIDE), COUNT, SIDE, ONCE)
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
        store_taps(taps, mixed, r, at // 3, at % 3, c, keep, CHANNELS, COUNT, 3, ONCE)
        tl.store(constant + r + c, tl.zeros_like(mixed), c + tap == 0)


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
