"""Where a grid begins: how much tokens count, and the best of its phases."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from .. import kernels
from .dispatch import op, reference
from .roll import roll

__all__ = ["best_offset", "best_partition", "moments", "observed_scores", "phase_scores", "square_and_along",
           "to_float64"]  # fmt: skip

_OBSERVED: list[Tensor] | None = None


@contextmanager
def observed_scores() -> Iterator[list[Tensor]]:
    """Every table of scores (B, s_h, s_w) that an anchor chooses by in this context, in turn; kernels are off."""
    global _OBSERVED
    before, _OBSERVED = _OBSERVED, []
    try:
        with reference():
            yield _OBSERVED
    finally:
        _OBSERVED = before


def to_float64(x: Tensor) -> Tensor:
    return x.float() if x.device.type == "mps" else x.double()  # MPS has no float64


def phase_scores(energy: Tensor, stride: tuple[int, int]) -> Tensor:
    """Sum a per-position score (B, H, W) over the grid of each phase -> (B, s_h, s_w), in float64."""
    batch, height, width = energy.shape
    (sh, sw) = stride
    if height % sh or width % sw:
        raise ValueError(f"a grid of {(height, width)} does not divide into phases of stride {stride}")
    return to_float64(energy).view(batch, height // sh, sh, width // sw, sw).sum((1, 3))


def best_offset(scores: Tensor, origin: Tensor | None = None, size: tuple[int, int] | None = None) -> Tensor:
    """(B, s_h, s_w) scores -> (B, 2) offsets of the maximum; with ``origin``, from there on, on a torus of ``size``."""
    if _OBSERVED is not None:
        _OBSERVED.append(scores)
    best = scores.flatten(1).argmax(1)
    return begin_beyond(torch.stack([best // scores.shape[2], best % scores.shape[2]], 1), origin, size)


def begin_beyond(offset: Tensor, origin: Tensor | None, size: tuple[int, int] | None) -> Tensor:
    if origin is None or size is None:
        return offset
    rows, columns = (origin + offset).unbind(1)
    return torch.stack([rows % size[0], columns % size[1]], 1)


def _fits_moments(x: Tensor, direction: Tensor) -> bool:
    return not torch.compiler.is_compiling() and x.is_contiguous()  # a compiler has it for free


def _moments(x: Tensor, direction: Tensor) -> tuple[Tensor, ...]:
    return kernels.token_moments(x, direction).unbind(1)


@op(kernel=_moments, fits=_fits_moments)
def moments(x: Tensor, direction: Tensor) -> tuple[Tensor, ...]:
    """What scores need of tokens x (B, H, W, C): sums (B, H, W) over channels of x, of its square and of its product
    with ``direction``, in float32 at least."""
    x = x if x.dtype == torch.float64 else x.float()
    return x.sum(-1), x.square().sum(-1), (x * direction[: x.shape[-1]].to(x)).sum(-1)


def square_and_along(x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """|x|^2 and <direction, x> of x (..., C), not in autocast's precision. Where channels are beside one another,
    nothing as large as x is written; a compiler sees to that itself."""
    if torch.compiler.is_compiling() or x.stride(-1) != 1 or not x.is_cpu:
        return x.square().sum(-1), (x * direction).sum(-1)
    with torch.autocast(x.device.type, enabled=False):
        return torch.linalg.vector_norm(x, dim=-1).square(), x @ direction


class Fusable(Protocol):
    """What can be done in the launch that chooses windows."""

    def with_windows(self, square: Tensor, along: Tensor, weights: Tensor, window: tuple[int, int],
                     gain: float) -> Tensor | None: ...  # fmt: skip


def _fits_partition(square: Tensor, along: Tensor, weights: Tensor, window: tuple[int, int], power: int, gain: float,
                    origin: Tensor | None = None, fused_with: Fusable | None = None) -> bool:  # fmt: skip
    return power == 2 and origin is None and kernels.fits_window_scores(square, window)


def _best_partition(square: Tensor, along: Tensor, weights: Tensor, window: tuple[int, int], power: int, gain: float,
                    origin: Tensor | None = None, fused_with: Fusable | None = None) -> Tensor:  # fmt: skip
    along = along if gain else square
    found = None if fused_with is None else fused_with.with_windows(square, along, weights, window, gain)
    return kernels.best_window(square, along, weights, list(window), gain) if found is None else found


@op(kernel=_best_partition, fits=_fits_partition)
def best_partition(square: Tensor, along: Tensor, weights: Tensor, window: tuple[int, int], power: int, gain: float,
                   origin: Tensor | None = None, fused_with: Fusable | None = None) -> Tensor:  # fmt: skip
    """Where the best partition of tokens t into windows begins:

        strength(t) = |t| + gain <direction, t>
        m*          = argmax_m sum_k v_m[k]^power,   v_m[k] the mean strength in window k of the partition at m,

    a token counting with the weight of its row times that of its column. An axis on which the grid is a single window
    has no partition to choose: there the strongest token or, on one such axis, the strongest row or column comes first.

    Shapes: square and along (B, H, W), of ``moments``; weights (n,), n at least the window; origin (B, 2) in [0,
    side), from where on the grid is read, if not from (0, 0) -> (B, 2), in the tokens' own places. ``fused_with`` is
    what kernels may do in the same launch.
    """
    height, width = square.shape[1:]
    x = square.sqrt() + gain * along if gain else square.sqrt()
    x = x if origin is None else roll(x, origin, (1, 2), within=True)
    one_high, one_wide = height == window[0], width == window[1]
    if one_high and one_wide:
        return best_offset(x, origin, (height, width))
    v = x
    for dim, side in enumerate(window, 1):
        first, *others = (v.roll(-i, dim) * (weights[i] / side).to(v) for i in range(side))
        v = sum(others, first)
    energy = v.square() if power == 2 else (v / v.amax((1, 2), keepdim=True)).pow(power)  # v is positive
    if not (one_high or one_wide):
        return best_offset(phase_scores(energy, window), origin, (height, width))
    rows = x.sum(2) if one_high else energy.sum(2).view(x.shape[0], -1, window[0]).sum(1)
    columns = x.sum(1) if one_wide else energy.sum(1).view(x.shape[0], -1, window[1]).sum(1)
    return begin_beyond(torch.stack([rows.argmax(1), columns.argmax(1)], 1), origin, (height, width))
