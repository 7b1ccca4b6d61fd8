"""Patch merging: 2 x 2 tokens side by side, normalised, projected."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import kernels
from .dispatch import op, product_dtype
from .roll import roll

__all__ = ["Fold", "MergeWeights", "Merging", "merge_patches", "reduce_patches", "reduction_dtype"]


class Fold(NamedTuple):
    """A LayerNorm of the patch, folded into the convolution: (W' p - mean ``sums``) / std + ``constant``, (r,) each, or
    (parts, r) for a kernel that adds these up."""

    sums: Tensor
    constant: Tensor
    eps: float

    def whole(self) -> "Fold":
        return self if self.sums.ndim == 1 else Fold(self.sums.sum(0), self.constant.sum(0), self.eps)


class Merging(NamedTuple):
    """A patch merging, and the type that ``kernels.merged_product`` multiplies in, if that is how it is taken."""

    reduction: nn.Linear
    norm: nn.LayerNorm | None
    scaled: torch.dtype | None = None


class MergeWeights(NamedTuple):
    """What a merging anchor scores, with the norm before it; and what the merging itself multiplies by, if a kernel has
    made both in one pass: see ``kernels.merging_weights``.

    Shapes: taps (r, C, 2, 2) or, from that kernel, (4, r, C) or, for one pass, (2 C, 32).
    """

    taps: Tensor
    fold: Fold | None
    scaled: Tensor | None = None
    folded: Tensor | None = None

    @property
    def kernel(self) -> Tensor:
        """(r, C, 2, 2)"""
        if self.taps.ndim == 4:
            return self.taps
        if self.taps.ndim == 3:
            return self.taps.unflatten(0, (2, 2)).permute(2, 3, 0, 1)
        return self.taps.view(2, -1, 2, 4, 4)[0, :, :, 2:].permute(3, 0, 1, 2)


def _fits_merge(x: Tensor, offset: Tensor | None = None, norm: nn.LayerNorm | None = None) -> bool:
    return offset is not None and (norm is None or norm.elementwise_affine) and kernels.fits_merge_kernel(x)


def _merge_kernel(x: Tensor, offset: Tensor | None = None, norm: nn.LayerNorm | None = None) -> Tensor:
    gain, bias, eps = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    return kernels.rolled_merge(x, offset, gain, bias, eps, product_dtype(x))  # type: ignore[arg-type]


@op(kernel=_merge_kernel, fits=_fits_merge)
def merge_patches(x: Tensor, offset: Tensor | None = None, norm: nn.LayerNorm | None = None) -> Tensor:
    """Concatenate 2 x 2 tokens, normalised by ``norm``: (B, H, W, C) -> (B, H/2, W/2, 4C) as (column, row, channel).

    ``offset`` (B, 2) in [0, side) is where each image begins, if not at (0, 0). Odd sides are padded.
    """
    x = x if offset is None else roll(x, offset, (1, 2), within=True)
    x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2)) if x.shape[1] % 2 or x.shape[2] % 2 else x
    b, h, w, c = x.shape
    x = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 4, 2, 5).flatten(3)
    return x if norm is None else norm(x)


def reduction_dtype(x: Tensor, norm: nn.LayerNorm | None, reduction: nn.Linear) -> torch.dtype | None:
    """The type ``reduce_patches`` multiplies in if it is one kernel: in inference, half precision, with few outputs."""
    dtype = product_dtype(x)
    plain = norm is None or (norm.elementwise_affine and x.dtype == dtype)  # a mean must not be rounded
    plain = plain and reduction.bias is None and kernels.fits_merged_product(x, reduction.weight, dtype)
    return dtype if plain else None


def reduce_patches(x: Tensor, offset: Tensor | None, norm: nn.LayerNorm | None, reduction: nn.Linear,
                   weights: MergeWeights | None = None,
                   wave: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``reduction`` of ``merge_patches``: (B, H, W, C) -> (B, H/2, W/2, D). In inference one kernel, if it fits.

    ``weights`` are what the anchor has made of these two modules'. With ``wave`` also the results' moments
    (``kernels.token_moments``), where that kernel has them for little, else None.
    """
    if offset is not None and kernels.usable(x) and torch.is_grad_enabled():  # patches are made again, not remembered
        return checkpoint(lambda t: reduction(merge_patches(t, offset, norm)), x, use_reentrant=False,
                          preserve_rng_state=False), None  # fmt: skip
    dtype = reduction_dtype(x, norm, reduction)
    if offset is None or dtype is None:
        return reduction(merge_patches(x, offset, norm)), None
    x, eps, gain, bias, sums, squares = x.to(dtype), 0.0, None, None, None, None
    if norm is not None:
        eps, gain, bias = norm.eps, norm.weight, norm.bias
        if torch.compiler.is_compiling():  # the anchor has these sums already, and the compiler finds them
            sums, squares = x.float().sum(-1), x.float().square().sum(-1)
        else:
            sums, squares, _ = kernels.token_moments(x, norm.weight).unbind(1)
    scaled, folded = (None, None) if weights is None else weights[2:]
    if scaled is None:
        affine: list[list[Tensor]] = [[] if tensor is None else [tensor] for tensor in (gain, bias)]
        alone = kernels.Mergings([reduction.weight], None, affine[0], affine[1], dtype, dtype, [True], [False])
        scaled, folded = kernels.merging_weights(alone)[0][2:]
    folded = None if norm is None else folded
    tokens, moments = kernels.merged_product(x, offset, scaled, folded, sums, squares, eps, wave)
    return tokens, moments if len(moments) else None
