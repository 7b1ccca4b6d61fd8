"""The residual stream: what layers add to tokens."""

from torch import Tensor, nn

from . import kernels

__all__ = ["add_norm", "norm_ahead"]


def add_norm(x: Tensor, update: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """x + update, and its norm: (..., C) each, in one pass if a kernel fits."""
    if kernels.fits_add_norm(x, update, norm.weight):
        return kernels.add_norm(x, update, norm.weight, norm.bias, norm.eps, kernels.product_dtype(x))
    x = x + update
    return x, norm(x)


def norm_ahead(x: Tensor, norm: nn.LayerNorm) -> Tensor | None:
    """The norm of x by a kernel, if it fits, else None: for the first of several blocks, where a compiler would fuse it
    with all that comes before, and take longer."""
    if not kernels.fits_add_norm(x, None, norm.weight):
        return None
    return kernels.add_norm(x, None, norm.weight, norm.bias, norm.eps, kernels.product_dtype(x))[1]
