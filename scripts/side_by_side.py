"""Train several rows side by side on one GPU, then measure each: a small batch alone leaves a large GPU half idle.

python scripts/side_by_side.py cvt/cifar10_default cvt/cifar10_ours --battery --data DIR --epochs 50 \\
    --mixed_precision bf16 --compile

A run is FOLDER/RECIPE. Flags that are not listed below go to every ``train.py``; those of one run follow its name:
``"cvt/cifar10_default --lr 5e-4"``. A run waits for one that it names in braces, to take its weights:
``"cvt/cifar10_adapted --pretrained {cvt/cifar10_default}"``. ``+`` before a run makes it wait for all runs before it.
On CUDA the runs share the GPU by its multi-process service, if that is installed, ``--jobs`` at a time. Two or three
fill a GPU: with eight, a CvT-13 on an H200 trained at a fifth of its rate.

Every run has a folder in ``--output_dir``, with a log of what it printed. With ``--battery`` a trained model is
measured, into ``battery.json`` beside it. ``--budget`` stops all runs after so many seconds: each writes a checkpoint,
and the same command goes on from it.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

import shiftvit
from common.evaluation.flags import add_precision, count
from common.evaluation.plots import read_log
from common.evaluation.tables import format_table, write_json

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("swin", "swinv2", "cvt", "mvitv2")
SERVICE = "nvidia-cuda-mps-control"
GRACE = 120  # seconds in which a run that is stopped writes its checkpoint
OUTPUT = "output.log"
FLAGS = "flags.txt"  # those of the training
TRAINED = ("trained", "is measured", "done")
SHOWN = ("epoch", "images_per_s", "top1", "c_cons", "s_cons")


@dataclass
class Run:
    """A training, then its measurement: one process after the other."""

    folder: str
    recipe: str
    flags: list[str]
    directory: Path
    after: list["Run"] = field(default_factory=list)
    state: str = "waits"  # trains, trained, is measured, done, failed
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def advance(self, common: Sequence[str], battery: Sequence[str] | None, free: bool = True) -> None:
        """Go on as far as may be. ``common``: flags of every training; ``battery``: those of a measurement, if any.
        Nothing is started unless a job is ``free``."""
        trained, measured = ((self.directory / name).exists() for name in ("results.json", "battery.json"))
        said, words = self.directory / FLAGS, shlex.join([*common, *self.flags])
        if self.state == "waits" and trained:
            self.state = "trained"
            if said.exists() and said.read_text() != words:
                warnings.warn(f"{self.directory} was trained with {said.read_text()} and is not trained again with "
                              f"{words}: for that choose another --output_dir", stacklevel=2)  # fmt: skip
        elif self.state == "waits" and any(run.state == "failed" for run in self.after):
            self.state = "failed"
        elif self.state == "waits" and free and all(run.state in TRAINED for run in self.after):
            resume = ["--resume_from_checkpoint", "latest"] if any(self.directory.glob("checkpoints/step_*")) else []
            self.start("trains", [f"{self.folder}/train.py", "--recipe", self.recipe, *common, *self.flags, *resume,
                                  "--report_to", "none", "--output_dir", str(self.directory)])  # fmt: skip
            said.write_text(words)
        elif self.state == "trains" and not self.running:
            self.state = "trained" if trained else "failed"
        elif self.state == "trained" and (battery is None or measured):
            self.state = "done"
        elif self.state == "trained" and free and battery is not None:
            self.start("is measured", ["scripts/battery.py", *battery, "--model", str(self.directory), "--json",
                                       str(self.directory / "battery.part.json")])  # fmt: skip
        elif self.state == "is measured" and not self.running:
            self.state = "done" if self.process is not None and self.process.returncode == 0 else "failed"
            for part in self.directory.glob("battery.part.*") if self.state == "done" else ():  # a battery is whole
                part.replace(self.directory / part.name.replace(".part", ""))

    def start(self, state: str, command: Sequence[str]) -> None:
        """Run a script with flags, where this one runs: paths among the flags mean the same."""
        self.state, (script, *flags) = state, command
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / OUTPUT).open("ab") as log:
            self.process = subprocess.Popen([sys.executable, str(ROOT / script), *flags], stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip

    def stop(self) -> None:
        """Have it write its checkpoint and end; a measurement ends at once."""
        if self.process is None or self.process.poll() is not None:
            return
        os.killpg(self.process.pid, signal.SIGTERM)
        self.state = "stopped"

    def wait(self, until: float) -> None:
        """Until it has ended, and no longer than asked."""
        if self.process is None:
            return
        try:
            self.process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)

    def row(self) -> dict[str, Any]:
        """What is known of it, by its log."""
        log = self.directory / "log.jsonl"
        rows = read_log(log) if log.exists() else []
        last = {key: next((row[key] for row in reversed(rows) if key in row), None) for key in SHOWN}
        return {"run": self.directory.name, "state": self.state, **last}


def read_runs(texts: Sequence[str], output: Path) -> list[Run]:
    """The runs that are asked for. A name in braces becomes the folder of that run, which must come before."""
    runs: list[Run] = []
    for text in texts:
        name, *flags = shlex.split(text)
        waits, name = name.startswith("+"), name.removeprefix("+")
        folder, _, recipe = name.partition("/")
        if folder not in FOLDERS or not recipe:
            raise ValueError(f"{text!r} is not a run: write FOLDER/RECIPE, with a folder of {', '.join(FOLDERS)}")
        known = {f"{run.folder}/{run.recipe}": run for run in runs}
        after = list(runs) if waits else [run for each, run in known.items() if f"{{{each}}}" in text]
        for each, run in known.items():
            flags = [flag.replace(f"{{{each}}}", str(run.directory)) for flag in flags]
        if unknown := [flag for flag in flags if re.search(r"\{.+?\}", flag)]:
            raise ValueError(f"{unknown[0]} names no run before {name!r}: there is {', '.join(known) or 'none'}")
        label = "_".join([folder, recipe, *(flag.strip("-").replace("/", "-") for flag in flags if "/" not in flag)])
        if label in {run.directory.name for run in runs}:
            raise ValueError(f"{text!r} is given twice: two runs would share one folder")
        runs.append(Run(folder, recipe, flags, output / label, after))
    return runs


@contextmanager
def shared_gpu() -> Iterator[None]:
    """CUDA's multi-process service, if it is installed: else processes take turns on the GPU."""
    if not torch.cuda.is_available() or not shutil.which(SERVICE) or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
        subprocess.run([SERVICE, "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run([SERVICE], input=b"quit\n", check=False)


def train_together(runs: Sequence[Run], common: Sequence[str], battery: Sequence[str] | None, until: float,
                   jobs: int) -> None:  # fmt: skip
    """Start what may start, trainings first, and measure what is trained, until nothing is left to do or time is up."""
    shown, words = 0.0, ""
    with tqdm(total=len(runs), unit="run") as bar:
        while any(run.state not in ("done", "failed") for run in runs):
            for run in sorted(runs, key=lambda run: run.state == "trained"):
                run.advance(common, battery, sum(other.running for other in runs) < jobs)
            if more := sum(run.state in ("done", "failed") for run in runs) - bar.n:
                bar.update(more)
            if time.monotonic() > until:
                bar.write("time is up: runs write their checkpoints")
                return
            if time.monotonic() > shown + 10:
                shown, before = time.monotonic(), words
                rows = [run.row() for run in runs if run.running]
                words = ", ".join(f"{row['run']} {row['state']} {row['epoch'] or ''}".rstrip() for row in rows)
                bar.set_postfix_str(words) if words != before else None
            time.sleep(0.2)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("runs", nargs="+", metavar="FOLDER/RECIPE", help="what to train")
    parser.add_argument("--data", required=True, help="a folder or a Hub id, for all runs")
    add_precision(parser)
    parser.add_argument("--limit", type=count, help="train and measure on the first images alone, to rehearse")
    parser.add_argument("--battery", action="store_true", help="measure each model once it is trained")
    parser.add_argument("--jobs", type=count, default=3, help="trainings and measurements at a time (%(default)s)")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which all runs are stopped")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/side_by_side"), help="where the runs go (%(default)s)"
    )
    args, flags = parser.parse_known_args(arguments)
    runs, until = read_runs(args.runs, args.output_dir.resolve()), time.monotonic() + args.budget
    asked = {"--data": args.data, "--mixed_precision": args.mixed_precision, "--limit": args.limit}
    both = [word for flag, value in asked.items() if value for word in (flag, str(value))]
    with shared_gpu():
        try:
            train_together(runs, [*both, *flags], both if args.battery else None, until, args.jobs)
        finally:
            for run in runs:
                run.stop()
            end = time.monotonic() + GRACE
            for run in runs:
                run.wait(end)
    rows = [run.row() for run in runs]
    write_json(args.output_dir / "summary.json", rows)
    print(format_table(rows))
    for run in runs:
        if run.state == "failed" and (log := run.directory / OUTPUT).exists():
            last = log.read_text(errors="replace").replace("\r", "\n").strip().splitlines()[-1:]
            raise ValueError(f"{run.directory.name} failed: {' '.join(last)[:300]} (all that it printed: {log})")
    return rows


if __name__ == "__main__":
    shiftvit.run(main)
