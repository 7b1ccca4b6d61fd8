"""Spoil files at random and load them: each must work, or be refused by a short error of ours.

``python scripts/fuzz.py``                                   10,000 files
``python scripts/fuzz.py --files 500 --kinds config parquet --seed 7``

Configs, preprocessing, weights, parquet files, images and training checkpoints lose bytes, gain some, have bits
flipped, parts exchanged and JSON values replaced by others (``tests/spoilt.py``). They go through the public
functions: ``from_pretrained``, ``Preprocess.load``, ``load_data``, the image reader of ``predict.py``, and what resumes
a run. Wrong is another error than a ``ValueError`` that our own code raises, a message of 500 characters or more, a
crash, more than ``--seconds``, or more than ``--memory`` MiB. Such a file is kept under ``--output``, and the exit
status is 1. A case has a number: (kind, seed) makes the same file again.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # this tree, whatever is installed

from spoilt import KINDS, little_memory  # noqa: E402

import shiftvit  # noqa: E402
from common.evaluation.flags import count, whole  # noqa: E402
from common.evaluation.tables import format_table  # noqa: E402

LONGEST = 500  # characters of a message, without the path of the file


class Outcome(NamedTuple):
    seed: int
    what: str  # "works", "refused", or what is wrong
    message: str = ""


# one case after another, in a process that may crash or hang


def attempt(kind: str, seed: int, directory: Path, memory: int) -> Outcome:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    load = KINDS[kind](directory, random.Random(f"{kind} {seed}"))
    try:
        with little_memory(memory), warnings.catch_warnings(action="ignore"):
            load()
    except Exception as error:
        message = str(error).replace(str(directory), "")
        where = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        ours = type(error) is ValueError and ROOT in where.parents and ".venv" not in where.parts
        if ours and len(message) < LONGEST:
            return Outcome(seed, "refused", message)
        what = f"message of {len(message)} characters" if ours else f"{type(error).__name__} of {where.name}"
        return Outcome(seed, what, "".join(traceback.format_exception(error))[-4000:])
    return Outcome(seed, "works")


def work(kind: str, seeds: Sequence[int], directory: Path, memory: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    for stream in (1, 2):  # libraries for images write there themselves
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    for seed in seeds:
        connection.send(tuple(attempt(kind, seed, directory, memory)))


def run_kind(kind: str, seeds: Sequence[int], directory: Path, seconds: float, memory: int) -> Iterator[Outcome]:
    """Outcomes in turn; a process that crashes or hangs is replaced and goes on after the case that did it."""
    context = multiprocessing.get_context("fork")
    seeds = list(seeds)
    while seeds:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(kind, seeds, directory, memory, theirs))
        process.start()
        theirs.close()
        try:
            while seeds:
                if not ours.poll(seconds):
                    yield Outcome(seeds.pop(0), f"hangs for {seconds:g} s")
                    break
                yield Outcome(*ours.recv())
                seeds.pop(0)
        except EOFError:
            process.join()
            yield Outcome(seeds.pop(0), f"crashes with {process.exitcode}")
        process.kill()
        process.join()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=count, default=10_000, help="over all kinds (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of files (all)")
    parser.add_argument("--seed", type=whole, default=0, help="of the first case of each kind (%(default)s)")
    parser.add_argument("--seconds", type=float, default=30, help="for one file (%(default)s)")
    parser.add_argument("--memory", type=count, default=1024, help="MiB that one file may take (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/fuzz"), help="folder for offenders (%(default)s)")
    args = parser.parse_args(arguments)
    rows, offenders = [], 0
    with tqdm(total=args.files, unit="file") as bar, tempfile.TemporaryDirectory() as scratch:
        for i, kind in enumerate(args.kinds):
            files = args.files * (i + 1) // len(args.kinds) - args.files * i // len(args.kinds)
            counts: Counter[str] = Counter()
            seeds, directory = range(args.seed, args.seed + files), Path(scratch) / "case"
            for outcome in run_kind(kind, seeds, directory, args.seconds, args.memory * 2**20):
                fine = outcome.what in ("works", "refused")
                counts[outcome.what if fine else "WRONG"] += 1
                bar.update()
                if not fine:
                    bar.write(f"{kind} {outcome.seed}: {outcome.what}")
                    keep(args.output / f"{kind}-{outcome.seed}", kind, outcome)
            rows.append({"kind": kind, "files": files, **{key: counts[key] for key in ("works", "refused", "WRONG")}})
            offenders += counts["WRONG"]
    total = {key: sum(row[key] for row in rows) for key in ("files", "works", "refused", "WRONG")}
    print(format_table([*rows, {"kind": "all", **total}]))
    if offenders:
        print(f"{offenders} offenders: {args.output}")
    raise SystemExit(bool(offenders))


def keep(target: Path, kind: str, outcome: Outcome) -> None:
    """The file of an offender, made again, and what it did."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    KINDS[kind](target, random.Random(f"{kind} {outcome.seed}"))
    (target / "offence.txt").write_text(f"kind {kind}, seed {outcome.seed}: {outcome.what}\n\n{outcome.message}\n")


if __name__ == "__main__":
    shiftvit.run(main)
