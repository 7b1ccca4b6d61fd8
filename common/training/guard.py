"""The guard of a run: a loss or weights that are not finite end it before a checkpoint or a model is overwritten."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..evaluation.tables import write_json
from .checkpoints import Progress

__all__ = ["REPORT_NAME", "FiniteGuard"]

REPORT_NAME = "non_finite.json"
NEVER = 2**62  # a step that no run reaches


class FiniteGuard:
    """Notes on the device, at every step, whether loss and gradient norm are finite; ``check`` reads the note.

    A step that the gradient scaler of fp16 skips leaves the weights as they are and is no fault, unless more than
    ``max_skipped`` follow each other.
    """

    def __init__(self, accelerator: Accelerator, directory: Path, max_skipped: int) -> None:
        self.accelerator, self.path, self.max_skipped = accelerator, directory / REPORT_NAME, max_skipped
        self.first_bad = torch.full((), NEVER, dtype=torch.long, device=accelerator.device)
        self.losses: list[Tensor] = []  # of one optimizer step
        self.batches: list[dict[str, Any]] = []  # since the last check; the indices stay on the device
        self.skipped = 0

    def batch(self, loss: Tensor, images: Tensor, progress: Progress) -> None:
        """Take note of a batch on its way to step ``progress.step + 1``."""
        self.losses.append(loss.detach().float().clone())  # a graph of CUDA's writes the next one in its place
        self.batches.append({"step": progress.step + 1, "epoch": progress.epoch, "images": images,
                             "process": self.accelerator.process_index})  # fmt: skip

    def step(self, norm: Any, progress: Progress) -> Tensor:
        """Take note of optimizer step ``progress.step`` and of its gradient norm, if gradients are clipped; the loss of
        the step, the mean over the parts of its batch."""
        loss = torch.stack(self.losses).mean() if len(self.losses) > 1 else self.losses[0]  # not finite if one is not
        self.losses = []
        if self.accelerator.optimizer_step_was_skipped:
            self.skipped += 1
            if self.skipped > self.max_skipped:
                self._stop(progress.step, progress, f"{self.skipped} steps in a row were skipped: fp16 overflows "
                           f"whatever its scale, and --max_skipped allows {self.max_skipped}")  # fmt: skip
            return loss
        self.skipped = 0
        total = loss + _local(norm.detach()).float() if isinstance(norm, Tensor) else loss
        self.first_bad = torch.where(total.isfinite(), self.first_bad, self.first_bad.clamp(max=progress.step))
        return loss

    def check(self, progress: Progress, modules: Sequence[nn.Module] = ()) -> None:
        """Wait for the device; raise if a step since the start, or a weight of ``modules``, was not finite."""
        first = self.first_bad
        tensors = [_local(t.detach()) for m in modules for t in (*m.parameters(), *m.buffers())]
        if tensors := [t for t in tensors if t.is_floating_point() and t.numel()]:
            largest = torch.nn.utils.get_total_norm(tensors, math.inf)
            first = torch.where(largest.isfinite(), first, first.clamp(max=progress.step))
        step = int(self.accelerator.gather(first.reshape(1)).min())  # of all processes, which stop together
        if step < NEVER:
            self._stop(step, progress, "the loss or the weights are not finite")
        self.batches = [row for row in self.batches if row["step"] >= progress.step]

    def _stop(self, step: int, progress: Progress, what: str) -> None:
        rows = gather_object([{**row, "images": row["images"].tolist()} for row in self.batches])
        epoch = next((row["epoch"] for row in rows if row["step"] == step), progress.epoch)
        if self.accelerator.is_main_process:
            write_json(self.path, {"step": step, "epoch": epoch, "noticed_at_step": progress.step, "batches": rows})
        raise FloatingPointError(f"{what}, first at step {step} (epoch {epoch}): lower --lr or --clip_grad, use bf16 "
                                 f"or float32 instead of fp16, or look at the images that {self.path} lists; "
                                 "checkpoints and models written before are untouched")  # fmt: skip


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
