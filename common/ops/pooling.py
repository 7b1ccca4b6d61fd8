"""MViTv2's poolings: of queries, keys and values head by head, of the skip, and positions beside queries."""

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from .depthwise import depthwise, depthwise_by
from .dispatch import op
from .residual import materialize
from .roll import roll
from .weights import is_plain, kernel_weights

__all__ = ["circular_max", "pool_heads", "pool_maximum", "with_positions"]


def _fits_pool(qkv: Tensor, pools: list[nn.Conv2d], norms: list[nn.LayerNorm], heads: int, origin: Tensor | None,
               tail: Tensor) -> bool:  # fmt: skip
    plain = all(map(is_plain, (*pools, *norms)))
    return plain and kernels.fits_pooled(qkv.chunk(3, -1)[0], pools[0].kernel_size, norms[0].weight)


def _pool_kernel(qkv: Tensor, pools: list[nn.Conv2d], norms: list[nn.LayerNorm], heads: int, origin: Tensor | None,
                 tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    weights = materialize(kernel_weights(*(pool.weight for pool in pools)))
    pooled, tails = [], (None, tail, None)
    unrolled = torch.compiler.is_compiling()  # else a model's first output would wait for it: eager time is launches
    for x, weight, pool, norm, extra in zip(qkv.chunk(3, -1), weights, pools, norms, tails, strict=True):
        stride, circular = pool.stride[0], pool.padding_mode == "circular"
        affine = norm.weight, norm.bias, norm.eps
        pooled.append(kernels.pooled(x, weight, *affine, stride, circular, extra, origin, unrolled))
    q, k, v = pooled
    return q, k, v


@op(kernel=_pool_kernel, fits=_fits_pool)
def pool_heads(qkv: Tensor, pools: list[nn.Conv2d], norms: list[nn.LayerNorm], heads: int, origin: Tensor | None,
               tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Pool queries, keys and values, every head by the same depthwise convolution, and normalise them. Pooled grids
    begin at ``origin``. Keys get the channels of ``tail`` (H/s W/s, n) beside theirs, values zeros or nothing.

    Shapes: qkv (B, H, W, 3 heads d) -> (B, heads, H/s W/s, d), d + n for keys, d or d + n for values.
    """
    plain, pooled = all(map(is_plain, pools)), []
    weights = materialize(kernel_weights(*(pool.weight for pool in pools), repeats=heads)) if plain else pools
    for x, weight, pool, norm in zip(qkv.chunk(3, -1), weights, pools, norms, strict=True):
        if plain:
            x = depthwise(x, weight, pool.stride[0], pool.padding_mode == "circular", origin).unflatten(3, (heads, -1))
        else:  # a head after another: only the pooling itself knows what it computes
            x = torch.stack([depthwise_by(pool, head, origin) for head in x.chunk(heads, -1)], 3)
        pooled.append(norm(x).to(x.dtype).flatten(1, 2).transpose(1, 2))
    q, k, v = pooled
    k = torch.cat([k, tail.to(k).expand(*k.shape[:2], -1, -1)], -1)
    return q, k, F.pad(v, (0, tail.shape[1]))  # flash attention wants all as wide; cuDNN does not


def _fits_positions(q: Tensor, by_row: Tensor, by_column: Tensor) -> bool:
    return kernels.fits_positioned(q)


def _positions_kernel(q: Tensor, by_row: Tensor, by_column: Tensor) -> Tensor:
    return kernels.positioned(q, by_row.to(q.dtype), by_column.to(q.dtype))


@op(kernel=_positions_kernel, fits=_fits_positions)
def with_positions(q: Tensor, by_row: Tensor, by_column: Tensor) -> Tensor:
    """Queries, and beside them their products with a vector per row and per column of keys.

    Shapes: q (B, heads, H W, d), by_row (H, m, d), by_column (W, n, d) -> (B, heads, H W, d + m + n).
    """
    grid = q.unflatten(2, (len(by_row), len(by_column)))  # B, heads, H, W, d
    along_h = torch.einsum("bnhwd,hkd->bnhwk", grid, by_row)
    along_w = torch.einsum("bnhwd,wkd->bnhwk", grid, by_column)
    return torch.cat([q, torch.cat([along_h, along_w], -1).flatten(2, 3).to(q.dtype)], -1)


def _fits_maximum(x: Tensor, stride: int, circular: bool, origin: Tensor | None) -> bool:
    return origin is not None and circular and kernels.fits_pooled_maximum(x, stride)


def _maximum_kernel(x: Tensor, stride: int, circular: bool, origin: Tensor | None) -> Tensor:
    return kernels.pooled_maximum(x, origin)  # type: ignore[arg-type]


@op(kernel=_maximum_kernel, fits=_fits_maximum)
def pool_maximum(x: Tensor, stride: int, circular: bool, origin: Tensor | None) -> Tensor:
    """Maximum over s + 1 tokens a side at stride s, from ``origin`` on: (B, H, W, C) -> (B, H/s, W/s, C)."""
    x = x if origin is None else roll(x, origin, (1, 2), within=True)
    if circular:
        return circular_max(circular_max(x, stride, 1), stride, 2)
    return F.max_pool2d(x.permute(0, 3, 1, 2), stride + 1, stride, stride // 2).permute(0, 2, 3, 1)


def circular_max(x: Tensor, stride: int, dim: int) -> Tensor:
    """Maximum over the s + 1 places around every s-th along ``dim``, on the torus: (..., side, ...) -> side / s.

    Of the window that starts s // 2 places before s i, those places lie in the group of s before, the others in group
    i: maxima of slices, which the compiler makes one pass without a padded copy.
    """
    before = stride // 2
    places = x.unflatten(dim, (-1, stride)).unbind(dim + 1)
    here, last = reduce(torch.maximum, places[: stride + 1 - before]), reduce(torch.maximum, places[stride - before :])
    return torch.maximum(here, last.roll(1, dim))
