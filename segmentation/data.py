"""Scenes with a label per pixel, by name: digit scenes made here, folders, ADE20K, the Hub.

A parquet folder has ``train.parquet`` (or ``train-NUMBER.parquet``) and the same of ``validation``, ``val`` or
``test``: the first that is there is evaluated, of CamVid ``test``, here and on the Hub. They may lie under ``data/``,
and have an image column (``image`` or ``img``) and a column of label images (``label``, ``annotation`` or ``mask``).
ADE20K's own tree has ``images/training``, ``annotations/training`` and the same under ``validation``.
``classes.txt`` in either names the classes of your own, one a line: class c is number c in label images, from 0, and
255 does not count. Small sets of one size are decoded once, into memory; others stay encoded for the loader's workers.
"""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm

from common.data.images import open_image
from common.data.sources import (
    IMAGE_COLUMNS,
    IMAGE_SUFFIXES,
    find_column,
    held_out,
    import_datasets,
    load_hub_split,
    parquet_files,
    read_columns,
    row_name,
    stored_bytes,
)
from common.data.splits import load_digits_data
from common.evaluation.metrics import IGNORE_INDEX
from common.models.hub import is_hub_id
from common.seeding import hashed_uniform

from .labels import ADE20K, KNOWN, Labelling
from .splits import EncodedScenes, PixelSplit, Scenes

__all__ = ["from_dataset", "load_digit_scenes", "load_evaluation", "load_scenes", "load_split"]

LABEL_COLUMNS = ("label", "annotation", "mask")
CLASSES_NAME = "classes.txt"
MEMORY = 2**31  # bytes of decoded pixels and labels up to which a split of one size is held in memory


def load_scenes(name: str, labelling: Labelling | None = None,
                split: str | None = None) -> tuple[PixelSplit, PixelSplit]:  # fmt: skip
    """Train and evaluation split by name: ``digits``, a folder, or a Hub id ``owner/name[@revision]``.

    ``labelling`` is that of the folder's ``classes.txt``, or of ``KNOWN`` data sets by the last part of the name, else
    the labels as they are stored. ``split`` is the one to evaluate, if not the first of the labelling's.
    """
    if not name:
        raise ValueError("this recipe is for data of your own: give a folder or a Hub id by --data")
    if name == "digits":
        digits = dict(zip(("train", "test"), load_digit_scenes(), strict=True))
        return digits["train"], digits[held_out(digits, name, (split or "test",))]
    path = Path(name)
    known = labelling or _named_classes(path) or KNOWN.get(path.name.partition("@")[0].lower())
    labelling = known or Labelling()
    labelling = replace(labelling, evaluated=(split,)) if split else labelling
    if is_hub_id(name):
        return _load_hub(name, labelling)
    if not path.is_dir():
        raise FileNotFoundError(f"no data folder {name}: give 'digits', a folder of parquet files, ADE20K's own "
                                "folder, or a Hub id 'owner/name'")  # fmt: skip
    if (path / "images").is_dir():
        if known is None:
            warnings.warn(f"{path} is read as ADE20K, 150 classes numbered from 1. If it is not, name its classes in "
                          f"{path / CLASSES_NAME}, one a line, numbered from 0", stacklevel=2)  # fmt: skip
        train, test = (_read_tree(path, part, known or ADE20K) for part in ("training", split or "validation"))
        return _same_classes(train, test)
    return _same_classes(load_split(path, ("train",), labelling), load_split(path, labelling.evaluated, labelling))


def load_evaluation(name: str, split: str | None = None) -> PixelSplit:
    """The evaluation split by name, as ``load_scenes`` has it; without the other one, where the classes are known."""
    path = Path(name)
    known = _named_classes(path) or KNOWN.get(path.name.partition("@")[0].lower())
    if known is not None and is_hub_id(name):
        found, part = load_hub_split(name, (split,) if split else known.evaluated)
        return from_dataset(found, f"{name} ({part})", known)
    if known is None or not path.is_dir():
        return load_scenes(name, split=split)[1]
    if (path / "images").is_dir():
        return _read_tree(path, split or "validation", known)
    return load_split(path, (split,) if split else known.evaluated, known)


def _named_classes(folder: Path) -> Labelling | None:
    """The classes that a folder names itself."""
    file = folder / CLASSES_NAME
    if not file.is_file():
        return None
    try:
        names = tuple(line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip())
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8: save it as that, one name a line") from None
    if len(names) < 2 or len(set(names)) < len(names) or len(names) > IGNORE_INDEX:
        raise ValueError(f"{file} has {len(names)} names, {len(set(names))} of them different: expected 2 to "
                         f"{IGNORE_INDEX} different ones, one a line")  # fmt: skip
    return Labelling(names)


def load_digit_scenes(train: int = 1000, test: int = 200, size: int = 64) -> tuple[Scenes, Scenes]:
    """Scenes of up to four of scikit-learn's handwritten digits on black, 11 classes: background and ten digits.

    Scenes to train are made of digits to train, scenes to test of held-out digits, each always the same. A digit takes
    a third to nearly a half of the side, at a random place in its quarter of the canvas; its pixels are those at least
    a quarter as bright as ink.
    """
    splits = load_digits_data(size=8, margin=0)
    names = ("background", *splits[0].classes)
    scenes = []
    for seed, (split, count) in enumerate(zip(splits, (train, test), strict=True)):
        u = hashed_uniform(torch.arange(count), 20, 64, seed)
        images, labels = torch.zeros(count, 1, size, size), torch.zeros(count, size, size, dtype=torch.uint8)
        half = size // 2
        for i in range(count):
            for quarter in range(4):
                present, which, scale, row, column = u[i, 5 * quarter : 5 * quarter + 5].tolist()
                if present < 0.25 and quarter != i % 4:  # one digit at least
                    continue
                side = int(size * (0.34 + 0.14 * scale))
                k = int(which * len(split))
                digit = split.images[k, :1].float()[None]
                digit = F.interpolate(digit, (side, side), mode="bilinear", align_corners=False)[0, 0].clamp(0, 255)
                top = quarter // 2 * half + int(row * (half - side + 1))
                left = quarter % 2 * half + int(column * (half - side + 1))
                images[i, 0, top : top + side, left : left + side] = digit
                patch = labels[i, top : top + side, left : left + side]
                patch[digit >= 64] = int(split.labels[k]) + 1
        scenes.append(Scenes(images.round().byte().expand(-1, 3, -1, -1).contiguous(), labels, names))
    return scenes[0], scenes[1]


def load_split(folder: Path, names: Sequence[str], labelling: Labelling) -> PixelSplit:
    """The first split of a folder of parquet files that goes by one of ``names``."""
    files = next(filter(None, (parquet_files(folder, name) for name in names)), [])
    if not files:
        raise FileNotFoundError(f"{folder} has no {' or '.join(names)}.parquet, nor ADE20K's 'images' folder; it holds "
                                f"{sorted(p.name for p in folder.iterdir())[:8]}")  # fmt: skip
    table = read_columns(files, IMAGE_COLUMNS, LABEL_COLUMNS)
    return _split(range(len(table)), partial(_read_cells, *table.columns), labelling, partial(row_name, files[0]))


def _read_tree(folder: Path, part: str, labelling: Labelling) -> PixelSplit:
    """ADE20K's own tree: images/PART/NAME.jpg with annotations/PART/NAME.png."""
    images, annotations = folder / "images" / part, folder / "annotations" / part
    for directory in (images, annotations):
        if not directory.is_dir():
            raise FileNotFoundError(f"no folder {directory}: expected images/{part} and annotations/{part}")
    items = []
    visible = (p for p in images.iterdir() if not p.name.startswith("."))  # macOS hides a file beside each
    for path in sorted(p for p in visible if p.suffix.lower() in IMAGE_SUFFIXES):
        label = annotations / f"{path.stem}.png"
        if not label.is_file():
            raise FileNotFoundError(f"{path} has no labels: expected {label}")
        items.append((path, label))
    if not items:
        raise FileNotFoundError(f"no images under {images}: expected NAME.jpg (or png, webp, bmp)")
    return _split(items, _read_paths, labelling, _path_name)


def _load_hub(name: str, labelling: Labelling) -> tuple[PixelSplit, PixelSplit]:
    datasets = import_datasets(name)
    repository, _, revision = name.partition("@")
    found = datasets.load_dataset(repository, revision=revision or None)
    parts = ("train", held_out(found, name, labelling.evaluated))
    train, test = (from_dataset(found[part], f"{name} ({part})", labelling) for part in parts)
    return _same_classes(train, test)


def from_dataset(dataset: Any, name: str, labelling: Labelling) -> PixelSplit:
    """A split of a (memory-mapped) dataset of the library ``datasets``."""
    import datasets

    image, label = (find_column(dataset.column_names, wanted, name) for wanted in (IMAGE_COLUMNS, LABEL_COLUMNS))
    for column in (image, label):
        dataset = dataset.cast_column(column, datasets.Image(decode=False))
    read = partial(_read_row, dataset.select_columns([image, label]), image, label)
    return _split(range(len(dataset)), read, labelling, partial(row_name, name))


# how a split reads an item and what it calls it: plain functions, so that a split can be sent to workers


def _read_cells(images: Any, labels: Any, i: int) -> tuple[bytes, bytes]:
    cells = (images[i].as_py(), labels[i].as_py())
    first, second = (cell["bytes"] if isinstance(cell, dict) else cell for cell in cells)
    return first, second


def _read_row(rows: Any, image: str, label: str, i: int) -> tuple[bytes, bytes]:
    row = rows[i]
    return stored_bytes(row[image]), stored_bytes(row[label])


def _read_paths(paths: tuple[Path, Path]) -> tuple[bytes, bytes]:
    return paths[0].read_bytes(), paths[1].read_bytes()


def _path_name(paths: tuple[Path, Path]) -> str:
    return str(paths[0])


def _split(items: Sequence[Any], read: Callable[[Any], tuple[bytes, bytes]], labelling: Labelling,
           name: Callable[[Any], str]) -> PixelSplit:  # fmt: skip
    """Scenes of one size (judged by their headers) that fit into memory there, others encoded."""
    encoded = EncodedScenes(items, read, labelling, name)
    size: tuple[int, int] | None = None
    for item in items:
        try:
            with open_image(read(item)[0]) as image:
                size, last = image.size, size
        except Exception:
            continue  # named where the scene is used
        if (last is not None and size != last) or 4 * len(items) * size[0] * size[1] > MEMORY:
            return encoded
    return _in_memory(encoded)


def _in_memory(split: EncodedScenes) -> Scenes:
    """Decode all scenes, in threads, into two arrays."""
    with ThreadPoolExecutor() as pool:
        pairs = list(tqdm(pool.map(split.decode, range(len(split))), total=len(split), desc="decode", leave=False))
    images, labels = (torch.stack(part) for part in zip(*pairs, strict=True))
    classes = split.labelling.classes
    if classes is None:
        counted = labels[labels != IGNORE_INDEX]
        classes = tuple(str(i) for i in range(int(counted.max()) + 1 if counted.numel() else 0))
    return Scenes(images, labels, classes)


def _same_classes(train: PixelSplit, test: PixelSplit) -> tuple[PixelSplit, PixelSplit]:
    """Two splits whose classes were counted apart know all of them."""
    if train.classes != test.classes:
        classes = max(train.classes, test.classes, key=len)
        train, test = (
            replace(split, classes=classes) if isinstance(split, Scenes) else split for split in (train, test)
        )
    return train, test
