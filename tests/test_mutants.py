"""The list of mutants does not rot: else it would show no longer that tests notice what is broken."""

import ast
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
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
    path = pathlib.Path(directory)
    print(list(script["run_all"](mutants, path / "all", 2, 120).values()))
    print(list(script["run_all"](mutants, path / "none", 2, 120, deadline=0.0).values()))
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


def test_touched_code_and_touched_tests_choose_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    """Else CI breaks nothing of what a commit changed, and is content."""
    script: dict[str, Any] = runpy.run_path(str(SCRIPT))
    mutant, chosen = script["Mutant"], script["chosen"]
    one = mutant("x", "one", "common/grid.py", "", "", ("test_loop.py::test_a", "test_hub.py::test_b"))
    two = mutant("x", "two", "common/shifts.py", "", "", ("test_loop.py::test_a",))
    assert chosen([one, two], None, {"common/shifts.py", "tests/test_hub.py"}) == [two, one]  # new code comes first
    assert chosen([one, two], None, {"tests/test_loop.py"}) == [one, two]
    assert chosen([one, two], ["two"], {"tests/test_loop.py"}) == [two]
    assert chosen([one, two], None, {"README.md"}) == chosen([one, two], None, set()) == []
    for flags in (["--only", "no such mutant"], ["--only", "no such mutant", "--touched", "HEAD", "--budget", "1"]):
        with pytest.raises(SystemExit) as end:
            script["main"](flags)
        assert not end.value.code
        assert "no mutant is in what was asked for" in capsys.readouterr().out


def test_touched_files_are_found_in_young_and_shallow_clones(tmp_path: Path) -> None:
    touched_files = runpy.run_path(str(SCRIPT))["touched_files"]

    def git(*words: str) -> None:
        settings = ("-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *settings, *words], cwd=tmp_path, check=True, capture_output=True)

    assert touched_files("HEAD~1", tmp_path) == set()  # no repository
    git("init")
    assert touched_files("HEAD~1", tmp_path) == set()  # no commit
    for name in ("old", "new"):
        (tmp_path / name).touch()
        git("add", name)
        git("commit", "-m", name)
    assert touched_files("HEAD~1", tmp_path) == {"new"}
    assert touched_files("HEAD~9", tmp_path) == {"new"}  # no such revision: the last commit
    git("clone", "--depth", "1", f"file://{tmp_path}", "shallow")
    assert touched_files("HEAD~1", tmp_path / "shallow") == {"old", "new"}  # all that its only commit holds


@pytest.mark.slow
def test_the_script_tells_caught_from_survived() -> None:
    """Of a mutant that its test catches, one that changes nothing, and one that does not apply."""
    command = [sys.executable, "-c", THREE, str(SCRIPT)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300, check=True)
    caught, survived, gone = ast.literal_eval(done.stdout.splitlines()[-3])
    assert caught.startswith("caught")
    assert survived.startswith("SURVIVED")
    assert "does not apply: common/shifts.py holds its text 0 times" in gone
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == ["no time"] * 3
