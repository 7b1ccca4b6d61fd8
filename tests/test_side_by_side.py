"""Several runs on one GPU: in their order, measured once trained, stopped and resumed together."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT

TRAIN = """
import json, pathlib, signal, sys, time
flags = sys.argv[1:]
out = pathlib.Path(flags[flags.index("--output_dir") + 1])
notes = out.parent / "notes.txt"
(out.parent / "folders.txt").open("a").write(f"{pathlib.Path.cwd()}\\n")
notes.open("a").write(f"{out.name} {' '.join(flags)}\\n")
def stop(*_):
    (out / "checkpoints" / "step_1").mkdir(parents=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
if "--fail" in flags:
    sys.exit("no such data")
(out / "log.jsonl").write_text(json.dumps({"step": 1, "epoch": 3, "top1": 50.0}) + "\\n")
if "--slow" in flags and "--resume_from_checkpoint" not in flags:
    time.sleep(60)
order = (out.parent / "order.txt").open("a", buffering=1)
order.write(f"{out.name} begins\\n")
time.sleep(0.3)
order.write(f"{out.name} ends\\n")
(out / "results.json").write_text("{}")
"""
BATTERY = """
import pathlib, sys
flags = sys.argv[1:]
target = pathlib.Path(flags[flags.index("--json") + 1])
assert (target.parent / "results.json").exists()
(target.parent.parent / "folders.txt").open("a").write(f"{pathlib.Path.cwd()}\\n")
(target.parent.parent / "order.txt").open("a").write(f"{target.parent.name} is measured\\n")
(target.parent.parent / "measured.txt").open("a").write(f"{' '.join(flags)}\\n")
target.write_text("{}")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The script, over trainings that take no time."""
    for path, text in (("swin/train.py", TRAIN), ("cvt/train.py", TRAIN), ("scripts/battery.py", BATTERY)):
        (tmp_path / "root" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / path).write_text(text)
    monkeypatch.setattr(sys, "argv", ["side_by_side.py"])
    names = runpy.run_path(str(ROOT / "scripts" / "side_by_side.py"))
    monkeypatch.setitem(names["main"].__globals__, "ROOT", tmp_path / "root")
    return SimpleNamespace(**names, output=tmp_path / "out")


def run(script: SimpleNamespace, *words: str) -> list[dict[str, Any]]:
    return script.main([*words, "--data", "digits", "--output_dir", str(script.output)])


def test_runs_wait_for_those_whose_weights_they_take(script: SimpleNamespace) -> None:
    """Else a model is made adaptive before it is trained."""
    runs = "swin/a", "cvt/b --lr 5e-4", "cvt/c --pretrained {cvt/b}"
    rows = run(script, *runs, "--battery", "--mixed_precision", "bf16", "--epochs", "2", "--limit", "8")
    assert [(row["run"], row["state"], row["epoch"], row["top1"]) for row in rows] == [
        ("swin_a", "done", 3, 50.0), ("cvt_b_lr_5e-4", "done", 3, 50.0), ("cvt_c_pretrained", "done", 3, 50.0),
    ]  # fmt: skip
    notes = (script.output / "notes.txt").read_text().splitlines()
    assert notes[-1].startswith("cvt_c_pretrained ")
    after = [
        [other.directory.name for other in each.after] for each in script.read_runs([*runs, "+cvt/d"], script.output)
    ]
    assert after == [[], [], ["cvt_b_lr_5e-4"], ["swin_a", "cvt_b_lr_5e-4", "cvt_c_pretrained"]]
    assert f"--pretrained {script.output / 'cvt_b_lr_5e-4'}" in notes[-1]
    assert all("--data digits --mixed_precision bf16 --limit 8 --epochs 2" in note for note in notes)
    measured_by = (script.output / "measured.txt").read_text().splitlines()
    assert len(measured_by) == 3
    assert all(words.startswith("--data digits --mixed_precision bf16 --limit 8 --model") for words in measured_by)
    assert all((script.output / row["run"] / "battery.json").exists() for row in rows)
    assert json.loads((script.output / "summary.json").read_text()) == rows
    measured = script.output / "swin_a" / "battery.json"
    measured.write_text("as it was")
    run(script, "swin/a", "--battery")  # what is done is not done again
    assert (script.output / "notes.txt").read_text().splitlines() == notes
    assert measured.read_text() == "as it was"
    measured.rename(measured.with_name("battery.part.json"))  # as a measurement leaves it that was cut
    run(script, "swin/a", "--battery")
    assert measured.read_text() == "{}"
    assert not measured.with_name("battery.part.json").exists()


def test_a_run_that_was_trained_with_other_flags_is_told(script: SimpleNamespace) -> None:
    """Else the table of a command with --epochs 50 shows, as done, what an earlier one trained for 2."""
    run(script, "swin/a", "--epochs", "2")
    with pytest.warns(UserWarning, match="trained with --data digits --epochs 2 and is not trained again with .* 50"):
        run(script, "swin/a", "--epochs", "50")


def test_paths_are_those_of_the_caller(script: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else data and weights named by a path are not found, or are others, unless one stands in the project's folder."""
    monkeypatch.chdir(script.output.parent)
    run(script, "swin/a --pretrained weights", "--battery")
    folders = (script.output / "folders.txt").read_text().splitlines()
    assert folders == 2 * [str(script.output.parent)]


def test_jobs_take_turns_and_trainings_come_first(script: SimpleNamespace) -> None:
    """More than a GPU can take at a time slow one another down."""
    run(script, "swin/a", "swin/b", "cvt/c --pretrained {swin/a}", "--battery", "--jobs", "1")
    names = "swin_a", "swin_b", "cvt_c_pretrained"
    trained = [f"{name} {what}" for name in names for what in ("begins", "ends")]
    order = (script.output / "order.txt").read_text().splitlines()
    assert order == [*trained, *(f"{name} is measured" for name in names)]
    with pytest.raises(SystemExit):
        run(script, "swin/a", "--jobs", "0")


def test_time_is_up_and_the_same_command_goes_on(script: SimpleNamespace) -> None:
    """Else hours of training are lost with a machine that is lent by the hour."""
    rows = run(script, "swin/a", "swin/b --slow", "+swin/c", "--budget", "4")
    assert [row["state"] for row in rows] == ["done", "stopped", "waits"]
    rows = run(script, "swin/a", "swin/b --slow", "+swin/c")
    assert [row["state"] for row in rows] == ["done", "done", "done"]
    assert "--resume_from_checkpoint latest" in (script.output / "notes.txt").read_text().splitlines()[-2]


def test_a_run_that_fails_is_named_with_its_last_words(script: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"swin_b_fail failed: no such data \(all that it printed: .*output.log\)"):
        run(script, "swin/a", "swin/b --fail", "+swin/c")
    states = json.loads((script.output / "summary.json").read_text())
    assert [row["state"] for row in states] == ["done", "failed", "failed"]  # the last has nothing to wait for


@pytest.mark.parametrize(("words", "reason"), [
    (["vgg/a"], "'vgg/a' is not a run: write FOLDER/RECIPE"),
    (["swin"], "'swin' is not a run"),
    (["swin/a", "swin/a"], "given twice"),
    (["swin/a --pretrained {swin/b}", "swin/b"], "names no run before 'swin/a': there is none"),
])  # fmt: skip
def test_mistakes_are_told(script: SimpleNamespace, words: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        run(script, *words)
