"""The canonical place of an image, through whole numbers alone: see ``anchors.canonical`` for what it is."""

from contextlib import suppress

import torch
from torch import Tensor

from .. import kernels
from ..kernels.canonical import BASE, HALF, PRIME
from .dispatch import op

__all__ = ["canonical_place", "read"]


def _fits(x: Tensor, kernel: Tensor, packed: torch.dtype | None = None, sketch: list[Tensor] | None = None) -> bool:
    return kernels.fits_canonical_kernel(x)


def _place(x: Tensor, kernel: Tensor, packed: torch.dtype | None = None,
           sketch: list[Tensor] | None = None) -> tuple[Tensor, Tensor, list[Tensor] | None]:  # fmt: skip
    offset, x, *sketched = kernels.canonical_offset(x, kernel, packed, sketch)
    return offset, x, None if sketch is None else sketched


@op(kernel=_place, fits=_fits)
def canonical_place(x: Tensor, kernel: Tensor, packed: torch.dtype | None = None,
                    sketch: list[Tensor] | None = None) -> tuple[Tensor, Tensor, list[Tensor] | None]:  # fmt: skip
    """Offsets o(x) (B, 2) with o(roll(x, s)) = o(x) - s; the images as they are read from now on, which kernels that
    read them want ``packed`` in a type; and what ``kernels.sketched`` makes of a ``sketch``, if it is done meanwhile.

    Shapes: x (B, C, H, W), kernel (2, n), whole numbers from 1 to 2^15, n at least H and W.
    """
    if x.device.type == "mps":  # has no float64, and less would not be exact
        return canonical_place(x.cpu(), kernel.cpu())[0].to(x.device), x, None
    g, (height, width) = read(x).double(), x.shape[2:]
    y, z = kernel[0, :height], circulant(kernel[1, :width]).T
    d = g.sum(2)  # B, H
    best = largest(d - d.roll(1, 1), torch.ones_like(d, dtype=torch.bool))
    best = largest(d @ circulant(y).T, best)  # below 2^47: sums are exact up to 2^53
    left, _ = (best * torch.arange(height, 0, -1, device=x.device)).topk(_most(best), 1)  # zero where there is none
    row = height - left
    seen = circulant(y, row) @ g  # B, best rows, W: below 2^36, in two digits then
    near = largest((seen - seen.roll(1, 2)).flatten(1), (left > 0).repeat_interleave(width, 1))
    upper = (seen * 2**-18).floor()
    lower = ((seen - upper * 2**18) @ z).long()
    scores = ((upper @ z).long() * 2**18 + lower).flatten(1)
    place = torch.where(near, scores, torch.iinfo(torch.int64).min).argmax(1, keepdim=True)
    return torch.cat([row.gather(1, place // width), place % width], 1), x, None


def _most(among: Tensor) -> int:
    """How many rows (B, H) an image has at most; all there are in a graph, under ``vmap`` and on a GPU, which would
    wait for the answer."""
    if among.is_cpu and not torch.compiler.is_compiling():
        with suppress(RuntimeError):
            return int(among.sum(1).max())
    return among.shape[1]


def circulant(k: Tensor, rows: Tensor | None = None) -> Tensor:
    """(n, n) matrix C[i, j] = k[j - i], or some of its rows (..., n): ``C @ a`` correlates a with k."""
    j = torch.arange(len(k), device=k.device)
    return k.double()[(j - (j if rows is None else rows)[..., None]) % len(k)]


def read(x: Tensor) -> Tensor:
    """Images (B, C, H, W) as one whole number in [-1019, 1019] per pixel (B, H, W), in float32.

    Every step is exact or rounds one number once, so that fusing a product with a sum changes nothing. What is not
    finite counts as zero.
    """
    x = x.float() * 2**-8
    x = x.sub_((x + 0.5).floor_()).mul_(2**18).add_(0.5).floor_()  # round(1024 x), modulo 2^18, around zero
    first, *others = x.nan_to_num_(0).unbind(1)
    g = residue(first)
    for level in others:
        g = residue(level.add(g, alpha=BASE))
    return g.sub_(HALF)


def residue(t: Tensor) -> Tensor:
    """Whole numbers up to 2^18 in float32 modulo the prime. The quotient is taken half a step off whole numbers, so
    that its rounding does not matter."""
    return t.sub((t + 0.5).mul_(1 / PRIME).floor_(), alpha=PRIME)


def largest(scores: Tensor, among: Tensor) -> Tensor:
    """Where scores (B, n) are largest, among the places given: masks (B, n)."""
    least = -torch.inf if scores.is_floating_point() else torch.iinfo(scores.dtype).min
    scores = torch.where(among, scores, least)
    return among & (scores == scores.amax(1, keepdim=True))
