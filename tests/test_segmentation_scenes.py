"""Scenes with a label per pixel: what is read from where, what is refused, crops, sizes and colours."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DATA
from PIL import Image
from segmentation_helpers import scene, write_parquet

from segmentation.data import from_dataset, load_evaluation, load_scenes, load_split
from segmentation.labels import ADE20K, CAMVID, Labelling
from segmentation.preprocess import ScenePreprocess, distort_colours, resize_labels
from segmentation.splits import EncodedScenes, Scenes, decode_labels


def test_digit_scenes_are_real_held_out_and_always_the_same() -> None:
    """The first run of every user would train on something else each time, or on its test digits."""
    (train, test), (again, _) = load_scenes("digits"), load_scenes("digits")
    assert isinstance(train, Scenes)
    assert isinstance(again, Scenes)
    assert torch.equal(train.images, again.images)
    assert torch.equal(train.labels, again.labels)
    assert len(train.classes) == len(test.classes) == 11
    assert set(train.labels.unique().tolist()) == set(test.labels.unique().tolist()) == set(range(11))
    assert ((train.images[:, 0] >= 64) == (train.labels > 0)).float().mean() > 0.99  # ink is what is labelled


def test_parquet_folders_and_their_labels(tmp_path: Path) -> None:
    """CamVid's void class or ADE20K's label 0 would be learned and counted as a class."""
    for part, count in (("train", 3), ("validation", 2)):
        write_parquet(tmp_path / "plain" / f"{part}-0.parquet", [scene(i) for i in range(count)])
        write_parquet(tmp_path / "camvid" / f"{part}.parquet", [scene(i, classes=12) for i in range(count)])
        write_parquet(tmp_path / "ade20k/data" / f"{part}.parquet",
                      [scene(i, (12 + i, 16), classes=151) for i in range(count)], "annotation")  # fmt: skip
    train, test = load_scenes(str(tmp_path / "plain"))
    assert isinstance(train, Scenes)
    assert (len(train), len(test), train.classes) == (3, 2, ("0", "1", "2", "3", "4"))
    train, _ = load_scenes(str(tmp_path / "camvid"))
    assert isinstance(train, Scenes)
    assert train.classes == CAMVID.classes
    stored = np.asarray(Image.open(io.BytesIO(scene(0, classes=12)[1])))
    assert torch.equal(train.labels[0] == 255, torch.from_numpy(stored == 11))
    train, _ = load_scenes(str(tmp_path / "ade20k"))
    assert isinstance(train, EncodedScenes)  # of different sizes: decoded on demand
    assert len(train.classes) == 150
    image, labels = train.decode(1)
    assert image.shape == (3, 13, 16)
    stored = np.asarray(Image.open(io.BytesIO(scene(1, (13, 16), classes=151)[1])))
    assert torch.equal(labels.long(), torch.from_numpy(np.where(stored == 0, 255, stored.astype(int) - 1)))


def test_the_tree_of_ade20k_and_the_hub(tmp_path: Path) -> None:
    """People who have ADE20K as it is published could not use it."""
    import datasets

    for part in ("training", "validation"):
        for i in range(2):
            image, labels = scene(i, (10, 12 + i), classes=151)
            for kind, content in (("images", image), ("annotations", labels)):
                path = tmp_path / kind / part / f"ADE_{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    with pytest.warns(UserWarning, match="is read as ADE20K.*name its classes in .*classes.txt"):
        train, test = load_scenes(str(tmp_path))
    assert isinstance(train, EncodedScenes)
    assert (len(train), len(test), len(train.classes)) == (2, 2, 150)
    (tmp_path / "annotations/training/ADE_1.png").unlink()
    missing = pytest.raises(FileNotFoundError, match="ADE_1.png has no labels: expected .*annotations")
    with missing, pytest.warns(UserWarning, match="ADE20K"):
        load_scenes(str(tmp_path))

    rows = [dict(zip(("image", "annotation"), scene(i, (10, 12 + i), classes=151), strict=True)) for i in range(2)]
    features = datasets.Features({"image": datasets.Image(), "annotation": datasets.Image()})
    encoded = [{key: {"bytes": content, "path": None} for key, content in row.items()} for row in rows]
    split = from_dataset(datasets.Dataset.from_list(encoded, features=features), "owner/name", ADE20K)
    assert isinstance(split, EncodedScenes)
    assert all(torch.equal(a, b) for a, b in zip(split.decode(0), train.decode(0), strict=True))
    files = [{key: {"bytes": None, "path": str(tmp_path / kind / "training/ADE_0.png")}
              for key, kind in (("image", "images"), ("annotation", "annotations"))}]  # fmt: skip
    named = from_dataset(datasets.Dataset.from_list(files, features=features), "owner/name", ADE20K)
    assert torch.equal(named.images[0], split.decode(0)[0])  # a repository of image files


def test_splits_are_told_apart_by_whole_names(tmp_path: Path) -> None:
    """A folder with ``trainval`` would train on what it is measured on."""
    for name, seed in (("train-00000-of-00002", 0), ("train-00001-of-00002", 1), ("trainval", 2), ("train_small", 3),
                       ("val", 4), ("val_small", 5)):  # fmt: skip
        write_parquet(tmp_path / f"{name}.parquet", [scene(seed)])
    train, test = load_scenes(str(tmp_path))
    assert (len(train), len(test)) == (2, 1)
    write_parquet(tmp_path / "validation.parquet", [scene(6), scene(7)])
    assert len(load_scenes(str(tmp_path))[1]) == 2


@pytest.mark.parametrize("folder", ["camvid", "mine"])
def test_a_split_by_name(tmp_path: Path, folder: str) -> None:
    """``val`` of CamVid, of which ``test`` is measured, and ``test`` of others."""
    for count, name in enumerate(("train", "val", "test"), 1):
        write_parquet(tmp_path / folder / f"{name}.parquet", [scene(i) for i in range(count)])
    for load in (load_evaluation, lambda *args, **options: load_scenes(*args, **options)[1]):
        sizes = [len(load(str(tmp_path / folder), split=split)) for split in (None, "train", "val", "test")]
        assert sizes == [3 if folder == "camvid" else 2, 1, 2, 3]
    assert [len(load_evaluation("digits", split)) for split in ("train", "test")] == [1000, 200]


def test_the_evaluation_split_needs_no_other(tmp_path: Path) -> None:
    """Who evaluates would wait for scenes that are not used, or need them."""
    for name in ("camvid", "mine"):
        write_parquet(tmp_path / name / "val.parquet", [scene(0), scene(1)])
    (tmp_path / "mine/classes.txt").write_text("\n".join("abcde"))
    assert load_evaluation(str(tmp_path / "camvid")).classes == CAMVID.classes
    assert load_evaluation(str(tmp_path / "mine")).classes == tuple("abcde")
    (tmp_path / "mine/classes.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no train.parquet"):  # which may have more classes
        load_evaluation(str(tmp_path / "mine"))
    assert len(load_evaluation("digits")) == 200


def test_a_folder_names_its_own_classes(tmp_path: Path) -> None:
    """Else photographs of several sizes have no classes, and a tree is taken for ADE20K, each label one off."""
    for part in ("train", "val"):
        write_parquet(tmp_path / f"{part}.parquet", [scene(i, (10, 12 + i), classes=3) for i in range(2)])
    with pytest.raises(ValueError, match="put classes.txt, one name a line, beside the data"):
        load_scenes(str(tmp_path))
    (tmp_path / "classes.txt").write_text("road\n car\n\nsky\n", encoding="utf-8-sig")  # as Windows does
    train, _ = load_scenes(str(tmp_path))
    assert train.classes == ("road", "car", "sky")
    assert isinstance(train, EncodedScenes)
    stored = np.asarray(Image.open(io.BytesIO(scene(0, (10, 12), classes=3)[1])))
    assert torch.equal(train.decode(0)[1], torch.tensor(stored))
    (tmp_path / "classes.txt").write_text("road\ncar\n")
    with pytest.raises(ValueError, match="row 0 of .* has label 2, but there are 2 classes"):
        load_scenes(str(tmp_path))[0].decode(0)  # type: ignore[attr-defined]
    (tmp_path / "classes.txt").write_text("road\ncar\nsky\n", encoding="utf-16")  # as PowerShell's > does
    with pytest.raises(ValueError, match="classes.txt is not UTF-8: save it as that"):
        load_scenes(str(tmp_path))
    (tmp_path / "classes.txt").write_text("road\nroad\n")
    with pytest.raises(ValueError, match="has 2 names, 1 of them different"):
        load_scenes(str(tmp_path))


def test_a_tree_of_other_classes(tmp_path: Path) -> None:
    """Labels that are described would be read as ADE20K's, and what macOS puts beside each file as scenes."""
    for part in ("training", "validation"):
        for kind, content in zip(("images", "annotations"), scene(0), strict=True):
            folder = tmp_path / kind / part
            folder.mkdir(parents=True)
            (folder / "a.png").write_bytes(content)
            (folder / "._a.png").write_bytes(b"Mac OS X")
    train, test = load_scenes(str(tmp_path), Labelling(tuple("abcde")))
    assert train.classes == test.classes == tuple("abcde")
    assert len(train) == len(test) == 1
    assert train.labels.unique().tolist() == [0, 1, 2, 3, 4]


def test_labels_that_are_no_numbers_of_classes_are_refused() -> None:
    """In JPEG, masks of 0 and 255 would become hundreds of classes; fractions would be cut off."""
    labels = np.asarray(Image.open(io.BytesIO(scene(0)[1])))
    for image, kind, message in (
        (Image.fromarray(labels), "JPEG", "labels are a JPEG, which changes numbers: store them as PNG"),
        (Image.fromarray(labels * np.float32(0.5)), "TIFF", "labels hold fractions, such as .*: store whole numbers"),
    ):
        buffer = io.BytesIO()
        image.save(buffer, kind)
        with pytest.raises(ValueError, match=message):
            decode_labels(buffer.getvalue())
    buffer = io.BytesIO()
    Image.fromarray(labels.astype(np.float32)).save(buffer, "TIFF")
    assert np.array_equal(decode_labels(buffer.getvalue()), labels)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_grey_labels_of_few_bits_keep_their_numbers(bits: int) -> None:
    """Tools that make PNG files smaller store few classes in few bits; Pillow reads them as shades from 0 to 255."""
    labels = np.arange(48).reshape(6, 8) % 2**bits
    rows = np.packbits(((labels[..., None] >> np.arange(bits)[::-1]) & 1).reshape(6, -1), axis=1)
    filtered = b"".join(b"\0" + row.tobytes() for row in rows)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", 8, 6, bits, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(filtered)),
        (b"IEND", b""),
    )
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
    assert np.array_equal(decode_labels(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)), labels)


def test_broken_scenes_are_named(tmp_path: Path) -> None:
    """A wrong row among 20,000 could not be found, or would train silently."""
    good = [scene(i) for i in range(3)]
    with pytest.raises(FileNotFoundError, match="no data folder .*missing"):
        load_scenes(str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match=r"has no train.parquet, .*it holds"):
        load_scenes(str(tmp_path))
    write_parquet(tmp_path / "test.parquet", good)
    for rows, message in (
        ([good[0], (good[1][0], scene(1, (12, 15))[1])], "row 1 of .*train.parquet: the image is 12x16, its labels are "
                                                         "12x15: they must have one size"),
        ([good[0], (b"no image", good[1][1])], "row 1 of .* is not a readable scene"),
        ([good[0], (good[1][0], good[2][0])], "row 1 of .*one channel, got mode RGB"),
    ):  # fmt: skip
        write_parquet(tmp_path / "train.parquet", rows)
        with pytest.raises(ValueError, match=message):
            load_scenes(str(tmp_path))
    write_parquet(tmp_path / "train.parquet", good)
    with pytest.raises(ValueError, match="row 0 of .* has label 4, but there are 3 classes, labelled 0 to 2"):
        load_scenes(str(tmp_path), Labelling(("a", "b", "c")))
    write_parquet(tmp_path / "train.parquet", good, label="class")
    with pytest.raises(ValueError, match="has columns .* but none of"):
        load_scenes(str(tmp_path))
    images, labels = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="do not fit"):
        Scenes(images, labels[:, :4], ("a",))
    with pytest.raises(ValueError, match="labels run up to 3, but there are 2 classes"):
        Scenes(images, labels + 3, ("a", "b"))
    with pytest.raises(ValueError, match="empty"):
        Scenes(images[:0], labels[:0], ("a",))


@pytest.fixture
def mixed(tmp_path: Path) -> EncodedScenes:
    scenes = [scene(i, (20 + 4 * i, 30)) for i in range(3)]
    for part in ("train", "val"):
        write_parquet(tmp_path / f"{part}.parquet", scenes)
    split, _ = load_scenes(str(tmp_path), Labelling(tuple("abcde")))
    assert isinstance(split, EncodedScenes)
    return split


def test_crops_belong_to_seed_epoch_and_scene(mixed: EncodedScenes) -> None:
    """A resumed run, or one with other workers or batches, would train on other crops."""
    preprocess = ScenePreprocess(size=(24, 24), resize=(60, 24), ratio_range=(0.5, 2.0), flip=True, photometric=True,
                                 max_class_share=0.9)  # fmt: skip
    split = mixed.prepared(preprocess, seed=7)
    items = [split[(2, i)] for i in range(3)]
    index = torch.arange(3)
    pixels = [split.decode(i) for i in range(3)]
    whole_batch = preprocess.train([p[0] for p in pixels], [p[1] for p in pixels], index, 7, 2)
    by_workers = preprocess.train(torch.stack([i[0] for i in items]), torch.stack([i[1] for i in items]), index, 7, 2,
                                  cropped=True)  # fmt: skip
    alone = preprocess.train([pixels[1][0]], [pixels[1][1]], index[1:2], 7, 2)
    assert torch.equal(whole_batch[0], by_workers[0])
    assert torch.equal(whole_batch[1], by_workers[1])
    assert torch.equal(whole_batch[0][1:2], alone[0])
    assert whole_batch[0].shape == (3, 3, 24, 24)
    other = preprocess.train([p[0] for p in pixels], [p[1] for p in pixels], index, 7, 3)
    assert not torch.equal(other[0], whole_batch[0])


def test_what_a_crop_lacks_is_ignored() -> None:
    """The filling would be learned as a class; labels would not lie on their pixels."""
    preprocess = ScenePreprocess(size=(32, 32), ratio_range=(0.5, 2.0), flip=True)
    labels = torch.randint(0, 4, (8, 6, 5), dtype=torch.uint8).repeat_interleave(4, 1).repeat_interleave(4, 2)
    images = (labels * 60)[:, None].expand(-1, 3, -1, -1).contiguous()  # the label can be read off the pixel
    x, y = preprocess.train(images, labels, torch.arange(8), 0, 0)
    filled = y == 255
    assert filled.any()
    pixels = preprocess.denormalise(x)[:, 0]
    assert (pixels[filled] == round(0.485 * 255)).all()
    assert ((pixels.float() / 60).round().long() == y)[~filled].float().mean() > 0.8  # but where two classes mix
    halves = torch.zeros(8, 40, dtype=torch.uint8)
    halves[:, 20:] = 1
    image = halves.expand(3, -1, -1) * 200
    mixed = {}
    for most in (0.75, 1.0):
        crops = [ScenePreprocess(size=(8, 8), max_class_share=most).crop(image, halves, i, 0)[1] for i in range(40)]
        mixed[most] = sum(0.25 < crop.float().mean() < 0.75 for crop in crops)
    assert mixed[0.75] > mixed[1.0]


def test_evaluation_sizes_are_the_papers(mixed: EncodedScenes, tmp_path: Path) -> None:
    """Adaptive models would be measured at sizes they are not exact for, or refuse them."""
    preprocess = ScenePreprocess(size=(448, 448), resize=(1792, 448), multiple=(224, 224))
    assert preprocess.evaluation_size((512, 683)) == (448, 672)
    assert preprocess.evaluation_size((300, 900)) == (448, 1344)
    assert preprocess.evaluation_size((200, 1600)) == (224, 1792)
    assert ScenePreprocess(size=(360, 480), multiple=(224, 224)).evaluation_size((10, 10)) == (448, 672)
    preprocess.save(tmp_path)
    assert ScenePreprocess.load(tmp_path / "preprocessor_config.json") == preprocess
    small = ScenePreprocess(size=(8, 8), resize=(32, 16), multiple=(8, 8))
    image, labels, _ = mixed.prepared(small)[1]
    assert (image.shape[1:], labels.shape) == ((16, 24), (24, 30))  # masks are brought to the labels
    assert small.evaluate(image[None]).shape == (1, 3, 16, 24)
    with pytest.raises(ValueError, match="different sizes .*batch size of 1"):
        small.evaluate([torch.zeros(3, 20, 30, dtype=torch.uint8), torch.zeros(3, 20, 60, dtype=torch.uint8)])
    assert resize_labels(torch.arange(4)[None].expand(4, 4), (8, 8))[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert resize_labels(torch.arange(9)[None], (1, 3))[0].tolist() == [1, 4, 7]


def test_colours_are_distorted_as_in_opencv() -> None:
    """The recipe's photometric distortion would be another one. HSV by the standard library."""
    import colorsys

    x = torch.randint(0, 256, (1, 3, 5, 5), dtype=torch.uint8)
    still = [0.9, 0.0]
    same = torch.tensor([[*still, *still, *still, *still, 0.7]])
    assert (distort_colours(x, same) - x).abs().max() < 1e-3
    u = torch.tensor([[0.1, 0.75, *still, 0.2, 0.9, 0.3, 0.25, 0.7]])  # +16, saturation x 1.4, hue - 18 degrees
    distorted = distort_colours(x, u)
    for pixel, got in zip(x[0].flatten(1).T.tolist(), distorted[0].flatten(1).T, strict=True):
        h, s, v = colorsys.rgb_to_hsv(*(min(255, c + 16) / 255 for c in pixel))
        expected = torch.tensor(colorsys.hsv_to_rgb((h - 18 / 360) % 1, min(1.0, 1.4 * s), v)) * 255
        assert (got - expected).abs().max() < 0.05
    brighter = distort_colours(x, torch.tensor([[*still, 0.1, 0.0, *still, *still, 0.2]]))
    assert (brighter - x * 0.5).abs().max() < 1e-3


@pytest.mark.skipif(not (DATA / "camvid").is_dir(), reason="the real CamVid is not beside the checkout")
def test_the_real_camvid_is_read() -> None:
    """Its numbers of scenes and classes are those that tables name."""
    split = load_split(DATA / "camvid", ("val",), CAMVID)
    assert isinstance(split, Scenes)
    assert split.images.shape == (101, 3, 360, 480)
    assert len(split.classes) == 11
    assert set(split.labels.unique().tolist()) == {*range(11), 255}
