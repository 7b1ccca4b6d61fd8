"""Every command and every snippet of the documentation runs: as it stands or, where it would take hours or many GPUs,
with its flags, recipe and configuration read as the real run would."""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from test_finetuning import write_tree

from common.training.recipe import parse_command_line

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
SHORT = {"swin": ["--limit", "48", "--batch_size", "16", "--epochs", "1", "--report_to", "none", "--metrics", "top1"],
         "segmentation": ["--limit", "8", "--batch_size", "4", "--steps", "2", "--report_to", "none", "--metrics",
                          "mascc"]}  # fmt: skip


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for block in re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.M | re.S):
            yield str(page.relative_to(ROOT)), block


def commands(*pages: str) -> list[str]:
    lines = [line for page, block in blocks("sh") for line in block.splitlines() if not pages or page in pages]
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in lines]
    return list(dict.fromkeys(line for line in lines if line))


@pytest.mark.parametrize(("page", "code"), list(blocks("python")))
def test_snippets_run(page: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page, "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("command", commands())
def test_commands_are_right(command: str, call: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts and configurations exist, recipes and flags are known."""
    words = shlex.split(command)
    if words[0] == "shiftvit":  # the same scripts by name
        folder = words[2] if words[1] in ("train", "evaluate") else "scripts"
        words = [*(["accelerate", "launch"] if words[1] == "train" else ["python"]), f"{folder}/{words[1]}.py",
                 *words[3 if folder != "scripts" else 2 :]]  # fmt: skip
    for word in words:
        if word.endswith((".yaml", ".sbatch", ".py")):
            assert (ROOT / word).exists(), f"{word} is missing"
        if word.endswith(".yaml"):
            assert yaml.safe_load((ROOT / word).read_text())["compute_environment"] == "LOCAL_MACHINE"
    if words[:2] == ["accelerate", "launch"] or words[0] == "sbatch":
        script = next(word for word in words if word.endswith("train.py"))
        recipes = import_module(f"{script.split('/')[0]}.recipes").RECIPES
        parse_command_line(recipes, "digits", words[words.index(script) + 1 :])
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
    elif words[0] == "source":
        assert words[1] == ".venv/bin/activate"  # which the Makefile makes
    else:
        assert words[0] in ("python", "pip"), f"what is {words[0]}?"
        if words[1].endswith(".py"):
            call(words[1], "--help")
            known = capsys.readouterr().out
            assert not [word for word in words if word.startswith("--") and word not in known], command


@pytest.mark.slow
def test_the_pages_run_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., None]) -> None:
    """The commands a newcomer types first, on a small folder of images, one after the other."""
    write_tree(tmp_path / "data", count=6)
    shutil.copytree(tmp_path / "data/val", tmp_path / "data/test")
    monkeypatch.chdir(ROOT)
    for line in commands("docs/train.md", "docs/exactness.md", "docs/adapt.md"):
        if "--config_file" in line or line.startswith("sbatch"):
            continue
        line = line.replace("DIR", str(tmp_path / "data")).replace("outputs/", f"{tmp_path}{os.sep}outputs/")
        words = shlex.split(line)
        words = words[2:] if words[0] == "accelerate" else words[1:]
        if words[0].endswith("train.py"):
            words += [] if "--output_dir" in words else ["--output_dir", str(tmp_path / "run")]
            words += SHORT[words[0].split("/")[0]]
            words += ["--model", "a_swin_micro", "--resize", "36"] if "photographs" in words else []  # not a tiny one
        call(*words)
