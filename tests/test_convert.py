"""Files people have: the authors' layouts, safetensors first, pickles only when asked and only as weights."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import randomize
from safetensors.torch import save_file
from timm.models.mvitv2 import checkpoint_filter_fn

import cvt.convert
import mvitv2.convert
import swin.convert
from common import create_model, from_pretrained
from common.publishing.convert import read_weights


def test_mvitv2_of_the_authors() -> None:
    """Our reading of their names is timm's."""
    state = create_model("mvitv2_tiny").state_dict()
    theirs = mvitv2.convert.to_original(state)
    assert "blocks.1.proj.weight" in theirs
    assert "head.projection.weight" in theirs
    again = mvitv2.convert.from_original(theirs)
    assert list(again) == list(state)
    assert all(torch.equal(again[name], state[name]) for name in state)
    assert checkpoint_filter_fn(dict(theirs), timm.create_model("mvitv2_tiny")).keys() == state.keys()


def test_original_layouts_go_both_ways() -> None:
    state = create_model("cvt_micro").state_dict()
    again = cvt.convert.from_original(cvt.convert.to_original(state))
    assert list(again) == list(state)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_becomes_a_model_directory(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomize(create_model("swin_micro")).eval()
    state = {name: tensor.contiguous() for name, tensor in swin.convert.to_timm(model.state_dict()).items()}
    file = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save({"model": state}, file)
    else:
        save_file(state, file)
    flags = ["--allow_pickle"] if suffix == ".pth" else []
    monkeypatch.setattr(sys, "argv", ["convert", str(file), str(tmp_path / "out"), "--model", "swin_micro", *flags])
    swin.convert.main({"timm": swin.convert.from_timm}, default_model="swin_tiny")
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(from_pretrained(str(tmp_path / "out"))(x), model(x))


@pytest.mark.parametrize("config", [
    {"model_type": "swin", "id2label": {str(i): f"class {i}" for i in range(10)}, "torch_dtype": "float32",
     "task_specific_params": {"a": {"b": {"c": 1}}}},
    {"architecture": "swin_tiny_patch4_window7_224", "label_names": [f"class {i}" for i in range(10)]},
    {"id2label": {str(i): f"LABEL_{i}" for i in range(10)}}, {"label_names": ["one"]},
])  # fmt: skip
def test_class_names_beside_weights_are_kept(config: dict[str, Any], tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Repositories of timm and transformers hold them in config.json; predictions would be bare numbers."""
    save_file(create_model("swin_micro").state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["convert", str(tmp_path / "model.safetensors"), str(tmp_path / "out"), "--model", "swin_micro"]
    monkeypatch.setattr(sys, "argv", words)
    swin.convert.main({"timm": swin.convert.from_timm}, default_model="swin_tiny")
    known = tuple(f"class {i}" for i in range(10)) if "class 9" in json.dumps(config) else ()
    assert from_pretrained(str(tmp_path / "out")).class_names == known


@pytest.mark.parametrize("tables", [False, True])
def test_windows_that_weights_do_not_fix_are_told(tables: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """SwinV2's weights fit any window: those of another became a model of the variant's own, without a word."""
    model = randomize(create_model("swinv2_micro", window_size=8)).eval()
    stored = dict(model.state_dict())  # with its tables, as the authors' files
    stored |= {name: table for name, table in model.named_buffers() if tables and name.endswith("coords_table")}
    save_file(stored, tmp_path / "weights.safetensors")

    def convert(*flags: str) -> str:
        words = [str(tmp_path / "weights.safetensors"), str(tmp_path / "out"), "--model", "swinv2_micro", *flags]
        monkeypatch.setattr(sys, "argv", ["convert", *words])
        swin.convert.main({"timm": swin.convert.from_timm}, default_model="swinv2_tiny")
        return capsys.readouterr().out

    if tables:
        with pytest.raises(ValueError, match="has windows of 8 in .*, the model of 4: give --model_args window_size=8"):
            convert()
        with pytest.raises(ValueError, match="as trained with other windows"):
            convert("--model_args", "window_size=8", "pretrained_window_sizes=4,4")
    else:
        assert "window_size=4" in convert()
    convert("--model_args", "window_size=8")
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(from_pretrained(str(tmp_path / "out"))(x), model(x))


class Bomb:
    """What a hostile pickle does when it is unpickled."""

    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("exploded"),))


def test_pickles_are_read_only_when_asked_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "weights.pth"
    file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="is not a safetensors file.*--allow_pickle"):
        read_weights(file)
    with pytest.raises(pickle.UnpicklingError):
        read_weights(file, allow_pickle=True)
    assert not Path("exploded").exists()
    torch.save({"model": [1, 2, 3]}, file)
    with pytest.raises(ValueError, match="does not hold a dictionary of tensors"):
        read_weights(file, allow_pickle=True)
