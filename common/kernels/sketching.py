"""What anchors make of weights: a few fixed combinations of their rows.

In a compiled graph weights are inputs like others, and all this is done in every forward: one launch instead of many.

- ``sketched``: of any weights and the bias that goes with them.
- ``merging_weights``: of those of a patch merging, with the norm before it; and what ``merged_product`` takes of these.
"""

import torch
from torch import Tensor

from .base import AVAILABLE, launch, operator, power, usable

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["fits_sketch", "merging_weights", "sketched"]

COLUMNS = 8  # of weights that one program mixes: 32 bytes of each row


def fits_sketch(mixing: Tensor, weight: Tensor) -> bool:
    """Whether ``sketched`` and ``merging_weights`` take these: at most 2048 rows, of at most float32."""
    single = weight.dtype != torch.float64 and mixing.dtype != torch.float64
    return usable(weight) and single and len(weight) <= 2048 and weight.is_contiguous() and mixing.stride(1) == 1


if AVAILABLE:

    @triton.jit
    def _four(mixing, r, d, ms, COUNT: tl.constexpr, D: tl.constexpr):
        """Combinations r to r + 3 of D rows, all read at once."""
        mixing += r * ms + d
        m0 = tl.load(mixing, d < tl.where(r < COUNT, D, 0), 0.0).to(tl.float32)
        m1 = tl.load(mixing + ms, d < tl.where(r + 1 < COUNT, D, 0), 0.0).to(tl.float32)
        m2 = tl.load(mixing + 2 * ms, d < tl.where(r + 2 < COUNT, D, 0), 0.0).to(tl.float32)
        m3 = tl.load(mixing + 3 * ms, d < tl.where(r + 3 < COUNT, D, 0), 0.0).to(tl.float32)
        return m0, m1, m2, m3

    @triton.jit
    def _sketch(out, m, w, r, j, columns, COUNT: tl.constexpr):
        tl.store(out + r * columns + j, tl.sum(m[:, None] * w, 0), j < tl.where(r < COUNT, columns, 0))

    @triton.jit
    def _sketched(mixing, weight, bias, out, ms, columns, BIAS: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr,
                  ROWS: tl.constexpr, J: tl.constexpr):  # fmt: skip
        """Four combinations of all rows of J columns, which are read at once; bias is one more column."""
        block, r, d = tl.program_id(0), tl.program_id(1) * 4, tl.arange(0, ROWS)
        j = block * J + tl.arange(0, J)
        if BIAS:
            last = tl.load(bias + d, d < tl.where(block == columns // J, D, 0), 0.0).to(tl.float32)
        keep = (d < D)[:, None] & (j < columns)[None, :]
        w = tl.load(weight + d[:, None] * columns + j[None, :], keep, 0.0).to(tl.float32)
        m0, m1, m2, m3 = _four(mixing, r, d, ms, COUNT, D)
        if BIAS:
            w = tl.where((j == columns)[None, :], last[:, None], w)
            columns += 1
        _sketch(out, m0, w, r, j, columns, COUNT)
        _sketch(out, m1, w, r + 1, j, columns, COUNT)
        _sketch(out, m2, w, r + 2, j, columns, COUNT)
        _sketch(out, m3, w, r + 3, j, columns, COUNT)

    @triton.jit
    def _tap(taps, parts, m, w, scale, shift, r, j, block, WIDTH: tl.constexpr, COUNT: tl.constexpr,
             NORM: tl.constexpr):  # fmt: skip
        """One combination of J columns, and what it adds to the sums over all."""
        token = j // (WIDTH // 4)  # of a patch, as (column, row); taps are (row, column)
        place = ((token % 2 * 2 + token // 2) * COUNT + r) * (WIDTH // 4) + j % (WIDTH // 4)
        mixed = tl.sum(m[:, None] * w, 0)
        if NORM:
            parts += block * (2 * COUNT) + r
            tl.store(parts + COUNT, tl.sum(mixed * shift, 0), r < COUNT)
            mixed *= scale
            tl.store(parts, tl.sum(mixed, 0), r < COUNT)
        tl.store(taps + place, mixed.to(taps.dtype.element_ty), j < tl.where(r < COUNT, WIDTH, 0))

    @triton.jit
    def _merging_weights(mixing, weight, gain, bias, taps, parts, scaled, folded, ms, BLOCKS: tl.constexpr,
                         WIDTH: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr, NORM: tl.constexpr,
                         BIAS: tl.constexpr, ROWS: tl.constexpr, J: tl.constexpr, K: tl.constexpr):  # fmt: skip
        """The first programs make four combinations of all rows of J columns, which are read at once, of ``BLOCKS`` of
        these; the others scale a row each.

        A sum over all columns is left in parts, one of each block. Of a scaled row it is taken after rounding.
        """
        GROUPS: tl.constexpr = (COUNT + 3) // 4
        program = tl.program_id(0)
        if program < BLOCKS * GROUPS:
            block, r, d = program // GROUPS, program % GROUPS * 4, tl.arange(0, ROWS)
            j = block * J + tl.arange(0, J)
            scale, shift = 1.0, 0.0
            if NORM:
                scale = tl.load(gain + j, j < WIDTH, 0.0).to(tl.float32)
                shift = tl.load(bias + j, (j < WIDTH) & BIAS, 0.0).to(tl.float32)
            keep = (d < D)[:, None] & (j < WIDTH)[None, :]
            w = tl.load(weight + d[:, None] * WIDTH + j[None, :], keep, 0.0).to(tl.float32)
            m0, m1, m2, m3 = _four(mixing, r, d, ms, COUNT, D)
            _tap(taps, parts, m0, w, scale, shift, r, j, block, WIDTH, COUNT, NORM)
            _tap(taps, parts, m1, w, scale, shift, r + 1, j, block, WIDTH, COUNT, NORM)
            _tap(taps, parts, m2, w, scale, shift, r + 2, j, block, WIDTH, COUNT, NORM)
            _tap(taps, parts, m3, w, scale, shift, r + 3, j, block, WIDTH, COUNT, NORM)
        else:
            n, k = program - BLOCKS * GROUPS, tl.arange(0, K)
            row = tl.load(weight + n * WIDTH + k, k < WIDTH, 0.0).to(tl.float32)
            if NORM:
                tl.store(folded + D + n, tl.sum(row * tl.load(bias + k, (k < WIDTH) & BIAS, 0.0).to(tl.float32), 0))
                row *= tl.load(gain + k, k < WIDTH, 0.0).to(tl.float32)
            row = row.to(scaled.dtype.element_ty)
            tl.store(scaled + n * WIDTH + k, row, k < WIDTH)
            if NORM:
                tl.store(folded + n, tl.sum(row.to(tl.float32), 0))


@operator("shift_vits::sketched")
def sketched(mixing: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Combinations ``mixing`` (r, D) of rows of weights (D, n) and, as one more column, of ``bias`` (D,), in float32:
    (r, n) or (r, n + 1)."""
    r, (d, n) = len(mixing), weight.shape
    out = torch.empty((r, n + (bias is not None)), dtype=torch.float32, device=weight.device)
    rows = power(d)
    launch(_sketched, (-(-out.shape[1] // COLUMNS), -(-r // 4)), mixing, weight, weight if bias is None else bias, out,
           mixing.stride(0), n, BIAS=bias is not None, D=d, COUNT=r, ROWS=rows, J=COLUMNS,
           num_warps=max(2, min(8, rows * COLUMNS // 1024)))  # fmt: skip
    return out


@operator("shift_vits::merging_weights")
def merging_weights(weight: Tensor, mixing: Tensor | None, gain: Tensor | None, bias: Tensor | None,
                    dtype: torch.dtype,
                    scale: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What an anchor and ``merged_product`` need of weights (D, 4C) that follow a norm with ``gain`` and ``bias``.

    - of the rows' combinations ``mixing`` (r, D), or none: taps (row, column, r, C) of type ``dtype``, times gain; and
      partial sums (parts, 2, r) of these over all columns, before they are rounded, and of their products with bias,
      without gain;
    - the weights times gain (D, 4C), of type ``scale``, or none; and their sums over columns, as rounded, so that what
      is taken off for a mean is what it adds, and their products with bias: (2, D).
    """
    (d, wide), r = weight.shape, 0 if mixing is None else len(mixing)
    blocks = -(-wide // COLUMNS) if r else 0
    rows, lines = power(d), 0 if scale is None else d
    taps = torch.empty((2, 2, r, wide // 4), dtype=dtype, device=weight.device)
    scaled = torch.empty((lines, wide), dtype=scale or dtype, device=weight.device)
    parts = torch.empty((0 if gain is None else blocks, 2, r), dtype=torch.float32, device=weight.device)
    folded = torch.empty((2, 0 if gain is None else lines), dtype=torch.float32, device=weight.device)
    given = [weight if tensor is None else tensor for tensor in (gain, bias)]
    launch(_merging_weights, (blocks * -(-r // 4) + lines,), weight if mixing is None else mixing, weight, *given,
           taps, parts, scaled, folded, 0 if mixing is None else mixing.stride(0), BLOCKS=blocks, WIDTH=wide, D=d,
           COUNT=r, NORM=gain is not None, BIAS=bias is not None, ROWS=rows, J=COLUMNS, K=power(wide),
           num_warps=max(2, min(8, rows * COLUMNS // 1024)))  # fmt: skip
    return taps, parts, scaled, folded
