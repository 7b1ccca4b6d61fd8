"""The canonical anchor: one roll at the image after which every shifted copy of it is the same array, bit for bit.

An adaptive model is equivariant by itself; floating point is not: a sum taken in another order differs in its last
bits, and a near tie between two anchors may then fall the other way. The canonical anchor removes the cause. It reads
the image through integers only, each small enough for the number format that it is summed in, so its choice does not
depend on the order of any sum, on the device or on the precision of the model.

Any o with o(roll(x, s)) = o(x) - s would do. This one, with fixed random kernels y and z (indices are circular):

    g[h, w] = polynomial in 37 of the channels' round(1024 x), modulo the prime 2039   what a pixel is
    d[h]    = sum_w g[h, w]                                                            what a row is, wherever it begins
    rows    = those with the largest d[h] - d[h - 1]                                   as a rule there is one
              or, of several, those of them with the largest sum_i d[i] y[i - h]
    s[h, w] = sum_i g[i, w] y[i - h], h in rows                                        what a column is from there
    o       = the place with the largest s[h, w] - s[h, w - 1]                         as a rule there is one
              or, of several, the one with the largest sum_ij g[i, j] y[i - h] z[j - w]

Whatever d and s are, this holds: they only save us the last line at all places. That is a hash, of 40 bits and more, of
all that is seen from a place. So places tie where the torus looks the same from both, and hardly ever else; the first
of these is taken, and all give one array. Steps, since what is flat, such as a border, has none: with d and s alone its
rows and columns would often tie. An image such as a checkerboard has many best rows, and takes longer.

What is read as one colour is not told apart: values that differ by less than 1/1024 or by a multiple of 256, and by
accident one pair of colours in 2,039. An image that repeats but for such differences may come to rest at any repeat.

It would make *any* network shift-invariant. It is therefore a separate switch (``canonical=``), and every float64 test
of a module or a model runs with it off.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import kernels
from ..kernels.canonical import BASE, HALF, PRIME
from ..shifts import roll

__all__ = ["Canonical"]

LIMIT = 2048  # pixels per side: sums of 10 + 11 + 15 + 11 + 15 bits stay below 2^63


class Placed(NamedTuple):
    """Where images begin (B, 2), the images as they are read from now on, and combinations of weights with those of a
    bias, if asked for and made."""

    offset: Tensor
    images: Tensor
    sketched: list[Tensor] | None


class Canonical(nn.Module):
    """Offsets o(x) with o(roll(x, s)) = o(x) - s, so that roll(x, o(x)) is one array for all shifted copies of x.

    Shapes: images (B, C, H, W), floating point -> images (B, C, H, W), offsets (B, 2).
    """

    kernel: Tensor

    def __init__(self, max_side: int = LIMIT) -> None:
        super().__init__()
        if not 0 < max_side <= LIMIT:
            raise ValueError(f"the canonical anchor is exact up to {LIMIT} pixels per side, got max_side={max_side}")
        generator = torch.Generator().manual_seed(2024)
        # y, z: all different, so that two equal objects at any distance are told apart; positive, so that few cancel
        kernel = torch.stack([torch.randperm(2**15, generator=generator)[:max_side] + 1 for _ in range(2)]).int()
        self.register_buffer("kernel", kernel, persistent=False)  # integers: .half() leaves them alone

    def offset(self, x: Tensor) -> Tensor:
        return self.place(x)[0]

    @torch.no_grad()
    def place(self, x: Tensor, packed: torch.dtype | None = None, sketch: list[Tensor] | None = None) -> Placed:
        """The offsets; and with a type, also the images: a kernel that reads them leaves them ``packed`` in it. With
        ``sketch``, what ``kernels.sketched`` takes, what it makes of that, if it is done meanwhile."""
        height, width = x.shape[2:]
        if max(height, width) > self.kernel.shape[1]:
            raise ValueError(f"the canonical anchor reaches {self.kernel.shape[1]} pixels per side, got "
                             f"{(height, width)}: use smaller images, or canonical=False")  # fmt: skip
        if not kernels.fits_canonical_kernel(x):
            return Placed(self._choose(x), x if packed is None else kernels.packed(x, packed), None)
        offset, x, *sketched = kernels.canonical_offset(x, self.kernel, packed, sketch)
        return Placed(offset, x, None if sketch is None else sketched)

    def _choose(self, x: Tensor) -> Tensor:
        if x.device.type == "mps":  # has no float64, and less would not be exact
            return self._choose(x.cpu()).to(x.device)
        g, width = read(x), x.shape[3]
        rows, columns = (self._circulant(which, side) for which, side in enumerate(x.shape[2:]))
        d = g.sum(2).long()  # B, H
        best = largest(d - d.roll(1, 1), torch.ones_like(d, dtype=torch.bool))
        best = largest((d[:, None] * rows).sum(2), best)
        seen = rows.double() @ g.double()  # B, H, W: below 2^36, in two digits then, as sums of 2^53 are exact
        near = largest((seen - seen.roll(1, 2)).flatten(1), best.repeat_interleave(width, 1))
        upper = (seen * 2**-18).floor()
        upper, lower = ((digit @ columns.T.double()).long() for digit in (upper, seen - upper * 2**18))
        scores = torch.where(near, (upper * 2**18 + lower).flatten(1), torch.iinfo(torch.int64).min)
        place = scores.argmax(1)
        return torch.stack([place // width, place % width], 1)

    def _circulant(self, which: int, n: int) -> Tensor:
        """(n, n) matrix C[i, j] = k[j - i]: ``C @ a`` correlates a with the kernel k."""
        k, i = self.kernel[which, :n].long(), torch.arange(n, device=self.kernel.device)
        return k[(i - i[:, None]) % n]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        offset = self.offset(x)
        return roll(x, offset, within=True), offset


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
        g = residue((g + HALF).mul_(BASE).add_(level))
    return g


def residue(t: Tensor) -> Tensor:
    """Whole numbers up to 2^18 in float32 modulo the prime, less half of it. The quotient is taken half a step off
    whole numbers, so that its rounding does not matter."""
    return t - (t + 0.5).mul_(1 / PRIME).floor_().mul_(PRIME) - HALF


def largest(scores: Tensor, among: Tensor) -> Tensor:
    """Where scores (B, n) are largest, among the places given: masks (B, n)."""
    least = -torch.inf if scores.is_floating_point() else torch.iinfo(scores.dtype).min
    scores = torch.where(among, scores, least)
    return among & (scores == scores.amax(1, keepdim=True))
