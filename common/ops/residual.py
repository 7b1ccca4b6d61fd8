"""The residual stream: what layers add to tokens, and its norm."""

import torch
from torch import Tensor, nn

from .. import kernels
from .dispatch import op, product_dtype, usable
from .roll import roll
from .weights import is_plain

__all__ = ["add_norm", "materialize", "norm_ahead"]


def _fits(x: Tensor, update: Tensor, norm: nn.LayerNorm, origin: Tensor | None = None) -> bool:
    return is_plain(norm) and kernels.fits_add_norm(x, update, norm.weight)


def _add_norm(x: Tensor, update: Tensor, norm: nn.LayerNorm, origin: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return kernels.add_norm(x, update, norm.weight, norm.bias, norm.eps, product_dtype(x), origin)


@op(kernel=_add_norm, fits=_fits)
def add_norm(x: Tensor, update: Tensor, norm: nn.LayerNorm, origin: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x + update, and its norm: (..., C) each. With ``origin`` (B, 2) in [0, side), tokens x (B, H, W, C) are read from
    there on."""
    x = (x if origin is None else roll(x, origin, (1, 2), within=True)) + update
    return x, norm(x)


def _fits_ahead(x: Tensor, norm: nn.LayerNorm) -> bool:
    return is_plain(norm) and kernels.fits_add_norm(x, None, norm.weight)


def _norm_ahead(x: Tensor, norm: nn.LayerNorm) -> Tensor | None:
    return kernels.add_norm(x, None, norm.weight, norm.bias, norm.eps, product_dtype(x), None)[1]


@op(kernel=_norm_ahead, fits=_fits_ahead)
def norm_ahead(x: Tensor, norm: nn.LayerNorm) -> Tensor | None:
    """The norm of x by a kernel, else None: for the first of several blocks, where a compiler would fuse it with all
    that comes before, and take longer."""
    return None


def materialize(x: Tensor) -> Tensor:
    """x, for several kernels to read. A compiler that has put off the sum that x is would write it for each of them;
    what is asked for by its strides it writes once."""
    put_off = torch.compiler.is_compiling() and not torch.is_grad_enabled() and x.is_contiguous()
    return x.as_strided(x.shape, x.stride()) if put_off and usable(x) else x
