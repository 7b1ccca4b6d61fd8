"""Patch mergings as kernels score them: what is made of their weights serves the score and the product."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import kernels
from .dispatch import op, product_dtype, usable
from .energy import Scoring, best_of_tokens, combination, plain_taps
from .strided import Strided
from .weights import gathered, is_plain, weight_of

__all__ = ["MergeEnergy", "MergeWeights", "Merging", "Mergings", "merging_dtype"]

PATCH = Strided((2, 2), (2, 2), (0, 0))


class Merging(NamedTuple):
    """The modules of a patch merging."""

    reduction: nn.Linear
    norm: nn.LayerNorm | None


class MergeWeights(NamedTuple):
    """What is scored: taps, their sums over columns and what a norm's bias adds, (parts, r) each, parts for a kernel
    that adds these up. And what ``merged_product`` multiplies by, ``scaled`` (D, 4C) and ``folded`` (2, D), if that is
    how the merging is taken."""

    taps: Tensor | None
    sums: Tensor | None
    constant: Tensor | None
    paired: bool
    scaled: Tensor | None = None
    folded: Tensor | None = None


def merging_dtype(x: Tensor, norm: nn.LayerNorm | None, reduction: nn.Linear) -> torch.dtype | None:
    """The type that ``merged_product`` multiplies tokens in, if it does: in inference, in half precision, with few
    outputs, with modules that are nothing else."""
    dtype = product_dtype(x)
    plain = is_plain(reduction) and reduction.bias is None
    if norm is not None:  # a mean must not be rounded
        plain = plain and is_plain(norm) and norm.elementwise_affine and x.dtype == dtype
    return dtype if plain and kernels.fits_merged_product(x, reduction.weight, dtype) else None


def prepare(x: Tensor, mergings: Sequence[Merging], scoring: Scoring | None) -> "kernels.Mergings | None":
    """What ``kernels.merging_weights`` takes of mergings of tokens like x; None where torch does all."""
    weights = [weight_of(merging.reduction) for merging in mergings]
    dtypes = [merging_dtype(x, merging.norm, merging.reduction) for merging in mergings]
    projection = None if scoring is None else combination(scoring, max(map(len, weights)), weights[0])
    if scoring is None or min(map(len, weights)) <= scoring.sketch or not kernels.fits_sketch(projection, *weights):
        projection = None
    scale = next((dtype for dtype in dtypes if dtype is not None), None)
    if projection is None and scale is None:
        return None
    paired = [projection is not None and kernels.fits_token_scores(x, len(projection), 2, 0, weight.shape[1] // 4)
            for weight in weights]  # fmt: skip
    norms = [merging.norm for merging in mergings]
    gains = [weight_of(norm) for norm in norms if norm is not None]
    biases = [gathered(norm.bias) for norm in norms if norm is not None and norm.bias is not None]
    return kernels.Mergings(weights, projection, gains, biases, x.dtype, scale, [d is not None for d in dtypes], paired)


class Mergings:
    """The mergings to come in one forward, of tokens like x: what kernels need of the weights of all is made in one
    launch, when it is first asked for; in a compiled graph in that which chooses the windows of the first stage."""

    def __init__(self, x: Tensor, mergings: Sequence[Merging], scoring: Scoring | None) -> None:
        self.mergings = mergings
        self.given = prepare(x, mergings, scoring) if mergings and usable(x) else None
        self.prepared: list[MergeWeights] | None = None

    def with_windows(self, square: Tensor, along: Tensor, weights: Tensor, window: tuple[int, int],
                     gain: float) -> Tensor | None:  # fmt: skip
        """Where windows begin, as of ``kernels.best_window``, if both are done in one launch."""
        given = self.given if self.prepared is None and torch.compiler.is_compiling() else None
        if given is None or not kernels.fits_fused_windows(square, window, given):
            return None
        offset, prepared = kernels.best_window_fused(square, along, weights, list(window), gain, given)
        self.prepared = [_weights(given, i, one) for i, one in enumerate(prepared)]
        return offset

    def take(self, reduction: nn.Linear) -> MergeWeights | None:
        """Those of the merging with this projection, if kernels make them."""
        if self.prepared is None and self.given is not None:
            self.prepared = merging_weights(self.given.weights[0], self.given)
        which = [i for i, merging in enumerate(self.mergings) if merging.reduction is reduction]
        return self.prepared[which[0]] if self.prepared and which else None


def _merging_weights(x: Tensor, given: "kernels.Mergings") -> list[MergeWeights]:
    return [_weights(given, i, one) for i, one in enumerate(kernels.merging_weights(given))]


@op(kernel=_merging_weights, fits=lambda x, given: True)
def merging_weights(x: Tensor, given: "kernels.Mergings") -> list[MergeWeights]:
    """What kernels need of the weights of mergings, of which x is the first: nothing in torch."""
    return []


def _weights(given: "kernels.Mergings", i: int, prepared: tuple[Tensor, ...]) -> MergeWeights:
    taps, parts, *others = prepared
    others = others if given.scaled[i] else []
    if given.projection is None:
        return MergeWeights(None, None, None, False, *others)
    taps = taps if given.paired[i] else taps[: 4 * len(given.projection)].unflatten(0, (4, -1))
    if not given.gains:
        return MergeWeights(taps, None, None, given.paired[i], *others)
    sums, constant = parts.unbind(1) if given.paired[i] else parts.sum(0).unbind()
    return MergeWeights(taps, sums, constant, given.paired[i], *others)


class MergeEnergy:
    """Of a patch merging, a 2 x 2 convolution of stride 2 of patches that a norm makes."""

    def __init__(self, reduction: nn.Linear, norm: nn.LayerNorm | None, scoring: Scoring) -> None:
        self.merging, self.scoring = Merging(reduction, norm), scoring

    @property
    def outputs(self) -> int:
        rows = self.merging.reduction.out_features
        return min(self.scoring.sketch or rows, rows)

    def fits(self, x: Tensor, origin: Tensor | None) -> bool:
        shape = self.outputs, x.shape[3], 2, 2
        return origin is None and kernels.fits_token_kernel(x.permute(0, 3, 1, 2), shape, (2, 2))

    def best(self, x: Tensor, origin: Tensor | None, prepared: MergeWeights | None) -> Tensor:
        norm, scoring = self.merging.norm, self.scoring
        prepared = prepared or Mergings(x, [self.merging], scoring).take(self.merging.reduction)
        if norm is None and prepared is not None and prepared.taps is not None:  # autocast leaves norms in float32
            x = x.to(prepared.taps.dtype)
        one_pass = kernels.fits_token_scores(x, self.outputs, 2, 0)
        if prepared is None or prepared.taps is None or prepared.paired != one_pass or prepared.taps.dtype != x.dtype:
            kernel, sums, constant = self.combined()
            taps = lambda paired: plain_taps(kernel, constant, x.dtype, paired)  # noqa: E731
        else:
            sums, zeros = prepared.sums, scoring.zeros[: self.outputs]
            constant = zeros if prepared.constant is None else prepared.constant
            taps = lambda paired: (prepared.taps.flatten(0, -2), constant)  # type: ignore[union-attr]  # noqa: E731
        colsum = None if norm is None else (lambda: sums.float())  # type: ignore[union-attr]
        return best_of_tokens(x, scoring, self.outputs, PATCH, taps, colsum, 0.0 if norm is None else norm.eps)

    def combined(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Weights (r, C, 2, 2) of what is scored; with a norm their sums and what its bias adds, (r,) each."""
        reduction, norm = self.merging
        combined = self.scoring.combined(weight_of(reduction))  # r, 4C
        weight = combined if norm is None else combined * weight_of(norm)
        kernel = weight.view(len(weight), 2, 2, -1).permute(0, 3, 2, 1)  # r, C, row, column
        if norm is None:
            return kernel, None, None
        return kernel, weight.sum(1), (combined * gathered(norm.bias)).sum(1)
