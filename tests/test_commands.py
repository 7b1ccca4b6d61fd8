"""Commands: every flag says what it is for, and an error of ours is one line."""

import argparse
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from conftest import ROOT
from PIL import Image
from torch.utils.data import DataLoader

import shiftvit
from common.training.directory import acquire, release
from common.training.recipe import parse_command_line


@pytest.mark.parametrize("folder", ["swin", "segmentation"])
def test_every_flag_of_training_has_a_word_and_a_default(folder: str, capsys: pytest.CaptureFixture[str],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "400")
    recipes = import_module(f"{folder}.recipes").RECIPES
    name = next(name for name in recipes if name != "digits")
    with pytest.raises(SystemExit):
        parse_command_line(recipes, "digits", ["--recipe", name, "--help"])
    said = capsys.readouterr().out
    flags = re.findall(r"^  (--[a-z_]+)[^\n]*?(?:  +|\n +)(\w[^\n]*)$", said, re.M)
    assert len(flags) > 45
    assert all(len(words.split()) > 1 for _, words in flags), flags
    assert re.search(rf"--lr LR .*\({recipes[name].lr}\)", said)
    assert f"(outputs/{name})" in said


COMMANDS = [path for path in sorted((ROOT / "scripts").glob("*.py")) if path.name != "mutants.py"] + [
    ROOT / folder / f"{name}.py" for folder in ("swin", "segmentation") for name in ("evaluate", "reproduce", "convert")
]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_flag_of_other_commands_has_a_word(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[argparse.Action] = []

    def stop(parser: argparse.ArgumentParser, *_: Any) -> None:
        found.extend(parser._actions)
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    with pytest.raises(SystemExit):
        runpy.run_path(str(path), run_name="__main__")
    assert len(found) > 1
    assert [action.dest for action in found if not action.help] == []
    by_hand = {"first_output.py": ["batch_size"]}  # it times imports, also those that flags need
    assert [action.dest for action in found if action.type is int] == by_hand.get(path.name, [])


@pytest.mark.parametrize("words", ["publish.py --sample -5", "publish.py --sample 1.5", "battery.py --seed -1",
                                   "benchmark.py --rounds 0", "first_output.py --batch_size 0",
                                   "mutants.py --jobs 0"])  # fmt: skip
def test_counts_are_counts(words: str, fails: Callable[..., list[str]]) -> None:
    """Else -5 images to look at again are all of them, and none is a traceback."""
    script, flag, value = words.split()
    said = fails(f"scripts/{script}", flag, value)[-1]
    assert re.search(rf"error: argument {flag}: {value} is not a (positive )?whole number", said)


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_an_error_of_ours_is_one_line() -> None:
    done = command("swin/evaluate.py", "--model", "nowhere/at/all")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("evaluate.py: error: no directory nowhere/at/all"), last


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """What ``python script flags`` says on stderr as it ends with status 2, but in this process."""

    def run(script: str, *flags: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [script, *flags])
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(True)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        AcceleratorState._reset_state(True)
        assert end.value.code == 2
        return capsys.readouterr().err.splitlines()

    return run


MISTAKES = {
    "--recipe nonsense": "argument --recipe: invalid choice: 'nonsense'",
    "--epoch_count 3": "unrecognized arguments: --epoch_count 3",
    "--data TMP/missing": "no data folder TMP/missing",
    "--data TMP/empty": "TMP/empty has neither",
    "--output_dir TMP/used": "TMP/used holds the checkpoints of a run",
    "--output_dir TMP/held": f"TMP/held is in use by process {os.getpid()}",
    "--output_dir TMP/file": "TMP/file cannot be written",
    "--resume_from_checkpoint TMP/broken": "TMP/broken is not a checkpoint",
    "--gradient_accumulation_steps 3": "batch_size 64 does not divide into 3 parts",
    "--batch_size 0": "argument --batch_size: 0 is not at least 1",
    "--drop_path 1": "argument --drop_path: 1.0 is not at least 0 and below 1",
    "--lr nan": "argument --lr: nan is not at least 1e-30",
    "--metrics top9": "unknown metric 'top9'",
    "--model nonsense": "unknown model 'nonsense'",
    "--model_args depth=3": "a_swin_micro cannot be built with {'num_classes': 10, 'depth': 3}",
    "--model_args window_size=0": "window_size (0, 0) must be 1 or more",
    "--pretrained cvt/checkpoints/a_cvt_micro": "a_cvt_micro/model.safetensors does not fit the model",
    "--mixed_precision fp64": "Accelerate cannot be set up: Unknown mixed_precision mode: fp64",
    "--rand_augment nonsense": "the RandAugment 'nonsense' is not known",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_end_a_training_in_one_line(flags: str, fails: Callable[..., list[str]], tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Before the first step: a misspelt metric was found after the last."""
    monkeypatch.chdir(ROOT)
    for name in ("empty", "broken", "used/checkpoints/step_00000001"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").touch()
    held = acquire(tmp_path / "held")
    words = flags.replace("TMP", str(tmp_path)).split()
    output = [] if "--output_dir" in words else ["--output_dir", str(tmp_path / "fresh")]
    (line,) = fails("swin/train.py", "--report_to", "none", "--steps", "1", *output, *words)
    release(held)
    assert line.startswith("train.py: error: ")
    assert MISTAKES[flags].replace("TMP", str(tmp_path)) in line


@pytest.mark.parametrize(("words", "message"), [
    ("segmentation/train.py --metrics top1", "train.py: error: unknown metric 'top1'"),
    ("cvt/reproduce.py --scale smoke --output_dir NULL", "reproduce.py: error: /dev/null/smoke/"),
    ("swin/evaluate.py --model NULL --batch_size 0", "argument --batch_size: 0 is not a positive whole number"),
    ("swin/evaluate.py --model a_swin_micro --metrics top2", "evaluate.py: error: unknown metric 'top2': choose among"),
    ("swin/evaluate.py --model a_swin_micro --model_args num_classes=3", "3 classes, but the data have 10"),
    ("swin/evaluate.py --model timm:nonsense", "evaluate.py: error: timm:nonsense cannot be loaded"),
    ("swin/evaluate.py --model swin/checkpoints/swin_micro --limit 4 --resize 16", "cannot be resized to 16 and then"),
    ("scripts/predict.py --model timm:/tmp/nowhere NULL", "predict.py: error: timm:/tmp/nowhere cannot be loaded"),
    ("scripts/predict.py --model timm:local-dir:NULL NULL", "predict.py: error: "),
    ("swin/evaluate.py --model upernet_a_swin_micro", "or 'shiftvit evaluate segmentation'"),
    ("scripts/predict.py --model owner/name NULL", "predict.py: error: "),  # an OSError that a library raises
    ("scripts/exactness.py --device nonsense", "argument --device: nonsense is not available here"),
    ("scripts/battery.py --model NULL --data NULL", "battery.py: error: no data folder /dev/null"),
    ("scripts/walk.py nonsense", "walk.py: error: unknown model 'nonsense'"),
    ("scripts/score_study.py --data NULL", "score_study.py: error: no data folder /dev/null"),
    ("scripts/doctor.py --device cpu --model a_swim_tiny", "doctor.py: error: unknown model 'a_swim_tiny': did you"),
    ("swin/convert.py NULL NULL", "convert.py: error: /dev/null is not a safetensors file"),
])  # fmt: skip
def test_mistakes_end_other_commands_in_one_line(words: str, message: str, fails: Callable[..., list[str]]) -> None:
    (line,) = fails(*words.replace("NULL", "/dev/null").split())
    assert message in line


def test_every_command_ends_through_one_place() -> None:
    """But ``mutants.py``, whose tests are forked from it and must find a Python that nothing of ours has changed."""
    for path in (path for folder in shiftvit.PACKAGES for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        if 'if __name__ == "__main__":' in text and path.name not in ("mutants.py", "command.py"):
            assert re.search(r'if __name__ == "__main__":\n    shiftvit.run\(\s*main\b', text), path


def test_the_first_process_speaks_for_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Another one waits for the launcher to end it, and speaks if that does not happen."""
    waited: list[float] = []
    monkeypatch.setattr(shiftvit.time, "sleep", waited.append)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: None)  # as training does, which asks for a checkpoint so
    for rank, said in (("0", "train.py: error: full\n"), ("1", "\ntrain.py: error: rank 1: full\n")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            shiftvit.run(_full_disk)
        assert capsys.readouterr().err == said
    assert waited == [shiftvit.PATIENCE]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)


def _full_disk() -> None:
    raise OSError("full")


def test_tracebacks_are_shown_to_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHIFTVIT_TRACEBACK", "1")
    with pytest.raises(OSError, match="full"):
        shiftvit.run(_full_disk)


def test_what_nobody_expected_keeps_its_traceback() -> None:
    def broken() -> None:
        int("no number")

    with pytest.raises(ValueError, match="invalid literal"):
        shiftvit.run(broken)


def test_what_python_raises_in_a_line_of_ours_is_a_bug() -> None:
    code = compile("len(5)", str(ROOT / "common" / "grid.py"), "exec")
    with pytest.raises(TypeError, match="has no len"):
        shiftvit.run(exec, code)


@pytest.mark.parametrize("script", ["swin/train.py", "swin/evaluate.py"])
def test_a_broken_image_is_named_in_one_line(script: str, fails: Callable[..., list[str]], tmp_path: Path) -> None:
    """Also where a worker of the loader reads it, of which torch raises the traceback as text."""
    for part in ("train", "val"):
        (tmp_path / part / "only").mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (100, 110)).save(tmp_path / part / "only" / f"{i}.png")
        (tmp_path / part / "only" / "2.png").write_bytes(b"no image\nat all")
    flags = {"swin/train.py": f"--batch_size 4 --report_to none --output_dir {tmp_path / 'run'}",
             "swin/evaluate.py": "--model cvt_micro"}[script]  # fmt: skip
    (line,) = (line for line in fails(script, "--data", str(tmp_path), "--dataloader_num_workers", "1", *flags.split())
               if "error" in line)  # fmt: skip
    assert f"{Path(script).name}: error: {tmp_path}/" in line  # behind what clears the bar
    assert "2.png is not a readable image (no image in a format that Pillow reads): repair or drop it" in line


def test_what_nobody_expected_in_a_worker_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="Original Traceback") as end:
        shiftvit.run(list, DataLoader([1], collate_fn=_broken, num_workers=1))
    assert shiftvit._caught(end.value) == ""


def _broken(_: Any) -> None:
    int("no number")


@pytest.mark.slow
def test_two_processes_say_it_once(tmp_path: Path) -> None:
    words = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "swin/train.py", "--batch_size",
             "15", "--report_to", "none", "--output_dir", str(tmp_path))  # fmt: skip
    done = command(*words)
    assert done.returncode
    assert done.stderr.count("train.py: error: ") == 1
    assert done.stderr.count("batch_size 15 does not divide into 2 parts") == 1
