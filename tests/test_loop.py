"""The training loop does what its flags say: schedule, clipping, averaging, the best model, augmentation by epoch."""

import json
import runpy
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import ROOT
from safetensors.torch import load_file
from torch import Tensor, nn

from common import create_model, from_pretrained
from common.data.preprocess import PREPROCESSOR_NAME, Preprocess
from common.data.sources import load_data
from common.evaluation.evaluate import evaluate
from common.training import engine, reproduce
from common.training.engine import _parameters, _schedule
from common.training.recipe import Recipe, RunOptions, parse_command_line
from common.training.task import Classification
from swin.recipes import RECIPES

Train = Callable[..., dict[str, Any]]
WEIGHT = "head.fc.weight"


class Witness(Classification):
    """Notes the last layer and its gradient at every step, the last layer at every evaluation, and which batches it is
    asked for; scores by a list."""

    scores: ClassVar[list[float]] = []
    trained: ClassVar[list[Tensor]] = []
    evaluated: ClassVar[list[dict[str, Tensor]]] = []
    asked: ClassVar[list[tuple[int, int]]] = []
    images: ClassVar[list[list[int]]] = []
    gradients: ClassVar[list[bool]] = []

    def inputs(self, batch: Any, epoch: int, number: int) -> tuple[Tensor, Tensor]:
        self.asked.append((epoch, number))
        self.images.append(batch.tolist())
        return super().inputs(batch, epoch, number)

    def loss(self, model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        self.trained.append(model.state_dict()[WEIGHT].clone())
        self.gradients.append(model.get_parameter(WEIGHT).grad is not None)
        return super().loss(model, images, targets)

    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        self.evaluated.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return {"top1": self.scores[len(self.evaluated) - 1]} if self.scores else super().evaluate(model)

    def confirm(self, directory: Path, results: dict[str, Any]) -> None:
        """Nothing: it would count as one more evaluation."""


@pytest.fixture
def witness(monkeypatch: pytest.MonkeyPatch) -> type[Witness]:
    for name in ("scores", "trained", "evaluated", "asked", "images", "gradients"):
        monkeypatch.setattr(Witness, name, [])
    return Witness


def equal(path: Path, state: dict[str, Tensor]) -> bool:
    saved = load_file(path / "model.safetensors")
    return saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in state)


def test_each_step_has_its_learning_rate_and_each_batch_its_number(
    tmp_path: Path, train_digits: Train, witness: type[Witness]
) -> None:
    """Stepped twice, the schedule would be over at half the run; a batch would be augmented by another's numbers."""
    flags = ("--epochs", "2", "--warmup_epochs", "1", "--gradient_accumulation_steps", "2")
    train_digits(tmp_path, *flags, task=witness)
    _, recipe, _ = parse_command_line(RECIPES, "digits", ["--batch_size", "16", *flags])
    factor = _schedule(recipe, steps_per_epoch=4, total=8)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    rates = [row["lr"] for row in rows if "lr" in row]
    assert rates == pytest.approx([recipe.scaled(recipe.lr) * factor(step) for step in range(1, 9)])
    assert witness.asked == [(epoch, number) for epoch in (0, 1) for number in range(8)]


def test_epochs_have_orders_of_their_own_and_steps_gradients(
    tmp_path: Path, train_digits: Train, witness: type[Witness]
) -> None:
    """Batches would be the same in all epochs; gradients of all steps would add up, not only those of one."""
    train_digits(tmp_path, "--epochs", "2", "--gradient_accumulation_steps", "2", task=witness)
    first, second = ([index for batch in witness.images[i : i + 8] for index in batch] for i in (0, 8))
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second
    assert witness.gradients == [False, True] * 8


def test_labels_are_smoothed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes ask for it; mixed targets are smoothed already."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)
    recipe = Recipe(model="swin_micro", data="digits", label_smoothing=0.3)
    job = Classification(recipe, RunOptions(limit=32), Accelerator())
    logits, labels, images = torch.randn(4, 10), torch.arange(4), torch.zeros(4, 3, 32, 32)
    mixed = torch.rand(4, 10).softmax(1)
    model: Any = lambda images: logits  # noqa: E731
    torch.testing.assert_close(job.loss(model, images, labels), F.cross_entropy(logits, labels, label_smoothing=0.3))
    torch.testing.assert_close(job.loss(model, images, mixed), F.cross_entropy(logits, mixed))
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("layer_decay", [1.0, 0.9])
def test_norms_and_biases_do_not_decay(layer_decay: float) -> None:
    """They would be pulled to zero, where a norm has no gain."""
    model: Any = create_model("swin_micro")
    groups = _parameters(model, Recipe(model="swin_micro", weight_decay=0.3, layer_decay=layer_decay))
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.3 if parameter.ndim > 1 and "bias_table" not in name else 0.0), name


def test_gradients_are_clipped(tmp_path: Path, train_digits: Train, witness: type[Witness]) -> None:
    """One odd batch would undo a run. A norm far below AdamW's epsilon leaves the weights where they are."""
    train_digits(tmp_path, "--clip_grad", "1e-16", "--weight_decay", "0", "--steps", "3", task=witness)
    start, *later = witness.trained
    assert all((weight - start).abs().max() < 1e-6 for weight in later)
    witness.trained.clear()
    train_digits(tmp_path, "--clip_grad", "0", "--weight_decay", "0", "--steps", "3", task=witness)
    assert (witness.trained[-1] - start).abs().max() > 1e-4


def test_best_is_the_best_and_last_the_last(tmp_path: Path, train_digits: Train, witness: type[Witness]) -> None:
    """``best/`` would hold the worst model, or the last; resumed, a worse one would take its place."""
    witness.scores.extend([10.0, 30.0, 20.0])
    flags = ("--epochs", "3", "--eval_every", "1", "--checkpointing_steps", "1", "--checkpoints_total_limit", "99")
    train_digits(tmp_path, *flags, task=witness)
    first, second, third = witness.evaluated
    assert equal(tmp_path / "best", second)
    assert equal(tmp_path, third)
    assert not torch.equal(first[WEIGHT], second[WEIGHT])
    witness.scores[:], witness.evaluated[:] = [29.0], []
    train_digits(tmp_path, *flags, "--resume_from_checkpoint", str(tmp_path / "checkpoints/step_00000010"),
                 task=witness)  # fmt: skip
    assert equal(tmp_path / "best", second)
    assert equal(tmp_path, witness.evaluated[0])


def test_a_best_model_that_was_not_saved_any_more_is_the_best_again(
    tmp_path: Path, train_digits: Train, witness: type[Witness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between its evaluation and its file, it would be in the log, and ``best/`` would hold an earlier one."""
    flags = ("--epochs", "3", "--eval_every", "1", "--checkpointing_steps", "1")
    witness.scores.extend([10.0, 30.0, 30.0, 20.0])
    save = witness.save

    def killed(self: Witness, *args: Any) -> None:
        if len(self.evaluated) == 2:
            raise KeyboardInterrupt
        save(self, *args)

    monkeypatch.setattr(witness, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        train_digits(tmp_path, *flags, task=witness)
    monkeypatch.setattr(witness, "save", save)
    train_digits(tmp_path, *flags, "--resume_from_checkpoint", "latest", task=witness)
    assert equal(tmp_path / "best", witness.evaluated[2])
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(row["step"], row["top1"]) for row in rows if "top1" in row] == [(4, 10.0), (8, 30.0), (12, 20.0)]


def test_results_are_those_of_the_saved_weights(
    tmp_path: Path, train_digits: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved is measured once more: numbers that belong to other weights are not written."""
    save = Classification.save

    def save_other_weights(self: Classification, directory: Path, state: dict[str, Tensor]) -> None:
        save(self, directory, {**state, WEIGHT: -state[WEIGHT]})

    monkeypatch.setattr(Classification, "save", save_other_weights)
    with pytest.raises(RuntimeError, match=r"saved in .* has top1 \d.*, not \d.* as measured before"):
        train_digits(tmp_path, "--steps", "12", "--lr", "0.02")
    assert not (tmp_path / "results.json").exists()


def test_the_average_is_what_is_evaluated_and_saved(
    tmp_path: Path, train_digits: Train, witness: type[Witness]
) -> None:
    """The numbers would be those of the average, the published weights the last ones."""
    flags = ("--steps", "4", "--lr", "0.02")
    train_digits(tmp_path / "last", *flags, task=witness)
    weights = [*witness.trained, witness.evaluated[0][WEIGHT]]  # before each step, and after the last
    witness.evaluated.clear()
    train_digits(tmp_path / "average", *flags, "--ema_decay", "0.5", task=witness)
    average = weights[1]  # none of the weights before training, and few of the first steps
    for step, weight in enumerate(weights[2:], 2):
        decay = min(0.5, 1 - step**-0.75)
        average = decay * average + (1 - decay) * weight
    saved = load_file(tmp_path / "average" / "model.safetensors")
    torch.testing.assert_close(saved[WEIGHT], average)
    assert (saved[WEIGHT] - weights[-1]).abs().max() > 1e-4
    for directory in (tmp_path / "average", tmp_path / "average" / "best"):
        assert equal(directory, witness.evaluated[0])


@pytest.mark.parametrize(
    "augmentation",
    [
        {"circular": True},
        {"shift": 4},
        {"flip": True, "rotate": 15.0},
        {"erase": 1.0},
        {"mixup": 0.8},
        {"rand_augment": "rand-m9-inc1"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_augmentation_changes_with_the_epoch(augmentation: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model would see the same few pictures in all 300 epochs."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)
    recipe = Recipe(model="swin_micro", data="digits", **augmentation)
    job = Classification(recipe, RunOptions(limit=32), Accelerator())

    def pictures(epoch: int, number: int = 0) -> Tensor:
        items = [job.train_split[epoch, i] for i in range(16)]
        batch = torch.utils.data.default_collate(items)
        return job.inputs(batch, epoch, number)[0]

    assert torch.equal(pictures(3), pictures(3))
    assert not torch.equal(pictures(3), pictures(4))
    if recipe.mixup:
        assert not torch.equal(pictures(3, 0), pictures(3, 1))
    AcceleratorState._reset_state(True)


def test_a_compiled_run_leaves_a_loadable_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                train_digits: Callable[..., dict[str, Any]]) -> None:  # fmt: skip
    """A compiler wraps the model: its name must not get into those of the weights."""
    from accelerate.utils import TorchDynamoPlugin

    modes = []
    monkeypatch.setattr(engine, "TorchDynamoPlugin",
                        lambda backend, mode: modes.append(mode) or TorchDynamoPlugin(backend="eager"))  # fmt: skip
    results = train_digits(tmp_path, "--compile", "--compile_mode", "reduce-overhead")
    assert modes == ["reduce-overhead"]
    again = evaluate(from_pretrained(tmp_path).eval(), load_data("digits")[1].head(64),
                     Preprocess.load(tmp_path / PREPROCESSOR_NAME), ["top1"], progress=False)  # fmt: skip
    assert again["top1"] == results["top1"]


def test_a_warm_up_that_outlasts_the_training_is_told(tmp_path: Path, train_digits: Train,
                                                      capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Recipes count warm-up in epochs, and ``--epochs`` leaves them: a peak that is never reached looks like a slow
    model."""
    for epochs, told in (("2", True), ("1", False)):
        train_digits(tmp_path / epochs, "--warmup_epochs", epochs, "--steps", "5")
        assert ("warm-up takes 8 steps, the training 5; shorten it with --warmup_epochs" in capsys.readouterr().out
                ) is told  # fmt: skip


def test_without_its_metric_no_model_is_the_best(tmp_path: Path, train_digits: Train) -> None:
    """Else best/ holds the first model that was evaluated, the least trained of all."""
    train_digits(tmp_path, "--metrics", "c_cons", "--epochs", "2", "--eval_every", "1")
    assert (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / "best").exists()


def test_seconds_of_training_add_up(tmp_path: Path, train_digits: Train) -> None:
    """Else ``train_seconds`` of a run that was resumed are those of its last part: it looks fast."""
    train_digits(tmp_path, "--epochs", "2", "--checkpointing_steps", "4")
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    rows = [{**row, "seconds": 1000.0} if row["step"] == 4 else row for row in rows]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    resumed = train_digits(tmp_path, "--epochs", "2", "--resume_from_checkpoint",
                           str(tmp_path / "checkpoints" / "step_00000004"))  # fmt: skip
    assert 1000 < resumed["train_seconds"] < 1100


def test_a_learning_rate_that_is_no_peak_is_told(tmp_path: Path, train_digits: Train,
                                                 capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """``--lr`` alone, lowered to fine-tune, leaves the recipe's last and first rate: the rate would rise to the end."""
    for lr, told in (("5e-6", ["--min_lr 1e-05 is above --lr 5e-06"]), ("2e-5", [])):
        train_digits(tmp_path / lr, "--lr", lr, "--steps", "1")
        lines = capsys.readouterr().out.splitlines()
        assert [line.partition(",")[0] for line in lines if "is above" in line] == told


def test_classes_without_training_images_are_told(tmp_path: Path, train_digits: Train) -> None:
    """Else ``--limit`` on a folder, whose first images are all of one class, gives a top-1 that says nothing."""
    with pytest.warns(UserWarning, match="no training image of 5 of 10 classes: "):
        train_digits(tmp_path, "--limit", "8", "--batch_size", "8", "--steps", "1")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="no training image")
        train_digits(tmp_path, "--steps", "1")


def test_a_finished_run_is_set_aside(tmp_path: Path, train_digits: Train) -> None:
    """Else the next folder's training would replace it: all have their digits in one directory."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.getsignal(signal.SIGTERM)
    for seed in ("0", "1", "2"):
        train_digits(tmp_path, "--steps", "1", "--seed", seed)
    assert signal.signal(signal.SIGINT, before[0]) is signal.default_int_handler  # Ctrl-C interrupts again
    assert signal.getsignal(signal.SIGTERM) is before[1]  # and what follows, such as a battery, can be stopped
    settings = [json.loads((tmp_path / f"results.json{end}").read_text())["seed"] for end in (".old-1", ".old-2", "")]
    assert settings == [0, 1, 2]
    assert {path.name for path in tmp_path.glob("model.safetensors*")} == {
        f"model.safetensors{end}" for end in ("", ".old-1", ".old-2")
    }


def test_a_signal_ends_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                ) -> None:  # fmt: skip
    """Else Ctrl-C, or a cluster at the end of a job, ends one training and the next begins; and a study notes the run
    that was cut as done, and never repeats it."""
    begun = []
    monkeypatch.setattr(reproduce, "train", lambda name, *_: begun.append(name) or {"stopped_at": 3})
    arguments = ["--scale", "smoke", "--rows", "cifar10", "cifar10_default", "--output_dir", str(tmp_path)]
    assert reproduce.main(RECIPES, "", arguments) == []
    assert begun == ["cifar10"]
    assert "stopped in row cifar10: the same command goes on from there" in capsys.readouterr().out
    study = runpy.run_path(str(ROOT / "scripts" / "score_study.py"))
    options: list[RunOptions] = []
    study["run"].__globals__["train"] = lambda name, recipe, option, task: options.append(option) or {"stopped_at": 3}
    args = SimpleNamespace(data="digits", epochs=1, output_dir=tmp_path, compile=False, limit=4, mixed_precision="no")
    with pytest.raises(KeyboardInterrupt):
        study["run"]("swin", "default", 0, args)
    assert not list(tmp_path.glob("*.json"))
    assert options[0].overwrite_output_dir  # the checkpoint that it wrote is not in the way
    (path := tmp_path / "run.json").write_text(json.dumps({"variant": "default", "epochs": 2}))
    assert study["finished"](path, {"epochs": 2, "limit": None})
    for other in ({"epochs": 12}, {"epochs": 2, "limit": 64}):  # nor averaged with runs of another length
        assert not study["finished"](path, other)
