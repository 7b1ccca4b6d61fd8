"""A-PMerge."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Grid
from ..ops.merge_energy import MergeEnergy, Merging, Mergings
from ..ops.residual import materialize
from ..ops.roll import circular_pad, roll
from ..ops.strided import Strided
from ..ops.weights import gathered, weight_of
from .base import Anchor
from .energy import at_every_position, phase_energies

__all__ = ["MergeAnchor"]

PATCH = Strided((2, 2), (2, 2), (0, 0))


class MergeAnchor(Anchor):
    """A-PMerge (claim pmergeconv): patch merging is a 2 x 2 convolution of stride 2; m* = argmax_m of the energy of
    its tokens at phase m.

    The LayerNorm of the merged patch p is folded: W LN(p) = (W' p - mean W'1) / std + W b, where W' = W diag(gain), so
    that no 4C-wide patch is ever written out. Without a norm (SwinV2 normalises after the projection, which would level
    all energies) the projection itself is scored.

    Shapes: x (B, H, W, C), reduction 4C -> D, norm over 4C, patches flattened as (column, row, channel)
    -> rolled x, offsets (B, 2) in {0, 1}.
    """

    def forward(self, x: Tensor, reduction: nn.Linear, norm: nn.LayerNorm | None = None,
                low_precision: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
        offset = self.offset(x, reduction, norm, low_precision=low_precision)
        return roll(x, offset, (1, 2), within=True), offset

    def plan(self, grid: Grid, layers: Sequence[Merging]) -> Grid:
        return grid._replace(plan=Mergings(grid.tokens, layers, self)) if self.scores_layer and grid.canonical else grid

    def prepared(self, grid: Grid, reduction: nn.Linear, norm: nn.LayerNorm | None = None) -> Grid:
        weights, x = None if grid.plan is None else grid.plan.take(reduction), grid.tokens
        if norm is None and weights is not None and weights.scaled is not None:  # what is multiplied is scored, too
            x = x.to(weights.scaled.dtype)
        return grid._replace(tokens=materialize(x), shared=weights)

    def window(self, reduction: nn.Linear, norm: nn.LayerNorm | None = None) -> tuple[int, int]:
        return PATCH.stride

    def energy(self, reduction: nn.Linear, norm: nn.LayerNorm | None = None) -> MergeEnergy:
        return MergeEnergy(reduction, norm, self)

    def scores(self, x: Tensor, reduction: nn.Linear, norm: nn.LayerNorm | None = None) -> Tensor:
        projection = self.combined(weight_of(reduction))  # r, 4C
        weight = projection if norm is None else projection * weight_of(norm)
        kernel = weight.view(len(weight), 2, 2, -1).permute(0, 3, 2, 1)  # r, C, row, column
        t = at_every_position(x.permute(0, 3, 1, 2), kernel, PATCH)
        if norm is not None:
            x = x.to(t.dtype)
            moments = torch.stack([x.mean(-1), x.square().mean(-1)], 1)  # of tokens, then of the patches they begin
            mean, square = F.avg_pool2d(circular_pad(moments, (0, 1, 0, 1)), 2, stride=1).split(1, 1)
            inverse_std = (square - mean.square()).clamp_min(0).add(norm.eps).rsqrt()
            constant = (projection * gathered(norm.bias)).sum(1)
            t = (t - mean * weight.sum(1).view(1, -1, 1, 1)) * inverse_std + constant.view(1, -1, 1, 1)
        return phase_energies(t, PATCH.stride, self.score.name)
