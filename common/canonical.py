"""The canonical anchor: one roll at the image after which every shifted copy of it is the same array, bit for bit.

An adaptive model is equivariant by itself; floating point is not: a sum taken in another order differs in its last
bits, and a near tie between two anchors may then fall the other way. The canonical anchor removes the cause. It reads
the image through integers only (every partial sum fits the 53 bits of a float64), so its choice does not depend on the
order of any sum, on the device or on the precision of the model, and two places tie only where the torus itself looks
the same from both.

It would make *any* network shift-invariant. It is therefore a separate switch (``canonical=``), and every float64 test
of a module or a model runs with it off.
"""

import math

import torch
from torch import Tensor, nn

from .shifts import roll

__all__ = ["Canonical"]

LEVELS = 255  # grey levels that the image is read at
BITS = 12  # bits of a kernel entry, at most


class Canonical(nn.Module):
    """Offsets o(x) with o(roll(x, s)) = o(x) - s, so that roll(x, o(x)) is one array for all shifted copies of x.

    o is the argmax over all H x W places of the circular correlation of the image with a fixed random kernel
    K[i, j] = u[i] v[j]: two matrix products with circulants. Exact while the image has at most 53 bits to sum: any side
    up to 2,048 with 3 channels.

    Shapes: images (B, C, H, W), floating point -> images (B, C, H, W), offsets (B, 2).
    """

    kernel: Tensor

    def __init__(self, max_side: int = 2048) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2024)
        kernel = torch.randint(1 - 2**BITS, 2**BITS, (2, max_side), generator=generator)
        kernel[:, 0] = 2**BITS  # one clear peak: a single bright pixel has one best place
        self.register_buffer("kernel", kernel, persistent=False)  # integers: .half() leaves them alone

    @torch.no_grad()
    def offset(self, x: Tensor) -> Tensor:
        _, channels, height, width = x.shape
        if max(height, width) > self.kernel.shape[1]:
            raise ValueError(f"the canonical anchor reaches {self.kernel.shape[1]} pixels per side, got "
                             f"{(height, width)}: use smaller images, or canonical=False")  # fmt: skip

        # integers below 2^24: exact in float32, whatever the order
        x = x.float()
        low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
        levels = ((x - low) * (LEVELS / (high - low).clamp_min(1e-30))).round()
        weights = [c % 5 + 1 for c in range(channels)]
        s = torch.stack([weight * levels[:, c] for c, weight in enumerate(weights)]).sum(0)  # B, H, W

        # what is left of 53 bits goes to the two kernels
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.float32 if x.device.type == "mps" else torch.float64  # MPS has no float64: near-exact there
            used = math.log2(LEVELS * sum(weights) * height * width)
            bits = max(1, min(BITS, int((53 - used) / 2)))
            rows, columns = (self._circulant(axis, side, bits).to(wide) for axis, side in enumerate((height, width)))
            score = rows.T @ (s.to(wide) @ columns)  # B, H, W: one score per place
        row = score.amax(2).argmax(1)  # in two steps: each of them has enough rows to fill a device
        column = score.gather(1, row.view(-1, 1, 1).expand(-1, 1, width)).squeeze(1).argmax(1)
        return torch.stack([row, column], 1)

    def _circulant(self, axis: int, n: int, bits: int) -> Tensor:
        """(n, n) matrix C[i, j] = k[i - j]: ``s @ C`` correlates s with the kernel k."""
        i = torch.arange(n, device=self.kernel.device)
        return (self.kernel[axis, :n] >> (BITS - bits))[(i[:, None] - i) % n]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        offset = self.offset(x)
        return roll(x, offset, within=True), offset
