"""How the kernels of ``image_conv`` read windows of an image, piece by piece, and weights in the same order."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import next_power_of_2
from .pixels import is_packed

__all__ = ["PHASES", "TOKENS", "all_phases", "count_bytes", "cut_windows", "has_many_sums", "in_pieces"]

PLANES = 64  # places of a window in planes, multiplied at once
TOKENS: dict[str, Any] = {"places": (32, 64), "lines": True, "bands": 2, "cells": (64, 64), "rows": (19, 28),
                          "programs": 264, "settled": 3, "wide": 128, "num_warps": 4, "num_stages": (2, 2),
                          "ahead": 64}  # fmt: skip
PHASES: dict[str, Any] = {"places": (32, 32), "lines": False, "bands": 3, "cells": (64, 32), "rows": (28, 28),
                          "programs": 132, "settled": 2, "wide": 64, "num_warps": 4, "num_stages": (3, 3),
                          "ahead": 64}  # fmt: skip
"""Places of a window in a packed image, multiplied at once, in a program that has few sums in registers, or many;
whether its lines are read up to a power of two, where that is less than a third more; bands of it at most; cells in a
product, and for an image or two; rows of them in a program, few sums or many, and programs that are enough to take
fewer; how many bands make a program wait for the sums that it takes along: where these change places, compilers else
let no two products overlap; outputs that take twice the warps; rows that are on their way, few sums or many, and
outputs that take one more."""


def cut_windows(channels: int, near: bool, size: int, stride: int, outputs: int, how: dict[str, Any]) -> dict[str, int]:
    """How windows of size x size pixels are read, ``near`` if they are packed. If it takes no more bands than given, in
    bands of ``stride`` rows: a band is read once for all the windows that it is a part of.

    A band of a ``packed`` image is read line by line, LINE pixels each, in STEPS pieces of K numbers and one of TAIL,
    or none, all powers of two. A piece of whole lines is read faster; with no more than is needed, more programs fit.
    """
    if not near:
        pieces = -(-(size**2) * channels // PLANES)
        return {"K": PLANES, "STEPS": pieces, "TAIL": 0, "LINE": size, "BAND": size, "BANDS": 1}
    band, count = (stride, -(-size // stride)) if stride < size <= how["bands"] * stride else (size, 1)
    line = next_power_of_2(size) if how["lines"] and 4 * size > 3 * next_power_of_2(size) else size
    numbers = band * line * next_power_of_2(channels)
    k = max(16, min(how["places"][has_many_sums(outputs, count)], next_power_of_2(numbers)))
    steps, left = divmod(numbers, k)
    tail = max(16, next_power_of_2(left)) if left else 0
    return {"K": k, "STEPS": steps + (tail == k), "TAIL": tail % k, "LINE": line, "BAND": band, "BANDS": count}


def _length(cut: dict[str, int]) -> int:
    """Numbers of a band in pieces."""
    return cut["STEPS"] * cut["K"] + cut["TAIL"]


def has_many_sums(outputs: int, bands: int) -> int:
    """1 where a program has many sums in registers, else 0: which of two numbers to take (compilers want no bool)."""
    return int(bands * outputs > 128)


def count_bytes(outputs: int, how: dict[str, Any], cut: dict[str, int], near: bool) -> int:
    """Bytes of a program that holds all weights, and what it reads for a row, for those on their way and one more."""
    stages = how["num_stages"][has_many_sums(outputs, cut["BANDS"])]
    read = how["cells"][0] * (stages + 1) * (2 if near else 4)  # bytes of packed numbers, or in planes
    return _length(cut) * (2 * max(16, outputs) * cut["BANDS"] + read)


def in_pieces(weight: Tensor, x: Tensor, stride: int, phases: bool = False) -> Tensor:
    """Weights (outputs, C, size, size) as (places, outputs) in the order in which windows of x are read by
    ``image_tokens`` or ``image_phases`` (see ``cut_windows``): channel by channel or, if it is ``packed``, pixel by
    pixel, with zeros for channels up to a power of two. Zeros also beyond a window, up to whole pieces."""
    size, c = weight.shape[-1], next_power_of_2(x.shape[1])
    cut = cut_windows(x.shape[1], is_packed(x), size, stride, len(weight), PHASES if phases else TOKENS)
    if not is_packed(x):
        weight = weight.flatten(1).T
        return F.pad(weight, (0, 0, 0, _length(cut) - len(weight))).contiguous()
    weight = weight.permute(2, 3, 1, 0)
    weight = F.pad(weight, (0, 0, 0, c - x.shape[1], 0, cut["LINE"] - size, 0, cut["BANDS"] * cut["BAND"] - size))
    weight = weight.unflatten(0, (-1, cut["BAND"])).flatten(1, 3)  # bands, (row, column, channel), outputs
    return F.pad(weight, (0, 0, 0, _length(cut) - weight.shape[1])).flatten(0, 1).contiguous()


def all_phases(weight: Tensor, stride: int) -> Tensor:
    """A kernel (r, C, k, k) at each phase of its stride s, in windows of k + s - 1: (r s s, C, window, window)."""
    k = weight.shape[-1]
    tap = torch.arange(k + stride - 1, device=weight.device) - torch.arange(stride, device=weight.device)[:, None]
    inside, tap = (tap >= 0) & (tap < k), tap.clamp(0, k - 1)  # phase, place in the window
    moved = weight[:, :, tap[:, None, :, None], tap[None, :, None, :]]  # r, C, s, s, window, window
    moved = moved * (inside[:, None, :, None] & inside[None, :, None, :])
    return moved.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
