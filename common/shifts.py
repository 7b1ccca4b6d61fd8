"""Shifts of images and tokens: per-sample rolls on the torus, and the two kinds of shift the paper measures with.

One convention holds everywhere: ``roll(x, o)[h] = x[h + o]`` (indices modulo the side), so offsets add up, and an
offset is the place in ``x`` that ends up at the origin.
"""

import torch
from torch import Tensor

from .ops.roll import circular_pad, convolve, roll
from .seeding import constants, hashed_uniform

__all__ = ["circular_pad", "circular_shift", "convolve", "random_shifts", "roll", "shift_and_crop", "standard_shift"]


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
    span = constants(tuple(hi - lo + 1 for lo, hi in zip(low, high, strict=True)), index.device, torch.long)
    return (hashed_uniform(index, 2, *seeds) * span).long() + constants(tuple(low), index.device, torch.long)
