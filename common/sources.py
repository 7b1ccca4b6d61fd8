"""Data sets from disk, read without any other library's loader: folders of parquet files, trees of images; and from
the Hub.

A parquet folder has ``train*.parquet`` and ``test*``, ``val*`` or ``validation*.parquet`` (also under ``data/``), with
an image column (``img`` or ``image``: bytes, or a struct with ``bytes``) and a label column. An image tree has
``train/CLASS/FILE`` and ``val/CLASS/FILE`` (or ``test``, ``validation``).
"""

import io
import json
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm.auto import tqdm

from .data import Arrays

__all__ = ["decode_image", "load_folder", "load_hub", "load_split"]

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "fine_label")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
EVALUATION_SPLITS = ("test", "validation", "val")


def load_folder(folder: Path) -> tuple[Arrays, Arrays]:
    """Train and evaluation split of a folder, decoded once to uint8. All images must have one size."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no data folder {folder}: give 'digits' or a folder of parquet files or images")
    train, test = load_split(folder, ("train",)), load_split(folder, EVALUATION_SPLITS)
    if train.classes != test.classes:
        count = max(len(train.classes), len(test.classes))
        if not all(name == str(i) for split in (train, test) for i, name in enumerate(split.classes)):
            raise ValueError(f"{folder}: train has classes {train.classes[:3]}..., test {test.classes[:3]}...")
        names = tuple(str(i) for i in range(count))
        train, test = (Arrays(s.images, s.labels, names) for s in (train, test))
    return train, test


def load_hub(name: str) -> tuple[Arrays, Arrays]:
    """Train and evaluation split of a Hub dataset, ``owner/name`` or ``owner/name@revision``, through ``datasets``."""
    try:
        import datasets
    except ImportError:
        raise ImportError(f"{name} is on the Hub: pip install 'shift-equivariant-vits[hub-data]' to read it, or give a "
                          "folder with its parquet files") from None  # fmt: skip
    repository, _, revision = name.partition("@")
    found = datasets.load_dataset(repository, revision=revision or None)
    evaluation = next((split for split in EVALUATION_SPLITS if split in found), None)
    if "train" not in found or evaluation is None:
        raise ValueError(f"{name} has splits {sorted(found)}: expected train and one of {EVALUATION_SPLITS}")
    return _from_dataset(found["train"], name), _from_dataset(found[evaluation], name)


def _from_dataset(dataset: Any, name: str) -> Arrays:
    import datasets

    image, label = (_column(dataset.column_names, wanted, name) for wanted in (IMAGE_COLUMNS, LABEL_COLUMNS))
    cells = dataset.cast_column(image, datasets.Image(decode=False))[image]
    labels = torch.tensor(list(dataset[label]), dtype=torch.long)
    images = _decode_all(list(cells), lambda cell: decode_image(cell["bytes"]), lambda i: f"row {i} of {name}")
    feature = dataset.features[label]
    names = feature.names if isinstance(feature, datasets.ClassLabel) else range(int(labels.max()) + 1)
    return Arrays(images, labels, tuple(str(n) for n in names))


def load_split(folder: Path, names: Iterable[str]) -> Arrays:
    """The first split of a folder that goes by one of ``names``."""
    for name in names:
        files = sorted([*folder.glob(f"{name}*.parquet"), *folder.glob(f"data/{name}*.parquet")])
        if files:
            return _read_parquet(files)
        if (folder / name).is_dir():
            return _read_tree(folder / name)
    found = sorted(p.name for p in folder.iterdir())[:8]
    raise FileNotFoundError(
        f"{folder} has neither {'/'.join(names)}*.parquet nor such a folder of images; it holds {found}"
    )


def _read_parquet(files: list[Path]) -> Arrays:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(files[0])
        columns = [_column(schema.names, wanted, files[0]) for wanted in (IMAGE_COLUMNS, LABEL_COLUMNS)]
        table = pa.concat_tables([pq.read_table(file, columns=columns) for file in files])
    except pa.ArrowException as error:
        raise ValueError(f"{files[0].parent} holds no readable parquet ({error}): fetch the files again") from None
    cells = table.column(columns[0]).to_pylist()
    labels = torch.tensor(table.column(columns[1]).to_pylist(), dtype=torch.long)
    images = _decode_all(cells, lambda cell: decode_image(cell["bytes"] if isinstance(cell, dict) else cell),
                         lambda i: f"row {i} of {files[0].parent}/{files[0].name}")  # fmt: skip
    stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    names = stored.get("info", {}).get("features", {}).get(columns[1], {}).get("names")
    classes = tuple(names) if names else tuple(str(i) for i in range(int(labels.max()) + 1))
    return Arrays(images, labels, classes)


def _column(have: list[str], wanted: tuple[str, ...], file: Path | str) -> str:
    for name in wanted:
        if name in have:
            return name
    raise ValueError(f"{file} has columns {have}, but none of {wanted}: rename one of them")


def _read_tree(folder: Path) -> Arrays:
    classes = sorted(p.name for p in folder.iterdir() if p.is_dir())
    items = [(path, label) for label, name in enumerate(classes) for path in sorted((folder / name).iterdir())
             if path.suffix.lower() in IMAGE_SUFFIXES]  # fmt: skip
    if not items:
        raise FileNotFoundError(f"no images under {folder}: expected {folder}/CLASS/FILE.jpg (or png, webp, bmp)")
    images = _decode_all([path for path, _ in items], lambda path: decode_image(path.read_bytes()),
                         lambda i: str(items[i][0]))  # fmt: skip
    return Arrays(images, torch.tensor([label for _, label in items]), tuple(classes))


def decode_image(content: bytes) -> np.ndarray:
    """Encoded image -> (H, W, 3) uint8. Refuses what would unfold to more than 90 million pixels."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(io.BytesIO(content)) as image:
            return np.asarray(image.convert("RGB"))


def _decode_all(items: list[Any], decode: Callable[[Any], np.ndarray], where: Callable[[int], str]) -> torch.Tensor:
    """Decode in threads, into one array; a broken image is named."""

    def one(pair: tuple[int, Any]) -> np.ndarray:
        try:
            return decode(pair[1])
        except Exception as error:
            raise ValueError(f"{where(pair[0])} is not a readable image ({error}): repair or drop it") from None

    with ThreadPoolExecutor() as pool:
        arrays = list(tqdm(pool.map(one, enumerate(items)), total=len(items), desc="decode", leave=False))
    sizes = {array.shape for array in arrays}
    if len(sizes) > 1:
        raise ValueError(f"images have {len(sizes)} different sizes ({sorted(sizes)[:3]}...): resize them to one first")
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
