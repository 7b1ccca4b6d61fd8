"""Measure and assert what happens to an output when the input is rolled.

An *action* says what a function promises: it takes the output for x, the output for the rolled x and the roll, and
returns the pair of tensors that must be equal. The expected roll is always derived from the offsets that the function
itself reports, never searched for.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..shifts import roll

__all__ = ["TOLERANCE", "anchored", "assert_shift_equivariant", "dense", "invariant", "shift_error"]

Action = Callable[[Any, Any, Tensor], tuple[Tensor, Tensor]]

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative error that rounding alone may cause, per dtype."""


def invariant(y: Tensor, y_rolled: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Logits: the output does not move."""
    return y, y_rolled


def dense(y: Tensor, y_rolled: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Masks (B, C, H, W): the output moves with the input."""
    return roll(y, offset), y_rolled


def anchored(stride: int, dims: tuple[int, int] = (-2, -1)) -> Action:
    """Tokens of a stride-``stride`` grid together with the input offset of their origin: ``(tokens, offset)``.

    Token h of x lies at offset + stride h; of the rolled x, at offset' + roll + stride h in the coordinates of x. So
    the tokens must agree after a roll by (offset' + roll - offset) / stride, which must be whole.
    """

    def action(y: tuple[Tensor, Tensor], y_rolled: tuple[Tensor, Tensor], offset: Tensor) -> tuple[Tensor, Tensor]:
        moved = y_rolled[1] + offset - y[1]
        if (moved % stride).any():
            raise AssertionError(f"reported offsets {y[1].tolist()} and {y_rolled[1].tolist()} for a roll of "
                                 f"{offset.tolist()} do not lie on one grid of stride {stride}")  # fmt: skip
        return roll(y[0], moved // stride, dims), y_rolled[0]

    return action


def shift_error(f: Callable[[Tensor], Any], x: Tensor, shift: tuple[int, int], action: Action = invariant) -> float:
    """Relative error ||expected - got|| / ||expected|| of ``f`` on images (B, C, H, W) rolled by ``shift``."""
    return _errors(f, x, [shift], action)[shift]


@torch.no_grad()
def _errors(f: Callable[[Tensor], Any], x: Tensor, shifts: Iterable[tuple[int, int]],
            action: Action) -> dict[tuple[int, int], float]:  # fmt: skip
    y, errors = f(x), dict[tuple[int, int], float]()
    for shift in shifts:
        offset = torch.tensor(shift, device=x.device).expand(len(x), 2)
        expected, got = action(y, f(roll(x, offset)), offset)
        error = (expected - got).double().norm() / expected.double().norm().clamp_min(1e-300)
        errors[shift] = error.item()
    return errors


def assert_shift_equivariant(f: Callable[[Tensor], Any], x: Tensor, shifts: Iterable[tuple[int, int]],
                             action: Action = invariant, tolerance: float | None = None) -> None:  # fmt: skip
    """Raise AssertionError, naming the worst shift, unless ``f`` follows ``action`` for all ``shifts``."""
    tolerance = TOLERANCE[x.dtype] if tolerance is None else tolerance
    errors = _errors(f, x, shifts, action)
    if not errors:
        raise ValueError("no shift to test")
    worst = max(errors, key=lambda shift: errors[shift] if errors[shift] == errors[shift] else float("inf"))
    if not errors[worst] <= tolerance:
        failed = sum(not e <= tolerance for e in errors.values())
        raise AssertionError(f"not shift-equivariant: relative error {errors[worst]:.3g} > {tolerance:.3g} at shift "
                             f"{worst}; {failed} of {len(errors)} shifts fail")  # fmt: skip
