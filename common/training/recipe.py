"""Recipes: what a training run is, as frozen data, and the command line made from it."""

import argparse
import dataclasses
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ..data.preprocess import IMAGENET_MEAN, IMAGENET_STD
from ..models.registry import MODEL_ARGUMENTS, parse_arguments

__all__ = ["BaseRecipe", "Recipe", "RunOptions", "parse_command_line"]


@dataclass(frozen=True, kw_only=True)
class BaseRecipe:
    """Model, data and schedule of a run, whatever its task. Every field can be overridden on the command line."""

    model: str  # name of the model, see common.list_models()
    data: str = "digits"  # 'digits', a folder, or a Hub id
    epochs: int = 100  # passes over the training images
    steps: int = 0  # optimizer steps; 0: as many as the epochs have
    batch_size: int = 96  # images per optimizer step, over all processes and accumulation steps
    # where the weights start
    pretrained: str | None = None  # directory or Hub id; its last layer starts anew if the classes differ
    freeze: int = 0  # freeze the stem and the first n stages; -1: all but the head
    # optimizer: AdamW
    lr: float = 5e-4  # peak learning rate
    lr_batch: int = 512  # lr, warmup_lr and min_lr are for this batch size and scale with batch_size; 0: they do not
    schedule: Literal["cosine", "poly"] = "cosine"  # how the learning rate falls after warm-up
    warmup_epochs: float = 20.0  # epochs over which the learning rate rises
    warmup_steps: int = 0  # steps of warm-up; if not 0, it replaces warmup_epochs
    warmup_lr: float = 5e-7  # learning rate at the start
    min_lr: float = 5e-6  # learning rate at the end
    weight_decay: float = 0.05  # of matrices only: not of biases, norms and what the model excludes
    betas: tuple[float, float] = (0.9, 0.999)  # decay rates of AdamW's averages of gradients and squared gradients
    clip_grad: float = 5.0  # norm that gradients are clipped to; 0: no clipping
    layer_decay: float = 1.0  # each layer's learning rate relative to the one after it
    # regularisation
    drop_path: float | None = None  # rate of stochastic depth; none: the model's own
    ema_decay: float = 0.0  # decay of an exponential moving average of the weights, lower at first; 0: no average
    # images
    mean: tuple[float, float, float] = IMAGENET_MEAN  # mean of red, green and blue, to normalise images
    std: tuple[float, float, float] = IMAGENET_STD  # standard deviation of red, green and blue, to normalise images
    flip: bool = False  # random horizontal flips
    # evaluation
    metrics: tuple[str, ...] = ()  # what is measured, see evaluate.py --help
    seed: int = 0  # of weights, order and augmentation
    model_args: Mapping[str, Any] = field(default_factory=dict)
    target: Mapping[str, float] = field(default_factory=dict)  # what the paper reports for this row

    def settings(self) -> dict[str, Any]:
        """What the run depends on: all but the target."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "target"}

    def scaled(self, value: float) -> float:
        """A learning rate stated for ``lr_batch``, at this recipe's batch size."""
        return value * self.batch_size / self.lr_batch if self.lr_batch else value


@dataclass(frozen=True, kw_only=True)
class Recipe(BaseRecipe):
    """One row of a classification table."""

    label_smoothing: float = 0.0  # share of each label that is spread over all classes
    mixup: float = 0.0  # alpha of mixup; if cutmix is on, too, each batch gets one of the two
    cutmix: float = 0.0  # alpha of cutmix
    mixup_prob: float = 1.0  # probability that a batch is mixed at all
    resize: int | None = None  # side before the centre crop; none: no crop
    rotate: float = 0.0  # random rotation by up to this many degrees
    scale: float = 0.0  # random scaling by up to this share
    shift: int = 0  # random standard shifts by up to this many pixels of the model's input, filled with the mean colour
    circular: bool = False  # random circular shifts as augmentation (the paper's "DA" rows)
    rand_augment: str = ""  # RandAugment as timm writes it, such as rand-m9-mstd0.5-inc1
    erase: float = 0.0  # probability of random erasing
    crop: bool = False  # measure S-Cons under a centre crop (ImageNet), not with zeros
    metrics: tuple[str, ...] = ("top1", "c_cons", "s_cons")  # what is measured, see evaluate.py --help


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run a recipe here: what does not change the result in exact arithmetic."""

    output_dir: str = "outputs"  # where model, log, results and checkpoints go
    mixed_precision: str | None = None  # no, fp16 or bf16; none: as `accelerate config` says
    gradient_accumulation_steps: int = 1  # parts that a batch is split into
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    compile: bool = False  # train with torch.compile
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"  # reduce-overhead: CUDA graphs
    channels_last: bool = False  # use the channels_last memory format
    cpu_threads: int = 1  # on a CPU; one thread gives the same bits on any number of cores; 0: torch's choice
    dataloader_num_workers: int = min(8, os.cpu_count() or 1)  # processes that decode large images
    streaming: bool = False  # stream the training images through `datasets` instead of loading them first
    skip_broken: bool = False  # leave unreadable images out, and count them
    expected_rows: tuple[int, int, int] | None = None  # training images, evaluation images, classes; else refused
    limit: int | None = None  # use only the first images of each split
    eval_every: int = 0  # epochs between evaluations; 0: about ten in all
    eval_batch_size: int = 128  # images at once in evaluation, per process
    checkpointing_steps: int = 0  # optimizer steps between checkpoints; 0: not by steps
    checkpointing_minutes: float = 10.0  # minutes between checkpoints; 0: not by time; also on SIGTERM and Ctrl-C
    checkpoints_total_limit: int = 2  # checkpoints to keep
    max_skipped: int = 20  # steps in a row that the gradient scaler of fp16 may skip
    resume_from_checkpoint: str | None = None  # a checkpoint directory, or "latest"
    overwrite_output_dir: bool = False  # start anew where another run was: its files are renamed, none is deleted
    report_to: str = "tensorboard"  # names of Accelerate's trackers: tensorboard, wandb, trackio, ... or none


LEAST: Mapping[str, float] = {
    **dict.fromkeys(("batch_size", "gradient_accumulation_steps", "eval_batch_size", "checkpoints_total_limit",
                     "limit", "resize", "size"), 1),
    **dict.fromkeys(("lr", "std", "layer_decay", "ratio_range", "max_class_share"), 1e-30),
    **dict.fromkeys(("epochs", "steps", "lr_batch", "warmup_epochs", "warmup_steps", "warmup_lr", "min_lr",
                     "weight_decay", "betas", "clip_grad", "drop_path", "ema_decay", "seed", "label_smoothing", "mixup",
                     "cutmix", "mixup_prob", "shift", "erase", "cpu_threads", "dataloader_num_workers", "eval_every",
                     "checkpointing_steps", "checkpointing_minutes", "max_skipped", "auxiliary", "multiple", "scale"),
                    0),
}  # fmt: skip
BELOW: Mapping[str, float] = {**dict.fromkeys(("betas", "drop_path", "ema_decay", "label_smoothing", "scale"), 1),
                              "seed": 2**32}  # fmt: skip
"""Bounds of flags: else a number that makes no sense fails far from here, or trains something else."""

R = TypeVar("R", bound=BaseRecipe)


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def optional(text: str) -> Any:
        return None if text == "none" else read(text)

    optional.__name__ = read.__name__  # which errors show
    return optional


def _parser_type(annotation: Any) -> dict[str, Any]:
    """argparse settings for a field's type."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (a for a in arguments if a is not type(None))
        settings = _parser_type(inner)
        return settings if "nargs" in settings else {"type": _or_none(settings["type"])}
    if origin is tuple:
        return {"type": arguments[0], "nargs": "+" if arguments[-1] is Ellipsis else len(arguments)}
    if origin is Literal:
        return {"choices": arguments}
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": annotation}


def _comments(cls: type) -> dict[str, str]:
    """The comment beside each field in the source, which is the help of its flag."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        found |= dict(re.findall(r"^    (\w+): [^#\n]*  # (.+)$", inspect.getsource(base), re.M))
    return found


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "none" if value is None else str(value) or "''"


def parse_command_line(recipes: Mapping[str, R], default: str, arguments: Sequence[str] | None = None,
                       description: str | None = None) -> tuple[str, R, RunOptions]:  # fmt: skip
    """The recipe that ``--recipe`` names, with overrides, and the run options. An unknown flag is an error.

    ``--adapt`` takes the adaptive version of the recipe's model: with ``--pretrained``, the paper's experiment of
    plugging the adaptive modules into a trained default model.
    """
    parser = argparse.ArgumentParser(description=description, usage="%(prog)s [--recipe NAME] [--FLAG VALUE ...]",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--recipe", default=default, choices=sorted(recipes), metavar="NAME",
                        help=f"the run to start from: {', '.join(recipes)}")  # fmt: skip
    parser.add_argument(
        "--adapt", action="store_true", help="make the model adaptive; --pretrained may be a default one"
    )
    parser.add_argument("--model_args", **MODEL_ARGUMENTS)
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.add_argument("--recipe", default=default)
    recipe_name = named.parse_known_args(arguments)[0].recipe
    stated = recipes.get(recipe_name, recipes[default])  # its values are the defaults that --help shows
    kind = type(recipes[default])
    run_options = RunOptions(output_dir=f"outputs/{recipe_name}")
    for cls, values, title in (
        (kind, stated, f"recipe overrides, with the values of {recipe_name}"),
        (RunOptions, run_options, "run options"),
    ):
        group = parser.add_argument_group(title)
        hints, comments = typing.get_type_hints(cls), _comments(cls)
        for f in dataclasses.fields(cls):
            if f.name not in ("model_args", "target"):
                words = f"{comments[f.name]} ({_shown(getattr(values, f.name))})".replace("%", "%%")
                settings = _parser_type(hints[f.name])
                group.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=words, **settings)
    chosen = vars(parser.parse_args(arguments))
    for key, value in chosen.items():
        least, below = LEAST.get(key), BELOW.get(key, math.inf)
        numbers = [number for number in (value if isinstance(value, list) else [value]) if number is not None]
        if least is not None and not all(least <= number < below for number in numbers):
            bound = f" and below {below}" if below < math.inf else ""
            parser.error(f"argument --{key}: {_shown(tuple(numbers))} is not at least {least:g}{bound}")
    for length, steps in (("epochs", "steps"), ("warmup_epochs", "warmup_steps")):
        if length in chosen:  # else the recipe's own steps would count, and the flag would not
            chosen.setdefault(steps, 0)
    if "compile_mode" in chosen and not chosen.get("compile"):
        parser.error("argument --compile_mode: nothing is compiled without --compile")
    name, adapt, model_args = chosen.pop("recipe"), chosen.pop("adapt"), parse_arguments(chosen.pop("model_args"))
    chosen = {key: tuple(value) if isinstance(value, list) else value for key, value in chosen.items()}
    run_names = {f.name for f in dataclasses.fields(RunOptions)}
    overrides = {key: value for key, value in chosen.items() if key not in run_names}
    recipe = dataclasses.replace(recipes[name], **overrides, model_args={**recipes[name].model_args, **model_args})
    if adapt:
        decoder, name_of_backbone = re.fullmatch(r"(upernet_)?(?:a_)?(\w+)", recipe.model).groups("")  # type: ignore
        recipe = dataclasses.replace(recipe, model=f"{decoder}a_{name_of_backbone}")
    options = {"output_dir": f"outputs/{name}", **{key: value for key, value in chosen.items() if key in run_names}}
    return name, recipe, RunOptions(**options)
