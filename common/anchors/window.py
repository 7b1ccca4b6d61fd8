"""A-WSA."""

from torch import Tensor

from ..grid import Grid
from ..ops.roll import roll
from .base import Anchor

__all__ = ["WindowAnchor"]


class WindowAnchor(Anchor):
    """A-WSA (eq. a_wsa): m* = argmax_m || v_m ||_2, v_m[k] the mean token norm in window k of the partition at m.

    The paper's score ties where it should not: it cannot see where in its window a bright token sits, and norms are all
    equal after a LayerNorm at its initial gain. All but ``energy`` break such ties: a token counts with its norm plus a
    little of one fixed direction, and the mean over a window has slightly uneven weights (``ops.choice``).

    An axis on which the grid is a single window has no partition to choose: there the strongest token, or on one such
    axis the strongest row or column, comes first.

    Shapes: x (B, H, W, C) -> rolled x, offsets (B, 2) in [0, window).
    """

    def forward(self, x: Tensor, window: tuple[int, int], low_precision: bool = False) -> tuple[Tensor, Tensor]:
        offset = self.offset(x, window, low_precision=low_precision)
        return roll(x, offset, (1, 2), within=True), offset

    def prepared(self, grid: Grid, window: tuple[int, int]) -> Grid:
        return grid._replace(shared=grid.plan)

    def window(self, window: tuple[int, int]) -> tuple[int, int]:
        return window
