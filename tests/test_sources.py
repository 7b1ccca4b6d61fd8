"""Data from disk: what people have is read, and what is broken is named."""

import io
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import DATA
from PIL import Image

from common.data import load_data
from common.sources import _from_dataset, decode_image


def encode(seed: int, size: tuple[int, int] = (8, 8), kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def write_parquet(path: Path, images: list[bytes], labels: list[int], image: str = "img", label: str = "label") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": content, "path": None} for content in images]
    pq.write_table(pa.table({image: cells, label: labels}), path)


@pytest.mark.parametrize(("image", "label", "names"), [
    ("img", "label", ("train.parquet", "test.parquet")),
    ("img", "fine_label", ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet")),
    ("image", "label", ("train-0.parquet", "validation-0.parquet")),
])  # fmt: skip
def test_parquet_folders(tmp_path: Path, image: str, label: str, names: tuple[str, str]) -> None:
    for name, labels in zip(names, ([0, 1, 2, 1], [2, 0]), strict=True):
        write_parquet(tmp_path / name, [encode(i) for i in range(len(labels))], labels, image, label)
    train, test = load_data(str(tmp_path))
    assert (len(train), len(test), len(train.classes)) == (4, 2, 3)
    assert train.classes == test.classes
    assert torch.equal(train.images[1].permute(1, 2, 0), torch.from_numpy(decode_image(encode(1)).copy()))


def test_image_trees(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("val", 1)):
        for c, name in enumerate(("cat", "dog")):
            for i in range(count):
                path = tmp_path / split / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(encode(10 * c + i))
    train, test = load_data(str(tmp_path))
    assert train.classes == ("cat", "dog")
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert len(test) == 2


def test_hub_datasets_become_the_same_arrays(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"img": [{"bytes": encode(i), "path": None} for i in range(3)], "label": [1, 0, 1]}
    arrays = _from_dataset(datasets.Dataset.from_dict(rows, features=features), "local/test")
    assert arrays.classes == ("cat", "dog")
    assert arrays.labels.tolist() == [1, 0, 1]
    assert torch.equal(arrays.images[2].permute(1, 2, 0), torch.from_numpy(decode_image(encode(2)).copy()))


def test_broken_data_are_named(tmp_path: Path) -> None:
    good = [encode(i) for i in range(3)]
    with pytest.raises(FileNotFoundError, match="no data folder"):
        load_data(str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match="has neither train.*it holds"):
        load_data(str(tmp_path))
    write_parquet(tmp_path / "test.parquet", good, [0, 1, 2])
    write_parquet(tmp_path / "train.parquet", [good[0], b"not an image", good[2]], [0, 1, 2])
    with pytest.raises(ValueError, match="row 1 of .*train.parquet is not a readable image"):
        load_data(str(tmp_path))
    write_parquet(tmp_path / "train.parquet", good, [0, 1, -1])
    with pytest.raises(ValueError, match="labels run from -1 to 1"):
        load_data(str(tmp_path))
    write_parquet(tmp_path / "train.parquet", good, [0, 1, 2], label="class")
    with pytest.raises(ValueError, match="has columns .* but none of"):
        load_data(str(tmp_path))
    write_parquet(tmp_path / "train.parquet", [*good[:2], encode(3, (9, 9))], [0, 1, 2])
    with pytest.raises(ValueError, match="2 different sizes"):
        load_data(str(tmp_path))
    (tmp_path / "train.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match="no readable parquet"):
        load_data(str(tmp_path))


def test_a_decompression_bomb_is_refused() -> None:
    header = bytearray(encode(0))
    header[16:24] = (30000).to_bytes(4, "big") * 2  # width and height of the PNG: 900 million pixels
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    with pytest.raises((Image.DecompressionBombError, Image.DecompressionBombWarning)):
        decode_image(bytes(header))


@pytest.mark.skipif(not (DATA / "cifar10").is_dir(), reason="the real CIFAR-10 is not beside the checkout")
def test_the_real_cifar10_is_read() -> None:
    train, test = load_data(str(DATA / "cifar10"))
    assert (len(train), len(test)) == (50000, 10000)
    assert train.classes[:2] == ("airplane", "automobile")
    assert train.labels.bincount().tolist() == [5000] * 10
