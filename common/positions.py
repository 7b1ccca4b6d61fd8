"""Relative positions, by the name that people type: see ``common.models.positions``."""

from .models.positions import circular_rows, linear_rows

__all__ = ["circular_rows", "linear_rows"]
