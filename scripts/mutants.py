"""Break the code on purpose, one line at a time, and see whether a test notices.

``python scripts/mutants.py``                    all mutants
``python scripts/mutants.py --touched main``     those in files that differ from a revision, or whose tests do
``python scripts/mutants.py --touched HEAD~3 --budget 240``     as many of them as there is time for
``python scripts/mutants.py --only NaN "best model"``     those whose name holds one of these
``python scripts/mutants.py --list``             the table, and no run

The mutants lie in ``tests/mutants/*.toml``: a file, a text that it holds once, what takes its place, and the tests that
must fail then. Each is applied to a copy of the tree. Before, all these tests must pass without any. The exit status is
1 if a mutant survives, no longer applies, or has tests that do not run; one that ``--budget`` leaves no time for does
not count.
"""

import argparse
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parents[1]
NO_TIME = "no time"
LIBRARIES = ("accelerate", "huggingface_hub", "matplotlib.figure", "pyarrow.parquet", "sklearn.datasets", "timm",
             "torchvision", "transformers")  # fmt: skip
POLL = 0.05  # seconds
CHUNK = 8  # mutants whose tests first run without any: the fewer, the sooner a budget sees one caught


@dataclass(frozen=True)
class Mutant:
    """``old``, which ``file`` holds once, becomes ``new``; one of ``tests`` (``test_x.py::test_y``) must fail."""

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, tree: Path) -> None:
        path = tree / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name!r} does not apply: {self.file} holds its text {count} times, not once")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")

    def undo(self, tree: Path) -> None:
        shutil.copyfile(ROOT / self.file, tree / self.file)


def load(root: Path = ROOT) -> list[Mutant]:
    mutants = []
    for path in sorted((root / "tests" / "mutants").glob("*.toml")):
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
        mutants += [Mutant(path.stem, **{**row, "tests": tuple(row["tests"])}) for row in rows]
    return mutants


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutants whose name or area holds one of these")
    parser.add_argument("--touched", metavar="REV", help="mutants of what differs from this revision")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds, after which no mutant is begun")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (%(default)s)")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for one mutant (%(default)s)")
    args = parser.parse_args(arguments)
    if args.jobs < 1:
        parser.error(f"argument --jobs: {args.jobs} is not a positive whole number")
    deadline = time.monotonic() + args.budget
    mutants = chosen(load(), args.only, touched_files(args.touched) if args.touched else None)
    outcomes = dict.fromkeys(mutants, "not run" if args.list else NO_TIME)
    if not args.list and mutants:
        os.environ["HF_HUB_OFFLINE"] = "1"  # before any import: no test may depend on a network
        for library in LIBRARIES:  # once, for all that are forked: most of a short test is imports
            __import__(library)
        size = CHUNK if args.budget < math.inf else len(mutants)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:  # what is killed may still write
            for i in range(0, len(mutants), size):
                if time.monotonic() < deadline:
                    place = Path(directory) / str(i)
                    outcomes |= run_all(mutants[i : i + size], place, args.jobs, args.timeout, deadline)
    from common.evaluation.tables import format_table  # only now: the forked processes import trees of their own

    rows = [{"mutant": m.name, "file": m.file, "outcome": outcome} for m, outcome in outcomes.items()]
    print(format_table(rows))
    caught = sum(outcome.startswith("caught") for outcome in outcomes.values())
    left = sum(outcome == NO_TIME for outcome in outcomes.values())
    said = f"{len(rows)} mutants" if rows else "no mutant is in what was asked for"
    print(said + ("" if args.list or not rows else f", {caught} caught, no time for {left}"))
    raise SystemExit(not args.list and caught + left < len(rows))


def touched_files(revision: str, root: Path = ROOT) -> set[str]:
    """Files that differ from a revision; in a clone too young or too shallow for it, those of the last commit."""
    for words in (["diff", "--name-only", revision, "--"], ["show", "--name-only", "--format=", "HEAD"]):
        done = subprocess.run(["git", *words], cwd=root, text=True, capture_output=True, check=False)
        if not done.returncode:
            return set(done.stdout.splitlines())
        print(f"git {' '.join(words)}: {done.stderr.strip().splitlines()[0]}")
    return set()


def chosen(mutants: Iterable[Mutant], only: Sequence[str] | None, touched: set[str] | None) -> list[Mutant]:
    """Mutants by name, and by what was touched: their file, or one of their tests, which may no longer notice."""
    if touched is not None:
        mutants = [m for m in mutants if touched & {m.file, *(f"tests/{test.split('::')[0]}" for test in m.tests)}]
        mutants.sort(key=lambda m: m.file not in touched)  # first those in code that is new
    return [m for m in mutants if not only or any(word in (m.area, m.name) or word in m.name for word in only)]


def run_all(mutants: Sequence[Mutant], directory: Path, jobs: int, timeout: float,
            deadline: float = math.inf) -> dict[Mutant, str]:  # fmt: skip
    """What became of each mutant. A tree per job, in which one mutant follows another."""
    trees = [copy_tree(directory / f"tree{i}") for i in range(min(jobs, len(mutants)))]
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    print(f"{len(tests)} tests without a mutant")
    process = start(trees[0], [*tests])
    process.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
    if process.is_alive():
        process.kill()
        return dict.fromkeys(mutants, NO_TIME)
    if process.exitcode:
        raise SystemExit(f"tests fail without any mutant:\n{(trees[0] / 'output.txt').read_text()[-3000:]}")
    outcomes, waiting, running = dict.fromkeys(mutants, NO_TIME), list(mutants), {}
    with tqdm(total=len(mutants), unit="mutant") as bar:
        while (waiting and time.monotonic() < deadline) or running:
            if waiting and trees and time.monotonic() < deadline:
                mutant, tree = waiting.pop(0), trees.pop()
                try:
                    mutant.apply(tree)
                except ValueError as error:
                    outcomes[mutant] = str(error)
                    trees.append(tree)
                    bar.update()
                    continue
                running[mutant] = start(tree, mutant.tests), tree, time.monotonic()
                continue
            time.sleep(POLL)
            for mutant, (process, tree, since) in list(running.items()):
                seconds = time.monotonic() - since
                early = process.is_alive() and seconds < timeout
                if early and time.monotonic() < deadline:
                    continue
                outcome = judge(process, seconds)
                outcomes[mutant] = NO_TIME if early else outcome
                if not outcomes[mutant].startswith(("caught", NO_TIME)):
                    bar.write(f"{mutant.name}: {outcomes[mutant]}")
                mutant.undo(tree)
                del running[mutant]
                trees.append(tree)
                bar.update()
    return outcomes


def judge(process: BaseProcess, seconds: float) -> str:
    if process.is_alive():
        process.kill()
        process.join()
        return f"caught: hangs ({seconds:.0f} s)"
    meaning = {0: "SURVIVED", 1: "caught"}
    return f"{meaning.get(process.exitcode or 0, f'TESTS DO NOT RUN ({process.exitcode})')} ({seconds:.0f} s)"


def copy_tree(target: Path) -> Path:
    """What git knows of the working tree, and what is new in it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    return target


def start(tree: Path, tests: Sequence[str]) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(tree, tests))
    process.start()
    return process


def run_tests(tree: Path, tests: Sequence[str]) -> None:
    """In a process of its own: tests of a tree, with that tree's modules and nothing cached."""
    output = os.open(tree / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    flags = ["-x", "-q", "-p", "no:cacheprovider", "--basetemp", str(tree / "basetemp"), "--rootdir", str(tree)]
    code = pytest.main([*flags, *(f"tests/{test}" for test in tests)])
    sys.stdout.flush()
    os._exit(int(code))


if __name__ == "__main__":
    main()
