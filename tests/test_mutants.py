"""The list of mutants does not rot: else it would show no longer that tests notice what is broken."""

import ast
import runpy
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from conftest import ROOT

SCRIPT = ROOT / "scripts" / "mutants.py"
THREE = """
import pathlib, runpy, sys, tempfile
script = runpy.run_path(sys.argv[1])
old = "from .seeding import constants, hashed_uniform"
news = {"up": old + "; from .training import engine", "equal": old + "  # the same", "gone": ""}
mutants = [script["Mutant"]("x", name, "common/shifts.py", old if new else "no such text", new, ("test_house.py",))
           for name, new in news.items()]
assert script["chosen"](mutants, ["equ"], None) == mutants[1:2]
with tempfile.TemporaryDirectory() as directory:
    print(list(script["run_all"](mutants, pathlib.Path(directory), 2, 120).values()))
"""


@cache
def functions(name: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / name).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_mutant_still_applies() -> None:
    mutants: list[Any] = runpy.run_path(str(SCRIPT))["load"]()
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 60
    for mutant in mutants:
        text = (ROOT / mutant.file).read_text()
        count = text.count(mutant.old)
        assert count == 1, f"{mutant.name}: {mutant.file} holds its text {count} times"
        assert mutant.old != mutant.new
        compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert name.partition("[")[0] in functions(file), f"{mutant.name}: no test {test}"


@pytest.mark.slow
def test_the_script_tells_caught_from_survived() -> None:
    """Of a mutant that its test catches, one that changes nothing, and one that does not apply."""
    command = [sys.executable, "-c", THREE, str(SCRIPT)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300, check=True)
    caught, survived, gone = ast.literal_eval(done.stdout.splitlines()[-1])
    assert caught.startswith("caught")
    assert survived.startswith("SURVIVED")
    assert "does not apply: common/shifts.py holds its text 0 times" in gone
