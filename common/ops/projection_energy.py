"""Strided projections as kernels score them: CvT's keys and values, MViTv2's pooled queries, keys and values."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import kernels
from .dispatch import product_dtype, usable
from .energy import Scoring, Taps, best_of_tokens, combination
from .residual import materialize
from .strided import Strided
from .weights import gathered

__all__ = ["DepthwiseEnergy", "PooledEnergy", "Pooling", "Poolings", "normed"]


def normed(x: Tensor, norm: nn.LayerNorm) -> Tensor | None:
    """The norm of x as products read it, for an anchor and a block; None where only the block itself can take it: for a
    gradient, with sharded weights, or where no kernel reads it."""
    if not usable(x) or torch.is_grad_enabled() or isinstance(norm.weight, DTensor):
        return None
    return materialize(norm(x).to(product_dtype(x)))


def _as_scored(x: Tensor, norm: nn.LayerNorm, normalised: Tensor | None) -> Tensor:
    """Tokens as ``norm`` makes them and a convolution reads them."""
    if normalised is None:
        weight, bias = gathered(norm.weight).to(x), gathered(norm.bias).to(x)
        normalised = F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
    return normalised.to(product_dtype(normalised))


class DepthwiseEnergy:
    """Of two depthwise convolutions of normalised tokens, which share one offset."""

    def __init__(self, norm: nn.LayerNorm, key: nn.Conv2d, value: nn.Conv2d, scoring: Scoring) -> None:
        self.norm, self.key, self.value, self.scoring = norm, key, value, scoring

    def fits(self, x: Tensor, origin: Tensor | None) -> bool:
        """With as few combinations as a kernel makes."""
        conv, scoring = Strided.of(self.key), self.scoring
        shape = scoring.sketch, x.shape[3], *conv.kernel
        few = scoring.sketch and kernels.fits_token_kernel(x.permute(0, 3, 1, 2), shape, conv.stride)
        projection = scoring.directions[:, : 2 * x.shape[3]] if few else None
        weights = self.key.weight, self.value.weight
        return origin is None and conv.kernel == (3, 3) and kernels.fits_sketch(projection, *weights)

    def best(self, x: Tensor, origin: Tensor | None, prepared: tuple[Tensor, Any] | None) -> Tensor:
        """``prepared`` are first of all the normalised tokens, where they are known already."""
        x = _as_scored(x, self.norm, None if prepared is None else prepared[0])
        projection = self.scoring.directions[:, : 2 * x.shape[3]]

        def taps(paired: bool) -> Taps:
            return kernels.depthwise_taps(projection, self.key.weight, self.value.weight, x.dtype, paired)

        return best_of_tokens(x, self.scoring, self.scoring.sketch, Strided.of(self.key), taps)


class Pooling(NamedTuple):
    """Outputs of a projection that are pooled at one stride: its rows ``outputs``, and the poolings, one after another,
    each the same for all heads."""

    qkv: nn.Linear
    outputs: slice
    pools: list[nn.Conv2d]
    heads: int


class Poolings:
    """The poolings to come in one forward, in a compiled graph: what is scored of all is made in one launch."""

    def __init__(self, poolings: Sequence[Pooling | None], scoring: Scoring) -> None:
        self.poolings, self.scoring = poolings, scoring
        self.prepared: list[Taps] | None = None

    def take(self, x: Tensor, layer: Any) -> Taps | None:
        """What is scored of this layer (``anchors.PooledProjections``); ``x`` are its normalised tokens."""
        if self.prepared is None:
            found = [pooling for pooling in self.poolings if pooling is not None]
            paired = all(kernels.fits_token_scores(x, self.scoring.sketch, 3, 1, p.qkv.in_features) for p in found)
            all_found = torch.compiler.is_compiling() and len(found) == len(self.poolings)
            self.prepared = pooled_taps(found, self.scoring, x.dtype, True) if all_found and paired else []
        if not self.prepared:
            return None
        return self.prepared[[found.qkv for found in self.poolings if found is not None].index(layer.pooling().qkv)]


def pooled_taps(poolings: Sequence[Pooling], scoring: Scoring, dtype: torch.dtype, paired: bool) -> list[Taps]:
    """What is scored of each; none if a kernel does not fit."""
    sizes = [pooling.outputs.stop - pooling.outputs.start for pooling in poolings]
    projection = combination(scoring, max(sizes), scoring.direction) if min(sizes) > scoring.sketch else None
    weights = [[p.qkv.weight, p.qkv.bias, *(pool.weight for pool in p.pools)] for p in poolings]
    if projection is None or not kernels.fits_sketch(projection, *(weight for each in weights for weight in each)):
        return []
    given = [kernels.Pooled(w[p.outputs], b[p.outputs], pools)
             for p, (w, b, *pools) in zip(poolings, weights, strict=True)]  # fmt: skip
    return kernels.pooled_taps(projection, given, dtype, paired)


class PooledEnergy:
    """Of a projection of normalised tokens and its pooling, one convolution: kernel P[o, i, j] W[o, c]."""

    def __init__(self, norm: nn.LayerNorm, pooling: Pooling, scoring: Scoring) -> None:
        self.norm, self.pooling, self.scoring = norm, pooling, scoring

    def fits(self, x: Tensor, origin: Tensor | None) -> bool:
        """With as few combinations as a kernel makes."""
        (qkv, outputs, pools, _), scoring = self.pooling, self.scoring
        shape, conv = (scoring.sketch, x.shape[3], 3, 3), Strided.of(pools[0])
        few = 0 < scoring.sketch < outputs.stop - outputs.start
        few = few and kernels.fits_token_kernel(x.permute(0, 3, 1, 2), shape, conv.stride)
        projection = combination(scoring, outputs.stop - outputs.start, scoring.direction) if few else None
        weights = qkv.weight, qkv.bias, *(pool.weight for pool in pools)
        return origin is None and kernels.fits_sketch(projection, *weights)

    def best(self, x: Tensor, origin: Tensor | None, prepared: tuple[Tensor | None, Taps | None] | None) -> Tensor:
        """``prepared`` are the normalised tokens and what ``Poolings`` has made, where they are known already."""
        normalised, weights = prepared or (None, None)
        x = _as_scored(x, self.norm, normalised)

        def taps(paired: bool) -> Taps:
            return weights or pooled_taps([self.pooling], self.scoring, x.dtype, paired)[0]

        return best_of_tokens(x, self.scoring, self.scoring.sketch, Strided.of(self.pooling.pools[0]), taps)
