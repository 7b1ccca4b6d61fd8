"""Patch merging: 2 x 2 tokens side by side, normalised, projected."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import kernels
from .dispatch import op, product_dtype
from .merge_energy import MergeWeights, Merging, Mergings, merging_dtype
from .roll import roll
from .weights import is_plain

__all__ = ["merge_patches", "reduce_patches"]


def _fits_merge(x: Tensor, origin: Tensor | None = None, norm: nn.LayerNorm | None = None) -> bool:
    plain = norm is None or (is_plain(norm) and norm.elementwise_affine)
    return origin is not None and plain and kernels.fits_merge_kernel(x)


def _merge_kernel(x: Tensor, origin: Tensor | None = None, norm: nn.LayerNorm | None = None) -> Tensor:
    gain, bias, eps = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    return kernels.rolled_merge(x, origin, gain, bias, eps, product_dtype(x))  # type: ignore[arg-type]


@op(kernel=_merge_kernel, fits=_fits_merge)
def merge_patches(x: Tensor, origin: Tensor | None = None, norm: nn.LayerNorm | None = None) -> Tensor:
    """Concatenate 2 x 2 tokens, normalised by ``norm``: (B, H, W, C) -> (B, H/2, W/2, 4C) as (column, row, channel).

    ``origin`` (B, 2) in [0, side) is where each image begins, if not at (0, 0). Odd sides are padded.
    """
    x = x if origin is None else roll(x, origin, (1, 2), within=True)
    x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2)) if x.shape[1] % 2 or x.shape[2] % 2 else x
    b, h, w, c = x.shape
    x = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 4, 2, 5).flatten(3)
    return x if norm is None else norm(x)


def _fits_reduce(x: Tensor, origin: Tensor | None, norm: nn.LayerNorm | None, reduction: nn.Linear,
                 weights: MergeWeights | None = None, direction: Tensor | None = None) -> bool:  # fmt: skip
    return origin is not None and (torch.is_grad_enabled() or merging_dtype(x, norm, reduction) is not None)


def _reduce(x: Tensor, origin: Tensor | None, norm: nn.LayerNorm | None, reduction: nn.Linear,
            weights: MergeWeights | None = None,
            direction: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """In inference one kernel. In training patches are made again for the backward pass, not remembered."""
    if torch.is_grad_enabled():
        return checkpoint(lambda t: reduction(merge_patches(t, origin, norm)), x, use_reentrant=False,
                          preserve_rng_state=False), None  # fmt: skip
    x, eps, sums, squares = x.to(product_dtype(x)), 0.0, None, None
    if norm is not None:
        eps = norm.eps
        if torch.compiler.is_compiling():  # the anchor has these sums already, and the compiler finds them
            sums, squares = x.float().sum(-1), x.float().square().sum(-1)
        else:
            sums, squares, _ = kernels.token_moments(x, norm.weight).unbind(1)
    if weights is None or weights.scaled is None:
        weights = Mergings(x, [Merging(reduction, norm)], None).take(reduction)
    if weights is None or weights.scaled is None or origin is None:  # the kernel that makes them has failed
        return reduction(merge_patches(x, origin, norm)), None
    folded = None if norm is None else weights.folded
    tokens, moments = kernels.merged_product(x, origin, weights.scaled, folded, sums, squares, eps, direction)
    return tokens, moments if len(moments) else None


@op(kernel=_reduce, fits=_fits_reduce)
def reduce_patches(x: Tensor, origin: Tensor | None, norm: nn.LayerNorm | None, reduction: nn.Linear,
                   weights: MergeWeights | None = None,
                   direction: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``reduction`` of ``merge_patches``: (B, H, W, C) -> (B, H/2, W/2, D).

    ``weights`` are what has been made of these two modules' for their anchor. With ``direction`` also the results'
    moments (``ops.choice.moments``), where a kernel has them for little, else None.
    """
    return reduction(merge_patches(x, origin, norm)), None
