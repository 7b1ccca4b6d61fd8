"""Disturb a training run in every way that comes to mind, and see whether it ends with the weights it would have had.

``python scripts/soak.py --kills 50``

A micro model learns digits on one CPU process. It is killed at random moments and resumed by ``--resume_from_checkpoint
latest``; its disk is full; its directory is read-only; its newest checkpoint is torn; a second run comes in; a fresh
one begins over it; it goes on with another accumulation and with two processes; a worker of its loader dies, and one of
two processes. At the end its weights must equal those of an undisturbed run to the bit (with another accumulation or
number of processes: to rounding), or the refusal must say what to do. The exit status is 1 if one does not.
"""

import argparse
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file
from tqdm.auto import tqdm

import shiftvit
from common.data.sources import load_data
from common.evaluation.flags import whole
from common.evaluation.tables import format_table
from common.training.checkpoints import latest_checkpoint
from common.training.engine import main as train
from swin.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]
RESUME = ("--resume_from_checkpoint", "latest")
PATIENCE = 60.0  # seconds in which a run must end after one of its processes
ROUNDING = 1e-4  # relative difference of the weights that another order of sums may make
TORN = {
    "empty": lambda content: b"",
    "one byte": lambda content: content[:1],
    "half": lambda content: content[: len(content) // 2],
    "all but one byte": lambda content: content[:-1],
    "first bit flipped": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "last bit flipped": lambda content: content[:-1] + bytes([content[-1] ^ 128]),
    "zeros at its end": lambda content: content[:-64] + bytes(len(content[-64:])),
    "missing": lambda content: None,
}


class Soak:
    """A directory with an undisturbed run, made when it is asked for, and what it takes to start others."""

    def __init__(self, directory: Path, kills: int, seed: int, *more: str, drop_path: str = "0.1") -> None:
        self.directory, self.kills, self.rng = directory, kills, random.Random(seed)
        self.steps = 40 + 8 * kills  # more than a run is let go between two kills
        shutil.rmtree(directory, ignore_errors=True)  # two disturbances may begin with the same run
        directory.mkdir()
        load_data("digits")  # imports what every run needs, once for all
        self.flags = ["--model", "swin_micro", "--limit", "64", "--batch_size", "16", "--steps", str(self.steps),
                      "--checkpointing_steps", "1", "--eval_every", "5", "--metrics", "top1", "--report_to", "none",
                      "--drop_path", drop_path, "--ema_decay", "0.9", *more]  # fmt: skip

    @cached_property
    def reference(self) -> Path:
        self.finish(output := self.directory / "undisturbed")
        return output

    def start(self, output: Path, *more: str, prepare: Callable[[], Any] = lambda: None) -> BaseProcess:
        """A run in a process of its own; what it says goes to ``output.txt`` beside its directory."""
        process = multiprocessing.get_context("fork").Process(target=self._run, args=(output, more, prepare))
        process.start()
        return process

    def _run(self, output: Path, more: Sequence[str], prepare: Callable[[], Any]) -> None:
        said = os.open(output.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(said, stream)
        prepare()
        shiftvit.run(train, RECIPES, "digits", None, [*self.flags, "--output_dir", str(output), *more])

    def started(self, output: Path, count: int, *more: str) -> BaseProcess:
        """A run that has gone on by so many steps."""
        before, process = steps(output), self.start(output, *more)
        wait_for(output, before + count, process.is_alive)
        return process

    def said(self, output: Path) -> str:
        return output.with_suffix(".txt").read_text(errors="replace")

    def finish(self, output: Path, *more: str) -> None:
        process = self.start(output, *more)
        process.join()
        assert not process.exitcode, f"a run ended with {process.exitcode}:\n{self.said(output)[-2000:]}"

    def refused(self, output: Path, message: str, *more: str, prepare: Callable[[], Any] = lambda: None) -> None:
        """A run must end at once, and say why."""
        process = self.start(output, *more, prepare=prepare)
        process.join()
        assert process.exitcode == 2, f"not refused: ended with {process.exitcode}"
        assert re.search(rf"error: .*{message}", self.said(output)), f"another refusal: {self.said(output)[-500:]}"

    def equal(self, output: Path, within: float = 0.0) -> float:
        """How far its weights are from those of the undisturbed run, which must be no more than that."""
        one, other = (load_file(path / "model.safetensors") for path in (self.reference, output))
        first, second = (torch.cat([state[name].double().flatten() for name in one]) for state in (one, other))
        difference = float((first - second).norm() / first.norm())
        assert difference <= within, f"weights differ by {difference:.1e} of their norm"
        return difference

    def resumed(self, output: Path, *more: str, within: float = 0.0) -> float:
        """It goes on to its end, with the weights that it would have had."""
        self.finish(output, *RESUME, *more)
        return self.equal(output, within)

    def half_way(self, name: str) -> Path:
        """A copy of the killed run's directory, in the middle of the run."""
        return Path(shutil.copytree(self.directory / "middle", self.directory / name))


def steps(output: Path) -> int:
    """Of the newest checkpoint, by its name."""
    return max((int(path.name[5:]) for path in output.glob("checkpoints/step_*")), default=0)


def killed(soak: Soak, bar: tqdm) -> str:
    """SIGKILL after some steps, or after some time, which falls into the start, a resumption or an evaluation."""
    output, rng, moments = soak.directory / "killed", soak.rng, []
    for number in range(soak.kills):
        process, begun = soak.start(output, *RESUME), steps(output)
        ahead, patience = rng.choice((0, 1, 2, 4, 8)), rng.uniform(0, 1)
        deadline = time.monotonic() + patience
        while process.is_alive() and (steps(output) < begun + ahead if ahead else time.monotonic() < deadline):
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1))
        assert process.is_alive(), f"the run ended before kill {number + 1}:\n{soak.said(output)[-2000:]}"
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        moments.append(steps(output))
        bar.update()
        if number == soak.kills // 2:
            shutil.copytree(output, soak.directory / "middle")  # as a kill has left it
    soak.resumed(output)
    return f"{soak.kills} kills up to step {moments[-1]} of {soak.steps}: same bits"


def full_disk(soak: Soak) -> str:
    output = soak.half_way("full")
    before = sorted(path.name for path in output.glob("checkpoints/step_*"))
    soak.refused(output, "could not write checkpoint .*free some disk space", *RESUME,
                 prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)))  # fmt: skip
    assert sorted(path.name for path in output.glob("checkpoints/step_*")) == before
    soak.resumed(output)
    return "refused, earlier checkpoints stay; resumed: same bits"


def read_only(soak: Soak) -> str:
    output = soak.half_way("locked")
    for path in (output, *output.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    soak.directory.chmod(0o755)
    soak.refused(output, "cannot be written.*choose another --output_dir", *RESUME,
                 prepare=lambda: os.getuid() or os.setuid(65534))  # fmt: skip # root may write anywhere
    for path in (output, *output.rglob("*")):
        path.chmod(0o755)
    soak.resumed(output)
    return "refused; resumed where it may write: same bits"


def torn(soak: Soak) -> str:
    output = soak.half_way("torn")
    root = output / "checkpoints"
    newest = root / f"step_{steps(output):08d}"
    (root / "aside").mkdir(exist_ok=True)
    (before,) = (path for path in root.glob("step_*") if path != newest)
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    for file in files:
        content = file.read_bytes()
        for kind, tear in TORN.items():
            spoilt = tear(content)
            file.unlink() if spoilt is None else file.write_bytes(spoilt)
            found = latest_checkpoint(root, report=lambda text: None)
            assert found == before, f"{file.name}, {kind}: {found} is taken for whole"
        file.write_bytes(content)
    assert latest_checkpoint(root) == newest
    (newest / "optimizer.bin").write_bytes(b"")
    soak.resumed(output)
    assert f"passed over: {newest}" in soak.said(output)
    return f"{len(files) * len(TORN)} torn files passed over; resumed from the one before: same bits"


def two_runs(soak: Soak) -> str:
    output = soak.half_way("shared")
    first = soak.started(output, 2, *RESUME)
    alias = soak.directory / "alias"
    alias.symlink_to(output)  # the same directory by another name
    soak.refused(alias, f"is in use by process {first.pid} .*choose another --output_dir", *RESUME)
    first.join()
    assert first.exitcode == 0
    soak.equal(output)
    return "the second is refused, the first ends with the same bits"


def fresh_run(soak: Soak) -> str:
    output = soak.half_way("used")
    files = {path.name: path.read_bytes() for path in output.glob(f"checkpoints/step_{steps(output):08d}/*")}
    soak.refused(output, "holds the checkpoints of a run .*--overwrite_output_dir")
    soak.finish(output, "--overwrite_output_dir")
    soak.equal(output)
    aside = sorted((output / "checkpoints.old-1").glob("step_*"))[-1]
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == files
    return "refused; with --overwrite_output_dir the old one is set aside: same bits"


def wait_for(output: Path, count: int, alive: Callable[[], bool]) -> None:
    while steps(output) < count:
        assert alive(), "the run has ended"
        time.sleep(0.01)


def without_drop_path(soak: Soak) -> Soak:
    """A short run, killed in the middle: parts of a batch draw other random numbers than the whole."""
    plain = Soak(soak.directory / "plain", 0, 0, drop_path="0")
    process = plain.started(plain.directory / "middle", 10)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    return plain


def accumulation(soak: Soak) -> str:
    soak = without_drop_path(soak)
    difference = soak.resumed(soak.half_way("accumulated"), "--gradient_accumulation_steps", "2", within=ROUNDING)
    return f"goes on; weights differ by {difference:.1e} (no drop path)"


def launch(soak: Soak, output: Path, *more: str) -> "subprocess.Popen[bytes]":
    """A run on two processes."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
               "swin/train.py", *soak.flags, "--output_dir", str(output), *more]  # fmt: skip
    with output.with_suffix(".txt").open("wb") as said:
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                                stdout=said, stderr=said)  # fmt: skip


def children(process: int | None) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def processes(soak: Soak) -> str:
    soak = without_drop_path(soak)
    output = soak.half_way("distributed")
    assert launch(soak, output, *RESUME).wait() == 0, soak.said(output)[-2000:]
    assert "1 processes wrote" in soak.said(output)
    difference = soak.equal(output, ROUNDING)
    return f"goes on, and says that random numbers differ; weights differ by {difference:.1e} (no drop path)"


def with_workers(soak: Soak) -> Soak:
    """Runs that decode images in workers: they have several sizes."""
    images = soak.directory / "images"
    for number in range(64):
        path = images / ("test" if number < 16 else "train") / str(number % 2)
        path.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((33 + number % 3, 40), 99).save(path / f"{number}.png")
    return Soak(soak.directory / "large", 0, 0, "--data", str(images), "--dataloader_num_workers", "2")


def ended_job(soak: Soak) -> str:
    soak = with_workers(soak)
    output = soak.directory / "ended"
    process = soak.started(output, 5)
    for number in [*children(process.pid), process.pid]:  # a cluster tells all of them
        os.kill(number or 0, signal.SIGTERM)
    process.join(PATIENCE)
    assert process.exitcode == 0, f"the run ended with {process.exitcode}: {soak.said(output)[-500:]}"
    assert "stopped by signal; go on with" in soak.said(output)
    soak.resumed(output)
    return "writes a checkpoint and ends; resumed: same bits"


def dead_worker(soak: Soak) -> str:
    soak = with_workers(soak)
    output = soak.directory / "orphaned"
    process = soak.started(output, 5)
    worker, begun = children(process.pid)[0], time.monotonic()
    os.kill(worker, signal.SIGKILL)
    process.join(PATIENCE)
    assert process.exitcode == 2, f"a worker died, and the run ended with {process.exitcode}"
    seconds = time.monotonic() - begun
    assert f"error: worker {worker} of the loader is killed by signal: Killed" in soak.said(output)
    soak.resumed(output)
    return f"ends {seconds:.0f} s later, naming the worker; resumed: same bits"


def dead_rank(soak: Soak) -> str:
    soak = without_drop_path(soak)
    output, longest = soak.directory / "bereft", 0.0
    for rank in (0, 1):
        process = launch(soak, output, *RESUME)
        wait_for(output, steps(output) + 5, lambda process=process: process.poll() is None)  # type: ignore[misc]
        ranks = [child for child in children(process.pid) if "train.py" in Path(f"/proc/{child}/cmdline").read_text()]
        os.kill(ranks[rank], signal.SIGKILL)
        begun = time.monotonic()
        assert process.wait(PATIENCE), "the launcher ended as if nothing had happened"
        longest = max(longest, time.monotonic() - begun)
        assert f"Signal 9 (SIGKILL) received by PID {ranks[rank]}" in soak.said(output)
        assert "[rank" not in soak.said(output), "the other process shows a traceback"
    difference = soak.resumed(output, within=ROUNDING)
    return f"ends up to {longest:.0f} s later, the launcher names the rank; resumed: weights differ by {difference:.1e}"


DISTURBANCES = {"a full disk": full_disk, "a read-only directory": read_only, "torn checkpoints": torn,
                "two runs in one directory": two_runs, "a fresh run over an old one": fresh_run,
                "another accumulation": accumulation, "two processes": processes,
                "SIGTERM to a run and its workers": ended_job, "a dead worker": dead_worker,
                "a dead rank": dead_rank}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=whole, default=50, help="SIGKILLs at random moments (%(default)s)")
    parser.add_argument("--seed", type=whole, default=0, help="of these moments (%(default)s)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as directory, tqdm(total=args.kills + len(DISTURBANCES)) as bar:
        soak = Soak(Path(directory), args.kills, args.seed)
        for name, disturb in {"kills": killed, **DISTURBANCES}.items():
            try:
                outcome = disturb(soak, bar) if disturb is killed else disturb(soak)  # type: ignore[operator]
            except AssertionError as error:
                outcome, failed = f"FAILED: {error}", True
            rows.append({"disturbance": name, "outcome": outcome})
            bar.update(name != "kills")
            bar.write(f"{name}: {outcome}")
    print(format_table(rows))
    raise SystemExit(failed)


if __name__ == "__main__":
    shiftvit.run(main)
