"""No anchor: where it replaces all anchors, the model is the default; where it replaces one, the paper's ablation."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..grid import Grid

__all__ = ["NoAnchor"]


class NoAnchor(nn.Module):
    """Leaves every grid as it is. It defines the methods that models call; ``Anchor`` overrides them."""

    def on(self, grid: Grid, *layers: Any) -> Grid:
        """The grid, beginning at the best phase for the layers that follow; without an anchor, where it began."""
        return grid.begin_again()

    def plan(self, grid: Grid, layers: Sequence[Any]) -> Grid:
        """Say which layers this anchor will serve in one forward, so that kernels may prepare the weights of all."""
        return grid

    def energy(self, *layers: Any) -> Any:
        """What is scored of a layer, as kernels read it (``ops.energy.Energy``); None if they do not."""
        return None

    @property
    def reads(self) -> Tensor | None:
        """The direction in which this anchor needs moments of its tokens; None if it does not."""
        return None
