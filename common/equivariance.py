"""How equivariance is measured and asserted, by the name that people type: see ``common.evaluation.equivariance``."""

from .evaluation.equivariance import TOLERANCE, anchored, assert_shift_equivariant, dense, invariant, shift_error

__all__ = ["TOLERANCE", "anchored", "assert_shift_equivariant", "dense", "invariant", "shift_error"]
