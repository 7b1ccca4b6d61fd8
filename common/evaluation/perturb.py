"""Images that no model was trained on: with a patch erased, upside down, half a pixel further on."""

import torch
from torch import Tensor, nn

from ..seeding import hashed_uniform

__all__ = ["PERTURBATIONS", "ShiftAverage", "erased", "flipped", "half_pixel"]


def erased(x: Tensor, index: Tensor, largest: int, seed: int) -> Tensor:
    """A square patch of each image (B, C, H, W) set to zero, its side uniform in {0, ..., largest}, anywhere inside it
    (tab. supp_ood_patches). The patch of an image depends on its ``index`` and the seed alone."""
    height, width = x.shape[-2:]
    u = hashed_uniform(index, 3, seed, 28)
    side = (u[:, 0] * (largest + 1)).long()[:, None]
    inside = []
    for axis, length in enumerate((height, width), 1):
        place = torch.arange(length, device=x.device)
        start = (u[:, axis, None] * (length - side + 1)).long()
        inside.append((place >= start) & (place < start + side))  # B, length
    return x.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0.0)


def flipped(x: Tensor, index: Tensor, largest: int, seed: int) -> Tensor:
    """Upside down (tab. supp_ood_flips)."""
    return x.flip(-2)


def half_pixel(x: Tensor, index: Tensor, largest: int, seed: int) -> Tensor:
    """Half a pixel further down and right on the torus, by its Fourier series."""
    for dim in (-2, -1):
        n = x.shape[dim]
        turn = torch.exp(-1j * torch.pi * torch.fft.rfftfreq(n, device=x.device))
        turn = turn.real if n == 1 else turn
        shape = [-1 if d == x.ndim + dim else 1 for d in range(x.ndim)]
        x = torch.fft.irfft(torch.fft.rfft(x.float(), dim=dim) * turn.view(shape), n=n, dim=dim)
    return x


PERTURBATIONS = {"erased": erased, "flipped": flipped, "half": half_pixel}
"""By the name that a metric has behind its colon: ``c_cons:erased@28``."""


class ShiftAverage(nn.Module):
    """A model whose probabilities are averaged over an n x n lattice of circular shifts: what test-time augmentation
    buys, at n^2 times the cost. Images (B, C, H, W) -> log-probabilities (B, classes)."""

    def __init__(self, model: nn.Module, side: int) -> None:
        super().__init__()
        self.model, self.side = model, side

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        total: Tensor | float = 0.0
        for i in range(self.side):  # steps that are no multiple of a patch, or all would see the same grid
            for j in range(self.side):
                shift = (i * height // self.side + i, j * width // self.side + j)
                total = total + self.model(x.roll(shift, (-2, -1))).float().softmax(-1)
        return (total / self.side**2).log()  # type: ignore[union-attr]
