"""Data sets from disk, read without any other library's loader: folders of parquet files, trees of images; and from
the Hub.

A parquet folder has ``train.parquet`` or ``train-NUMBER.parquet``, and the same of ``validation``, ``val`` or ``test``
(also under ``data/``). It has an image column (``img`` or ``image``: bytes, or a struct with ``bytes``) and a label
column. An image tree has ``train/CLASS/FILE`` and ``val/CLASS/FILE`` (or ``validation``, ``test``). The first of these
that is there is evaluated, here and on the Hub. Labels number the classes from 0, or name them: names become classes in
sorted order.

Small images of one size are decoded once, into memory; others stay encoded for the loader's workers.
"""

import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..models.hub import is_hub_id
from .images import decode_image
from .preprocess import SMALL
from .splits import Arrays, Encoded, Split, check_rows, load_digits_data, same_classes, shown

__all__ = ["EVALUATION_SPLITS", "IMAGE_COLUMNS", "IMAGE_SUFFIXES", "KNOWN", "LABEL_COLUMNS", "find_column",
           "held_out", "load_data", "load_evaluation", "load_folder", "load_hub", "load_hub_split", "load_split",
           "parquet_files", "read_columns", "read_labels", "row_name", "shown", "stored_bytes"]  # fmt: skip

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "fine_label")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
EVALUATION_SPLITS = ("validation", "val", "test")  # in this order: public test splits may have no labels
MAX_CLASSES = 2**16  # that numbers stand for: beyond, they are something else, such as identifiers

KNOWN = {
    "uoft-cs/cifar10": (50_000, 10_000, 10),
    "uoft-cs/cifar100": (50_000, 10_000, 100),
    "ILSVRC/imagenet-1k": (1_281_167, 50_000, 1000),
}
"""Images to train, images to evaluate and classes of the paper's data sets."""


def load_data(name: str, skip_broken: bool = False, split: str | None = None) -> tuple[Split, Split]:
    """Train and evaluation split by name: ``digits``, a folder, or a Hub id. ``split`` is the one to evaluate, if not
    the first of ``EVALUATION_SPLITS`` that is there."""
    if not name:
        raise ValueError("this recipe is for data of your own: give a folder or a Hub id by --data")
    evaluated = (split,) if split else EVALUATION_SPLITS
    if name == "digits":
        digits = dict(zip(("train", "test"), load_digits_data(), strict=True))
        return digits["train"], digits[held_out(digits, name, evaluated)]
    if is_hub_id(name):
        return load_hub(name, skip_broken, evaluated)
    return load_folder(Path(name), skip_broken, evaluated)


def load_evaluation(name: str, skip_broken: bool = False, split: str | None = None) -> Split:
    """The evaluation split by name, as ``load_data`` has it. A folder may hold no other: its classes are then those of
    that split. Of the Hub's data sets that name their classes no other is fetched."""
    folder, evaluated = Path(name), (split,) if split else EVALUATION_SPLITS
    if is_hub_id(name):
        found, part = load_hub_split(name, evaluated, folders=False)
        if not hasattr(found.features[find_column(found.column_names, LABEL_COLUMNS, name)], "names"):
            return load_data(name, skip_broken, split)[1]
        test, known = from_dataset(found, f"{name} ({part})", skip_broken), KNOWN.get(name.partition("@")[0])
        if known and split is None:
            check_rows(name, (known[0], len(test), len(test.classes)), known)
        return test
    if name in ("", "digits") or not folder.is_dir() or _holds(folder, "train"):
        return load_data(name, skip_broken, split)[1]
    return load_split(folder, evaluated, skip_broken)


def load_folder(folder: Path, skip_broken: bool = False,
                evaluated: Sequence[str] = EVALUATION_SPLITS) -> tuple[Split, Split]:  # fmt: skip
    """Train and evaluation split of a folder: the first of those ``evaluated`` that it has."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no data folder {folder}: give 'digits', a folder of parquet files or images, or a "
                                "Hub id 'owner/name'")  # fmt: skip
    train = load_split(folder, ("train",), skip_broken)
    test = load_split(folder, evaluated, skip_broken)
    return same_classes(train, test, str(folder))


def read_labels(values: Sequence[Any], names: Sequence[str] | None, where: str) -> tuple[Tensor, tuple[str, ...]]:
    """Labels as people store them -> (N,) numbers from 0, and names of the classes. ``where`` is the file and column.

    Text becomes classes in sorted order, or that of ``names``. Numbers, also fractions that are whole, are classes as
    they are: a class that no image has stays one, so that a part of a data set has the labels of the whole.
    """
    if not values:
        raise ValueError(f"{where}: there are no rows")
    text = any(isinstance(value, str) for value in values)
    for i, value in enumerate(values):
        whole = value.is_integer() if isinstance(value, float) else isinstance(value, int)
        if not (isinstance(value, str) if text else whole):
            raise ValueError(f"{where}: the label of row {i} is {str(value)[:40]!r}: expected whole numbers from 0, or "
                             "names; drop rows without a label")  # fmt: skip
    if text:
        classes = tuple(names or sorted(set(values)))
        place = {name: i for i, name in enumerate(classes)}
        if unknown := sorted(set(values) - set(classes)):
            raise ValueError(f"{where}: no class is named {shown(unknown)}; there are {shown(classes)}")
        return torch.tensor([place[value] for value in values]), classes
    low, high = int(min(values)), int(max(values))
    most = len(names) if names else MAX_CLASSES
    if low < 0 or high >= most:
        raise ValueError(f"{where}: labels run from {str(low)[:40]} to {str(high)[:40]}, but there are {most:,} "
                         "classes at most: number them from 0, or store their names")  # fmt: skip
    return torch.tensor([int(value) for value in values]), tuple(str(name) for name in names or range(high + 1))


def load_hub(name: str, skip_broken: bool = False,
             evaluated: Sequence[str] = EVALUATION_SPLITS) -> tuple[Split, Split]:  # fmt: skip
    """Train and evaluation split of a Hub dataset, ``owner/name`` or ``owner/name@revision``, through ``datasets``."""
    datasets = import_datasets(name)
    repository, _, revision = name.partition("@")
    with reaching(name):
        found = datasets.load_dataset(repository, revision=revision or None)
    parts = ("train", held_out(found, name, evaluated))
    train, test = (from_dataset(found[part], f"{name} ({part})", skip_broken) for part in parts)
    if repository in KNOWN and evaluated is EVALUATION_SPLITS:
        check_rows(name, (len(train), len(test), len(train.classes)), KNOWN[repository])
    return same_classes(train, test, name)


def load_hub_split(name: str, among: Sequence[str], folders: bool = True) -> tuple[Any, str]:
    """The first split of a Hub dataset that goes by one of ``among``, and that name. Its files alone are fetched;
    ``load_dataset`` by itself fetches those of all splits, whichever it is asked for. Not ``folders``: so it is where
    folders may name the classes, as those of one split may not be all."""
    datasets = import_datasets(name)
    repository, _, revision = name.partition("@")
    with reaching(name):
        builder = datasets.load_dataset_builder(repository, revision=revision or None)
        files = {str(split): list(where) for split, where in (builder.config.data_files or {}).items()}
        part = held_out(files, name, among) if files else ""  # none without a connection: what is cached, is whole
        named = builder.info.features or all(file.endswith(".parquet") for file in files.get(part, ()))
        if not files or not (folders or named):
            found = datasets.load_dataset(repository, revision=revision or None)
            return found[part := held_out(found, name, among)], part
        # what the card says of other splits is not checked
        return datasets.load_dataset(repository, revision=revision or None, data_files={part: files[part]}, split=part,
                                     features=builder.info.features, verification_mode="no_checks"), part  # fmt: skip


@contextmanager
def reaching(name: str) -> Iterator[None]:
    """Say what else to give where the Hub cannot be reached."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{name} cannot be read from the Hub ({str(error).splitlines()[0][:200]}): give a folder with "
                      "its files, --data DIR") from error  # fmt: skip


def held_out(splits: Collection[str], name: str, among: Sequence[str] = EVALUATION_SPLITS) -> str:
    """The split of a data set that is evaluated: the first of those ``among`` that it has."""
    evaluation = next((split for split in among if split in splits), None)
    if "train" not in splits or evaluation is None:
        raise ValueError(f"{name} has splits {sorted(splits)}: expected train and one of {tuple(among)}")
    return evaluation


def import_datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ImportError(f"{name} is read with the library 'datasets': pip install 'shift-equivariant-vits[hub-data]'"
                          ", or give a folder with its parquet files and leave out --streaming") from None  # fmt: skip
    return datasets


def from_dataset(dataset: Any, name: str, skip_broken: bool = False) -> Split:
    """A split of a (memory-mapped) dataset of the library ``datasets``."""
    import datasets

    image, label = (find_column(dataset.column_names, wanted, name) for wanted in (IMAGE_COLUMNS, LABEL_COLUMNS))
    rows = dataset.cast_column(image, datasets.Image(decode=False)).select_columns([image])
    feature = dataset.features[label]
    names = feature.names if isinstance(feature, datasets.ClassLabel) else None
    labels, classes = read_labels(list(dataset[label]), names, f"{name}, column {label!r}")
    return _split(range(len(rows)), partial(_read_row, rows, image), labels, classes,
                  partial(row_name, name), skip_broken)  # fmt: skip


def _holds(folder: Path, name: str) -> bool:
    return bool(parquet_files(folder, name)) or (folder / name).is_dir()


def load_split(folder: Path, names: Iterable[str], skip_broken: bool = False) -> Split:
    """The first split of a folder that goes by one of ``names``."""
    for name in names:
        if files := parquet_files(folder, name):
            return _read_parquet(files, skip_broken)
        if (folder / name).is_dir():
            return _read_tree(folder / name, skip_broken)
    raise FileNotFoundError(f"{folder} has neither {'/'.join(names)}.parquet, nor such parts with numbers, nor such a "
                            f"folder of images; it holds {sorted(p.name for p in folder.iterdir())[:8]}")  # fmt: skip


def parquet_files(folder: Path, name: str) -> list[Path]:
    """The files of a split: NAME.parquet or, of parts, NAME-NUMBER.parquet. ``trainval`` is no part of ``train``.
    Warns of missing parts, raises a ValueError where a split is there twice."""
    found = sorted([*folder.glob(f"{name}*.parquet"), *folder.glob(f"data/{name}*.parquet")])
    found = [file for file in found if re.fullmatch(r"([-_.]?\d[\w.-]*)?\.parquet", file.name.removeprefix(name))]
    most = min((int(m[1]) for file in found if (m := re.search(r"\d-of-(\d+)", file.name))), default=len(found))
    whole = any(file.name == f"{name}.parquet" for file in found)
    if len(found) > most or (whole and len(found) > 1) or len({file.parent for file in found}) > 1:
        raise ValueError(f"{folder} holds the {name!r} split more than once, in "
                         f"{shown([file.relative_to(folder) for file in found])}: move away all but one")  # fmt: skip
    if len(found) < most:
        warnings.warn(f"{folder} has {len(found)} of {most} files of its {name!r} split: the others are left out",
                      stacklevel=2)  # fmt: skip
    return found


def read_columns(files: list[Path], *wanted: tuple[str, ...]) -> Any:
    """A table of parquet files: the columns that go by one of each ``wanted`` names, in that order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        have = pq.read_schema(files[0]).names
        columns = [find_column(have, names, files[0]) for names in wanted]
        return pa.concat_tables([pq.read_table(file, columns=columns) for file in files]).select(columns)
    except (pa.ArrowException, OSError) as error:  # a broken page is an OSError there
        raise ValueError(f"{files[0].parent} holds no readable parquet ({str(error)[:200]}): fetch the files "
                         "again") from None  # fmt: skip


def _read_parquet(files: list[Path], skip_broken: bool) -> Split:
    table = read_columns(files, IMAGE_COLUMNS, LABEL_COLUMNS)
    cells, label = table.column(0), table.column_names[1]
    names = _class_names(table.schema.metadata or {}, label)
    where = str(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    labels, classes = read_labels(table.column(1).to_pylist(), names, f"{where}, column {label!r}")
    return _split(range(len(cells)), partial(_read_cell, cells), labels, classes, partial(row_name, files[0]),
                  skip_broken)  # fmt: skip


def _class_names(metadata: dict[bytes, bytes], column: str) -> list[str] | None:
    """The class names that the Hub stores in a parquet file, if it does."""
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


# how a split reads an item and what it calls it: plain functions, so that a split can be sent to workers


def _read_cell(cells: Any, i: int) -> np.ndarray:
    cell = cells[i].as_py()
    return decode_image(cell["bytes"] if isinstance(cell, dict) else cell)


def _read_row(rows: Any, column: str, i: int) -> np.ndarray:
    return decode_image(stored_bytes(rows[i][column]))


def stored_bytes(cell: dict[str, Any]) -> bytes:
    """An image in a cell of the library ``datasets``; one of a repository of image files names its file instead."""
    content: bytes | None = cell["bytes"]
    if content is None:
        import fsspec  # which huggingface_hub needs, too

        with fsspec.open(cell["path"], "rb") as file:  # of a stream an address on the Hub
            content = file.read()
    return content


def _read_path(path: Path) -> np.ndarray:
    return decode_image(path.read_bytes())


def row_name(where: str | Path, i: int) -> str:
    return f"row {i} of {where}"


def find_column(have: list[str], wanted: tuple[str, ...], file: Path | str) -> str:
    for name in wanted:
        if name in have:
            return name
    raise ValueError(f"{file} has columns {have}, but none of {wanted}: rename one of them")


def _read_tree(folder: Path, skip_broken: bool) -> Split:
    classes = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    found = [(path, label) for label, name in enumerate(classes) for path in sorted((folder / name).iterdir())
             if not path.name.startswith(".")]  # fmt: skip
    items = [(path, label) for path, label in found if path.suffix.lower() in IMAGE_SUFFIXES]
    if not items:
        raise FileNotFoundError(f"no images under {folder}: expected {folder}/CLASS/FILE.jpg (or one of "
                                f"{' '.join(IMAGE_SUFFIXES)})")  # fmt: skip
    if len(items) < len(found):
        other = next(path for path, _ in found if path.suffix.lower() not in IMAGE_SUFFIXES)
        warnings.warn(f"{len(found) - len(items)} of {len(found)} files under {folder} are left out, such as {other}: "
                      f"images end in {' '.join(IMAGE_SUFFIXES)}", stacklevel=2)  # fmt: skip
    labels = torch.tensor([label for _, label in items])
    return _split([path for path, _ in items], _read_path, labels, tuple(classes), str, skip_broken)


def _split(items: Sequence[Any], read: Callable[[Any], np.ndarray], labels: Tensor, classes: tuple[str, ...],
           name: Callable[[Any], str], skip_broken: bool) -> Split:  # fmt: skip
    """Small images of one size (judged by a few from all over the split) in memory, others encoded."""
    encoded = Encoded(items, read, labels, classes, name, skip_broken)
    shapes = {pixels.shape for pixels in encoded.peek(32)}
    small = len(shapes) == 1 and max(next(iter(shapes))) <= SMALL
    return _in_memory(encoded) if small else encoded


def _in_memory(split: Encoded) -> Split:
    """Decode all images, in threads, into one array; a broken image is named, or left out and counted."""

    def one(item: Any) -> np.ndarray | None:
        try:
            return split.read(item)
        except Exception as error:
            if split.skip_broken:
                return None
            raise ValueError(f"{split.name(item)} is not a readable image ({error}): repair or drop it, or use "
                             "--skip_broken") from None  # fmt: skip

    with ThreadPoolExecutor() as pool:
        arrays = list(tqdm(pool.map(one, split.items), total=len(split), desc="decode", leave=False))
    whole = [i for i, array in enumerate(arrays) if array is not None]
    if len(whole) < len(arrays):
        warnings.warn(f"{len(arrays) - len(whole)} of {len(arrays)} images are not readable and left out", stacklevel=2)
    if len({array.shape for array in arrays if array is not None}) > 1:
        return split
    images = torch.from_numpy(np.stack([arrays[i] for i in whole])).permute(0, 3, 1, 2).contiguous()
    return Arrays(images, split.labels[whole], split.classes)
