"""RandAugment on whole batches, where the images are.

Every operation is one of four: an affine map, a table of levels per channel, a blend with the grey image, a blend with
the blurred image. A layer computes all four for the batch, and each image takes what it drew. So nothing waits for a
processor, and what happens to image i depends on (seeds, i) alone.

Operations, magnitudes and the specification are timm's (the increasing set, ``inc1``). Affine maps are bilinear, where
timm draws bilinear or bicubic for each.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..seeding import constants, hashed_uniform

__all__ = ["OPERATIONS", "RandAugment", "augment"]

OPERATIONS = ("auto_contrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add", "color",
              "contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y")  # fmt: skip
MOVES = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")


@dataclass(frozen=True)
class RandAugment:
    """``layers`` operations per image, each with ``probability`` and a magnitude of 0 to 10 about ``magnitude``.
    ``compiled``: by torch.compile, which makes 15 kernels of the 260 of a layer.

    Shapes: images (B, 3, H, W) of whole levels 0 to 255 in floating point, index (B,) -> the same.
    """

    magnitude: float = 10.0
    layers: int = 2
    deviation: float = 0.0
    probability: float = 0.5
    fill: tuple[float, float, float] = (128.0, 128.0, 128.0)
    compiled: bool = False

    @classmethod
    def read(cls, specification: str, mean: tuple[float, float, float], compiled: bool = False) -> "RandAugment":
        """By a specification such as ``rand-m9-mstd0.5-inc1``; ``mean`` is the colour that comes in at borders."""
        kind, *parts = specification.split("-")
        found = {match[1]: match[2] for part in parts if (match := re.fullmatch(r"(m|n|mstd|p|inc)([\d.]+)", part))}
        try:
            settings = [
                float(found.get(key, default)) for key, default in (("m", 10), ("n", 2), ("mstd", 0), ("p", 0.5))
            ]
        except ValueError:
            settings = []
        if kind != "rand" or len(found) != len(parts) or found.get("inc") != "1" or not settings:
            raise ValueError(f"the RandAugment {specification!r} is not known: write it like rand-m9-mstd0.5-inc1, "
                             "with m, n, mstd, p and inc1 (operations that increase with the magnitude)")  # fmt: skip
        magnitude, layers, deviation, probability = settings
        red, green, blue = (float(min(255, round(255 * value))) for value in mean)
        return cls(magnitude, int(layers), deviation, probability, (red, green, blue), compiled)

    def __call__(self, images: Tensor, index: Tensor, *seeds: int) -> Tensor:
        u = hashed_uniform(index, 4 * self.layers, *seeds, 3).float()
        fill, layer = constants(self.fill, images.device), _compiled() if self.compiled else augment
        for drawn, chosen, sign, normal in zip(*(u[:, k::4].unbind(1) for k in range(4)), strict=True):
            operation = torch.where(chosen < self.probability, (drawn * len(OPERATIONS)).long(), -1)
            magnitude = self.magnitude + self.deviation * torch.special.ndtri(normal.clamp(1e-6, 1 - 1e-6))
            level = magnitude.clamp(0, 10) / 10
            images = layer(images, operation, level, torch.where(sign < 0.5, -1.0, 1.0), fill)
        return images


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(augment)


def augment(x: Tensor, operation: Tensor, level: Tensor, sign: Tensor, fill: Tensor) -> Tensor:
    """Image i by operation ``operation[i]`` of ``OPERATIONS`` at ``level[i]`` in [0, 1], to the side ``sign[i]``; none
    where that is -1. ``fill`` comes in at borders. Shapes: x (B, 3, H, W), fill (3,), the others (B,)."""
    operation, level, sign = (t.view(-1, 1, 1, 1) for t in (operation, level, sign))
    drawn = {name: operation == k for k, name in enumerate(OPERATIONS)}
    factor = (1 + sign * 0.9 * level).clamp_min(0.1)  # of blends: 1 leaves an image as it is
    red, green, blue = x.split(1, 1)
    grey = ((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536).floor()
    y = torch.where(drawn["color"], _blend(grey, x, factor), x)
    y = torch.where(drawn["sharpness"], _blend(_blur(x), x, factor), y)
    moved = torch.stack([drawn[name] for name in MOVES]).any(0)
    y = torch.where(moved, _move(x, drawn, sign * level, fill), y)
    tabled = drawn["color"] | drawn["sharpness"] | moved | (operation < 0)
    table = _table(x, drawn, level, factor, grey)  # B, 3, 256
    return torch.where(tabled, y, table.gather(2, x.flatten(2).long()).view_as(x))


def _blend(other: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    return (other + factor * (x - other)).clamp(0, 255).floor()


def _blur(x: Tensor) -> Tensor:
    """Each pixel five times and its eight neighbours once, over 13; the border as it is."""
    rows = x[:, :, :-2] + x[:, :, 1:-1] + x[:, :, 2:]
    nine = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inner = ((nine + 4 * x[:, :, 1:-1, 1:-1]) / 13 + 0.5).floor()
    return torch.cat([x[:, :, :1], torch.cat([x[:, :, 1:-1, :1], inner, x[:, :, 1:-1, -1:]], 3), x[:, :, -1:]], 2)


def _move(x: Tensor, drawn: dict[str, Tensor], by: Tensor, fill: Tensor) -> Tensor:
    """Rotated by up to 30 degrees, sheared by up to 0.3, moved by up to 0.45 of a side; each pixel's colour is that of
    its place before."""
    height, width = x.shape[2:]
    share = {name: torch.where(drawn[name], by, 0.0)[..., 0] for name in MOVES}  # B, 1, 1
    row, column = (torch.arange(n, device=x.device) + 0.5 for n in (height, width))
    row, column = row.view(1, -1, 1), column.view(1, 1, -1)
    angle = torch.deg2rad(30 * share["rotate"])
    cos, sin, down, right = torch.cos(angle), torch.sin(angle), row - height / 2, column - width / 2
    x_shift = 0.3 * share["shear_x"] * row + 0.45 * width * share["translate_x"]
    y_shift = 0.3 * share["shear_y"] * column + 0.45 * height * share["translate_y"]
    at_column = cos * right - sin * down + width / 2 + x_shift
    at_row = sin * right + cos * down + height / 2 + y_shift
    grid = torch.stack([2 * at_column / width - 1, 2 * at_row / height - 1], 3)
    inside = (at_column >= 0) & (at_column < width) & (at_row >= 0) & (at_row < height)
    seen = F.grid_sample(x, grid, padding_mode="border", align_corners=False).floor()
    return torch.where(inside[:, None], seen, fill.view(1, 3, 1, 1))


def _table(x: Tensor, drawn: dict[str, Tensor], level: Tensor, factor: Tensor, grey: Tensor) -> Tensor:
    """What becomes of each level of each channel: (B, 3, 256)."""
    drawn = {name: mask[..., 0] for name, mask in drawn.items()}
    level, factor = level[..., 0], factor[..., 0]  # B, 1, 1
    each = torch.arange(256, device=x.device, dtype=x.dtype)
    low, high = (side.unsqueeze(2) for side in (x.amin((2, 3)), x.amax((2, 3))))  # B, 3, 1
    stretched = ((each - low) * 255 / (high - low)).floor()
    below = 256 - (256 * level).floor()
    coarse = 2.0 ** (4 + (4 * level).floor())  # 4 to 0 bits are kept
    mean = (grey.mean((2, 3), keepdim=True)[..., 0] + 0.5).floor()
    found = {
        "auto_contrast": torch.where(high > low, stretched, each),
        "equalize": _equalized(x, high, each),
        "invert": 255 - each,
        "posterize": (each / coarse).floor() * coarse,
        "solarize": torch.where(each < below, each, 255 - each),
        "solarize_add": torch.where(each < 128, each + (110 * level).floor(), each),
        "brightness": (each * factor).floor(),
        "contrast": (mean + factor * (each - mean)).floor(),
    }
    table = each.expand(len(x), 3, 256)
    for name, values in found.items():
        table = torch.where(drawn[name], values, table)
    return table.clamp(0, 255)


def _equalized(x: Tensor, high: Tensor, each: Tensor) -> Tensor:
    """A table by which all levels of a channel occur about equally often."""
    levels = x.flatten(2).long()
    count = torch.zeros(*x.shape[:2], 256, device=x.device).scatter_add_(2, levels, torch.ones_like(x.flatten(2)))
    step = ((levels.shape[2] - count.gather(2, high.long())) / 255).floor()  # pixels to a level; the highest apart
    before = count.cumsum(2) - count
    return torch.where(step > 0, (((step / 2).floor() + before) / step).floor(), each)
