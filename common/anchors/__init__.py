"""Anchors: what makes a strided operation shift-equivariant."""

from .canonical import Canonical
from .modules import (
    Anchor,
    ConvAnchor,
    MergeAnchor,
    Score,
    WindowAnchor,
    best_offset,
    phase_scores,
    token_energy,
)

__all__ = [
    "Anchor",
    "Canonical",
    "ConvAnchor",
    "MergeAnchor",
    "Score",
    "WindowAnchor",
    "best_offset",
    "phase_scores",
    "token_energy",
]
