"""Commands: every flag says what it is for, and an error of ours is one line."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from conftest import ROOT
from PIL import Image

import shiftvit
from common.training.recipe import parse_command_line

SWIN = str(ROOT / "swin/checkpoints/a_swin_micro")


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


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("words", "message"), [
    (["swin/evaluate.py", "--model", "nowhere/at/all"], "evaluate.py: no directory nowhere/at/all"),
    pytest.param(["swin/evaluate.py", "--model", SWIN, "--metrics", "top2"],
                 "evaluate.py: unknown metric 'top2': choose among", marks=pytest.mark.slow),
    pytest.param(["scripts/predict.py", "--model", "owner/name", "IMAGE"], "predict.py: ", marks=pytest.mark.slow),
])  # fmt: skip
def test_an_error_of_ours_is_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "image.png")
    done = command(*(str(tmp_path / "image.png") if word == "IMAGE" else word for word in words))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(message), last


def test_what_nobody_expected_keeps_its_traceback() -> None:
    def broken() -> None:
        int("no number")

    with pytest.raises(ValueError, match="invalid literal"):
        shiftvit.run(broken)
