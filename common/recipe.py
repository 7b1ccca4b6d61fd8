"""Recipes: what a training run is, as frozen data, and the command line made from it."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Recipe", "RunOptions", "parse_command_line"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One row of a table: model, data, schedule. Every field can be overridden on the command line."""

    model: str
    data: str = "digits"
    epochs: int = 100
    batch_size: int = 96  # images per optimizer step, over all processes and accumulation steps
    # optimizer: AdamW with cosine decay
    lr: float = 5e-4
    lr_batch: int = 512  # lr, warm-up and final lr are stated for this batch and scale linearly with batch_size
    warmup_epochs: float = 20.0
    warmup_lr: float = 5e-7
    min_lr: float = 5e-6
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    clip_grad: float = 5.0
    # regularisation
    drop_path: float | None = None  # None: the model's own
    label_smoothing: float = 0.0
    ema_decay: float = 0.0  # 0: no exponential moving average of the weights
    # images
    resize: int | None = None
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    flip: bool = False
    rotate: float = 0.0
    scale: float = 0.0
    circular: bool = False  # random circular shifts as augmentation (the paper's "DA" rows)
    # evaluation
    metrics: tuple[str, ...] = ("top1", "c_cons", "s_cons")
    seed: int = 0
    model_args: Mapping[str, Any] = field(default_factory=dict)
    target: Mapping[str, float] = field(default_factory=dict)  # what the paper reports for this row

    def settings(self) -> dict[str, Any]:
        """What the run depends on: all but the target."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "target"}

    def scaled(self, value: float) -> float:
        """A learning rate stated for ``lr_batch``, at this recipe's batch size."""
        return value * self.batch_size / self.lr_batch


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run a recipe here: what does not change the result in exact arithmetic."""

    output_dir: str = "outputs"
    mixed_precision: str | None = None  # no, fp16 or bf16; None: as `accelerate config` says
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    compile: bool = False
    cpu_threads: int = 1  # on a CPU: one thread gives the same bits whatever the cores; 0: as torch chooses
    eval_every: int = 0  # epochs between evaluations; 0: about ten in all
    eval_batch_size: int = 128
    limit: int | None = None  # use only the first images of each split
    checkpointing_steps: int = 0  # optimizer steps between checkpoints; 0: none but on SIGTERM
    checkpoints_total_limit: int = 2
    resume_from_checkpoint: str | None = None  # a checkpoint directory, or "latest"
    report_to: str | None = None  # trackers of Accelerate by name: tensorboard, wandb, trackio, ...


def _parser_type(annotation: Any) -> dict[str, Any]:
    """argparse settings for a field's type."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (a for a in arguments if a is not type(None))
        return _parser_type(inner)
    if origin is tuple:
        return {"type": arguments[0], "nargs": "+" if arguments[-1] is Ellipsis else len(arguments)}
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": annotation}


def parse_command_line(recipes: Mapping[str, Recipe], default: str, arguments: Sequence[str] | None = None,
                       description: str | None = None) -> tuple[str, Recipe, RunOptions]:  # fmt: skip
    """The recipe that ``--recipe`` names, with overrides, and the run options. An unknown flag is an error."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--recipe", default=default, choices=sorted(recipes), help="the run to start from")
    for cls, title in ((Recipe, "recipe overrides"), (RunOptions, "run options")):
        group = parser.add_argument_group(title)
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            if f.name not in ("model_args", "target"):
                group.add_argument(f"--{f.name}", default=argparse.SUPPRESS, **_parser_type(hints[f.name]))
    chosen = vars(parser.parse_args(arguments))
    name = chosen.pop("recipe")
    chosen = {key: tuple(value) if isinstance(value, list) else value for key, value in chosen.items()}
    run_names = {f.name for f in dataclasses.fields(RunOptions)}
    overrides = {key: value for key, value in chosen.items() if key not in run_names}
    options = {"output_dir": f"outputs/{name}", **{key: value for key, value in chosen.items() if key in run_names}}
    return name, dataclasses.replace(recipes[name], **overrides), RunOptions(**options)
