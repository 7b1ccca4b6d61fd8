"""Data from disk: what people have is read, and what is broken is named."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import DATA
from PIL import Image
from torch.utils.data import DataLoader

from common.data.images import decode_image
from common.data.preprocess import Preprocess
from common.data.sources import KNOWN, from_dataset, load_data, load_evaluation
from common.data.splits import Encoded, check_rows
from common.data.streaming import load_stream


def encode(seed: int, size: tuple[int, int] = (8, 8), kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def write_parquet(path: Path, images: list[bytes], labels: list[Any], image: str = "img", label: str = "label") -> None:
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


def test_a_split_by_name(tmp_path: Path) -> None:
    """Else a test set beside a validation set cannot be measured."""
    for count, name in enumerate(("train", "val", "test"), 2):
        write_parquet(tmp_path / f"{name}.parquet", [encode(i) for i in range(count)], [i % 2 for i in range(count)])
    sizes = {split: len(load_data(str(tmp_path), split=split)[1]) for split in (None, "val", "test", "train")}
    assert sizes == {None: 3, "val": 3, "test": 4, "train": 2}
    with pytest.raises(FileNotFoundError, match=r"has neither dev\.parquet, .* it holds \['test.parquet', 'train"):
        load_data(str(tmp_path), split="dev")
    assert [len(load_data("digits", split=split)[1]) for split in (None, "test", "train")] == [360, 360, 1437]
    with pytest.raises(
        ValueError, match=r"digits has splits \['test', 'train'\]: expected train and one of \('val',\)"
    ):
        load_data("digits", split="val")


def test_a_split_to_evaluate_may_stand_alone(tmp_path: Path) -> None:
    """Many have ImageNet's validation images alone. Beside others, classes are those of the images to train on."""
    for c, name in enumerate(("cat", "dog")):
        (tmp_path / "val" / name).mkdir(parents=True)
        (tmp_path / "val" / name / "0.png").write_bytes(encode(c))
    alone = load_evaluation(str(tmp_path))
    assert (alone.classes, alone.labels.tolist()) == (("cat", "dog"), [0, 1])
    for name in ("ant", "cat", "dog"):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "0.png").write_bytes(encode(2))
    beside = load_evaluation(str(tmp_path))
    assert (beside.classes, beside.labels.tolist()) == (("ant", "cat", "dog"), [1, 2])
    assert load_evaluation(str(tmp_path), split="train").labels.tolist() == [0, 1, 2]
    with pytest.raises(FileNotFoundError, match="has neither test"):
        load_evaluation(str(tmp_path / "val"), split="test")
    with pytest.raises(FileNotFoundError, match="no data folder"):
        load_evaluation("nowhere")


def test_parts_of_parquet_are_counted(tmp_path: Path) -> None:
    """Else half a data set is trained on without a word, or all of it twice."""
    for name in ("train-00000-of-00002", "test"):
        write_parquet(tmp_path / f"{name}.parquet", [encode(0), encode(1)], [0, 1])
    with pytest.warns(UserWarning, match="has 1 of 2 files of its 'train' split: the others are left out"):
        assert len(load_data(str(tmp_path))[0]) == 2
    (tmp_path / "train-00000-of-00002.parquet").rename(tmp_path / "train-00000-of-00001.parquet")
    for other in ("train", "data/train", "train-00000-of-00001-c0ffee"):
        write_parquet(tmp_path / f"{other}.parquet", [encode(0)], [0])
        with pytest.raises(ValueError, match="holds the 'train' split more than once, in "):
            load_data(str(tmp_path))
        (tmp_path / f"{other}.parquet").unlink()


def test_image_trees(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("val", 1)):
        for c, name in enumerate(("cat", "dog")):
            for i in range(count):
                path = tmp_path / split / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(encode(10 * c + i))
        (tmp_path / split / ".ipynb_checkpoints").mkdir()  # no class
    train, test = load_data(str(tmp_path))
    assert train.classes == ("cat", "dog")
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert len(test) == 2


def test_hub_datasets_become_the_same_arrays(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"img": [{"bytes": encode(i), "path": None} for i in range(3)], "label": [1, 0, 1]}
    arrays = from_dataset(datasets.Dataset.from_dict(rows, features=features), "local/test")
    assert arrays.classes == ("cat", "dog")
    assert arrays.labels.tolist() == [1, 0, 1]
    assert torch.equal(arrays.images[2].permute(1, 2, 0), torch.from_numpy(decode_image(encode(2)).copy()))
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(encode(i))
    rows["img"] = [{"bytes": None, "path": str(tmp_path / f"{i}.png")} for i in range(3)]  # of image files on the Hub
    assert torch.equal(from_dataset(datasets.Dataset.from_dict(rows, features=features), "n").images, arrays.images)


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
    (tmp_path / "train.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match="no readable parquet"):
        load_data(str(tmp_path))


def test_broken_images_can_be_left_out_and_are_counted(tmp_path: Path) -> None:
    good = [encode(i) for i in range(4)]
    write_parquet(tmp_path / "test.parquet", good, [0, 1, 2, 0])
    write_parquet(tmp_path / "train.parquet", [good[0], b"not an image", *good[2:]], [0, 1, 2, 0])
    with pytest.warns(UserWarning, match="1 of 4 images are not readable"):
        train, _ = load_data(str(tmp_path), skip_broken=True)
    assert train.labels.tolist() == [0, 2, 0]


@pytest.mark.parametrize("sizes", [((120, 90), (120, 90)), ((8, 8), (9, 12))], ids=["large", "of different sizes"])
def test_large_images_stay_encoded_until_they_are_used(tmp_path: Path, sizes: tuple[tuple[int, int], ...]) -> None:
    """What does not fit an array, or would fill the memory, is decoded by workers, to the canvas' size."""
    content = [encode(i, sizes[i % 2]) for i in range(4)]
    write_parquet(tmp_path / "test.parquet", content, [0, 1, 2, 0])
    write_parquet(tmp_path / "train.parquet", [content[0], b"not an image", *content[2:]], [0, 1, 2, 0])
    train, test = load_data(str(tmp_path))
    assert isinstance(train, Encoded)
    preprocess = Preprocess(size=(24, 32))
    loader = DataLoader(test.prepared(preprocess), batch_size=4, num_workers=1)
    images, labels, index = test.fetch(next(iter(loader)))
    assert images.shape == (4, 3, 24, 32)
    assert (labels.tolist(), index.tolist()) == ([0, 1, 2, 0], [0, 1, 2, 3])
    assert torch.equal(images[2], preprocess.image(np.array(Image.open(io.BytesIO(content[2])))))
    assert test.prepared(preprocess)[(0, 2)][0].dtype == torch.uint8  # type: ignore[index]  # in training
    with pytest.raises(ValueError, match="row 1 of .*train.parquet is not a readable image.*--skip_broken"):
        train.prepared(preprocess)[1]
    skipping = load_data(str(tmp_path), skip_broken=True)[0].prepared(preprocess)
    assert isinstance(skipping, Encoded)
    assert skipping[(0, 1)][1:] == (2, 2)  # in training the next one takes its place
    assert skipping[1][1] == -1  # in evaluation it does not count
    assert skipping.broken.sum() == 1


def test_incomplete_data_sets_are_refused() -> None:
    """A table measured on half a data set is not that table."""
    check_rows("cifar10", (50_000, 10_000, 10), KNOWN["uoft-cs/cifar10"])
    with pytest.raises(ValueError, match="cifar10 has 49,999 training images instead of 50,000, 9 classes instead"):
        check_rows("cifar10", (49_999, 10_000, 9), KNOWN["uoft-cs/cifar10"])


def write_hub_parquet(path: Path, count: int, size: tuple[int, int] = (16, 16)) -> None:
    """As the Hub keeps its data sets: class names in the file's metadata."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [{"bytes": encode(i, size), "path": None} for i in range(count)],
            "label": [i % 2 for i in range(count)]}  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)


@pytest.mark.slow
def test_streams_give_every_image_once_and_shuffle_by_epoch(tmp_path: Path) -> None:
    for shard in range(2):
        write_hub_parquet(tmp_path / f"train-{shard}.parquet", 10)
    write_hub_parquet(tmp_path / "validation.parquet", 4)
    seen = {}
    for rank, epoch in ((0, 0), (0, 1), (1, 0)):
        train, test = load_stream(str(tmp_path))
        assert (len(train), len(test), train.classes) == (20, 4, ("cat", "dog"))
        train.prepared(Preprocess(size=(16, 16)), seed=3).shard(rank, 2).set_epoch(epoch)
        seen[rank, epoch] = [(image.sum().item(), label, index) for image, label, index in train]
    assert {len(part) for part in seen.values()} == {10}
    assert seen[0, 0] != seen[0, 1]
    first = [*seen[0, 0], *seen[1, 0]]  # what two processes see in an epoch
    assert len({index for _, _, index in first}) == 20
    assert sorted(total for total, _, _ in first) == sorted(
        2 * [int(decode_image(encode(i, (16, 16))).sum()) for i in range(10)]
    )


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "cifar10").is_dir(), reason="the real CIFAR-10 is not beside the checkout")
def test_the_real_cifar10_is_read() -> None:
    train, test = load_data(str(DATA / "cifar10"))
    assert (len(train), len(test)) == (50000, 10000)
    assert train.classes[:2] == ("airplane", "automobile")
    assert train.labels.bincount().tolist() == [5000] * 10


def test_image_trees_leave_nothing_out_silently(tmp_path: Path) -> None:
    """Else a class of GIFs is empty, and nobody learns why its accuracy is zero. Thin images are images."""
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for kind in ("GIF", "TIFF", "PNG", "BMP"):
            (tmp_path / split / "a" / f"x.{kind}").write_bytes(encode(1, (1, 40), kind))
    (tmp_path / "train" / "a" / ".x.png").write_bytes(b"what a file manager keeps")
    train, _ = load_data(str(tmp_path))
    assert len(train) == 4
    assert train.images.shape == (4, 3, 1, 40)
    assert Preprocess(size=(8, 8)).evaluate(train.images).isfinite().all()
    (tmp_path / "train" / "a" / "notes.txt").write_text("x")
    with pytest.warns(UserWarning, match=r"1 of 5 files under .*train are left out, such as .*notes.txt"):
        load_data(str(tmp_path))


def test_truncated_images_are_named(tmp_path: Path) -> None:
    """Else a half image is trained on, or an error names no file."""
    for kind in ("PNG", "JPEG", "BMP", "TIFF", "GIF", "WEBP"):
        content = encode(3, (64, 64), kind)
        for split, part in (("train", content[: 2 * len(content) // 3]), ("val", content)):
            path = tmp_path / kind / split / "a" / f"x.{kind.lower()}"
            path.parent.mkdir(parents=True)
            path.write_bytes(part)
        with pytest.raises(ValueError, match=rf"train/a/x.{kind.lower()} is not a readable image \(.{{5,200}}\)"):
            load_data(str(tmp_path / kind))[0].prepared(Preprocess(size=(8, 8)))[0]


# labels as people have them


@pytest.mark.parametrize(("labels", "numbers", "classes"), [
    (["dog", "cat", "dog", "ape"], [2, 1, 2, 0], ("ape", "cat", "dog")),
    ([1.0, 0.0, 2.0, 2.0], [1, 0, 2, 2], ("0", "1", "2")),
    ([True, False, True, True], [1, 0, 1, 1], ("0", "1")),
    ([5, 0, 5, 0], [5, 0, 5, 0], ("0", "1", "2", "3", "4", "5")),
], ids=["names", "whole fractions", "truth", "sparse"])  # fmt: skip
def test_labels_become_classes(tmp_path: Path, labels: list[Any], numbers: list[int], classes: tuple[str, ...]) -> None:
    """Else people have to rewrite their files first. The evaluation split may lack a class."""
    write_parquet(tmp_path / "train.parquet", [encode(i) for i in range(4)], labels)
    write_parquet(tmp_path / "test.parquet", [encode(i) for i in range(2)], labels[2:3] * 2)
    train, test = load_data(str(tmp_path))
    assert (train.labels.tolist(), train.classes) == (numbers, classes)
    assert (test.labels.tolist(), test.classes) == (numbers[2:3] * 2, classes)


@pytest.mark.parametrize(("labels", "message"), [
    ([0, None, 1], "the label of row 1 is 'None'"),
    (["a", None, "b"], "the label of row 1 is 'None'"),
    ([0.0, 0.5, 1.0], "the label of row 1 is '0.5'"),
    ([0.0, float("nan"), 1.0], "the label of row 1 is 'nan'"),
    ([0.0, float("inf"), 1.0], "the label of row 1 is 'inf'"),
    ([0, 1, 10**9], "labels run from 0 to 1000000000"),
    ([0, 1, 2**62], "labels run from 0 to 4611686018427387904"),
    ([0, 1, -1], "labels run from -1 to 1"),
    ([[0], [1], [2]], r"the label of row 0 is '\[0\]'"),
])  # fmt: skip
def test_labels_that_are_none_are_refused_by_file_and_column(tmp_path: Path, labels: list[Any], message: str) -> None:
    """Else they are cut, fill the memory, or end in an error that does not say where."""
    write_parquet(tmp_path / "train.parquet", [encode(i) for i in range(3)], labels)
    write_parquet(tmp_path / "test.parquet", [encode(i) for i in range(3)], [0, 1, 2])
    with pytest.raises(ValueError, match=rf"train.parquet, column 'label': ({message})") as error:
        load_data(str(tmp_path))
    assert len(str(error.value)) < 500


def test_class_names_that_differ_are_named(tmp_path: Path) -> None:
    """Else a model is measured on classes that it has never seen."""
    for name, labels in (("train", ["a", "b"]), ("test", ["a", "emu"])):
        write_parquet(tmp_path / f"{name}.parquet", [encode(i) for i in range(2)], labels)
    with pytest.raises(ValueError, match="train has classes a, b, but not emu of the evaluation split"):
        load_data(str(tmp_path))
