"""Flags of training that would be read and have no effect: they have one, or are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from common.training.log import check_trackers
from common.training.recipe import RunOptions, parse_command_line
from common.training.task import Classification
from segmentation.recipes import RECIPES as SCENES
from segmentation.task import Segmentation
from swin.recipes import RECIPES


def test_epochs_count_where_a_recipe_counts_steps() -> None:
    """Its 2,000 steps were taken, whatever ``--epochs`` said, and its 200 of warm-up."""
    _, recipe, _ = parse_command_line(SCENES, "digits", ["--recipe", "camvid", "--epochs", "5"])
    assert (recipe.epochs, recipe.steps, recipe.warmup_steps) == (5, 0, SCENES["camvid"].warmup_steps)
    _, recipe, _ = parse_command_line(SCENES, "digits", ["--recipe", "camvid", "--warmup_epochs", "0"])
    assert (recipe.steps, recipe.warmup_epochs, recipe.warmup_steps) == (SCENES["camvid"].steps, 0, 0)
    both = ["--epochs", "5", "--steps", "7", "--warmup_epochs", "1", "--warmup_steps", "3"]
    _, recipe, _ = parse_command_line(RECIPES, "digits", both)
    assert (recipe.steps, recipe.warmup_steps) == (7, 3)  # as the help says


def test_what_a_recipe_sets_can_be_left_out_again() -> None:
    """A run without what its recipe names by now could not be repeated by the command of its card."""
    given = ["--drop_path", "none", "--resize", "none"]
    for name in ("cifar10", "cifar10_mini"):
        _, recipe, _ = parse_command_line(RECIPES, "digits", ["--recipe", name, *given])
        assert RECIPES[name].drop_path is not None
        assert (recipe.drop_path, recipe.resize) == (None, None)


@pytest.mark.parametrize(("flags", "message"), [
    (["--compile_mode", "max-autotune"], "nothing is compiled without --compile"),
    (["--compile_mode", "max-autotune", "--no-compile"], "nothing is compiled without --compile"),
    (["--scale", "1.5"], "1.5 is not at least 0 and below 1"),  # images would be mirrored, or divided by zero
])  # fmt: skip
def test_flags_without_sense_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_command_line(RECIPES, "digits", flags)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("task", "recipe", "argument"), [
    (Classification, RECIPES["cifar10_mini"], {"drop_path_rate": 0.3}),
    (Segmentation, SCENES["camvid"], {"drop_path_rate": 0.3}),
    (Segmentation, SCENES["camvid"], {"img_size": 224}),
])  # fmt: skip
def test_an_argument_of_the_model_that_the_recipe_sets_itself_is_refused(task: Any, recipe: Any,
                                                                         argument: dict[str, Any]) -> None:  # fmt: skip
    """The recipe's own took its place, without a word."""
    recipe = parse_command_line({"own": recipe}, "own", ["--drop_path", "0.1"])[1]
    job = task.__new__(task)
    job.recipe, job.options = recipe.__class__(**{**vars(recipe), "model_args": argument}), RunOptions()
    sizes = {"img_size": recipe.size} if task is Segmentation else {}
    with pytest.raises(ValueError, match=f"--model_args {next(iter(argument))}=.* would have no effect beside"):
        job.create(10, **sizes)


def test_a_tracker_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate leaves it out without a word, and the curves of the run are nowhere."""
    accelerator = Accelerator(log_with=["tensorboard"], project_dir=str(tmp_path))
    assert check_trackers(accelerator, "tensorboard") is accelerator
    for known in ("all", "none"):
        check_trackers(accelerator, known)
    with pytest.raises(ValueError, match="--report_to wandb, aim: not installed here"):
        check_trackers(accelerator, "wandb,tensorboard,aim")


@pytest.mark.parametrize(("size", "parts"), [(15, 1), (6, 2)])
def test_batches_that_cannot_be_mixed_are_refused_at_once(size: int, parts: int, tmp_path: Path,
                                                          train_digits: Callable[..., Any]) -> None:  # fmt: skip
    """At the first step an earlier run was set aside already."""
    train_digits(tmp_path, "--steps", "1")
    before = sorted(path.name for path in tmp_path.iterdir())
    flags = ("--batch_size", str(size), "--gradient_accumulation_steps", str(parts))
    with pytest.raises(ValueError, match=f"pair the images of a batch, but {size // parts} per process and step is"):
        train_digits(tmp_path, "--overwrite_output_dir", "--mixup", "0.8", *flags)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
