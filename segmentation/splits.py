"""Splits with a label per pixel: in memory, or decoded on demand."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.data.images import decode_image, open_image, turn_of
from common.data.splits import Arrays, Split, spread
from common.evaluation.metrics import IGNORE_INDEX

from .labels import Labelling
from .preprocess import ScenePreprocess, resize_image

__all__ = ["EncodedScenes", "PixelSplit", "Scenes", "check_labels"]


class PixelSplit(Split):
    """Images with a label per pixel. ``cropped``: in training, items come out of the loader as crops."""

    cropped: bool = False

    def prepared(self, preprocess: Any, seed: int = 0) -> Any:
        return self


@dataclass(frozen=True)
class Scenes(PixelSplit, Arrays):
    """A split in memory: images (N, 3, H, W) uint8, labels (N, H, W) uint8, class names. Items are indices."""

    def __post_init__(self) -> None:
        if not len(self.images):
            raise ValueError("the data set is empty")
        if self.images.ndim != 4 or (len(self.images), *self.images.shape[2:]) != tuple(self.labels.shape):
            raise ValueError(f"images {tuple(self.images.shape)} and labels {tuple(self.labels.shape)} do not fit: "
                             "expected (N, 3, H, W) and (N, H, W)")  # fmt: skip
        counted = self.labels[self.labels != IGNORE_INDEX]
        if counted.numel() and (high := int(counted.max())) >= len(self.classes):
            raise ValueError(f"labels run up to {high}, but there are {len(self.classes)} classes")


@dataclass(frozen=True)
class EncodedScenes(PixelSplit):
    """A split that is decoded on demand: ``read(items[i])`` gives the bytes of image i and of its label image.

    After ``prepared`` an item is (image (3, H, W), labels (H, W), index), uint8: asked for by (epoch, index) the
    training crop, by index alone the whole scene, its image at the size it is evaluated at, its labels at their own.
    """

    items: Sequence[Any]
    read: Callable[[Any], tuple[bytes, bytes]]
    labelling: Labelling
    name: Callable[[Any], str]  # where an item comes from, for errors
    preprocess: ScenePreprocess | None = None
    seed: int = 0
    cropped = True

    def __post_init__(self) -> None:
        if not len(self.items):
            raise ValueError("the data set is empty")

    @property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        if self.labelling.classes is None:
            raise ValueError("scenes of several sizes, or too many for memory, need their classes named: put "
                             "classes.txt, one name a line, beside the data")  # fmt: skip
        return self.labelling.classes

    def __len__(self) -> int:
        return len(self.items)

    def decode(self, index: int) -> tuple[Tensor, Tensor]:
        """Image (3, h, w) and labels (h, w) of a scene at its own size, uint8."""
        where = self.name(self.items[index])
        try:
            content = self.read(self.items[index])
            image, stored = decode_image(content[0], upright=False), decode_labels(content[1])
        except Exception as error:
            raise ValueError(f"{where} is not a readable scene ({error}): repair or drop it") from None
        if image.shape[:2] != stored.shape:
            raise ValueError(f"{where}: the image is {image.shape[0]}x{image.shape[1]}, its labels are "
                             f"{stored.shape[0]}x{stored.shape[1]}: they must have one size")  # fmt: skip
        return torch.from_numpy(image.copy()).permute(2, 0, 1), self.labelling(stored, where)

    def __getitem__(self, item: int | tuple[int, int]) -> tuple[Tensor, Tensor, int]:
        if self.preprocess is None:
            raise RuntimeError("an encoded split needs prepared(preprocess) before it is read")
        epoch, index = item if isinstance(item, tuple) else (None, item)
        image, labels = self.decode(index)
        if epoch is not None:
            image, labels = self.preprocess.crop(image, labels, index, self.seed, epoch)
        else:
            image = resize_image(image, self.preprocess.evaluation_size((image.shape[1], image.shape[2])))
        return image.contiguous(), labels.contiguous(), index

    def pixels(self, index: int) -> np.ndarray:
        return self.decode(index)[0].permute(1, 2, 0).numpy()

    def head(self, count: int | None) -> "EncodedScenes":
        return replace(self, items=self.items[:count])

    def prepared(self, preprocess: Any, seed: int = 0) -> "EncodedScenes":
        return replace(self, preprocess=preprocess, seed=seed)


def check_labels(split: PixelSplit, where: str, classes: int, sample: int = 64) -> None:
    """Raise a ValueError where pixels of fewer classes count than must be; warn of classes that do not occur. Of scenes
    that are decoded on demand, a few are looked at."""
    whole, counts = isinstance(split, Scenes), torch.zeros(IGNORE_INDEX + 1, dtype=torch.long)
    for i in range(len(split)) if whole else spread(len(split), sample):
        with suppress(ValueError):  # what cannot be read is named where it is used
            labels = split.labels[i] if whole else split.decode(i)[1]  # type: ignore[attr-defined]
            counts += torch.bincount(labels.flatten(), minlength=IGNORE_INDEX + 1)
    present = {c for c in counts.nonzero().flatten().tolist() if c != IGNORE_INDEX}
    if counts.any() and len(present) < classes:
        found = f"no pixel but of class {split.classes[present.pop()]!r}" if present else "no pixel that counts"
        raise ValueError(f"{where} has {found}. Label {IGNORE_INDEX} does not count: number the classes from 0, two "
                         "classes 0 and 1")  # fmt: skip
    absent = [name for c, name in enumerate(split.classes) if c not in present]
    if whole and classes > 1 and absent:
        warnings.warn(f"{where} has no pixel of {', '.join(absent)[:200]}", stacklevel=2)


def decode_labels(content: bytes) -> np.ndarray:
    """Encoded label image -> (H, W) numbers. One channel: grey levels or palette entries."""
    with open_image(content) as image:
        if image.format == "JPEG":
            raise ValueError("labels are a JPEG, which changes numbers: store them as PNG")
        turn = turn_of(image, upright=False)
        numbers = np.asarray(image if turn is None else image.transpose(turn))
        if image.format == "PNG" and content[24:26] in (b"\2\0", b"\4\0"):  # grey of 2 or 4 bits, spread over 0 to 255
            numbers = numbers // (255 // (2 ** content[24] - 1))
    if numbers.ndim != 2:
        raise ValueError(f"labels must be an image of one channel, got mode {image.mode}")
    if image.mode == "F" and (numbers % 1 > 0).any():
        raise ValueError(f"labels hold fractions, such as {numbers[numbers % 1 > 0][0]:g}: store whole numbers")
    return numbers
