"""Runs whose processes die, as ``scripts/soak.py`` disturbs them: they end soon, say who died, and can go on."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from conftest import ROOT

import shiftvit


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), [
    ("SIGTERM to a run and its workers", "writes a checkpoint and ends; resumed: same bits"),
    ("a dead worker", "naming the worker; resumed: same bits"),
    ("a dead rank", "the launcher names the rank; resumed"),
])  # fmt: skip
def test_a_run_ends_with_its_processes(name: str, said: str, tmp_path: Path) -> None:
    """Lost otherwise: hours of a run that waits for a process that is gone, or advice to free disk space."""
    script = f"""
import runpy
from pathlib import Path
soak = runpy.run_path("scripts/soak.py")
print(soak["DISTURBANCES"]["{name}"](soak["Soak"](Path("{tmp_path}"), 0, 0)))
"""  # in a process of its own, since it forks, and a process that has run a backward pass cannot
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, text=True, capture_output=True,
                          check=False)  # fmt: skip
    assert said in done.stdout, done.stderr[-2000:]


def test_each_disturbance_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that begin with the same run are refused by the directory of the first, or go on with its weights."""
    soak = runpy.run_path(str(ROOT / "scripts/soak.py"))["Soak"]
    monkeypatch.setattr(soak, "finish", lambda self, output: output.mkdir())
    for _ in range(2):
        assert soak(tmp_path / "large", 0, 0).reference.is_dir()


def test_deaths_are_told_from_other_errors() -> None:
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    error.__cause__ = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    assert shiftvit.death(error).startswith("worker 7 of the loader is killed by signal: Killed: out of memory?")
    ended = RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. ")
    assert "the launcher ends all where one process is gone" in shiftvit.death(ended)
    peer = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5")
    assert "another process of this run is gone" in shiftvit.death(peer)
    for other in (OSError("Connection reset by peer"), BrokenPipeError(32, "Broken pipe"), ValueError("no")):
        assert not shiftvit.death(other)  # of the Hub, of a pipe, of something else


def test_a_worker_that_dies_while_a_checkpoint_is_written_is_no_full_disk(
    tmp_path: Path, train_digits: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error comes wherever the run is. One of several processes must not remove what the others still write."""

    def killed(*_: Any, **__: Any) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    monkeypatch.setattr(Accelerator, "save_state", killed)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        train_digits(tmp_path, "--checkpointing_steps", "2")
    assert (tmp_path / "checkpoints" / ".step_00000002").is_dir()
