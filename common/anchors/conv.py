"""A-token, and every other strided convolution."""

from torch import Tensor, nn

from ..grid import Grid
from ..ops.energy import ConvEnergy
from ..ops.roll import roll
from ..ops.strided import Strided, bare
from ..ops.weights import adapted, gathered, weight_of
from .base import Anchor
from .energy import at_every_position, phase_energies

__all__ = ["ConvAnchor"]


class ConvAnchor(Anchor):
    """A-token (eq. adaptive_token): m* = argmax_m sum_k |conv(x)_m[k]|^2, the convolution's tokens k at phase m.

    The convolution is taken at every position, on the torus, and its energy summed per phase. A score that does not
    need the layer takes the patches of a stride for the windows of ``WindowAnchor``.

    Shapes: x (B, C, H, W) -> rolled x, offsets (B, 2) in [0, stride).
    """

    def forward(self, x: Tensor, conv: nn.Conv2d, low_precision: bool = False) -> tuple[Tensor, Tensor]:
        offset = self.offset(x, conv, low_precision=low_precision)
        return roll(x, offset, within=True), offset

    def offset(self, x: Tensor, *layers: nn.Conv2d, low_precision: bool = False) -> Tensor:
        return self.choose(x.permute(0, 2, 3, 1), *layers, low_precision=low_precision)

    def prepared(self, grid: Grid, conv: nn.Conv2d) -> Grid:
        return grid if grid.stride == 1 else super().prepared(grid)  # an image is no sum that was put off

    def window(self, conv: nn.Conv2d) -> tuple[int, int]:
        return Strided.of(conv).stride

    def energy(self, conv: nn.Conv2d) -> ConvEnergy | None:
        return ConvEnergy(conv, self) if self.scores_layer and not adapted(conv) else None

    def scores(self, x: Tensor, conv: nn.Conv2d) -> Tensor:
        strided, weight, bias = Strided.of(conv), weight_of(conv), None if conv.bias is None else gathered(conv.bias)
        if bare(conv).groups == 1:
            weight, bias = self.combined(weight), None if bias is None else self.combined(bias)
        t = at_every_position(x.permute(0, 3, 1, 2), weight, strided, bias)
        return phase_energies(t, strided.stride, self.score.name)
