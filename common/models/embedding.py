"""How every architecture makes tokens."""

from torch import nn

from ..anchors import NoAnchor
from ..grid import Grid
from ..ops import embed
from ..ops.strided import Strided
from .classifier import PaddingMode

__all__ = ["PatchEmbed"]


class PatchEmbed(nn.Module):
    """Patches of pixels or of tokens, projected by a strided convolution (eq. token) and, with ``norm``, normalised:
    (B, H, W, C) -> (B, H/s, W/s, D). Patches overlap where ``size`` exceeds ``stride``."""

    def __init__(self, *, in_chans: int, dim: int, size: int, stride: int, padding: int = 0,
                 padding_mode: PaddingMode = "zeros", norm: bool = True) -> None:  # fmt: skip
        super().__init__()
        if not 1 <= size - 2 * padding <= stride:
            raise ValueError(f"patch size {size} with stride {stride} and padding {padding} does not give one token "
                             f"per {stride} pixels: 1 <= size - 2 * padding <= stride must hold")  # fmt: skip
        self.proj = nn.Conv2d(in_chans, dim, size, stride=stride, padding=padding, padding_mode=padding_mode)
        self.norm = nn.LayerNorm(dim) if norm else None

    def forward(self, grid: Grid, next_anchor: NoAnchor) -> Grid:
        """Read from the grid's origin on. ``next_anchor`` is the one whose moments a kernel may leave."""
        x, moments = embed(grid.tokens.permute(0, 3, 1, 2), self.proj, grid.origin, self.norm, next_anchor.reads)
        return grid.then(x, Strided.of(self.proj).stride[0], moments)
