"""Images by name: the embedded digits here; folders and Hub datasets in ``common.sources``.

A split of small images lives as one uint8 array, on the device where there is one; what travels through the loader is
indices. Resizing, augmentation and normalisation happen on the device, on whole batches.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from .seeding import hashed_uniform
from .shifts import circular_shift

__all__ = ["PREPROCESSOR_NAME", "Arrays", "Preprocess", "check_finite", "load_data", "load_digits_data"]


PREPROCESSOR_NAME = "preprocessor_config.json"


@dataclass(frozen=True)
class Arrays(Dataset):
    """A split in memory: images (N, 3, H, W) uint8, labels (N,), class names. Items are indices."""

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} images but {len(self.labels)} labels")
        if not len(self.images):
            raise ValueError("the data set is empty")
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= len(self.classes):
            raise ValueError(f"labels run from {low} to {high}, but there are {len(self.classes)} classes")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> int:
        return index

    def to(self, device: torch.device) -> "Arrays":
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def head(self, count: int | None) -> "Arrays":
        return replace(self, images=self.images[:count], labels=self.labels[:count])


def load_digits_data(size: int = 32, margin: int = 4) -> tuple[Arrays, Arrays]:
    """scikit-learn's 1,797 handwritten digits: 1,437 to train, 360 to test, white on black.

    Each 8 x 8 digit is drawn with a margin: on a torus, a digit that touches the border is ambiguous.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    side = size - 2 * margin
    images = F.interpolate(images, (side, side), mode="bilinear").clamp(0, 1)
    images = F.pad(images, (margin,) * 4).mul(255).round().byte().expand(-1, 3, -1, -1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(labels)))
    names = tuple(str(digit) for digit in digits.target_names)
    test, train = order[:360], order[360:]
    return Arrays(images[train], labels[train], names), Arrays(images[test], labels[test], names)


def load_data(name: str) -> tuple[Arrays, Arrays]:
    """Train and test split by name: ``digits``, a folder, or a Hub id (see ``common.sources``)."""
    if name == "digits":
        return load_digits_data()
    from .sources import load_folder, load_hub

    is_hub_id = name.count("/") == 1 and not Path(name).exists() and not name.startswith((".", "/", "~"))
    return load_hub(name) if is_hub_id else load_folder(Path(name))


@dataclass(frozen=True)
class Preprocess:
    """uint8 images (B, 3, h, w) -> normalised float images of the model's size, by resizing and a centre crop.

    ``resize`` is the size before the crop (None: the crop itself). Training adds, per image and by (seed, epoch,
    index): a horizontal flip, a small rotation and scaling, a circular shift.
    """

    size: tuple[int, int]
    resize: int | None = None
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    flip: bool = False
    rotate: float = 0.0
    scale: float = 0.0
    circular: bool = False

    def save(self, directory: Path) -> None:
        """Write what evaluation needs beside a model, as preprocessor_config.json."""
        stored = {key: getattr(self, key) for key in ("size", "resize", "mean", "std")}
        (directory / PREPROCESSOR_NAME).write_text(json.dumps(stored, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Preprocess":
        stored = json.loads(path.read_text())
        if unknown := sorted(set(stored) - {"size", "resize", "mean", "std"}):
            raise ValueError(f"{path} has unknown keys {unknown}")
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
        return cls(**arguments)

    def canvas(self, images: Tensor) -> Tensor:
        """Resized and normalised, not yet cropped: what a standard shift with a crop starts from."""
        x = images.float() / 255
        height, width = (self.resize, self.resize) if self.resize else self.size
        if x.shape[-2:] != (height, width):
            shrink = x.shape[-2] > height or x.shape[-1] > width
            x = F.interpolate(x, (height, width), mode="bilinear", antialias=shrink, align_corners=False)
        mean, std = (torch.tensor(v, device=x.device).view(1, -1, 1, 1) for v in (self.mean, self.std))
        return (x - mean) / std

    def crop(self, x: Tensor) -> Tensor:
        top, left = ((have - want) // 2 for have, want in zip(x.shape[-2:], self.size, strict=True))
        return x[..., top : top + self.size[0], left : left + self.size[1]]

    def evaluate(self, images: Tensor) -> Tensor:
        return self.crop(self.canvas(images))

    def train(self, images: Tensor, index: Tensor, *seeds: int) -> Tensor:
        u = hashed_uniform(index, 6, *seeds).float()
        x = images
        if self.rotate or self.scale:
            x = _affine(x.float(), (2 * u[:, 0] - 1) * self.rotate, 1 + (2 * u[:, 1] - 1) * self.scale)
        if self.flip:
            x = torch.where((u[:, 2] < 0.5).view(-1, 1, 1, 1), x.flip(-1), x)
        x = self.evaluate(x)
        if self.circular:
            x = circular_shift(x, (u[:, 3:5] * torch.tensor(x.shape[-2:], device=x.device)).long())
        return x


def _affine(x: Tensor, degrees: Tensor, scale: Tensor) -> Tensor:
    """Rotate and scale every image about its centre; zeros come in."""
    radians = torch.deg2rad(degrees)
    cos, sin, zero = torch.cos(radians) / scale, torch.sin(radians) / scale, torch.zeros_like(scale)
    theta = torch.stack([cos, -sin, zero, sin, cos, zero], 1).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def check_finite(images: Tensor, where: str) -> None:
    """Raise on NaN or Inf. Called where images enter the program, never in a forward."""
    if not torch.isfinite(images).all():
        bad = (~torch.isfinite(images)).flatten(1).any(1).nonzero().flatten().tolist()
        raise ValueError(f"{where}: images {bad[:5]} of the batch hold NaN or Inf; repair or drop them")
