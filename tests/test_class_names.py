"""Names of classes: stored at training, shown wherever a label is. Else a person reads "1" where a cat is."""

import io
import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from segmentation_helpers import scene, write_parquet

from common import from_pretrained
from common.data.sources import KNOWN, load_data, load_evaluation
from common.data.streaming import load_stream
from common.evaluation.evaluate import main as evaluate
from common.publishing.cards import model_card
from common.publishing.manifest import training_runs
from segmentation.data import load_scenes
from segmentation.inference import pictures
from segmentation.preprocess import ScenePreprocess
from shiftvit.page.move import Outcome, draw_card
from shiftvit.page.sides import Side

NAMES = ("cat", "china <b>", "flower")


def make_folder(folder: Path, side: int = 32, count: int = 16) -> Path:
    """Grey, then red, then green noise: a class each."""
    random = np.random.RandomState(0)
    for part, images in (("train", count), ("val", 4)):
        for channel, name in enumerate(NAMES):
            directory = folder / part / name
            directory.mkdir(parents=True)
            for i in range(images):
                pixels = random.randint(0, 100, (side, side, 3)).astype(np.uint8)
                pixels[..., channel] += 120
                Image.fromarray(pixels).save(directory / f"{i}.png")
    return folder


@pytest.fixture
def trained(tmp_path: Path, train_digits: Callable[..., dict[str, Any]]) -> Path:
    train_digits(tmp_path / "run", "--data", str(make_folder(tmp_path / "data")), "--limit", "48")
    return tmp_path / "run"


def test_predictions_have_names(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = json.loads((trained / "config.json").read_text())
    assert stored["id2label"] == {str(i): name for i, name in enumerate(NAMES)}
    assert stored["pretrained_cfg"]["std"] == [0.35, 0.35, 0.35]
    assert from_pretrained(str(trained / "best")).class_names == NAMES
    predict = runpy.run_path(str(ROOT / "scripts" / "predict.py"))["main"]
    image = trained.parent / "data/val/cat/0.png"
    found = predict(["--model", str(trained), str(image), "--device", "cpu"])["predictions"][0]["predictions"]
    assert {best["name"]: best["class"] for best in found} == {name: i for i, name in enumerate(NAMES)}
    assert "flower" in capsys.readouterr().out


def test_evaluation_says_where_classes_differ(trained: Path) -> None:
    """Lost otherwise: a model for cats and flowers is measured on digits 0 to 2, and nobody notices."""
    data = trained.parent / "data"
    (data / "val/cat").rename(data / "val/dog")
    (data / "train/cat").rename(data / "train/dog")
    flags = ["--model", str(trained), "--data", str(data), "--metrics", "top1"]
    with pytest.warns(UserWarning, match=r"model's classes are cat, china <b>, flower; those of the data are china"):
        evaluate("", flags)


def test_the_page_shows_names_and_no_markup() -> None:
    outcome = Outcome(torch.tensor([0.1, 0.8, 0.1]), torch.tensor([0.1, 0.8, 0.1]), [], True)
    card = draw_card("adaptive", outcome, NAMES)
    assert '<div class="label">china &lt;b&gt;</div>' in card
    assert "<span>cat</span>" in card
    assert ">china &lt;b&gt; → flower<" in draw_card("default", replace(outcome, moved=torch.eye(3)[2]), NAMES)
    nameless: Any = SimpleNamespace(class_names=(), num_classes=3)
    assert Side("default", nameless, nameless).names == ("0", "1", "2")


def test_cards_list_names() -> None:
    directory = ROOT / "segmentation/checkpoints/upernet_a_swin_micro"
    (results,) = (run for _, run in training_runs() if run["model"] == directory.name and run["recipe"] == "digits")
    card = model_card(from_pretrained(str(directory)), results, source="team/model")
    assert "(`model.class_names`): `background`, `0`, `1`" in card


def test_segmentation_draws_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = from_pretrained(str(ROOT / "segmentation/checkpoints/upernet_a_swin_micro"))
    assert model.class_names == ("background", *map(str, range(10)))
    drawn: list[list[str]] = []

    def legend(figure: Any, handles: list[Any], **_: Any) -> None:
        drawn.append([handle.get_label() for handle in handles])

    monkeypatch.setattr("matplotlib.figure.Figure.legend", legend)
    pictures({"a": model}, torch.zeros(1, 3, 64, 64), torch.tensor([[1, 1]]), tmp_path / "figure.png",
             preprocess=ScenePreprocess(size=(64, 64)), names=model.class_names)  # fmt: skip
    assert drawn == [["background"]]


def test_validation_comes_before_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rule for folders, the Hub and streams: else a copy of ImageNet is refused for its test split without labels,
    or the best model is chosen on test. CamVid's figures are of test."""
    import datasets

    buffer, counts = io.BytesIO(), {"train": 2, "test": 3, "val": 4}
    Image.new("L", (8, 8)).save(buffer, "PNG")
    image, label = {"bytes": buffer.getvalue(), "path": None}, datasets.ClassLabel(names=["cat"])
    features = datasets.Features({"image": datasets.Image(), "label": label})
    parts = datasets.DatasetDict({part: datasets.Dataset.from_dict({"image": [image] * n, "label": [0] * n}, features)
                                  for part, n in counts.items()})  # fmt: skip
    for part, count in counts.items():
        parts[part].to_parquet(tmp_path / f"{part}.parquet")
        for folder in ("scenes", "camvid"):
            write_parquet(tmp_path / folder / f"{part}.parquet", [scene(i) for i in range(count)])
    assert len(load_data(str(tmp_path))[1]) == len(load_stream(str(tmp_path))[1]) == 4
    assert [len(load_scenes(str(tmp_path / folder))[1]) for folder in ("scenes", "camvid")] == [4, 3]

    def load(*_: Any, split: str = "", **__: Any) -> Any:
        return parts[split] if split else parts

    builder = SimpleNamespace(config=SimpleNamespace(data_files={part: [] for part in parts}),
                              info=SimpleNamespace(features=None))  # fmt: skip
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: builder)
    monkeypatch.setattr("common.data.streaming.Stream", lambda *_: parts["train"])
    monkeypatch.setattr("common.data.streaming.same_classes", lambda *splits: splits[:2])
    monkeypatch.setitem(KNOWN, "owner/name", (2, 4, 1))
    assert len(load_data("owner/name")[1]) == len(load_stream("owner/name")[1]) == 4
    assert len(load_evaluation("owner/name")) == 4
    builder.config.data_files = None  # as without a connection
    assert len(load_evaluation("owner/name")) == 4


def test_splits_have_the_same_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an evaluation split that names its classes in another order, or lacks one, is compared with other classes:
    streamed, or from the Hub."""
    import datasets

    features = [datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
                for names in (["cat", "dog"], ["dog", "cat"])]  # fmt: skip
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    rows = {"image": [{"bytes": buffer.getvalue(), "path": None}] * 2, "label": [0, 1]}
    for name, feature in zip(("train", "test"), features, strict=True):
        datasets.Dataset.from_dict(rows, features=feature).to_parquet(tmp_path / f"{name}.parquet")
    train, test = load_stream(str(tmp_path))
    assert (train.classes, test.classes, test.labels.tolist()) == (("cat", "dog"), ("cat", "dog"), [1, 0])

    parts = {part: datasets.Dataset.from_dict({**rows, "label": labels}).cast_column("image", datasets.Image())
             for part, labels in (("train", ["cat", "dog"]), ("test", ["dog", "dog"]))}  # fmt: skip
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.DatasetDict(parts))
    train, test = load_data("owner/name")
    assert (train.classes, test.classes, test.labels.tolist()) == (("cat", "dog"), ("cat", "dog"), [1, 1])
