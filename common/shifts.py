"""Shifts of images and tokens: per-sample rolls on the torus, and the two kinds of shift the paper measures with.

One convention holds everywhere: ``roll(x, o)[h] = x[h + o]`` (indices modulo the side), so offsets add up, and an
offset is the place in ``x`` that ends up at the origin.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import kernels
from .seeding import hashed_uniform

__all__ = ["circular_pad", "circular_shift", "convolve", "random_shifts", "roll", "shift_and_crop", "standard_shift"]


def _gather(x: Tensor, offset: Tensor, dims: tuple[int, int]) -> Tensor:
    """Read ``x`` at positions moved by ``offset`` in [0, side]: one indexed read, no wrap-around copies."""
    rank = dims[1] + 1  # dimensions after the last rolled one are read whole
    index = []
    for d in range(rank):
        i = torch.arange(x.shape[d], device=x.device)
        if d in dims:
            i = i + offset[:, dims.index(d), None]
            i = torch.where(i < x.shape[d], i, i - x.shape[d])  # B, side; cheaper than a remainder per element
            index.append(i.view([i.shape[0], *(-1 if k == d else 1 for k in range(1, rank))]))
        else:
            index.append(i.view([-1 if k == d else 1 for k in range(rank)]))
    return x[tuple(index)]


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
    if not within:
        offset = torch.stack([offset[:, 0] % x.shape[h], offset[:, 1] % x.shape[w]], 1)
    if (h, w) == (1, 2) and kernels.fits_roll_kernel(x):
        return kernels.rolled(x, offset, 0)
    return _Roll.apply(x, offset, (h, w))


class _CircularPad(torch.autograd.Function):
    """Circular padding as one indexed read. Its backward adds the borders to the opposite sides: no scatter."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, pad: tuple[int, int, int, int]) -> Tensor:
        left, right, top, bottom = pad
        height, width = x.shape[-2:]
        rows = torch.arange(-top, height + bottom, device=x.device) % height
        columns = torch.arange(-left, width + right, device=x.device) % width
        return x[..., rows[:, None], columns]

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


def circular_pad(x: Tensor, pad: tuple[int, int, int, int]) -> Tensor:
    """Pad (B, C, H, W) with its own opposite side; ``pad`` is (left, right, top, bottom) as in ``F.pad``."""
    if not any(pad):
        return x
    # F.pad copies the middle and each border in turn: several passes on a GPU, and yet the faster form on a CPU
    return _CircularPad.apply(x, pad) if x.is_cuda else F.pad(x, pad, mode="circular")


def convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """``conv(x)``, with ``circular_pad`` where it pads circularly."""
    if conv.padding_mode != "circular" or isinstance(conv.padding, str):
        return conv(x)
    height, width = conv.padding
    x = circular_pad(x, (width, width, height, height))
    return F.conv2d(x, conv.weight, conv.bias, conv.stride, groups=conv.groups)


def circular_shift(x: Tensor, shift: Tensor) -> Tensor:
    """Move the content of (B, C, H, W) down and right by ``shift`` (B, 2); what leaves comes back opposite."""
    return roll(x, -shift)


def standard_shift(x: Tensor, shift: Tensor, fill: float = 0.0) -> Tensor:
    """Move the content of (B, C, H, W) down and right by ``shift`` (B, 2); what comes in is ``fill`` (zero-padding).

    The paper's standard shift for CIFAR.
    """
    keep = torch.ones_like(x[:, :1], dtype=torch.bool)
    for k, dim in enumerate((2, 3)):
        side = x.shape[dim]
        source = torch.arange(side, device=x.device) - shift[:, k, None]  # B, side
        inside = (source >= 0) & (source < side)
        keep = keep & inside.view(-1, 1, *((side, 1) if dim == 2 else (1, side)))
    return torch.where(keep, circular_shift(x, shift), fill)


def shift_and_crop(x: Tensor, shift: Tensor, size: tuple[int, int]) -> Tensor:
    """Shift (B, C, H, W) by ``shift`` (B, 2), then cut the central ``size``: real pixels come in, no padding.

    The paper's standard shift for ImageNet. A shift larger than the margin would show wrapped content; it raises no
    error on the device, so draw shifts within the margin.
    """
    top, left = ((have - want) // 2 for have, want in zip(x.shape[-2:], size, strict=True))
    if top < 0 or left < 0:
        raise ValueError(f"cannot cut {size} out of images of {tuple(x.shape[-2:])}: resize them larger first")
    return circular_shift(x, shift)[..., top : top + size[0], left : left + size[1]]


def random_shifts(index: Tensor, low: tuple[int, int], high: tuple[int, int], *seeds: int) -> Tensor:
    """(N, 2) shifts, uniform in [low, high] per axis, one per image. Row i depends on ``index[i]`` and ``seeds`` only,
    so that a data set gets the same shifts whatever the batch size and the number of processes."""
    span = torch.tensor([hi - lo + 1 for lo, hi in zip(low, high, strict=True)], device=index.device)
    return (hashed_uniform(index, 2, *seeds) * span).long() + torch.tensor(low, device=index.device)
