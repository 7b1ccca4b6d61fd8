"""Prepare the weights of patch mergings, for anchors to score and for ``merged_product`` to multiply by. A compiled
graph does this in every forward, in the launch that also chooses windows."""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base import AVAILABLE, launch, next_power_of_2, operator
from .choices import rows_apart, window_constants
from .sketching import shape_of_taps

if AVAILABLE:
    import triton
    import triton.language as tl

    from .choices import choose_window
    from .sketching import columns, four, store_taps, which

__all__ = ["Mergings", "best_window_fused", "fits_fused_windows", "merging_weights"]

MERGED = 16  # columns of weights that one program mixes
SCALED = 4  # rows of weights that one program scales
WARPS = 4


class Mergings(NamedTuple):
    """Weights (D, 4C) of patch mergings, each of which follows a norm with a gain and, where given, a bias (4C,), or
    none does; and what to make of them, see ``merging_weights``."""

    weights: list[Tensor]
    projection: Tensor | None
    gains: list[Tensor]
    biases: list[Tensor]
    dtype: torch.dtype
    scale: torch.dtype | None
    scaled: list[bool]
    paired: list[bool]

    def three(self, first: int) -> "Mergings":
        """Three of them at most."""
        some = slice(first, first + 3)
        return Mergings(self.weights[some], self.projection, self.gains[some], self.biases[some], self.dtype,
                        self.scale, self.scaled[some], self.paired[some])  # fmt: skip

    def shapes(self) -> list[list[tuple[int, ...]]]:
        """Of what is made of each."""
        r, norm = 0 if self.projection is None else len(self.projection), len(self.gains) > 0
        of: list[list[tuple[int, ...]]] = []
        for weight, scaled, paired in zip(self.weights, self.scaled, self.paired, strict=True):
            wide, lines = weight.shape[1], len(weight) * scaled
            of.append([shape_of_taps(r, wide // 4, 2, paired) if r else (0, wide // 4),
                       (-(-wide // MERGED) * norm, 2, r), (lines, wide), (2, lines * norm)])  # fmt: skip
        return of

    def apart(self, flat: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """Each one's own of results that lie one after another."""
        prepared: list[tuple[Tensor, ...]] = []
        at = [0, 0, 0, 0]
        for shapes in self.shapes():
            prepared.append(tuple(t[a : a + prod(n)].view(n) for t, a, n in zip(flat, at, shapes, strict=True)))
            at = [a + prod(n) for a, n in zip(at, shapes, strict=True)]
        return prepared


def fits_fused_windows(square: Tensor, window: tuple[int, int], mergings: Mergings) -> bool:
    """Whether ``best_window_fused`` takes what ``best_window`` does: at most three mergings, and windows that one
    program can choose."""
    known = window_constants(square, list(window))
    return known is not None and known[1] == WARPS and len(mergings.weights) <= 3


if AVAILABLE:

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
    def _merging(program, projection, weight, gain, bias, taps, parts, scaled, folded, ms, WIDTH: tl.constexpr,
                 D: tl.constexpr, COUNT: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, PAIRED: tl.constexpr,
                 ROWS: tl.constexpr, J: tl.constexpr, K: tl.constexpr, L: tl.constexpr):  # fmt: skip
        """The first programs make four combinations of all rows of J columns, which are read at once, and leave a sum
        over these columns in parts; the others scale L rows each."""
        BLOCKS: tl.constexpr = (WIDTH + J - 1) // J
        GROUPS: tl.constexpr = (COUNT + 3) // 4
        if program < BLOCKS * GROUPS:
            block, r, d = program // GROUPS, program % GROUPS * 4, tl.arange(0, ROWS)
            j = block * J + tl.arange(0, J)
            w = columns(weight, weight, d, j, WIDTH, D, False)
            mixed, one = four(projection, w, r, d, ms, COUNT, D), which(r)
            j, r = j[:, None, None], one[None, :, :]
            if NORM:
                scale, shift = tl.load(gain + j, j < WIDTH, 0.0), tl.load(bias + j, (j < WIDTH) & BIAS, 0.0)
                place = parts + block * (2 * COUNT) + one
                tl.store(place + COUNT, tl.sum(mixed * shift.to(tl.float32), 0), one < COUNT)
                mixed *= scale.to(tl.float32)
                tl.store(place, tl.sum(mixed, 0), one < COUNT)
            token = j // (WIDTH // 4)  # of a patch, as (column, row)
            store_taps(taps, mixed, r, token % 2, token // 2, j % (WIDTH // 4), (j < WIDTH) & (r < COUNT), WIDTH // 4,
                   COUNT, 2, PAIRED)  # fmt: skip
        else:
            _scale_rows(weight, gain, bias, scaled, folded, (program - BLOCKS * GROUPS) * L, WIDTH, D, NORM, BIAS, L, K)

    @triton.jit
    def _merging_weights(square, along, uneven, out, images, sm, projection, weight0, weight1, weight2, gain0, gain1,
                         gain2, bias0, bias1, bias2, taps, parts, scaled, folded, ms, HEIGHT: tl.constexpr,
                         WIDTH: tl.constexpr, GAIN: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
                         A: tl.constexpr, B: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, H: tl.constexpr,
                         W: tl.constexpr, PRECISION: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr,
                         WIDTH2: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
                         LINES0: tl.constexpr, LINES1: tl.constexpr, LINES2: tl.constexpr, TAPS0: tl.constexpr,
                         TAPS1: tl.constexpr, TAPS2: tl.constexpr, PAIRED0: tl.constexpr, PAIRED1: tl.constexpr,
                         PAIRED2: tl.constexpr, ROWS0: tl.constexpr, ROWS1: tl.constexpr, ROWS2: tl.constexpr,
                         K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, COUNT: tl.constexpr,
                         NORM: tl.constexpr, BIAS: tl.constexpr, J: tl.constexpr, L: tl.constexpr):  # fmt: skip
        """Up to three mergings in one launch, the last, which is the largest, first; results lie one after another.
        Before them windows of images, if any: of a few images most processors are idle."""
        GROUPS: tl.constexpr = (COUNT + 3) // 4
        PARTS1: tl.constexpr = (WIDTH0 + J - 1) // J * 2 * COUNT
        PARTS2: tl.constexpr = PARTS1 + (WIDTH1 + J - 1) // J * 2 * COUNT
        FIRST: tl.constexpr = (WIDTH2 + J - 1) // J * GROUPS + (LINES2 + L - 1) // L
        SECOND: tl.constexpr = FIRST + (WIDTH1 + J - 1) // J * GROUPS + (LINES1 + L - 1) // L
        program = tl.program_id(0) - images
        if program < 0:
            if HEIGHT > 0:
                choose_window(program + images, square, along, uneven, out, sm, HEIGHT, WIDTH, GAIN, WH, WW, A, B,
                              DOWN, ACROSS, H, W, PRECISION)  # fmt: skip
        elif program < FIRST:
            if D2 > 0:
                _merging(program, projection, weight2, gain2, bias2, taps + (TAPS0 + TAPS1), parts + PARTS2,
                         scaled + (LINES0 * WIDTH0 + LINES1 * WIDTH1), folded + 2 * (LINES0 + LINES1), ms, WIDTH2, D2,
                         COUNT, NORM, BIAS, PAIRED2, ROWS2, J, K2, L)  # fmt: skip
        elif program < SECOND:
            if D1 > 0:
                _merging(program - FIRST, projection, weight1, gain1, bias1, taps + TAPS0, parts + PARTS1,
                         scaled + LINES0 * WIDTH0, folded + 2 * LINES0, ms, WIDTH1, D1, COUNT, NORM, BIAS, PAIRED1,
                         ROWS1, J, K1, L)  # fmt: skip
        else:
            _merging(program - SECOND, projection, weight0, gain0, bias0, taps, parts, scaled, folded, ms, WIDTH0, D0,
                     COUNT, NORM, BIAS, PAIRED0, ROWS0, J, K0, L)  # fmt: skip


def merging_weights(mergings: Mergings) -> list[tuple[Tensor, ...]]:
    """What anchors and ``merged_product`` need of mergings' weights, of three in one launch. Of each:

    - of the rows' combinations ``projection`` (r, D or more), or none: taps of type ``dtype``, times gain; and partial
      sums (parts, 2, r) of these over all columns, before they are rounded, and of their products with bias, without
      gain;
    - where it is to be ``scaled``, the weights times gain (D, 4C), of type ``scale``; and their sums over columns, as
      rounded, so that what is taken off for a mean is what it adds, and their products with bias: (2, D).
    """
    prepared: list[tuple[Tensor, ...]] = []
    for first in range(0, len(mergings.weights), 3):
        three = mergings.three(first)
        prepared += three.apart(merging_weights_of_three(*three))
    return prepared


def best_window_fused(square: Tensor, along: Tensor, taps: Tensor, window: list[int], gain: float,
                       mergings: Mergings) -> tuple[Tensor, list[tuple[Tensor, ...]]]:  # fmt: skip
    """``best_window`` and ``merging_weights`` in one launch."""
    offset, *prepared = windows_and_weights(square, along, taps, window, gain, *mergings)
    return offset, mergings.apart(tuple(prepared))


@operator("shift_vits::merging_weights")
def merging_weights_of_three(weights: list[Tensor], projection: Tensor | None, gains: list[Tensor],
                             biases: list[Tensor], dtype: torch.dtype, scale: torch.dtype | None, scaled: list[bool],
                             paired: list[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``merging_weights`` of at most three, each kind of results one after another."""
    none = dict.fromkeys(("HEIGHT", "WIDTH", "GAIN", "WH", "WW", "A", "B", "DOWN", "ACROSS", "H", "W", "PRECISION"), 0)
    given = Mergings(weights, projection, gains, biases, dtype, scale, scaled, paired)
    return _launch(given, (*4 * weights[:1], 0, 0), none)


@operator("shift_vits::windows_and_weights")
def windows_and_weights(square: Tensor, along: Tensor, taps: Tensor, window: list[int], gain: float,
                        weights: list[Tensor], projection: Tensor | None, gains: list[Tensor], biases: list[Tensor],
                        dtype: torch.dtype, scale: torch.dtype | None, scaled: list[bool],
                        paired: list[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What ``best_window`` chooses, and ``merging_weights_of_three``."""
    known = window_constants(square, window)
    assert known is not None  # fits_fused_windows
    square, along = rows_apart(square, along)
    out = torch.empty((len(square), 2), dtype=torch.int64, device=square.device)
    images = square, along, taps, out, len(square), square.stride(0)
    given = Mergings(weights, projection, gains, biases, dtype, scale, scaled, paired)
    return out, *_launch(given, images, known[0] | {"GAIN": gain})


def _launch(mergings: Mergings, images: tuple[Any, ...],
            constants: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Make what is made of mergings, and windows of so many ``images``."""
    weights, projection, gains, biases, dtype, scale, *_ = mergings
    like, r, shapes = weights[0], 0 if projection is None else len(projection), mergings.shapes()
    kinds = zip(*([prod(n) for n in each] for each in shapes), strict=True)
    dtypes = dtype, torch.float32, scale or dtype, torch.float32
    out = [torch.empty(sum(n), dtype=of, device=like.device) for n, of in zip(kinds, dtypes, strict=True)]
    d, wide = [len(weight) for weight in weights], [weight.shape[1] for weight in weights]
    lines, blocks = [each[2][0] for each in shapes], sum(-(-n // MERGED) for n in wide)
    given = [[*tensors, *(3 - len(tensors)) * [like]] for tensors in (weights, gains, biases)]
    each: dict[str, list[int]] = {
        "WIDTH": wide, "D": d, "LINES": lines, "TAPS": [prod(taps) for taps, *_ in shapes],
        "PAIRED": [int(one) for one in mergings.paired], "ROWS": [next_power_of_2(n) for n in d],
        "K": [next_power_of_2(n) for n in wide],
    }  # fmt: skip
    constants |= {f"{name}{i}": n for name, values in each.items() for i, n in enumerate([*values, 0, 0][:3])}
    programs = images[4] + blocks * -(-r // 4) + sum(-(-n // SCALED) for n in lines)
    launch(_merging_weights, (programs,), *images, like if projection is None else projection,
           *(tensor for tensors in given for tensor in tensors), *out,
           0 if projection is None else projection.stride(0), **constants, COUNT=r, NORM=len(gains) > 0,
           BIAS=len(biases) > 0, J=MERGED, L=SCALED, num_warps=WARPS)  # fmt: skip
    return out[0], out[1], out[2], out[3]
