"""What a ``ProjectionAnchor`` looks at: the strided projections of CvT and MViTv2, before their norms."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops.projection_energy import DepthwiseEnergy, PooledEnergy, Pooling, Poolings, normed
from ..ops.residual import norm_ahead
from ..ops.strided import Strided
from ..ops.weights import adapted, gathered, weight_of
from .base import Anchor
from .energy import Projection

__all__ = ["KeysAndValues", "PooledProjections"]


class KeysAndValues(NamedTuple):
    """Two depthwise convolutions of the normalised tokens, which share one offset."""

    norm: nn.LayerNorm
    key: nn.Conv2d
    value: nn.Conv2d

    @property
    def modulus(self) -> tuple[int, int]:
        return Strided.of(self.key).stride

    def projections(self, anchor: Anchor) -> list[Projection]:
        weights = torch.stack([weight_of(self.key), weight_of(self.value)], 1)  # C, 2, 1, k, k
        if not anchor.sketch:  # grouped: the outputs of a channel are neighbours
            return [Projection(weights.flatten(0, 1), None, Strided.of(self.key))]
        parts = anchor.directions[:, : 2 * len(weights)].to(weights).unflatten(1, (2, -1))
        return [Projection(torch.einsum("rnc,cnij->rcij", parts, weights[:, :, 0]), None, Strided.of(self.key))]

    def energy(self, anchor: Anchor) -> DepthwiseEnergy | None:
        return None if adapted(self.key, self.value) else DepthwiseEnergy(self.norm, self.key, self.value, anchor)

    def normed(self, x: Tensor) -> Tensor | None:
        ahead = norm_ahead(x, self.norm)
        return normed(x, self.norm) if ahead is None else ahead

    def planned(self, layers: Sequence["KeysAndValues"], anchor: Anchor) -> None:
        """Nothing: these weights are few."""


class PooledProjections(NamedTuple):
    """Outputs of a projection of the normalised tokens, pooled: one for each stride. Of a few combinations of outputs
    both are one convolution, with kernel P[o, i, j] W[o, c]."""

    norm: nn.LayerNorm
    modulus: tuple[int, int]
    poolings: Sequence[Pooling]

    def projections(self, anchor: Anchor) -> list[Projection]:
        projections = []
        for qkv, outputs, pools, heads in self.poolings:
            taps = torch.cat([weight_of(pool)[:, 0].repeat(heads, 1, 1) for pool in pools])  # D, k, k
            conv, linear = Strided.of(pools[0]), (weight_of(qkv)[outputs], gathered(qkv.bias)[outputs])
            projections.append(Projection(taps[:, None], None, conv, linear))
            if anchor.sketch:
                weight, bias = taps[:, None] * linear[0][..., None, None], taps.sum((1, 2)) * linear[1]
                projections[-1] = Projection(anchor.combined(weight), anchor.combined(bias), conv)
        return projections

    def pooling(self) -> Pooling | None:
        """The only one, if kernels are to score it."""
        first, strides = self.poolings[0], [pooling.pools[0].stride for pooling in self.poolings]
        return first if strides == [self.modulus] and not adapted(first.qkv, *first.pools) else None

    def energy(self, anchor: Anchor) -> PooledEnergy | None:
        pooling = self.pooling()
        return None if pooling is None else PooledEnergy(self.norm, pooling, anchor)

    def normed(self, x: Tensor) -> Tensor | None:
        return normed(x, self.norm)

    def planned(self, layers: Sequence["PooledProjections"], anchor: Anchor) -> Poolings:
        return Poolings([layer.pooling() for layer in layers], anchor)
