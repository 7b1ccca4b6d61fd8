"""What a run writes while it trains: log.jsonl, the trackers and the progress bar."""

import json
import math
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from ..evaluation.plots import read_log
from .checkpoints import Progress

__all__ = ["Clock", "RunLog", "check_trackers"]


def check_trackers(accelerator: Accelerator, report_to: str) -> Accelerator:
    """``accelerator``, or a ValueError if it leaves out a tracker that is asked for: one that is not installed."""
    found = {str(tracker) for tracker in accelerator.log_with}
    if missing := [name for name in report_to.split(",") if name not in found | {"all", "none"}]:
        raise ValueError(f"--report_to {', '.join(missing)}: not installed here; install it, or name another, or none")
    return accelerator


class Clock:
    """Seconds since it was started."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.start = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self.start


class RunLog:
    """log.jsonl, the trackers and the progress bar, from the main process; a resumed run drops what it will redo."""

    def __init__(self, accelerator: Accelerator, path: Path, progress: Progress, metric: str) -> None:
        self.accelerator, self.path, self.metric, self.best = accelerator, path, metric, -math.inf
        self.seconds, self.last, self.images = 0.0, time.perf_counter(), 0
        if accelerator.is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [row for row in read_log(path) if not _redone(row, progress)]
            temporary = path.with_name(f".{path.name}")
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
            temporary.replace(path)
            self.best = max((row[metric] for row in rows if metric in row), default=-math.inf)
            self.seconds = max((row["seconds"] for row in rows if "seconds" in row), default=0.0)

    def step(self, bar: tqdm, loss: Tensor, lr: float, progress: Progress, images: int, every: int) -> None:
        bar.update()
        self.images += images
        if progress.step % every:
            return
        value = self.accelerator.reduce(loss.detach(), "mean").item()  # waits for the device
        now = time.perf_counter()
        rate, self.images = self.images / (now - self.last), 0
        self.seconds, self.last = self.seconds + now - self.last, now
        bar.set_postfix(loss=f"{value:.3f}", lr=f"{lr:.2g}", images_per_s=f"{rate:,.0f}")
        measured = {"loss": value} if math.isfinite(value) else {"skipped": True}  # a step that fp16 left out
        self._write({"step": progress.step, "epoch": progress.epoch, **measured, "lr": lr,
                     "images_per_s": round(rate, 1), "seconds": round(self.seconds, 2)})  # fmt: skip

    def epoch(self, progress: Progress, images: int, loss: Tensor, clock: Clock) -> None:
        """Write the rate over a whole epoch, loading and augmentation included."""
        loss.item()  # wait for the device
        seconds = clock.seconds()
        self._write({"step": progress.step, "epoch": progress.epoch, "epoch_seconds": round(seconds, 2),
                     "epoch_images_per_s": round(images / seconds, 1)})  # fmt: skip

    def evaluation(self, bar: tqdm, results: dict[str, Any], progress: Progress) -> bool:
        """Write an evaluation; True where its metric is measured, and the best so far."""
        self.seconds, self.last = self.seconds + time.perf_counter() - self.last, time.perf_counter()
        self.images = 0  # those before it took part of that time
        self._write({"step": progress.step, "epoch": progress.epoch, **results, "seconds": round(self.seconds, 2)})
        shown = "  ".join(f"{key} {value:.2f}" for key, value in results.items() if isinstance(value, float))
        bar.write(f"epoch {progress.epoch}: {shown}") if not bar.disable else None
        value = results.get(self.metric, -math.inf)
        best, self.best = value > self.best, max(self.best, value)
        return best

    def _write(self, row: dict[str, Any]) -> None:
        self.accelerator.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _redone(row: dict[str, Any], progress: Progress) -> bool:
    """Whether a run that goes on from there writes a row again: what came later, and what was measured at that very
    step, for a checkpoint lies before the evaluation, and the model may not have been saved any more."""
    return row["step"] > progress.step or (row["step"] == progress.step and not {"lr", "epoch_seconds"} & row.keys())
