"""scripts/predict.py: labels of image files, how they change under shifts, and what happens to files that are none."""

import itertools
import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from torch.utils.data import DataLoader

from common import create_model, from_pretrained
from common.data.preprocess import PREPROCESSOR_NAME, Preprocess
from common.data.sources import load_data
from common.data.splits import load_digits_data
from common.models.hub import resolve_file
from segmentation.data import load_digit_scenes
from segmentation.preprocess import ScenePreprocess

SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "predict.py"))
DEFAULT, ADAPTIVE = (str(ROOT / "swin/checkpoints" / name) for name in ("swin_micro", "a_swin_micro"))
CPU = ["--device", "cpu"]


@pytest.fixture
def digit(tmp_path: Path) -> Path:
    """A held-out '2' as a PNG; its name would be a formula to a careless plot."""
    path = tmp_path / r"a $\two$.png"
    Image.fromarray(load_digits_data()[1].images[0].permute(1, 2, 0).numpy()).save(path)
    return path


def predict(*arguments: str | Path) -> dict[str, Any]:
    return SCRIPT["main"]([*map(str, arguments), *CPU])


def test_labels_are_those_of_the_model(digit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lost otherwise: the command says something else than the model, or says it wrongly sorted or named."""
    (tmp_path / "names").write_text("\n".join(f"digit {i}" for i in range(10)), encoding="utf-8-sig")
    assert SCRIPT["read_classes"](str(tmp_path / "names"))[0] == "digit 0"  # without the mark that Windows begins with
    predict("--model", ADAPTIVE, digit, "--top", "3", "--classes", tmp_path / "names", "--json", tmp_path / "out.json")
    (found,) = json.loads((tmp_path / "out.json").read_text())["predictions"]
    preprocess = Preprocess.load(resolve_file(ADAPTIVE, PREPROCESSOR_NAME))
    with torch.no_grad():
        expected = from_pretrained(ADAPTIVE)(preprocess.evaluate(load_digits_data()[1].images[:1])).softmax(1)[0]
    values, classes = expected.topk(3)
    assert [best["class"] for best in found["predictions"]] == classes.tolist()
    assert [best["name"] for best in found["predictions"]] == [f"digit {c}" for c in classes.tolist()]
    assert [best["probability"] for best in found["predictions"]] == pytest.approx(values.tolist())
    assert "shifts" not in found
    lines = capsys.readouterr().out.splitlines()
    assert f"| digit 2 | {100 * values[0]:10.2f} % |".replace("  ", " ") in [line.replace("  ", " ") for line in lines]


def test_a_model_without_a_preprocessor_file_says_so(digit: Path, tmp_path: Path) -> None:
    """Lost otherwise: images normalised as ImageNet's, and labels that mean nothing."""
    create_model("a_swin_micro", num_classes=3).save_pretrained(tmp_path / "model")
    with pytest.warns(UserWarning, match="model has no preprocessor_config.json: images are normalised with ImageNet"):
        predict("--model", tmp_path / "model", digit)


def test_names_stored_with_a_model_come_before_imagenets(tmp_path: Path) -> None:
    """Lost otherwise: by way of timm a model of a thousand species calls them goldfish and toilet paper."""
    model = create_model("a_swin_micro", num_classes=1000)
    model.name_classes([f"species {i}" for i in range(1000)])
    model.save_pretrained(tmp_path)
    for source in (str(tmp_path), f"timm:local-dir:{tmp_path}"):
        assert SCRIPT["load"](source, None, "cpu").classes[1] == "species 1"


def test_the_shift_report_sets_default_beside_adaptive(digit: Path, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Lost otherwise: the picture of what this project is about."""
    plot = tmp_path / "new" / "heat.png"
    found = predict("--model", DEFAULT, "--model", ADAPTIVE, digit, "--shift-report", "--grid", "4", "--step", "7",
                    "--plot", plot)["predictions"]  # fmt: skip
    default, adaptive = (row["shifts"] for row in found)
    assert default["pixels"] == adaptive["pixels"] == [0, 7, 14, 21]
    assert adaptive["label_kept"] == adaptive["bit_identical"] == adaptive["count"] == 16
    assert {p for line in adaptive["probabilities"] for p in line} == {adaptive["probabilities"][0][0]}
    assert default["label_kept"] < 16
    assert default["labels"][0][0] == found[0]["predictions"][0]["class"]  # the first cell is the image in place
    assert default["bit_identical"] >= 1

    predict("--model", ADAPTIVE, digit, "--shift-report", "--grid", "1", "--plot", tmp_path / "heat.PDF")
    assert (tmp_path / "heat.PDF").read_bytes().startswith(b"%PDF")  # not a PNG, which no viewer of its name opens

    x = Preprocess.load(resolve_file(DEFAULT, PREPROCESSOR_NAME)).evaluate(load_digits_data()[1].images[:1])
    with torch.no_grad():
        moved = from_pretrained(DEFAULT)(x.roll((14, 7), (2, 3)))  # 14 down, 7 right
    assert default["labels"][2][1] == int(moved.argmax(1))
    assert default["probabilities"][2][1] == pytest.approx(float(moved.softmax(1)[0, default["labels"][0][0]]))

    text = capsys.readouterr().out
    assert "| down \\ right |" in text
    assert "16 of 16 |      16 of 16 |" in text
    with Image.open(plot) as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(2**20) or ()) > 50  # something is drawn


def test_standard_shifts_lose_content(digit: Path, tmp_path: Path) -> None:
    """Lost otherwise: the report passes circular shifts off as what a camera does."""
    report = ["--shift-report", "--grid", "3", "--step", "14", "--shifts", "standard", "--plot", tmp_path / "heat.png"]
    (found,) = predict("--model", ADAPTIVE, digit, *report)["predictions"]
    assert found["shifts"]["pixels"] == [-14, 0, 14]
    assert found["shifts"]["probabilities"][1][1] == found["predictions"][0]["probability"]  # in place
    assert found["shifts"]["bit_identical"] < 9  # exactness holds on the torus, not here


def test_images_of_any_size_and_mode(digit: Path, tmp_path: Path) -> None:
    """Lost otherwise: only images that are already as the model wants them can be predicted."""
    paths = []
    with Image.open(digit) as image:
        for name, mode, size in (("l.png", "L", (32, 32)), ("p.webp", "RGBA", (64, 64)), ("x.jpg", "RGB", (400, 400))):
            paths.append(tmp_path / name)
            image.convert(mode).resize(size, Image.Resampling.BICUBIC).save(paths[-1])
    rows = predict("--model", ADAPTIVE, digit, *paths)["predictions"]
    assert [row["predictions"][0]["class"] for row in rows] == [2, 2, 2, 2]


@pytest.mark.parametrize("side", [20, 32, 64, 100, 300])
def test_images_are_those_of_the_evaluation(side: int, tmp_path: Path) -> None:
    """Lost otherwise: a label that evaluation counted as right, and predict gives another."""
    pixels = np.random.default_rng(side).integers(0, 256, (2, side, side, 3), dtype=np.uint8)
    for part, name in itertools.product(("train", "val"), ("one", "two")):
        (tmp_path / part / name).mkdir(parents=True)
        Image.fromarray(pixels[int(name == "two")]).save(tmp_path / part / name / "image.png")
    for preprocess in (Preprocess(size=(32, 32)), Preprocess(size=(224, 224), resize=256)):
        split = load_data(str(tmp_path))[1].prepared(preprocess)
        seen = preprocess.evaluate(next(split.fetch(batch)[0] for batch in DataLoader(split, batch_size=2)))
        assert torch.equal(torch.stack([preprocess.image(image) for image in pixels]), seen)


def test_images_of_mixed_folders_are_those_of_the_evaluation(tmp_path: Path) -> None:
    """There, too: evaluation resized small images among large ones otherwise than those among their like."""
    sides, images = {"one": 40, "two": 300}, {}
    for part, name in itertools.product(("train", "val"), sides):
        images[name] = np.random.default_rng(sides[name]).integers(0, 256, (sides[name],) * 2 + (3,), dtype=np.uint8)
        (tmp_path / part / name).mkdir(parents=True)
        Image.fromarray(images[name]).save(tmp_path / part / name / "image.png")
    for preprocess in (Preprocess(size=(32, 32)), Preprocess(size=(224, 224), resize=256)):
        split = load_data(str(tmp_path))[1].prepared(preprocess)
        seen = preprocess.evaluate(next(split.fetch(batch)[0] for batch in DataLoader(split, batch_size=2)))
        assert torch.equal(torch.stack([preprocess.image(image) for image in images.values()]), seen)
        trained = preprocess.evaluate(torch.stack([split[(0, i)][0] for i in range(2)]))  # type: ignore[index]
        assert torch.allclose(trained, seen, atol=0.02)  # a level of 256


def test_files_that_are_no_images_are_named(digit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lost otherwise: one bad file among many hides all results, fills the memory, or goes unnoticed by a script."""
    whole = digit.read_bytes()
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")  # 48 kB that unfold to 1.2 GB
    names = {"text.png": "not an image", "cut.png": "broken image", "bomb.png": "more than 90 million pixels",
             "missing.png": "no such file", "": "a directory"}  # fmt: skip
    bad = [tmp_path / name for name in names]
    with pytest.raises(SystemExit) as end:
        predict("--model", ADAPTIVE, *bad, digit, "--json", tmp_path / "out.json")
    assert end.value.code == "5 of 6 images could not be read"
    said = capsys.readouterr()
    for path, reason in zip(bad, names.values(), strict=True):
        assert any(line.startswith(f"{path}: ") and reason in line for line in said.err.splitlines()), path
    stored = json.loads((tmp_path / "out.json").read_text())
    assert [row["predictions"][0]["class"] for row in stored["predictions"]] == [2]
    assert [entry["image"] for entry in stored["unreadable"]] == [str(path) for path in bad]


def test_huge_files_are_not_read(digit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost otherwise: a file of many gigabytes is pulled into memory before anybody looks at it."""
    monkeypatch.setitem(SCRIPT["read_image"].__globals__, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100: shrink it"):
        SCRIPT["read_image"](digit)


def test_segmenters_write_masks(digit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lost otherwise: who has no labels for their images gets no masks."""
    segmenter = ROOT / "segmentation/checkpoints/upernet_a_swin_micro"
    scenes, model = load_digit_scenes(train=1, test=2)[1], from_pretrained(str(segmenter))
    paths = [tmp_path / f"{i}.png" for i in range(2)]
    for path, image in zip(paths, scenes.images, strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    wide = tmp_path / "wide.png"
    Image.open(paths[0]).resize((90, 50)).save(wide)
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(SystemExit, match="1 of 4 images could not be read"):
        predict("--model", segmenter, *paths, wide, tmp_path / "text.png", "--masks", tmp_path / "masks", "--json",
                tmp_path / "out.json")  # fmt: skip
    x = ScenePreprocess.load(segmenter / "preprocessor_config.json").evaluate(scenes.images)
    for path, expected in zip(paths, model(x).argmax(1), strict=True):
        with Image.open(tmp_path / "masks" / path.name) as mask:
            assert mask.mode == "P"
            assert torch.equal(torch.from_numpy(np.array(mask)).long(), expected)
    with Image.open(tmp_path / "masks" / "wide.png") as mask:
        assert mask.size == (90, 50)
    rows = json.loads((tmp_path / "out.json").read_text())["predictions"]
    assert [row["changed"] for row in rows] == [0.0, 0.0, 0.0]
    assert sum(rows[0]["classes"].values()) == pytest.approx(100)
    assert "background" in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    shutil.copy(paths[0], tmp_path / "other")
    with pytest.raises(ValueError, match="two images have the same name"):
        predict("--model", segmenter, paths[0], tmp_path / "other" / paths[0].name, "--masks", tmp_path / "masks")
    with pytest.raises(ValueError, match=r"the mask of .*0.png would replace the image itself: choose another folder"):
        predict("--model", segmenter, paths[0], "--masks", tmp_path)
    shutil.copytree(segmenter, tmp_path / segmenter.name)  # else the second model's masks replace the first one's
    with pytest.raises(ValueError, match="two models are called upernet_a_swin_micro"):
        predict("--model", segmenter, "--model", tmp_path / segmenter.name, paths[0], "--masks", tmp_path / "masks")


def test_wrong_requests_say_what_to_do(digit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lost otherwise: a traceback from the depths instead of advice."""
    (tmp_path / "names").write_text("cat\ndog\n")
    segmenter = ROOT / "segmentation/checkpoints/upernet_a_swin_micro"
    for arguments, message in (
        (["--model", segmenter, "--model", ADAPTIVE], "segmenters are predicted without classifiers"),
        (["--model", segmenter, "--shift-report"], "segmenters are predicted without classifiers and without"),
        (["--model", ADAPTIVE, "--classes", tmp_path / "names"], "has 10 classes, but .* names 2"),
        (["--model", ADAPTIVE, "--classes", tmp_path / "none"], "give a text file with one name per line"),
    ):
        with pytest.raises(ValueError, match=message):
            predict(*arguments, digit)
    for name, channels in (("a_swin_micro", 1), ("upernet_swin_micro", 4)):
        create_model(name, in_chans=channels).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=f"expected {channels} channels, got 3 .*red, green and blue.*in_chans=3"):
            predict("--model", tmp_path, digit, "--masks", tmp_path / "masks")
    with pytest.raises(SystemExit):
        predict("--model", ADAPTIVE, digit, "--grid", "0")
    assert "argument --grid: 0 is not a positive whole number" in capsys.readouterr().err
