"""The family of scores: whatever an anchor looks at, the model stays exact. Else users lose the point of it all."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, awkward_images, randomize

from common.anchors import SCORES, Score, WindowAnchor, observed_scores
from common.evaluation.equivariance import assert_shift_equivariant, shift_error
from common.models.registry import create_model, list_models, parse_arguments
from common.training.recipe import parse_command_line
from swin.recipes import RECIPES

MICRO = list_models("a_*_micro", exclude_filters="upernet_*")
SHIFTS = [(1, 0), (0, 1), (2, 3), (-7, 13), (17, 101)]
TIES = {"two identical objects", "two identical objects, half a patch apart"}
"""Sums over tokens are equal for two arrangements that differ: only what tells places apart does not tie."""


@pytest.mark.parametrize("name", MICRO)
@pytest.mark.parametrize("score", SCORES)
def test_every_score_is_exact(name: str, score: str) -> None:
    """float64, canonical anchor off: the error is rounding. With it, in float32, the same bits."""
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert_shift_equivariant(randomize(create_model(name, score=score, canonical=False)).double().eval(), x, SHIFTS)
    model = randomize(create_model(name, score=score)).eval()
    with torch.no_grad():
        assert all(torch.equal(model(x.float()), model(x.float().roll(shift, (2, 3)))) for shift in SHIFTS)


@pytest.mark.parametrize("name", MICRO)
@pytest.mark.parametrize("score", ["fixed", "peak"])
def test_ties_are_broken_without_the_layer(name: str, score: str) -> None:
    model = randomize(create_model(name, score=score, canonical=False)).double().eval()
    for kind, x in awkward_images(32).items():
        if kind not in TIES:
            assert_shift_equivariant(model, x.double(), [(1, 0), (2, 3), (-7, 13)])


def test_the_papers_score_ties_and_says_so() -> None:
    """The negative control: else the test above would show nothing."""
    model = randomize(create_model("a_swin_micro", score="energy", sketch=0, canonical=False)).double().eval()
    assert shift_error(model, awkward_images(32)["one bright pixel"].double(), (1, 0)) > 1e-3


def test_model_arguments_from_a_command_line() -> None:
    text = ["canonical=false", "score=peak", "anchors=token,window", "img_size=64", "drop_path_rate=0.1"]
    expected = {"canonical": False, "score": "peak", "anchors": ("token", "window"), "img_size": 64,
                "drop_path_rate": 0.1}  # fmt: skip
    assert parse_arguments(text) == expected
    assert parse_arguments(["anchors="]) == {"anchors": ()}
    assert parse_arguments(["anchors=merge"]) == {"anchors": ("merge",)}
    _, recipe, _ = parse_command_line(RECIPES, "digits", ["--model_args", *text])
    assert recipe.model_args == expected
    with pytest.raises(ValueError, match="write NAME=VALUE"):
        parse_arguments(["canonical"])


def test_an_unknown_score_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown score 'loudest': choose one of .*energy.*peak"):
        create_model("a_swin_micro", score="loudest")


def test_a_new_score_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """All anchors of all models take it at once, and none of its parts is lost on the way."""
    monkeypatch.setitem(SCORES, "fourth power", Score("fourth power", power=4))
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for name in MICRO:
        model = randomize(create_model(name, score="fourth power", canonical=False)).double().eval()
        assert_shift_equivariant(model, x, SHIFTS[:3])
    tokens = torch.randn(4, 8, 8, 16, dtype=torch.float64)
    with observed_scores() as tables:
        WindowAnchor(score="fourth power").offset(tokens, (4, 4))
        WindowAnchor(score="fixed").offset(tokens, (4, 4))
    assert not torch.allclose(tables[0] / tables[0].amax(), tables[1] / tables[1].amax())


@torch.no_grad()
def test_the_strongest_patch_decides_a_peak() -> None:
    """Noise all over does not move the phase that one bright patch asks for."""
    x = torch.rand(8, 16, 16, 3, dtype=torch.float64)
    x[:, 5:7, 9:11] = 4.0
    assert WindowAnchor(score="peak").offset(x, (2, 2)).tolist() == [[1, 1]] * 8


def test_runs_of_a_study_that_fail_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a study of which every run failed ends with an empty table, and as if all were well."""
    study = runpy.run_path(str(ROOT / "scripts" / "score_study.py"))
    started: list[tuple[Any, ...]] = []
    process = SimpleNamespace(start=lambda: None, is_alive=lambda: False, pid=1)
    context = SimpleNamespace(Queue=Queue, Process=lambda target, args: started.append(args) or process)
    monkeypatch.setattr(study["mp"], "get_context", lambda _: context)
    command = ["score_study.py", "--data", "digits", "--families", "swin", "--variants", "fixed", "--output_dir"]
    monkeypatch.setattr(sys, "argv", [*command, str(tmp_path), "--mixed_precision", "no", "--limit", "8"])
    with pytest.raises(ValueError, match="3 of 3 runs left no result, such as swin-fixed-0: their errors are in .*log"):
        study["main"]()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--budget", "0"])
    study["main"]()  # no time was given
    assert len(started) == 6


def test_a_study_of_other_data_begins_anew(tmp_path: Path) -> None:
    """Else its table shows what was measured on other images."""
    finished, path = runpy.run_path(str(ROOT / "scripts" / "score_study.py"))["finished"], tmp_path / "run.json"
    asked = {"data": "cifar10", "epochs": 12, "limit": None, "precision": "bf16"}
    result = {"variant": "fixed", "epochs": 12, "limit": None, "precision": "bf16"}
    for told, same in (({}, True), ({"data": "cifar10"}, True), ({"data": "digits"}, False), ({"limit": 8}, False)):
        path.write_text(json.dumps(result | told))
        assert finished(path, asked) is same


def test_gaps_in_bf16_are_of_bf16(tmp_path: Path, train_digits: Callable[..., dict[str, Any]]) -> None:
    """Else the study of a training in float32 or fp16 shows the gaps of that precision under the name of another."""
    study = runpy.run_path(str(ROOT / "scripts" / "score_study.py"))["Study"]
    found = train_digits(tmp_path, "--model", "a_swin_micro", "--steps", "1", "--metrics", "top1", "c_cons", task=study)
    assert found["gap_bf16"] != found["gap_float32"]


@pytest.mark.slow
def test_the_study_writes_its_table(tmp_path: Path, call: Callable[..., None]) -> None:
    """Else nobody can run it again: every run would end without a result."""
    call("scripts/score_study.py", "--data", "digits", "--families", "swin", "--variants", "fixed", "--seeds", "0",
         "--epochs", "1", "--limit", "32", "--jobs", "1", "--mixed_precision", "no", "--output_dir", str(tmp_path),
         "--json", str(tmp_path / "table.json"))  # fmt: skip
    logs = [path.read_text()[-2000:] for path in tmp_path.glob("worker-*.log")]
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [(row["family"], row["variant"], row["c_cons"]) for row in rows] == [("swin", "fixed", 100.0)], logs
