"""Data sets of the Hub, whole and streamed: what is fetched, and what is refused before the Hub is asked."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_sources import encode, write_parquet
from torch.utils.data import DataLoader

from common.data.images import decode_image
from common.data.preprocess import Preprocess
from common.data.sources import EVALUATION_SPLITS, from_dataset, load_data, load_evaluation, load_hub_split
from common.data.streaming import Stream, endless, load_stream

CARD = """---
dataset_info:
  features:
  - {name: img, dtype: image}
  - {name: label, dtype: {class_label: {names: {'0': cat, '1': dog}}}}
  splits:
  - {name: train, num_bytes: 1, num_examples: 3}
  - {name: test, num_bytes: 1, num_examples: 2}
---
"""


def test_the_split_that_is_evaluated_is_fetched_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``load_dataset`` fetches all splits, whichever it is asked for: 150 GB of ImageNet to evaluate, or to stream."""
    import datasets

    folder = tmp_path / "data"
    for part, labels in (("train", [0, 1, 0]), ("test", [1, 1])):
        write_parquet(folder / f"{part}.parquet", [encode(i) for i in range(len(labels))], labels)
    (folder / "README.md").write_text(CARD)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    found, part = load_hub_split(str(folder), EVALUATION_SPLITS)
    assert [path.name for path in (tmp_path / "cache").rglob("*.arrow")] == ["data-test.arrow"]
    test = from_dataset(found, part)
    assert (part, test.classes, test.labels.tolist()) == ("test", ("cat", "dog"), [1, 1])
    monkeypatch.setattr("common.data.sources.is_hub_id", lambda name: True)
    assert load_evaluation(str(folder)).classes == ("cat", "dog")
    with pytest.raises(ValueError, match=r"has splits \['test', 'train'\]: expected train and one of \('val',\)"):
        load_evaluation(str(folder), split="val")


@pytest.mark.parametrize("name", ["digits", "", "./missing", "/missing/folder"])
def test_what_is_no_stream_is_not_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the embedded digits, or a folder with a typing error, cost half a minute of attempts to reach the Hub."""
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the Hub was asked"))
    with pytest.raises(FileNotFoundError, match=f"'{name}' is no data to stream: .* or leave out --streaming"):
        load_stream(name)


def test_folders_of_one_split_are_not_taken_for_all_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else dogs are class 0 where the test images show no cat."""
    import datasets

    for part, name in (("train", "cat"), ("train", "dog"), ("test", "dog")):
        (tmp_path / part / name).mkdir(parents=True)
        (tmp_path / part / name / "0.png").write_bytes(encode(0))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("common.data.sources.is_hub_id", lambda name: True)
    test = load_evaluation(str(tmp_path))
    assert (test.classes, test.labels.tolist()) == (("cat", "dog"), [1])


def test_streams_of_image_files(tmp_path: Path) -> None:
    """As repositories on the Hub hold them: a stream has an address for each, not its bytes."""
    import datasets

    for i, name in enumerate(("cat", "dog")):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "0.png").write_bytes(encode(i))
    rows = datasets.load_dataset("imagefolder", data_dir=str(tmp_path), split="train", streaming=True)
    stream = Stream(rows, 2, "owner/name").prepared(Preprocess(size=(8, 8)))
    seen = {label: image for image, label, _ in stream}
    assert all(torch.equal(seen[i].permute(1, 2, 0), torch.from_numpy(decode_image(encode(i)).copy())) for i in (0, 1))


def test_a_hub_out_of_reach_says_what_else_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def fails(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(
        OSError, match=r"owner/name cannot be read from the Hub \(Couldn't reach the Hub\): give .* --data"
    ):
        load_data("owner/name")


def test_streams_that_cannot_be_trained_on_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run waits for its first batch for ever, or ends with a StopIteration that says nothing."""
    import datasets

    with pytest.raises(ValueError, match="no worker of a process finds 4 readable images"):
        next(endless(DataLoader(range(3), batch_size=4, drop_last=True)))  # type: ignore[arg-type]
    builder = SimpleNamespace(config=SimpleNamespace(data_files={"train": ["a.parquet"]}))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: builder)
    with pytest.raises(ValueError, match=r"has splits \['train'\]: expected train and one of"):
        load_stream("uoft-cs/cifar10")
