"""Anchors: what makes a strided operation shift-equivariant (the paper's A-token, A-WSA, A-PMerge, APS).

An anchor looks at tokens on an H x W torus, scores each of the s x s offsets of a stride-s grid with a shift-invariant
function, rolls each sample by its own best offset and returns the rolled tokens with that offset. After it, the stock
strided operation at phase zero is equivariant. Nothing is learned in an anchor and nothing is stored; scores are taken
under ``no_grad`` and reduced over the grid in float64.

Two options make scores cheap without making them less exact. ``sketch=r`` scores r fixed random combinations of a
token's D channels instead of all (still a shift-invariant function, so still exact; 0 is the paper's full score).
``fast=True`` in a call leaves them in the precision of the model around them: safe behind the canonical anchor, where
all shifted copies are one array; otherwise scores are taken in float32 at least, outside autocast.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import kernels
from ..ops.merge import Fold, MergeWeights, Merging
from ..ops.strided import Strided
from ..ops.weights import gathered
from ..shifts import roll
from .canonical import Canonical
from .scoring import (
    Anchor,
    Ready,
    Taps,
    best_offset,
    phase_scores,
    token_energy,
)

__all__ = [
    "Anchor",
    "ConvAnchor",
    "Fold",
    "MergeAnchor",
    "MergeWeights",
    "Merging",
    "Ready",
    "Strided",
    "Taps",
    "WindowAnchor",
    "best_offset",
    "phase_scores",
    "token_energy",
]


class ConvAnchor(Anchor):
    """A-token (eq. adaptive_token) and every other strided convolution: m* = argmax_m sum |conv at phase m|^2.

    The convolution is taken at every position (circular padding (p, k - 1 - p)) and its energy summed per phase.

    Shapes: x (B, C, H, W) -> rolled x, offsets (B, 2) in [0, stride).
    """

    def __init__(self, *, score: str = "signed", sketch: int = 0) -> None:
        super().__init__(score=score, sketch=sketch)
        self.canonical = Canonical() if self.score.phase_of_place else None

    def forward(self, x: Tensor, conv: nn.Conv2d, fast: bool = False) -> tuple[Tensor, Tensor]:
        offset = self.offset(x, conv, fast)
        return roll(x, offset, within=True), offset

    def packing(self, x: Tensor, conv: nn.Conv2d) -> torch.dtype | None:
        """The type in which an image is to be ``packed``, once for ``offset`` and in inference for the convolution too;
        None to leave it as it is."""
        if not self.score.needs_layer:
            return None
        (k, _), (s, _), _ = Strided.of(conv)
        rows, half = min(self.sketch or len(conv.weight), len(conv.weight)), kernels.product_dtype(x)
        fits = kernels.fits_image_phases(x, rows, k, s)
        if fits and not torch.is_grad_enabled():
            fits = kernels.fits_image_tokens(x, conv.weight, s, half)
        return half if fits and (half in (torch.bfloat16, torch.float16) or kernels.INTERPRETED) else None

    @torch.no_grad()
    def offset(self, x: Tensor, conv: nn.Conv2d, fast: bool = False, at: Tensor | None = None,
               sketched: list[Tensor] | None = None) -> Tensor:  # fmt: skip
        """The best phase of x or, with ``at`` (B, 2) in [0, side), where the best phase of x rolled there begins in x:
        ``at`` and that phase, on the torus. ``sketched`` is what ``kernels.sketched`` makes of ``sketch_of``, where it
        is known already."""
        if not self.score.needs_layer:
            return self._of_pixels(x, Strided.of(conv).stride, fast, at)
        with self.precision(x, fast):
            x, strided = self.cast(x, fast), Strided.of(conv)
            if sketched is None:
                weight, bias = self._of_weights(conv, x.dtype)
            else:
                weight, bias = sketched[0].unflatten(1, conv.weight.shape[1:]).to(x.dtype), sketched[1]
            if fast and kernels.fits_image_phases(x, len(weight), strided.kernel[0], strided.stride[0]):
                return self._of_image(x, weight, strided, bias, at)
            ready = self._ready(conv, x.dtype)
            if at is None:
                return self.choose(x, weight, strided, bias, fast=fast, ready=ready)
            return self._beyond(at, self.choose(roll(x, at, within=True), weight, strided, bias, fast=fast,
                                                ready=ready), x)  # fmt: skip

    def _of_pixels(self, x: Tensor, stride: tuple[int, int], fast: bool, at: Tensor | None) -> Tensor:
        if self.canonical is not None and at is not None:
            place = at if fast else self.canonical.offset(x)
            return place if fast else torch.stack([place[:, i] % s for i, s in enumerate(stride)], 1)
        x = x if at is None else roll(x, at, within=True)
        offset = self.partition(x.permute(0, 2, 3, 1), stride, fast)
        return offset if at is None else self._beyond(at, offset, x)

    def _beyond(self, at: Tensor, offset: Tensor, x: Tensor) -> Tensor:
        sides = torch.stack([torch.full_like(at[:, 0], side) for side in x.shape[2:]], 1)
        return torch.where(at + offset < sides, at + offset, at + offset - sides)

    def sketch_of(self, conv: nn.Conv2d) -> list[Tensor] | None:
        """What ``kernels.sketched`` takes to make what is scored; None where it is made otherwise."""
        if not torch.compiler.is_compiling() or conv.bias is None:
            return None
        mixing = self._mixing(conv)
        return None if mixing is None else [mixing, conv.weight.flatten(1), conv.bias]

    def _mixing(self, conv: nn.Conv2d) -> Tensor | None:
        """What mixes a convolution's outputs, if a kernel does."""
        mixing, weights = self.mixing(len(conv.weight), self.wave), [conv.weight]
        weights += [] if conv.bias is None else [conv.bias]
        return mixing if conv.groups == 1 and kernels.fits_sketch(mixing, *weights) else None

    def _of_weights(self, conv: nn.Conv2d, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Weight of what is scored, and its bias, in float32 at least."""
        weight, bias = gathered(conv.weight), None if conv.bias is None else gathered(conv.bias)
        mixed = conv.groups == 1 and self.mixing(len(weight), weight) is not None
        if mixed:
            weight, bias = self.affine_rows(weight, bias)
        return weight.to(dtype, copy=True), bias if bias is None or mixed else bias.clone()

    def _ready(self, conv: nn.Conv2d, dtype: torch.dtype) -> Ready:
        """The same by a kernel, if it fits."""

        def make(once: bool) -> tuple[Tensor, Tensor] | None:
            mixing = self._mixing(conv)
            return None if mixing is None else kernels.convolution_taps(mixing, conv.weight, conv.bias, dtype, once)

        return make

    def _of_image(self, x: Tensor, weight: Tensor, conv: Strided, bias: Tensor | None, at: Tensor | None) -> Tensor:
        """All phases at once, as one product of windows that hold them all, read where the image lies."""
        (stride, _), (k, _) = conv.stride, conv.kernel
        half = kernels.product_dtype(x)  # float32 is more than a choice needs
        half = torch.float16 if half == torch.float32 and not kernels.INTERPRETED else half
        x = kernels.packed(x, half)
        weights = kernels.in_pieces(kernels.all_phases(weight.to(half), stride), x, stride, True)
        parts = kernels.image_phases(x, at, weights, bias, self.wave, k + stride - 1, stride, conv.padding[0])
        return kernels.best_phase(parts, stride, math.prod(x.shape[2:]), self.score.signed, at, x.shape[3])


class MergeAnchor(Anchor):
    """A-PMerge (claim pmergeconv): patch merging is a 2 x 2 convolution of stride 2; m* maximises its output's energy.

    The LayerNorm of the merged patch is folded: with per-token sums, W LN(p) = (W' p - mean W'1) / std + W b, where
    W' = W diag(gain), so that no 4C-wide patch is ever written out. Without a norm (SwinV2 normalises after the
    projection, which would level all energies) the projection itself is scored.

    Shapes: x (B, H, W, C), norm over 4C, reduction 4C -> D, patches flattened as (column, row, channel)
    -> rolled x, offsets (B, 2) in {0, 1}.
    """

    zeros: Tensor

    def __init__(self, *, score: str = "signed", sketch: int = 0) -> None:
        super().__init__(score=score, sketch=sketch)
        self.register_buffer("zeros", torch.zeros(64), persistent=False)  # what a norm would add to each output

    def forward(self, x: Tensor, reduction: nn.Linear, norm: nn.LayerNorm | None = None,
                fast: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
        offset = self.offset(x, reduction, norm, fast)
        return roll(x, offset, (1, 2), within=True), offset

    @torch.no_grad()
    def offset(self, x: Tensor, reduction: nn.Linear, norm: nn.LayerNorm | None = None, fast: bool = False,
               weights: MergeWeights | None = None) -> Tensor:  # fmt: skip
        """``weights`` are those of ``weights``, where they are known already."""
        if not self.score.needs_layer:
            return self.partition(x, (2, 2), fast)
        with self.precision(x, fast):
            x = self.cast(x, fast)
            weights = weights or self.weights(x, [Merging(reduction, norm)])[0]
            kernel, fold, taps = weights.kernel, weights.fold, weights.taps
            if fast and fold is None and kernels.usable(x):  # autocast leaves norms in float32, which products round
                x = x.to(taps.dtype)
            made = taps.ndim == (2 if kernels.fits_token_scores(x, len(kernel), 2, 0) else 3) and taps.dtype == x.dtype
            constant = self.zeros[: len(kernel)] if fold is None else fold.constant
            ready: Ready = (lambda once: (taps.flatten(0, -2), constant)) if made else None
            return self.choose(x.permute(0, 3, 1, 2), kernel, Strided((2, 2), (2, 2), (0, 0)), fold=fold, fast=fast,
                               ready=ready)  # fmt: skip

    @torch.no_grad()
    def weights(self, x: Tensor, mergings: Sequence[Merging],
                made: list[tuple[Tensor, ...]] | None = None) -> list[MergeWeights]:  # fmt: skip
        """What is scored of tokens like x, of its type, and what ``kernels.merged_product`` takes: of all mergings at
        once, for if a kernel makes it that is one launch. ``made`` is what it makes of ``recipe``, where it is known
        already."""
        return self._of_weights(x, mergings, made)

    def recipe(self, x: Tensor, mergings: Sequence[Merging]) -> kernels.Mergings | None:
        """What ``kernels.merging_weights`` takes; None where torch does all."""
        weights = [gathered(reduction.weight) for reduction, *_ in mergings]
        mixing = self.mixing(max(map(len, weights)), weights[0])
        mixing = mixing if min(map(len, weights)) > self.sketch and kernels.fits_sketch(mixing, *weights) else None
        scale = next((dtype for *_, dtype in mergings if dtype is not None), None)
        if mixing is None and scale is None:
            return None
        once = [mixing is not None and kernels.fits_token_scores(x, self.sketch, 2, 0, weight.shape[1] // 4)
                for weight in weights]  # fmt: skip
        affine = [[gathered(weight) for weight in _affine(norm)] for _, norm, _ in mergings]
        gains, biases = map(list, zip(*affine, strict=True)) if affine[0] else ([], [])
        scaled = [dtype is not None for *_, dtype in mergings]
        return kernels.Mergings(weights, mixing, gains, biases, x.dtype, scale, scaled, once)

    def _of_weights(self, x: Tensor, mergings: Sequence[Merging],
                    made: list[tuple[Tensor, ...]] | None = None) -> list[MergeWeights]:  # fmt: skip
        given = self.recipe(x, mergings)
        if given is None:
            return [self._plain(merging, x.dtype) for merging in mergings]
        made = kernels.merging_weights(given) if made is None else made
        result: list[MergeWeights] = []
        for merging, one, (taps, parts, *others) in zip(mergings, given.once, made, strict=True):
            others = [] if merging.scaled is None else others
            if given.mixing is None:
                result.append(MergeWeights(*self._plain(merging, x.dtype)[:2], *others))
                continue
            taps = taps if one else taps[: 4 * len(given.mixing)].unflatten(0, (4, -1))
            sums, constant = parts.unbind(1) if one else parts.sum(0).unbind()
            fold = None if merging.norm is None else Fold(sums, constant, merging.norm.eps)
            result.append(MergeWeights(taps, fold, *others))
        return result

    def _plain(self, merging: Merging, dtype: torch.dtype) -> MergeWeights:
        """What is scored, made by torch."""
        projection, norm = self.rows(gathered(merging.reduction.weight)), merging.norm  # r, 4C
        weight = projection if norm is None else projection * gathered(norm.weight)
        kernel = weight.view(len(weight), 2, 2, -1).permute(0, 3, 2, 1).to(dtype, copy=True)  # r, C, row, column
        if norm is None:
            return MergeWeights(kernel, None)
        return MergeWeights(kernel, Fold(weight.sum(1), (projection * gathered(norm.bias)).sum(1), norm.eps))


def _affine(norm: nn.LayerNorm | None) -> tuple[Tensor, ...]:
    return () if norm is None else (norm.weight, norm.bias)


class WindowAnchor(Anchor):
    """A-WSA (eq. a_wsa): m* = argmax_m || v_m ||_2, v_m[k] the mean token norm in window k of the partition at m.

    The paper's score ties where it should not: it cannot see where in its window a bright token sits, and norms are all
    equal after a LayerNorm at its initial gain. ``signed`` breaks such ties: a token counts with its norm plus a little
    of one fixed direction, and the mean over a window has slightly uneven weights.

    An axis on which the grid is a single window has no partition to choose: there the strongest token, or on one such
    axis the strongest row or column, comes first.

    Shapes: x (B, H, W, C) -> rolled x, offsets (B, 2) in [0, window).
    """

    def forward(self, x: Tensor, window: tuple[int, int], fast: bool = False) -> tuple[Tensor, Tensor]:
        offset = self.offset(x, window, fast)
        return roll(x, offset, (1, 2), within=True), offset

    def offset(self, x: Tensor, window: tuple[int, int], fast: bool = False, moments: Tensor | None = None) -> Tensor:
        """``moments`` (B, 3, H, W) are those of x, where they are known already."""
        return self.beside(x, window, fast, moments, None)[0]

    @torch.no_grad()
    def beside(self, x: Tensor, window: tuple[int, int], fast: bool, moments: Tensor | None,
               mergings: kernels.Mergings | None) -> tuple[Tensor, list[tuple[Tensor, ...]] | None]:  # fmt: skip
        """``offset``; and what ``kernels.merging_weights`` makes of mergings, if that is done in the same launch."""
        square = x[..., 0].float() if moments is None else moments[:, 1]  # its shape alone matters
        if mergings is None or not fast or not kernels.fits_beside(square, window, mergings):
            return self.partition(x, window, fast, moments), None
        with self.precision(x, fast=False):
            _, square, toward = self.moments(x) if moments is None else moments.unbind(1)
            gain, window_weights = self.gain(x), self.window_weights
            return kernels.best_window_beside(square, toward if gain else square, window_weights, list(window), gain,
                                              mergings)  # fmt: skip
