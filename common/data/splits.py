"""Splits of data by name: the embedded digits here; folders and Hub datasets in ``sources``.

A split either lies in memory as one uint8 array (``Arrays``: small images, on the device where there is one; what
travels through the loader is indices), or stays encoded and is decoded by the loader's workers (``Encoded``: large
images). Either way ``fetch`` turns a batch of the loader into (images, labels, index) on the device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from ..seeding import derive_seed
from .preprocess import Preprocess

__all__ = ["Arrays", "Encoded", "EpochSampler", "Split", "check_rows", "load_digits_data", "same_classes",
           "shown"]  # fmt: skip

Batch = tuple[Tensor, Tensor, Tensor]


class Split(Dataset[Any]):
    """Labelled images. Items are asked for by index, in training by (epoch, index)."""

    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def check(self) -> None:
        if not len(self):
            raise ValueError("the data set is empty")
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= len(self.classes):
            raise ValueError(f"labels run from {low} to {high}, but there are {len(self.classes)} classes")

    def fetch(self, batch: Any) -> Batch:
        """What the loader gave, moved to the device -> images (B, 3, h, w), as ``Preprocess.canvas`` takes them, labels
        (B,), index (B,)."""
        images, labels, index = batch
        return images, labels, index

    def to(self, device: torch.device) -> Self:
        return self

    def head(self, count: int | None) -> Self:
        """The first images alone."""
        raise NotImplementedError

    def pixels(self, index: int) -> np.ndarray:
        """One image (h, w, 3), uint8, as it is stored."""
        raise NotImplementedError

    def peek(self, count: int) -> Iterator[np.ndarray]:
        """A few images from all over the split, but those that cannot be read: they are named where they are used."""
        for i in spread(len(self), count):
            with suppress(Exception):
                yield self.pixels(i)

    def prepared(self, preprocess: Preprocess, seed: int = 0) -> "Split":
        """The split as a loader needs it: its workers, if it has any, resize the images."""
        return self


@dataclass(frozen=True)
class Arrays(Split):
    """A split in memory: images (N, 3, H, W) uint8, labels (N,), class names. Items are indices."""

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} images but {len(self.labels)} labels")
        self.check()

    def __getitem__(self, item: int | tuple[int, int]) -> int:
        return item[1] if isinstance(item, tuple) else item

    def fetch(self, batch: Tensor) -> Batch:
        return self.images[batch], self.labels[batch], batch

    def to(self, device: torch.device) -> "Arrays":
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def pixels(self, index: int) -> np.ndarray:
        return self.images[index].permute(1, 2, 0).numpy()

    def head(self, count: int | None) -> "Arrays":
        return replace(self, images=self.images[:count], labels=self.labels[:count])


@dataclass(frozen=True)
class Encoded(Split):
    """A split that is decoded on demand: ``read(items[i])`` gives image i as an (H, W, 3) uint8 array.

    Items are (image (3, h, w) of the canvas' size, label, index): in training uint8, else the canvas itself. An image
    that cannot be read is an error that names it or, with ``skip_broken``, is replaced by the next readable one in
    training, and has label -1 otherwise.
    """

    items: Sequence[Any]
    read: Callable[[Any], np.ndarray]
    labels: Tensor
    classes: tuple[str, ...]
    name: Callable[[Any], str]  # where an item comes from, for errors
    skip_broken: bool = False
    preprocess: Preprocess | None = None
    broken: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))  # filled in by the workers

    def __post_init__(self) -> None:
        if len(self.items) != len(self.labels):
            raise ValueError(f"{len(self.items)} images but {len(self.labels)} labels")
        self.check()
        if len(self.broken) != len(self):
            object.__setattr__(self, "broken", torch.zeros(len(self), dtype=torch.bool).share_memory_())

    def __getitem__(self, item: int | tuple[int, int]) -> tuple[Tensor, int, int]:
        if self.preprocess is None:
            raise RuntimeError("an encoded split needs prepared(preprocess) before it is read")
        epoch, index = item if isinstance(item, tuple) else (None, item)
        for attempt in range(10):
            i = (index + attempt) % len(self)
            try:
                resize = self.preprocess.canvas_of if epoch is None else self.preprocess.on_canvas
                return resize(self.pixels(i)), int(self.labels[i]), i
            except Exception as error:
                if not self.skip_broken:
                    raise ValueError(f"{self.name(self.items[i])} is not a readable image ({error}): repair or drop "
                                     "it, or use --skip_broken") from None  # fmt: skip
                self.broken[i] = True
                if epoch is None:
                    return torch.zeros(3, *self.preprocess.canvas_size), -1, i
        raise ValueError(f"no readable image among ten from {self.name(self.items[index])} on: check the data")

    def pixels(self, index: int) -> np.ndarray:
        return self.read(self.items[index])

    def head(self, count: int | None) -> "Encoded":
        return replace(self, items=self.items[:count], labels=self.labels[:count])

    def prepared(self, preprocess: Preprocess, seed: int = 0) -> "Encoded":
        return replace(self, preprocess=preprocess)


def spread(length: int, count: int) -> list[int]:
    return torch.linspace(0, length - 1, min(length, count)).long().tolist()


class EpochSampler(Sampler[tuple[int, int]]):
    """(epoch, index) over a permutation by (seed, epoch), the same on all processes; Accelerate shards it and sets the
    epoch. Only whole batches: ``count`` is rounded down to a multiple of ``batch_size``."""

    def __init__(self, count: int, seed: int, batch_size: int = 1) -> None:
        self.count, self.seed, self.epoch = count, seed, 0
        self.length = count // batch_size * batch_size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        order = torch.randperm(self.count, generator=generator)[: self.length].tolist()
        return iter([(self.epoch, index) for index in order])


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


def check_rows(name: str, found: tuple[int, int, int], expected: tuple[int, int, int]) -> None:
    """Raise unless a data set has the (train images, evaluation images, classes) that a table was measured on."""
    if found != expected:
        what = ("training images", "evaluation images", "classes")
        rows = zip(found, expected, what, strict=True)
        wrong = ", ".join(f"{have:,} {thing} instead of {want:,}" for have, want, thing in rows if have != want)
        raise ValueError(f"{name} has {wrong}: it is not the whole data set; fetch it again, or leave out "
                         "--expected_rows to train on it as it is")  # fmt: skip


S = TypeVar("S", bound=Split)
T = TypeVar("T", bound=Split)


def same_classes(train: S, test: T, where: str) -> tuple[S, T]:
    """Both splits with the classes of ``train``, in its order; their classes were read separately."""
    if train.classes == test.classes:
        return train, test
    numbered = all(name == str(i) for split in (train, test) for i, name in enumerate(split.classes))
    if numbered and len(train.classes) < len(test.classes) and is_dataclass(train):
        train = replace(train, classes=test.classes)
    if unknown := sorted(set(test.classes) - set(train.classes)):
        raise ValueError(f"{where}: train has classes {shown(train.classes)}, but not {shown(unknown)} of the "
                         "evaluation split: name the classes of both alike")  # fmt: skip
    place = torch.tensor([train.classes.index(name) for name in test.classes])
    return train, replace(test, labels=place[test.labels], classes=train.classes)  # type: ignore[type-var]


def shown(values: Sequence[Any]) -> str:
    """The first few, for an error."""
    return ", ".join(str(value)[:40] for value in values[:3]) + (", ..." if len(values) > 3 else "")
