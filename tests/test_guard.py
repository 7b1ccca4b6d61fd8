"""A run that diverges: it stops before it overwrites what was good, and says where and on which images."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from common.training.checkpoints import Progress
from common.training.guard import FiniteGuard
from common.training.task import Classification

Train = Callable[..., dict[str, Any]]


class Diverging(Classification):
    """From batch ``at`` on: a loss that is NaN, or a finite loss whose gradient is infinite."""

    at: ClassVar[int] = 5
    by_gradient: ClassVar[bool] = False
    seen: ClassVar[list[list[int]]] = []

    def inputs(self, batch: Any, epoch: int, number: int) -> tuple[Tensor, Tensor]:
        self.seen.append(batch.tolist())
        assert len(self.seen) < 60, "nobody has noticed"
        return super().inputs(batch, epoch, number)

    def loss(self, model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        loss = super().loss(model, images, targets)
        if len(self.seen) < self.at:
            return loss
        if self.by_gradient:
            loss.register_hook(lambda gradient: gradient * math.inf)
            return loss
        return loss * math.nan


@pytest.fixture
def diverging(monkeypatch: pytest.MonkeyPatch) -> type[Diverging]:
    monkeypatch.setattr(Diverging, "seen", [])
    return Diverging


def test_nan_between_log_lines_spares_the_checkpoints(
    tmp_path: Path, train_digits: Train, diverging: type[Diverging]
) -> None:
    """Long runs log every fiftieth step: both checkpoints would hold NaN before anyone looked."""
    with pytest.raises(FloatingPointError, match=r"not finite, first at step 5 \(epoch 1\).*lower --lr.*untouched"):
        train_digits(tmp_path, "--steps", "10000", "--checkpointing_steps", "2", "--checkpoints_total_limit", "9",
                     "--eval_every", "999", task=diverging)  # fmt: skip
    kept = sorted((tmp_path / "checkpoints").glob("step_*"))
    assert [path.name for path in kept] == ["step_00000002", "step_00000004"]
    assert all(t.isfinite().all() for path in kept for t in load_file(path / "model.safetensors").values())
    report = json.loads((tmp_path / "non_finite.json").read_text())
    assert (report["step"], report["epoch"], report["noticed_at_step"]) == (5, 1, 6)
    assert [row["images"] for row in report["batches"] if row["step"] == 5] == [diverging.seen[4]]


@pytest.mark.parametrize("clip", ["5", "0"])
def test_infinite_gradients_of_the_last_step_spare_the_model(
    tmp_path: Path, train_digits: Train, diverging: type[Diverging], clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is finite to the end, the weights are not: they would be evaluated and published."""
    train_digits(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    monkeypatch.setattr(diverging, "by_gradient", True)
    monkeypatch.setattr(diverging, "at", 4)
    with pytest.raises(FloatingPointError, match="first at step 4"):
        train_digits(tmp_path, "--seed", "1", "--clip_grad", clip, task=diverging)
    assert len(diverging.seen) == 4
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert json.loads((tmp_path / "non_finite.json").read_text())["batches"][-1]["images"] == diverging.seen[3]


def guard_on(directory: Path, max_skipped: int = 2) -> tuple[FiniteGuard, SimpleNamespace]:
    accelerator = SimpleNamespace(device=torch.device("cpu"), process_index=0, is_main_process=True,
                                  gather=lambda tensor: tensor, optimizer_step_was_skipped=False)  # fmt: skip
    return FiniteGuard(accelerator, directory, max_skipped), accelerator  # type: ignore[arg-type]


def test_a_step_that_was_not_finite_is_remembered(tmp_path: Path) -> None:
    """A loss may be NaN once and finite again: the weights are then not what they would have been."""
    guard, _ = guard_on(tmp_path)
    for step, loss in enumerate((1.0, math.nan, 1.0, math.inf, 1.0), 1):
        guard.batch(torch.tensor(loss), torch.arange(3), Progress(step=step - 1))
        guard.step(None, Progress(step=step))
    with pytest.raises(FloatingPointError, match="first at step 2"):
        guard.check(Progress(step=5), [nn.Linear(2, 2)])


def test_steps_that_fp16_skips_are_counted(tmp_path: Path) -> None:
    """A scaler overflows now and then and goes on; one that overflows for ever would idle until the last step."""
    guard, accelerator = guard_on(tmp_path)
    progress = Progress()

    def step(skipped: bool) -> None:
        guard.batch(torch.tensor(math.inf if skipped else 1.0), torch.arange(3), progress)
        progress.step += 1
        accelerator.optimizer_step_was_skipped = skipped
        guard.step(torch.tensor(math.nan if skipped else 1.0), progress)

    for skipped in (True, True, False, True, True):
        step(skipped)
    guard.check(progress, [nn.Linear(2, 2)])
    with pytest.raises(FloatingPointError, match="3 steps in a row were skipped.*--max_skipped allows 2"):
        step(True)
    assert json.loads((tmp_path / "non_finite.json").read_text())["step"] == 6


def test_watching_does_not_wait_for_the_device(tmp_path: Path) -> None:
    """Each wait would cost a GPU its queue; only ``check`` may read a number back."""
    reads: list[str] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            reads.extend([str(f)] if "_local_scalar_dense" in str(f) else [])
            return f(*args, **(kwargs or {}))

    guard, _ = guard_on(tmp_path)
    with Reads():
        for step in range(1, 6):
            guard.batch(torch.tensor(1.0), torch.arange(3), Progress(step=step - 1))
            guard.step(torch.tensor(1.0), Progress(step=step))
        assert not reads
        guard.check(Progress(step=5))
    assert len(reads) == 1
