"""Anchors: what makes a strided operation shift-equivariant (the paper's A-token, A-WSA, A-PMerge, APS).

An anchor looks at tokens on an H x W torus, scores each of the s x s offsets of a stride-s grid with a shift-invariant
function, rolls each sample by its own best offset and returns the rolled tokens with that offset. After it, the stock
strided operation at phase zero is equivariant. Nothing is learned in an anchor and nothing is stored; scores are taken
under ``no_grad`` and reduced over the grid in float64.
"""

from ..ops.choice import best_offset, observed_scores, phase_scores
from .base import Anchor
from .canonical import Canonical
from .conv import ConvAnchor
from .energy import Projection, token_energy
from .identity import NoAnchor
from .layers import KeysAndValues, PooledProjections
from .merge import MergeAnchor
from .projection import ProjectionAnchor
from .scores import SCORES, Score, find_score
from .window import WindowAnchor

__all__ = [
    "SCORES",
    "Anchor",
    "Canonical",
    "ConvAnchor",
    "KeysAndValues",
    "MergeAnchor",
    "NoAnchor",
    "PooledProjections",
    "Projection",
    "ProjectionAnchor",
    "Score",
    "WindowAnchor",
    "best_offset",
    "find_score",
    "observed_scores",
    "phase_scores",
    "token_energy",
]
