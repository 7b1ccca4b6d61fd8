"""What anchors share: m* = argmax_m score(m), the best of the phases at which a strided operation can begin."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..grid import Grid
from ..ops.choice import best_partition, moments, to_float64
from ..ops.energy import best_phase
from ..ops.residual import materialize
from .fixed import Fixed

__all__ = ["Anchor"]


class Anchor(Fixed):
    """Where each sample's grid begins. A subclass says how far its phases reach (``window``) and, for scores that need
    the layer behind it, what they are (``scores``). Nothing is learned and nothing is stored in an anchor.

    A grid that follows the content modulo s does so modulo all divisors of s, and through all equivariant layers. So
    where earlier anchors have settled where a window begins, another has nothing to make equivariant. The paper has it
    choose again; without ``reanchor`` it leaves such a grid as it is.

    ``low_precision`` leaves scores in the precision of the model around them: safe behind the canonical anchor, where
    all shifted copies are one array.
    """

    def __init__(self, *, score: str = "signed", sketch: int = 0, reanchor: bool = True) -> None:
        super().__init__(score=score, sketch=sketch)
        self.reanchor = reanchor
        self.scores_layer = self.score.needs_layer and type(self).scores is not Anchor.scores

    def on(self, grid: Grid, *layers: Any) -> Grid:
        window = self.window(*layers)
        if not self.reanchor and grid.is_anchored(window):
            return grid.begin_again()
        grid = self.prepared(grid, *layers)
        origin = self.choose(grid.tokens, *layers, low_precision=grid.canonical, origin=grid.origin,
                             known_moments=grid.moments, prepared=grid.shared)  # fmt: skip
        return grid.begin_at(origin, window, keep=not self.reanchor)

    def prepared(self, grid: Grid, *layers: Any) -> Grid:
        """The grid with what kernels compute for this anchor and for the layer after it, from the same tokens."""
        return grid._replace(tokens=materialize(grid.tokens))

    def offset(self, x: Tensor, *layers: Any, low_precision: bool = False) -> Tensor:
        """(B, 2) offsets of the best phase of tokens x (B, H, W, C)."""
        return self.choose(x, *layers, low_precision=low_precision)

    @torch.no_grad()
    def choose(self, x: Tensor, *layers: Any, low_precision: bool = False, origin: Tensor | None = None,
               known_moments: Tensor | None = None, prepared: Any = None) -> Tensor:  # fmt: skip
        """``offset`` of tokens that are read from ``origin`` (B, 2) on, if not from (0, 0), in their own places.
        Kernels leave ``known_moments`` of the tokens (B, 3, H, W) and what is ``prepared`` of the layer."""
        if self.scores_layer:
            with nullcontext() if low_precision else torch.autocast(x.device.type, enabled=False):
                x = x if low_precision or x.dtype == torch.float64 else x.float()
                energy = self.energy(*layers) if low_precision else None
                return best_phase(x, lambda t: self.scores(t, *layers), energy, origin, prepared)
        known = known_moments if low_precision else None
        _, square, along = moments(x, self.direction) if known is None else known.unbind(1)
        if not low_precision:
            square, along = to_float64(square), to_float64(along)
        gain = self.score.tie_break * (2.0 / x.shape[3]) ** 0.5
        return best_partition(square, along, self.window_weights, self.window(*layers), self.score.power, gain, origin,
                              prepared)  # fmt: skip

    @property
    def reads(self) -> Tensor | None:
        return None if self.scores_layer else self.direction

    def window(self, *layers: Any) -> tuple[int, int]:
        """How many phases there are, along each axis."""
        raise NotImplementedError

    def scores(self, x: Tensor, *layers: Any) -> Tensor:
        """(B, s_h, s_w), of the layer's output at each phase."""
        raise NotImplementedError
