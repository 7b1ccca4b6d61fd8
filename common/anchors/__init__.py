"""Anchors: what makes a strided operation shift-equivariant."""

from .canonical import Canonical
from .modules import (
    Anchor,
    ConvAnchor,
    MergeAnchor,
    WindowAnchor,
    best_offset,
    phase_scores,
    token_energy,
)
from .scores import SCORES, Score

__all__ = [
    "SCORES",
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
