"""Depthwise convolutions of channels-last tokens, and CvT's projections, which are one with a norm behind it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from .dispatch import op, product_dtype
from .roll import circular_pad, convolve, roll
from .weights import is_plain, kernel_weights, normed_kernel_weights

__all__ = ["as_tokens", "depthwise", "depthwise_by", "kernel_weights", "project", "split_class_tokens"]


def depthwise(x: Tensor, weight: Tensor, stride: int, circular: bool, origin: Tensor | None = None) -> Tensor:
    """Depthwise convolution of tokens, padded by k // 2 with zeros or (``circular``) with the opposite side. With
    ``origin`` (B, 2) in [0, side), the first output of a sample is there: nothing has to be rolled for it.

    Like ``F.conv2d``, it computes in autocast's dtype where autocast is on.

    Shapes: x (B, H, W, C), weight (k, k, C), k odd -> (B, ceil(H / stride), ceil(W / stride), C).
    """
    return _depthwise(x.to(product_dtype(x)), weight, stride, circular, origin)


def depthwise_by(conv: nn.Conv2d, x: Tensor, origin: Tensor | None = None) -> Tensor:
    """``depthwise`` by the weights of ``conv``, or by ``conv`` itself where it is more than them."""
    if is_plain(conv):
        return depthwise(x, kernel_weights(conv.weight)[0], conv.stride[0], conv.padding_mode == "circular", origin)
    x = x if origin is None else roll(x, origin, (1, 2), within=True)
    return convolve(conv, x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def _fits_depthwise(x: Tensor, weight: Tensor, stride: int, circular: bool, origin: Tensor | None) -> bool:
    whole = x.shape[1] % stride == x.shape[2] % stride == 0 if circular else origin is None  # cells are all tokens
    return kernels.fits_depthwise_kernel(x, weight.shape[:2]) and (whole or not torch.is_grad_enabled())


def _depthwise_kernel(x: Tensor, weight: Tensor, stride: int, circular: bool, origin: Tensor | None) -> Tensor:
    return kernels.depthwise_kernel(x, weight.float().contiguous(), origin, stride, circular)


@op(kernel=_depthwise_kernel, fits=_fits_depthwise)
def _depthwise(x: Tensor, weight: Tensor, stride: int, circular: bool, origin: Tensor | None) -> Tensor:
    x = x if origin is None else roll(x, origin, (1, 2), within=True)
    x, pad = x.permute(0, 3, 1, 2), weight.shape[0] // 2
    if circular:
        x, pad = circular_pad(x, (pad, pad, pad, pad)), 0
    elif torch.is_grad_enabled() and not x.is_cuda:  # see circular_pad
        x = x.contiguous()
    kernel = weight.to(x.dtype).permute(2, 0, 1)[:, None]  # C, 1, k, k
    return F.conv2d(x, kernel, stride=stride, padding=pad, groups=x.shape[1]).permute(0, 2, 3, 1)


def split_class_tokens(x: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Class tokens (B, n, C) and the grid (B, H, W, C) of tokens (B, n + H W, C), as ``project`` reads them."""
    learning = torch.is_grad_enabled()
    x = x if learning else x.to(product_dtype(x))  # once, and then read in place
    cls_token, x = x.split([x.shape[1] - size[0] * size[1], size[0] * size[1]], 1)
    x = x.unflatten(1, size)
    return cls_token, x.contiguous() if learning else x  # the compiler writes it so at once


def as_tokens(parameter: Tensor, tokens: Tensor) -> Tensor:
    """A parameter that goes beside tokens: in inference of their type, since autocast would make all float32."""
    return parameter if torch.is_grad_enabled() else parameter.to(tokens.dtype)


def _fits_project(x: Tensor, cls_token: Tensor, q: Any, k: Any, v: Any, origin: Tensor | None) -> bool:
    convs, norms = [part.conv for part in (q, k, v)], [part.norm for part in (q, k, v)]
    return all(map(is_plain, convs + norms)) and kernels.fits_depthwise_norm(x, convs, norms)


def _project(x: Tensor, cls_token: Tensor, q: Any, k: Any, v: Any,
             origin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """In inference: the norm is folded into the convolution, and keys and values are convolved in one pass."""
    parts = q, k, v
    weights = normed_kernel_weights([part.conv for part in parts], [part.norm for part in parts])
    x, circular = x.to(product_dtype(x)), q.conv.padding_mode == "circular"
    lead = cls_token.to(x.dtype)
    (queries,) = kernels.depthwise_norm_kernel(x, lead, weights[:1], None, 1, circular)
    keys, values = kernels.depthwise_norm_kernel(x, lead, weights[1:], origin, k.conv.stride[0], circular)
    return q.proj(queries), k.proj(keys), v.proj(values)


@op(kernel=_project, fits=_fits_project)
def project(x: Tensor, cls_token: Tensor, q: Any, k: Any, v: Any,
            origin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values by CvT's convolutional projections, modules each; keys and values begin at ``origin``.

    Shapes: x (B, H, W, C), class tokens (B, n, C) -> (B, n + H W, C) and twice (B, n + H/s W/s, C).
    """
    return q(x, cls_token, None), k(x, cls_token, origin), v(x, cls_token, origin)
