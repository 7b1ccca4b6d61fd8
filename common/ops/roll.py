"""Rolls on the torus, one offset per sample, and circular padding: one indexed read each, forward and backward.

``roll(x, o)[h] = x[h + o]``, indices modulo the side.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from .dispatch import forwards, op, usable
from .strided import bare
from .weights import is_plain, weight_of

__all__ = ["circular_pad", "convolve", "reads_from_origin", "roll"]


def _gather(x: Tensor, offset: Tensor, dims: tuple[int, int]) -> Tensor:
    """Read ``x`` at positions moved by ``offset`` in [0, side]: one indexed read, no wrap-around copies."""
    moved = []
    for d, o in zip(dims, offset.unbind(1), strict=True):
        i = torch.arange(x.shape[d], device=x.device) + o[:, None]
        moved.append(torch.where(i < x.shape[d], i, i - x.shape[d]))  # B, side; cheaper than a remainder
    place = moved[0][:, :, None] * x.shape[dims[1]] + moved[1][:, None]  # B, H, W
    if dims == (x.ndim - 2, x.ndim - 1):  # images
        place = place.view(x.shape[0], *[1] * (x.ndim - 3), -1).expand(*x.shape[:-2], -1)
        return x.flatten(-2).gather(-1, place).unflatten(-1, x.shape[-2:])
    x = x.movedim(dims, (1, 2))  # tokens: what follows the sides is read whole
    place = place + (x.shape[1] * x.shape[2] * torch.arange(x.shape[0], device=x.device))[:, None, None]
    return x.flatten(0, 2).index_select(0, place.flatten()).view(x.shape).movedim((1, 2), dims)


class _Roll(torch.autograd.Function):
    """Per-sample roll. Its backward is the opposite roll: again one gather, where autograd would scatter."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, offset: Tensor, dims: tuple[int, int]) -> Tensor:
        return _gather(x, offset, dims)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, offset, ctx.dims = inputs
        ctx.save_for_backward(offset)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (offset,) = ctx.saved_tensors
        sides = torch.stack([torch.full_like(o, grad.shape[d]) for o, d in zip(offset.T, ctx.dims, strict=True)], 1)
        return _Roll.apply(grad, sides - offset, ctx.dims), None, None


def _fits(x: Tensor, offset: Tensor, dims: tuple[int, int] = (-2, -1), within: bool = False) -> bool:
    tokens = [d % x.ndim for d in dims] == [1, 2]
    return tokens and offset.shape == (x.shape[0], 2) and kernels.fits_roll_kernel(x)


def _rolled(x: Tensor, offset: Tensor, dims: tuple[int, int] = (-2, -1), within: bool = False) -> Tensor:
    return kernels.rolled(x, offset if within else _wrapped(offset, x.shape[1], x.shape[2]), 0)


def _wrapped(offset: Tensor, height: int, width: int) -> Tensor:
    return torch.stack([offset[:, 0] % height, offset[:, 1] % width], 1)


@op(kernel=_rolled, fits=_fits)
def roll(x: Tensor, offset: Tensor, dims: tuple[int, int] = (-2, -1), within: bool = False) -> Tensor:
    """Roll every sample by its own offset: ``y[b, h, w] = x[b, h + offset[b, 0], w + offset[b, 1]]`` on the torus.

    Shapes: x (B, ..., H, W, ...) with the sides at ``dims``; offset (B, 2), integer, any sign or, with ``within``,
    known to lie in [0, side), which saves a division.
    """
    h, w = (d % x.ndim for d in dims)
    if not 0 < h < w:
        raise ValueError(
            f"roll needs two increasing spatial dims after the batch, got dims={dims} for {x.ndim}-d input"
        )
    if offset.shape != (x.shape[0], 2):
        raise ValueError(f"roll needs one (row, column) offset per sample, shape {(x.shape[0], 2)}, "
                         f"got {tuple(offset.shape)}")  # fmt: skip
    offset = offset if within else _wrapped(offset, x.shape[h], x.shape[w])
    differentiable = torch.is_grad_enabled() and x.requires_grad and not forwards()
    return _Roll.apply(x, offset, (h, w)) if differentiable else _gather(x, offset, (h, w))


def reads_from_origin(x: Tensor, inference: bool = False) -> bool:
    """Whether the kernels that take tokens (B, H, W, C) read each sample from its own origin on, so that nothing has to
    be moved. ``inference``: they do so for no gradient."""
    return usable(x) and not (inference and torch.is_grad_enabled())


class _CircularPad(torch.autograd.Function):
    """Circular padding as one indexed read. Its backward adds the borders to the opposite sides: no scatter."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, pad: tuple[int, int, int, int]) -> Tensor:
        return _around(x, pad)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, ctx.pad = inputs

    @staticmethod
    def backward(ctx, grad: Tensor):
        for dim, (before, after) in ((-1, ctx.pad[:2]), (-2, ctx.pad[2:])):
            side = grad.shape[dim] - before - after
            first, middle, last = grad.split([before, side, after], dim)
            zeros = (0, 0) if dim == -2 else ()  # F.pad counts from the last dimension
            grad = middle + F.pad(first, (*zeros, side - before, 0)) + F.pad(last, (*zeros, 0, side - after))
        return grad, None


def _around(x: Tensor, pad: tuple[int, int, int, int]) -> Tensor:
    left, right, top, bottom = pad
    height, width = x.shape[-2:]
    rows = torch.arange(-top, height + bottom, device=x.device) % height
    columns = torch.arange(-left, width + right, device=x.device) % width
    return x[..., rows[:, None], columns]


def circular_pad(x: Tensor, pad: tuple[int, int, int, int]) -> Tensor:
    """Pad (B, C, H, W) with its own opposite side; ``pad`` is (left, right, top, bottom) as in ``F.pad``."""
    if not any(pad):
        return x
    if max(pad[:2]) > x.shape[-1] or max(pad[2:]) > x.shape[-2]:  # around more than once, as no other way goes
        return _around(x, pad)
    if x.is_cuda:
        return _CircularPad.apply(x, pad)
    if torch.is_grad_enabled():  # on a CPU, convolutions learn faster where F.pad has put channels apart,
        return F.pad(x, pad, mode="circular")
    for dim, before, after in ((3, *pad[:2]), (2, *pad[2:])):  # and infer faster where they stay beside one another
        x = torch.cat([x.narrow(dim, x.shape[dim] - before, before), x, x.narrow(dim, 0, after)], dim)
    return x


def convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """``conv(x)``, with ``circular_pad`` where it pads circularly and is nothing but its weights; or those and what
    peft's adapters add to them, since these pad with zeros, whatever they are put around."""
    layer: Any = bare(conv)
    wrapped = layer is conv and not is_plain(conv)
    if wrapped or layer.padding_mode != "circular" or isinstance(layer.padding, str):
        return conv(x)
    height, width = layer.padding
    x = circular_pad(x, (width, width, height, height))
    weight = conv.weight if layer is conv else weight_of(conv).to(x.dtype)
    return F.conv2d(x, weight, conv.bias, layer.stride, groups=layer.groups)
