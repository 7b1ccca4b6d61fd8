"""The best phase of the layer behind an anchor: the plain form scores all phases, kernels a few fixed combinations of
the layer's outputs in one or two passes over what comes in."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from .choice import best_offset, moments
from .dispatch import op, usable
from .roll import roll
from .strided import Strided
from .weights import gathered

__all__ = ["ConvEnergy", "Energy", "Scoring", "affine_combined", "best_of_tokens", "best_phase", "combination",
           "image_needs"]  # fmt: skip

Taps = tuple[Tensor, Tensor]
"""Weights of what is scored, as kernels read them, and what is added to the sum of all."""


class Scoring(Protocol):
    """What kernels know of an anchor: whether ties are broken, the fixed direction that does, and the fixed
    combinations of outputs that are scored (``sketch`` of them, 0 for all outputs)."""

    direction: Tensor
    directions: Tensor
    zeros: Tensor
    sketch: int

    @property
    def signed(self) -> bool: ...

    def combined(self, weight: Tensor) -> Tensor: ...


class Energy(Protocol):
    """A layer, as kernels score it."""

    def fits(self, x: Tensor, origin: Tensor | None) -> bool:
        """Whether they do, for tokens or an image (B, H, W, C)."""
        ...

    def best(self, x: Tensor, origin: Tensor | None, prepared: Any) -> Tensor:
        """Where its best phase begins (B, 2); ``prepared`` is what has been made of its weights already, or None."""
        ...


def _fits(x: Tensor, scores: Callable[[Tensor], Tensor], energy: Energy | None, origin: Tensor | None = None,
          prepared: Any = None) -> bool:  # fmt: skip
    return energy is not None and energy.fits(x, origin)


def _best(x: Tensor, scores: Callable[[Tensor], Tensor], energy: Energy | None, origin: Tensor | None = None,
          prepared: Any = None) -> Tensor:  # fmt: skip
    return energy.best(x, origin, prepared)  # type: ignore[union-attr]


@op(kernel=_best, fits=_fits)
def best_phase(x: Tensor, scores: Callable[[Tensor], Tensor], energy: Energy | None, origin: Tensor | None = None,
               prepared: Any = None) -> Tensor:  # fmt: skip
    """m* = argmax_m scores(x)[m] of tokens x (B, H, W, C), read from ``origin`` (B, 2) on: (B, 2), in their own places.

    ``energy`` is the same for kernels, or None where they must not score: they do so in the precision of the model.
    """
    if origin is not None:  # an image, which lies in memory channel by channel
        x = roll(x.permute(0, 3, 1, 2), origin, within=True).permute(0, 2, 3, 1)
    return best_offset(scores(x), origin, (x.shape[1], x.shape[2]))


def combination(scoring: Scoring, outputs: int, like: Tensor) -> Tensor | None:
    """(r, D) weights of the r combinations of D outputs that are scored; None to score them all."""
    if not scoring.sketch or outputs <= scoring.sketch:
        return None
    return scoring.directions[:, :outputs].to(like)


def affine_combined(scoring: Scoring, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Combinations of a weight (D, ...) and of the bias (D,) that goes with it, or both as they are."""
    projection = combination(scoring, len(weight), weight)
    if projection is None:
        return weight, bias
    if bias is not None and kernels.fits_sketch(projection, weight, bias):
        mixed, constant = kernels.sketched(projection, weight.flatten(1), bias)
        return mixed.unflatten(1, weight.shape[1:]), constant
    return scoring.combined(weight), None if bias is None else scoring.combined(bias)


def best_of_tokens(x: Tensor, scoring: Scoring, outputs: int, conv: Strided, taps: Callable[[bool], Taps],
                   colsum: Callable[[], Tensor] | None = None, eps: float = 0.0) -> Tensor:  # fmt: skip
    """The best phase of a convolution of tokens (B, H, W, C), by one kernel (taps are made for one pass) or by a
    product and one. With ``colsum``, of normalised patches: what each output loses of their mean."""
    (_, h, w, c), (k, _), (stride, _), (p, _) = x.shape, *conv
    paired = kernels.fits_token_scores(x, outputs, k, p)
    weights, constant = taps(paired)
    sums, total, square = None, None, None
    if colsum is not None:
        total, square, _ = moments(x, scoring.direction)
        sums = colsum()
    if paired:
        return kernels.best_of_tokens(x, weights, constant, scoring.direction, sums, total, square, k, stride, eps,
                                      scoring.signed)  # fmt: skip
    y = F.linear(x, weights)  # every token by every tap, B, H, W, k k r
    parts = kernels.token_energies(y, constant, scoring.direction, sums, total, square, c, k, p, stride, eps)
    return kernels.best_phase(parts, stride, h * w, scoring.signed)


def plain_taps(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, paired: bool) -> Taps:
    """Of weights (r, C, k, k): (taps, C), a tap being a row, a column and an output, or as ``token_scores`` reads
    them."""
    constant = torch.zeros(len(weight), device=weight.device) if bias is None else bias.float().contiguous()
    if paired:
        return kernels.in_one_pass(weight.to(dtype)), constant
    taps = weight.to(dtype).permute(2, 3, 0, 1).flatten(0, 2)
    return F.pad(taps, (0, 0, 0, -len(taps) % 8)) if len(taps) % 8 else taps.clone(), constant  # in eights, for GPUs


class ConvEnergy:
    """Of a strided convolution of tokens, or of an image, all of whose phases are one product of windows that hold them
    all, read where the image lies."""

    def __init__(self, conv: nn.Conv2d, scoring: Scoring) -> None:
        self.conv, self.strided, self.scoring = conv, Strided.of(conv), scoring
        outputs = len(conv.weight)
        self.outputs = min(scoring.sketch or outputs, outputs)

    def fits(self, x: Tensor, origin: Tensor | None) -> bool:
        shape = self.outputs, self.conv.weight.shape[1], *self.strided.kernel
        tokens = origin is None and kernels.fits_token_kernel(x.permute(0, 3, 1, 2), shape, self.strided.stride)
        return tokens or self.fits_image(x.permute(0, 3, 1, 2))

    def fits_image(self, x: Tensor) -> bool:
        (k, _), (s, _), _ = self.strided
        return kernels.fits_image_phases(x, self.outputs, k, s)

    def packed_dtype(self, x: Tensor) -> torch.dtype | None:
        """The type in which an image (B, C, H, W) is to be packed, once for this and in inference for the convolution
        too; None to leave it as it is."""
        half, fits = kernels.product_dtype(x), self.fits_image(x)
        if fits and not torch.is_grad_enabled():
            fits = kernels.fits_image_tokens(x, self.conv.weight, self.strided.stride[0], half)
        return half if fits and (half in (torch.bfloat16, torch.float16) or kernels.INTERPRETED) else None

    def sketch(self) -> list[Tensor] | None:
        """What ``kernels.sketched`` takes to make what is scored, in a compiled graph; None where it is made later."""
        if not torch.compiler.is_compiling() or self.conv.bias is None:
            return None
        projection = self.projection()
        return None if projection is None else [projection, self.conv.weight.flatten(1), self.conv.bias]

    def projection(self) -> Tensor | None:
        """What combines the outputs, if a kernel does."""
        conv, projection = self.conv, combination(self.scoring, len(self.conv.weight), self.scoring.direction)
        weights = [conv.weight] if conv.bias is None else [conv.weight, conv.bias]
        return projection if conv.groups == 1 and kernels.fits_sketch(projection, *weights) else None

    def combined(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Weight (r, C, k, k) of what is scored, and its bias, in float32 at least."""
        conv = self.conv
        weight, bias = gathered(conv.weight), None if conv.bias is None else gathered(conv.bias)
        if conv.groups == 1:
            weight, bias = affine_combined(self.scoring, weight, bias)
        return weight.to(dtype), bias

    def best(self, x: Tensor, origin: Tensor | None, prepared: Any) -> Tensor:
        if self.fits_image(x.permute(0, 3, 1, 2)):
            return self.best_of_image(x.permute(0, 3, 1, 2), origin, prepared)

        def taps(paired: bool) -> Taps:
            projection = self.projection()
            if projection is not None:
                return kernels.convolution_taps(projection, self.conv.weight, self.conv.bias, x.dtype, paired)
            return plain_taps(*self.combined(x.dtype), x.dtype, paired)

        return best_of_tokens(x, self.scoring, self.outputs, self.strided, taps)

    def best_of_image(self, x: Tensor, origin: Tensor | None, prepared: list[Tensor] | None) -> Tensor:
        (k, _), (stride, _), (p, _) = self.strided
        if prepared is None:
            weight, bias = self.combined(x.dtype)
        else:
            weight, bias = prepared[0].unflatten(1, self.conv.weight.shape[1:]).to(x.dtype), prepared[1]
        half = kernels.product_dtype(x)  # float32 is more than a choice needs
        half = torch.float16 if half == torch.float32 and not kernels.INTERPRETED else half
        x = kernels.packed(x, half)
        weights = kernels.in_pieces(kernels.all_phases(weight.to(half), stride), x, stride, True)
        parts = kernels.image_phases(x, origin, weights, bias, self.scoring.direction, k + stride - 1, stride, p)
        return kernels.best_phase(parts, stride, math.prod(x.shape[2:]), self.scoring.signed, origin, x.shape[3])


def image_needs(x: Tensor, energy: ConvEnergy | None) -> tuple[torch.dtype | None, list[Tensor] | None]:
    """The type in which kernels want images (B, C, H, W) packed, and weights to combine, as those are read: None each
    where nothing is scored by them."""
    packed = energy.packed_dtype(x) if energy is not None and usable(x) else None
    return packed, None if energy is None or packed is None else energy.sketch()
