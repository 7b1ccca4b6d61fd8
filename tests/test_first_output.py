"""The command that measures how long a first output takes."""

import json
import runpy
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.mark.parametrize(("status", "said", "last"), [(-9, "", "nothing"), (0, " ", "nothing"), (1, "a\nb\n", "b")])
def test_a_process_that_dies_is_named(status: int, said: str, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the command ends in an IndexError, and nobody knows which model was too large."""
    main = runpy.run_path(str(ROOT / "scripts" / "first_output.py"))["main"]
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, status, "", said))
    with pytest.raises(ValueError, match=rf"swin_micro, eager: .* with status {status} .* last words: {last}$"):
        main(["--models", "swin_micro", "--modes", "eager", "--device", "cpu"])


@pytest.mark.slow
def test_seconds_are_those_of_a_fresh_process(tmp_path: Path) -> None:
    """Else caches of earlier runs hide what a new user waits for."""
    main = runpy.run_path(str(ROOT / "scripts" / "first_output.py"))["main"]
    flags = ["--device", "cpu", "--batch_size", "2"]
    rows = main(["--models", "swin_micro", "--modes", "eager", "warmed", *flags, "--json", str(tmp_path / "a.json")])
    assert [(row["model"], row["mode"]) for row in rows] == [("swin_micro", "eager"), ("swin_micro", "warmed")]
    for row in rows:
        assert 0.5 < row["import"] < 120
        assert 0 < row["second"] <= row["first"] < 60
    assert json.loads((tmp_path / "a.json").read_text())["rows"] == rows
    with pytest.raises(ValueError, match="no_model, eager: .*no_model"):
        main(["--models", "no_model", "--modes", "eager", *flags])
