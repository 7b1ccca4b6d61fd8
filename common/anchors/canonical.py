"""The canonical anchor: one roll at the image after which every shifted copy of it is the same array, bit for bit.

An adaptive model is equivariant by itself; floating point is not: a sum in another order differs in its last bits, and
a near tie between two anchors may fall the other way. This removes the cause: it reads the image through integers only,
each small enough for its number format, so its choice depends on no order of sums, no device and no precision.

Any o with o(roll(x, s)) = o(x) - s would do. This one, with fixed random kernels y and z (indices are circular):

    g[h, w] = polynomial in 37 of the channels' round(1024 x), modulo the prime 2039   what a pixel is
    d[h]    = sum_w g[h, w]                                                            what a row is, wherever it begins
    rows    = those with the largest d[h] - d[h - 1]                                   as a rule there is one
              or, of several, those of them with the largest sum_i d[i] y[i - h]
    s[h, w] = sum_i g[i, w] y[i - h], h in rows                                        what a column is from there
    o       = the place with the largest s[h, w] - s[h, w - 1]                         as a rule there is one
              or, of several, the one with the largest sum_ij g[i, j] y[i - h] z[j - w]

This holds for any d and s, which only save us from computing the last line at every place. That line is a hash, of 40
bits and more, of all that is seen from a place. So places tie where the torus looks the same from both, and hardly ever
otherwise; the first is taken, and all give one array. We compare differences since flat parts, such as a border, have
none: d and s alone would often tie there. An image such as a checkerboard has many best rows, and takes longer.

Some colours cannot be told apart: values that differ by less than 1/1024 or by a multiple of 256, and by chance one
pair of colours in 2,039. An image that is periodic but for such differences may be rolled to any of its repeats.

It would make *any* network shift-invariant: so it is a switch (``canonical=``), off in every float64 test.
"""

import torch
from torch import Tensor, nn

from ..grid import Grid
from ..ops.canonical import canonical_place
from ..ops.energy import image_needs
from ..ops.roll import roll
from ..seeding import drawn
from .identity import NoAnchor

__all__ = ["Canonical"]

LIMIT = 2048  # pixels per side: sums of 10 + 11 + 15 + 11 + 15 bits stay below 2^63


class Canonical(nn.Module):
    """Offsets o(x) with o(roll(x, s)) = o(x) - s, so that roll(x, o(x)) is one array for all shifted copies of x.

    Shapes: images (B, C, H, W), floating point -> images (B, C, H, W), offsets (B, 2).
    """

    kernel: Tensor

    def __init__(self, max_side: int = LIMIT) -> None:
        super().__init__()
        if not 0 < max_side <= LIMIT:
            raise ValueError(f"the canonical anchor is exact up to {LIMIT} pixels per side, got max_side={max_side}")
        # y, z: all different, so that two equal objects at any distance are told apart; positive, so that few cancel
        kernel = torch.stack([numbers[:max_side] + 1 for numbers in drawn(torch.randperm, 2**15, times=2)]).int()
        self.register_buffer("kernel", kernel, persistent=False)  # integers: .half() leaves them alone

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        offset = self.offset(x)
        return roll(x, offset, within=True), offset

    def offset(self, x: Tensor) -> Tensor:
        return self.place(x)[0]

    def on(self, grid: Grid, anchor: NoAnchor, conv: nn.Conv2d) -> Grid:
        """Images (B, H, W, C) that begin at their canonical place, with what the next anchor and the convolution behind
        it make of that pass."""
        x, energy = grid.tokens.permute(0, 3, 1, 2), anchor.energy(conv)
        offset, images, prepared = self.place(x, *image_needs(x, energy))
        return grid._replace(tokens=images.permute(0, 2, 3, 1), origin=offset, canonical=True, shared=prepared)

    @torch.no_grad()
    def place(self, x: Tensor, packed: torch.dtype | None = None,
              sketch: list[Tensor] | None = None) -> tuple[Tensor, Tensor, list[Tensor] | None]:  # fmt: skip
        """``ops.canonical.canonical_place`` of images within reach."""
        if max(x.shape[2:]) > self.kernel.shape[1]:
            raise ValueError(f"the canonical anchor reaches {self.kernel.shape[1]} pixels per side, got "
                             f"{tuple(x.shape[2:])}: use smaller images, or canonical=False")  # fmt: skip
        return canonical_place(x, self.kernel, packed, sketch)
