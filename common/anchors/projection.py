"""Strided projections of attention: CvT's keys and values, MViTv2's pooled queries, keys and values."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Grid
from ..ops.energy import Energy
from ..ops.residual import materialize
from ..ops.roll import roll
from ..ops.weights import gathered, weight_of
from .base import Anchor
from .energy import Projection, at_every_position, phase_energies

__all__ = ["Projected", "ProjectionAnchor"]


class Projected(Protocol):
    """What has strided projections: the norm before them, the least common multiple of their strides, and they
    themselves, as an anchor scores them (``Anchor.combined``), in plain torch and by kernels, if those do."""

    @property
    def norm(self) -> nn.LayerNorm: ...

    @property
    def modulus(self) -> tuple[int, int]: ...

    def projections(self, anchor: Anchor) -> Sequence[Projection]: ...

    def energy(self, anchor: Anchor) -> Energy | None: ...

    def normed(self, x: Tensor) -> Tensor | None: ...

    def planned(self, layers: Sequence[Any], anchor: Anchor) -> Any: ...


class ProjectionAnchor(Anchor):
    """m* = argmax_m sum_i |projection_i at phase m|^2: all projections of a block share one offset.

    Each is taken at every position, before its norm (which would level all energies); one of stride s sees phase m of
    the modulus as m mod s.

    Shapes: x (B, H, W, C) -> rolled x, offsets (B, 2) in [0, modulus).
    """

    def forward(self, x: Tensor, layer: Projected, low_precision: bool = False) -> tuple[Tensor, Tensor]:
        offset = self.offset(x, layer, low_precision=low_precision)
        return roll(x, offset, (1, 2), within=True), offset

    def plan(self, grid: Grid, layers: Sequence[Projected]) -> Grid:
        planned = layers[0].planned(layers, self) if layers and self.scores_layer and grid.canonical else None
        return grid._replace(plan=planned)

    def prepared(self, grid: Grid, layer: Projected) -> Grid:
        """With the normalised tokens, and what is made of weights for kernels."""
        x, shared = materialize(grid.tokens), None
        if self.scores_layer and grid.canonical and (normed := layer.normed(x)) is not None:
            shared = normed, None if grid.plan is None else grid.plan.take(normed, layer)
        return grid._replace(tokens=x, shared=shared)

    def window(self, layer: Projected) -> tuple[int, int]:
        return layer.modulus

    def energy(self, layer: Projected) -> Energy | None:
        return layer.energy(self)

    def scores(self, x: Tensor, layer: Projected) -> Tensor:
        norm, (rows, columns) = layer.norm, layer.modulus
        affine = weight_of(norm).to(x.dtype), gathered(norm.bias).to(x.dtype)
        x = F.layer_norm(x, norm.normalized_shape, *affine, norm.eps)
        tables = []
        for weight, bias, conv, linear in layer.projections(self):
            y = x if linear is None else F.linear(x, *(t.to(x.dtype) for t in linear))
            t = at_every_position(y.permute(0, 3, 1, 2), weight, conv, bias)
            scores = phase_energies(t, conv.stride, self.score.name)
            tables.append(scores.tile(1, rows // conv.stride[0], columns // conv.stride[1]))
        return torch.stack(tables).sum(0)
