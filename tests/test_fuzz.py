"""Files spoilt at random work or are refused: a part of what ``scripts/fuzz.py`` runs. Else a torn download, or a file
from a stranger, ends in a library's traceback, hangs, or takes all memory."""

import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from spoilt import KINDS

COUNTS = dict.fromkeys(KINDS, 30) | {"config": 60, "weights": 40, "checkpoint": 60}  # 370 in all
SLOW = "checkpoint", "JPEG", "WEBP", "GIF", "TIFF"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited through /proc")
@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in KINDS
])  # fmt: skip
def test_spoilt_files_work_or_are_refused(kind: str, tmp_path: Path) -> None:
    script: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "fuzz.py"))
    outcomes = list(script["run_kind"](kind, range(COUNTS[kind]), tmp_path / "case", 60, 2**30))
    wrong = [outcome for outcome in outcomes if outcome.what not in ("works", "refused")]
    assert not wrong, wrong[0]
    assert len(outcomes) == COUNTS[kind]
    assert {outcome.what for outcome in outcomes} == {"works", "refused"}  # neither harmless nor hopeless


WAYS: dict[str, Callable[[], Any]] = {
    "RuntimeError of linear.py": lambda: torch.nn.Linear(2, 2)(torch.zeros(3)),
    "hangs for 3 s": lambda: time.sleep(60),
    "crashes with 7": lambda: os._exit(7),
    "MemoryError of test_fuzz.py": lambda: bytearray(2**31),
    "works": lambda: None,
}


@pytest.mark.parametrize("what", WAYS)
def test_what_is_wrong_is_noticed(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another error, a hang, a crash, much memory: else the counts above would show nothing."""
    script: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "fuzz.py"))
    monkeypatch.setitem(KINDS, "GIF", lambda directory, rng: WAYS[what])
    (outcome,) = script["run_kind"]("GIF", [0], tmp_path / "case", 3, 2**30)
    assert outcome.what == what
