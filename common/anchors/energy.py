"""What the scores of a layer are made of: its output at every position, its energy per phase."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.choice import phase_scores, square_and_along, to_float64
from ..ops.everywhere import at_every_position
from ..ops.strided import Strided
from .scores import find_score

__all__ = ["Projection", "at_every_position", "phase_energies", "token_energy"]


class Projection(NamedTuple):
    """A strided convolution of normalised tokens: weights (D, C / groups, k, k), bias (D,) or None; and the linear
    layer before it, weight and bias, if there is one."""

    weight: Tensor
    bias: Tensor | None
    conv: Strided
    linear: tuple[Tensor, Tensor] | None = None


def token_energy(t: Tensor, score: str, dim: int = 1) -> Tensor:
    """|t|^2 over channels at ``dim`` or, where a score breaks ties, |t|^2 + 0.01 rms <r, t> with a fixed unit vector r,
    since energy cannot tell t from -t: (B, D, H, W) -> (B, H, W)."""
    if not find_score(score).tie_break:
        return t.square().sum(dim)
    t = t.movedim(dim, -1)
    channel = torch.arange(t.shape[-1], device=t.device, dtype=t.dtype)
    r = torch.sin(1.0 + 12.9898 * channel) * (2.0 / t.shape[-1]) ** 0.5  # no model is likely to be aligned with it
    energy, along = (to_float64(part) for part in square_and_along(t, r))
    return energy + 0.01 * energy.mean((-2, -1), keepdim=True).sqrt() * along


def phase_energies(t: Tensor, stride: Sequence[int], score: str) -> Tensor:
    """Energy of what a layer makes at every position, summed over the grid of each phase: -> (B, s_h, s_w)."""
    return phase_scores(token_energy(t, score), (stride[0], stride[1]))
