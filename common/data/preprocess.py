"""From uint8 images to what a model takes: resize, crop, augment, normalise, on whole batches where the images are.

What happens to image i in epoch e depends on (seed, e, i) alone, so neither batch size nor number of processes nor an
interruption changes it. Only mixup and cutmix look at a whole batch (``Mixing``).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data.mixup import Mixup
from torch import Tensor

from ..models.hub import PREPROCESSOR_NAME, StoredInput, read_fields
from ..seeding import constants, derive_seed, hashed_uniform, kept, seeded
from ..shifts import circular_shift, random_shifts, standard_shift
from .rand_augment import RandAugment

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "PREPROCESSOR_NAME", "SMALL", "Mixing", "Normalisation", "Preprocess",
           "check_finite"]  # fmt: skip

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SMALL = 96  # images of one size up to this side are held in memory, decoded, and resized in batches


class Normalisation:
    """Levels of pixels to what a model takes and back, and the file beside it that says so. A subclass is a data class;
    ``STORED`` are the fields that evaluation needs."""

    STORED: ClassVar[tuple[str, ...]]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def save(self, directory: Path) -> None:
        """Write what evaluation needs beside a model, as preprocessor_config.json."""
        stored = {key: getattr(self, key) for key in self.STORED}
        (directory / PREPROCESSOR_NAME).write_text(json.dumps(stored, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(**read_fields(cls, cls.STORED, path))

    def normalise(self, images: Tensor) -> Tensor:
        mean, std = (constants(tuple(v), images.device).view(1, -1, 1, 1) for v in (self.mean, self.std))
        return (images.float() / 255 - mean) / std

    def denormalise(self, x: Tensor) -> Tensor:
        """Normalised images -> uint8."""
        mean, std = (constants(tuple(v), x.device).view(1, -1, 1, 1) for v in (self.mean, self.std))
        return ((x.float() * std + mean) * 255).round().clamp(0, 255).byte()


@dataclass(frozen=True)
class Preprocess(Normalisation):
    """uint8 images (B, 3, h, w) -> normalised float images of the model's size, by resizing and a centre crop.

    ``resize`` is the size before the crop (None: the crop itself). Training adds, per image: a horizontal flip, a small
    rotation and scaling, RandAugment, a standard shift by up to ``shift`` pixels (a crop of the padded image), a
    circular shift, a rectangle of noise with probability ``erase``.
    """

    size: tuple[int, int]
    resize: int | None = None
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    flip: bool = False
    rotate: float = 0.0
    scale: float = 0.0
    shift: int = 0
    circular: bool = False
    erase: float = 0.0
    rand_augment: RandAugment | None = None

    STORED = StoredInput._fields

    def __post_init__(self) -> None:
        if self.resize and self.resize < max(self.size):
            raise ValueError(f"images cannot be resized to {self.resize} and then cropped to {self.size}: resize to "
                             f"{max(self.size)} or more, or leave it out")  # fmt: skip

    @property
    def canvas_size(self) -> tuple[int, int]:
        """(height, width) that images are resized to, before the crop."""
        return (self.resize, self.resize) if self.resize else self.size

    @classmethod
    def load(cls, path: Path) -> Self:
        stored = read_fields(cls, cls.STORED, path)
        if (resize := stored.get("resize")) is not None and resize < max(stored["size"]):
            raise ValueError(f"{path}: resize is {resize}, expected null or at least the size {stored['size']}, which "
                             "is cropped from it")  # fmt: skip
        return cls(**stored)

    def canvas(self, images: Tensor) -> Tensor:
        """Normalised and resized, not yet cropped: what a standard shift with a crop starts from. Fractions are that
        already, by ``canvas_of``."""
        if not images.is_floating_point():
            return self.resized(self.normalise(images))
        if tuple(images.shape[-2:]) != tuple(self.canvas_size):
            raise ValueError(f"images of {images.dtype} and {tuple(images.shape[-2:])} px are not a canvas of "
                             f"{self.canvas_size}: give uint8, which is resized and normalised")  # fmt: skip
        return images

    def canvas_of(self, pixels: np.ndarray) -> Tensor:
        """The canvas (3, h, w) of one image (h, w, 3), uint8, of any size. Small ones are resized as whole batches of
        them are: normalised, bilinearly."""
        small = max(pixels.shape[:2]) <= SMALL
        return self.canvas((torch.tensor(pixels).permute(2, 0, 1) if small else self.on_canvas(pixels))[None])[0]

    def on_canvas(self, pixels: np.ndarray) -> Tensor:
        """One image (h, w, 3), uint8, of any size -> (3, H, W), uint8, of the size before the crop."""
        image, (height, width) = Image.fromarray(pixels), self.canvas_size
        if image.size != (width, height):
            large = max(image.size) > SMALL
            image = image.resize((width, height), Image.Resampling.BICUBIC if large else Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()

    def resized(self, x: Tensor) -> Tensor:
        for dim, side in zip((-2, -1), self.canvas_size, strict=True):
            if x.shape[dim] != side:
                weights = _resizing(x.shape[dim], side, x.device)
                x = weights @ x if dim == -2 else x @ weights.T
        return x

    def crop(self, x: Tensor) -> Tensor:
        top, left = ((have - want) // 2 for have, want in zip(x.shape[-2:], self.size, strict=True))
        return x[..., top : top + self.size[0], left : left + self.size[1]]

    def evaluate(self, images: Tensor) -> Tensor:
        return self.crop(self.canvas(images))

    def image(self, pixels: np.ndarray) -> Tensor:
        """One image (h, w, 3), uint8, of any size -> normalised (3, H, W), as in evaluation."""
        return self.crop(self.canvas_of(pixels))

    def train(self, images: Tensor, index: Tensor, *seeds: int) -> Tensor:
        u = hashed_uniform(index, 6, *seeds).float()
        x = images
        if self.rotate or self.scale:
            x = _affine(x.float(), (2 * u[:, 0] - 1) * self.rotate, 1 + (2 * u[:, 1] - 1) * self.scale)
        if self.flip:
            x = torch.where((u[:, 2] < 0.5).view(-1, 1, 1, 1), x.flip(-1), x)
        if self.rand_augment is None:
            x = self.crop(self.resized(self.normalise(x)))  # in this order: fewer pixels where images are small
        else:
            levels = self.crop(self.resized(x.float())).round().clamp(0, 255)
            x = self.normalise(self.rand_augment(levels, index, *seeds))
        if self.shift:
            reach = (self.shift, self.shift)
            x = standard_shift(x, random_shifts(index, (-self.shift, -self.shift), reach, *seeds, 4))
        if self.circular:
            x = circular_shift(x, (u[:, 3:5] * constants(tuple(x.shape[-2:]), x.device)).long())
        return _erase(x, index, self.erase, *seeds) if self.erase else x


@kept(16)
def _resizing(old: int, new: int, device: torch.device) -> Tensor:
    """(new, old) weights of a bilinear resize along one axis, with antialiasing where it shrinks.

    Two small matrix products: on a GPU several times faster than interpolating a large batch of small images.
    """
    unit = torch.eye(old, dtype=torch.float32)[None, None]  # not one column wide: torch's antialiasing is wrong there
    weights = F.interpolate(unit, (new, old), mode="bilinear", antialias=new < old, align_corners=False)
    return weights[0, 0].contiguous().to(device)


def _affine(x: Tensor, degrees: Tensor, scale: Tensor) -> Tensor:
    """Rotate and scale every image about its centre; fill with zeros."""
    radians = torch.deg2rad(degrees)
    cos, sin, zero = torch.cos(radians) / scale, torch.sin(radians) / scale, torch.zeros_like(scale)
    theta = torch.stack([cos, -sin, zero, sin, cos, zero], 1).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _erase(x: Tensor, index: Tensor, probability: float, *seeds: int, tries: int = 10) -> Tensor:
    """Random erasing: noise in one rectangle of 2-33 % of the image, sides 0.3-3.3 to one; the first of ``tries``
    rectangles that fits."""
    batch, channels, height, width = x.shape
    u = hashed_uniform(index, 4 * tries + 1, *seeds, 1)  # another stream than the other augmentations
    chosen, u = u[:, 0] < probability, u[:, 1:].view(batch, tries, 4)
    area = (0.02 + (1 / 3 - 0.02) * u[..., 0]) * height * width
    ratio = torch.exp((2 * u[..., 1] - 1) * np.log(10 / 3))
    h, w = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (h < height) & (w < width)
    first = fits.byte().argmax(1, keepdim=True)
    chosen = chosen & fits.any(1)
    h, w = h.gather(1, first), w.gather(1, first)  # B, 1
    top = (u[..., 2].gather(1, first) * (height - h + 1)).floor()
    left = (u[..., 3].gather(1, first) * (width - w + 1)).floor()
    row, column = (torch.arange(n, device=x.device) for n in (height, width))
    inside = ((row >= top) & (row < top + h))[:, :, None] & ((column >= left) & (column < left + w))[:, None, :]
    start = (hashed_uniform(index, 1, *seeds, 2) * 2**52).long()  # B, 1
    pixel = torch.arange(channels * height * width, device=x.device)
    normal = torch.special.ndtri(hashed_uniform((start + pixel).flatten(), 1).clamp_min(1e-9))
    return torch.where((inside & chosen.view(-1, 1, 1))[:, None], normal.view_as(x).to(x.dtype), x)


class Mixing:
    """Mixup and cutmix of a batch (one of the two per batch, with its mirror; neither but with ``probability``), and
    smoothed soft targets; by timm."""

    def __init__(self, *, mixup: float, cutmix: float, label_smoothing: float, num_classes: int,
                 probability: float = 1.0) -> None:  # fmt: skip
        self.mix = Mixup(mixup_alpha=mixup, cutmix_alpha=cutmix, prob=probability, label_smoothing=label_smoothing,
                         num_classes=num_classes)  # fmt: skip

    def __call__(self, images: Tensor, labels: Tensor, *seeds: int) -> tuple[Tensor, Tensor]:
        self.check(len(images))
        with seeded(derive_seed(*seeds)):
            return self.mix(images.contiguous(), labels)

    def check(self, count: int) -> None:
        """Raise unless so many images can be paired."""
        if count % 2:
            raise ValueError(f"mixup and cutmix pair the images of a batch, but {count} per process and step is odd: "
                             "choose another --batch_size, or --mixup 0 --cutmix 0")  # fmt: skip


def check_finite(images: Tensor, where: str) -> None:
    """Raise on NaN or Inf. Called where images enter the program, never in a forward."""
    if not torch.isfinite(images).all():
        bad = (~torch.isfinite(images)).flatten(1).any(1).nonzero().flatten().tolist()
        raise ValueError(f"{where}: images {bad[:5]} of the batch hold NaN or Inf; repair or drop them")
