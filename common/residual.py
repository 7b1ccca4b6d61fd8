"""The residual stream: what layers add to tokens."""

from torch import Tensor, nn

from . import kernels

__all__ = ["add_norm"]


def add_norm(x: Tensor, update: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """x + update, and its norm: (..., C) each, in one pass if a kernel fits."""
    if kernels.fits_add_norm(x, update, norm.weight):
        return kernels.add_norm(x, update, norm.weight, norm.bias, norm.eps, kernels.product_dtype(x))
    x = x + update
    return x, norm(x)
