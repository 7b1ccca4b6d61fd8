"""What a training run is about: model, data, loss, measurements. The loop in ``engine`` needs nothing else."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor, nn

from ..data.preprocess import IMAGENET_MEAN, Mixing, Normalisation, Preprocess
from ..data.rand_augment import RandAugment
from ..data.sources import load_data
from ..data.splits import Split, check_rows, shown
from ..data.streaming import load_stream
from ..evaluation.evaluate import evaluate, parse_metric
from ..evaluation.metrics import room_to_shift
from ..models.classifier import Classifier
from ..models.hub import CONFIG_NAME, WEIGHTS_NAME, HubModel, read_config, resolve_file
from ..models.registry import create_model
from ..models.weights import compare_arguments, load_weights
from .checkpoints import on_main
from .recipe import BaseRecipe, Recipe, RunOptions

__all__ = ["Classification", "Task", "start_from"]

R = TypeVar("R", bound=BaseRecipe)
SLACK = 0.5  # percent, or two images of few: what rounding may change where the same sums run in another order


class Task(ABC, Generic[R]):
    """A model and its data. ``best`` is the metric that the best model is chosen by."""

    best: ClassVar[str]
    model: HubModel
    preprocess: Normalisation
    train_split: Split

    def __init__(self, recipe: R, options: RunOptions, accelerator: Accelerator) -> None:
        self.recipe, self.options, self.accelerator = recipe, options, accelerator

    @abstractmethod
    def read(self) -> tuple[Any, Any]:
        """The recipe's data: the split to train on, the split to evaluate on."""

    def load(self) -> tuple[Any, Any]:
        """What the options ask for of the data."""
        (train, test), options = self.read(), self.options
        if options.expected_rows:
            check_rows(self.recipe.data, (len(train), len(test), len(train.classes)), options.expected_rows)
        return train.head(options.limit), test.head(options.limit)

    def order(self) -> str:
        """What the order of images depends on, beside the recipe."""
        ways = f"{self.accelerator.num_processes} x {self.options.dataloader_num_workers} workers"
        return f"--streaming by {ways}" if self.options.streaming else "no --streaming"

    def create(self, classes: int, **arguments: Any) -> HubModel:
        """The recipe's model, with fresh weights."""
        recipe = self.recipe
        if recipe.drop_path is not None:
            arguments["drop_path_rate"] = recipe.drop_path
        for name in sorted(arguments.keys() & recipe.model_args.keys()):
            flag = {"drop_path_rate": "drop_path", "img_size": "size"}[name]
            raise ValueError(f"--model_args {name}={recipe.model_args[name]} would have no effect beside the recipe's "
                             f"{flag} of {getattr(recipe, flag)}: change that one, by --{flag}")  # fmt: skip
        return create_model(recipe.model, **{"num_classes": classes, **recipe.model_args, **arguments})

    @abstractmethod
    def inputs(self, batch: Any, epoch: int, number: int) -> tuple[Tensor, Tensor]:
        """Batch ``number`` of an epoch, as the loader gave it -> normalised images and targets."""

    def index(self, batch: Any) -> Tensor:
        """Which images of the split a batch of the loader holds."""
        return batch if isinstance(batch, Tensor) else batch[-1]

    @abstractmethod
    def loss(self, model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        """The training loss of a batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        """The recipe's metrics, over all processes."""

    def save(self, directory: Path, state: dict[str, Tensor]) -> None:
        """Write the model with these weights, and its preprocessing."""
        self.preprocess.save(self.model.save_pretrained(directory, state))

    def confirm(self, directory: Path, results: dict[str, Any]) -> None:
        """Measure the saved model, as others will load it; raise a RuntimeError where ``results`` are not its own."""
        model = on_main(self.accelerator, lambda: type(self.model).from_pretrained(directory))
        layout = torch.channels_last if self.options.channels_last else torch.contiguous_format
        found = self.evaluate(model.to(self.accelerator.device).to(memory_format=layout))
        slack = max(SLACK, 200 / results["images"])
        pairs = {name: (found[name], results[name]) for name in self.recipe.metrics}
        wrong = [f"{name} {saved:.2f}, not {measured:.2f}" for name, (saved, measured) in pairs.items()
                 if not abs(saved - measured) <= slack]  # fmt: skip
        if wrong:
            raise RuntimeError(f"the model saved in {directory} has {', '.join(wrong)} as measured before: "
                               "no results are written; report this, and keep the directory")  # fmt: skip


def warn_of_misfit(recipe: BaseRecipe, size: tuple[int, int], split: Split, accelerator: Accelerator) -> None:
    if accelerator.is_main_process and (reason := misfit(recipe, size, split)):
        warnings.warn(f"images do not fit this recipe: {reason}", stacklevel=3)


def misfit(recipe: BaseRecipe, size: tuple[int, int], split: Split) -> str:
    """Why a recipe does not fit the images of a split, and what would; empty if it does."""
    images, advice = list(split.peek(16)), "For photographs: --recipe photographs with its own model"
    if not images:
        return ""
    resize = getattr(recipe, "resize", None)
    if isinstance(resize, int) and resize >= 2 * max(size):  # scenes have a range of sizes
        return (f"they are resized to {resize}x{resize}, and the model sees {size[0]}x{size[1]} at the centre. For the "
                f"whole image: --resize {max(size)}{' --no-crop' * getattr(recipe, 'crop', False)}")  # fmt: skip
    side = sorted(min(image.shape[:2]) for image in images)[len(images) // 2]
    if side >= 3 * max(size):
        return f"they are {side} px or larger, but the model sees {size[0]}x{size[1]}. {advice}"
    if isinstance(resize, int) and resize > 4 * side:
        return f"they have about {side} px, enlarged to {resize}x{resize}. For images so small: --recipe digits"
    if recipe.mean != IMAGENET_MEAN:  # a recipe with statistics of its own
        mean = sum(image.mean((0, 1)) / 255 for image in images) / len(images)
        away = abs(mean - recipe.mean) / recipe.std
        if max(away) > 1:
            if any(recipe.mean) and all((image == image[..., :1]).all() for image in images):
                advice = "For grey digits: --recipe digits"
            return f"their mean colour is {mean.round(2).tolist()}, the recipe's {list(recipe.mean)}. {advice}"
    return ""


def warn_of_absent(split: Split, accelerator: Accelerator) -> None:
    present = set(getattr(split, "labels", torch.zeros(0)).tolist())  # a stream does not know them
    absent = [name for c, name in enumerate(split.classes) if present and c not in present]
    if accelerator.is_main_process and absent:
        warnings.warn(f"no training image of {len(absent)} of {len(split.classes)} classes: {shown(absent)}. --limit "
                      "takes the first images, and folders are read class by class", stacklevel=3)  # fmt: skip


class Classification(Task[Recipe]):
    """Images to one label each."""

    best = "top1"
    model: Classifier
    preprocess: Preprocess

    def __init__(self, recipe: Recipe, options: RunOptions, accelerator: Accelerator) -> None:
        super().__init__(recipe, options, accelerator)
        for name in recipe.metrics:
            parse_metric(name)  # now: else a misspelt one ends the run after its last step
        train, test = self.load()
        warn_of_absent(train, accelerator)
        self.model = self.build(len(train.classes))
        warn_of_misfit(recipe, self.model.img_size, train, accelerator)
        keys = ("resize", "mean", "std", "flip", "rotate", "scale", "shift", "circular", "erase")
        augment = RandAugment.read(recipe.rand_augment, recipe.mean, options.compile) if recipe.rand_augment else None
        self.preprocess = Preprocess(size=self.model.img_size, rand_augment=augment,
                                     **{key: getattr(recipe, key) for key in keys})  # fmt: skip
        for kind, reach, *_ in map(parse_metric, recipe.metrics if recipe.crop else ()):
            if kind == "s_cons":  # now: else a run without room ends at its first evaluation
                room_to_shift(self.preprocess.canvas_size, reach, self.preprocess.size)
        self.model.set_input(**{key: getattr(self.preprocess, key) for key in self.preprocess.STORED})
        self.model.name_classes(train.classes)
        self.train_split = train.prepared(self.preprocess, seed=recipe.seed).to(accelerator.device)
        self.test_split = test.to(accelerator.device)
        self.mixing = Mixing(mixup=recipe.mixup, cutmix=recipe.cutmix, probability=recipe.mixup_prob,
                             label_smoothing=recipe.label_smoothing,
                             num_classes=len(train.classes)) if recipe.mixup or recipe.cutmix else None  # fmt: skip
        part, rest = divmod(recipe.batch_size, accelerator.num_processes * accelerator.gradient_accumulation_steps)
        if self.mixing is not None and not rest:  # now: else an earlier run is set aside for nothing
            self.mixing.check(part)

    def read(self) -> tuple[Split, Split]:
        load: Callable[..., tuple[Split, Split]] = load_stream if self.options.streaming else load_data
        return load(self.recipe.data, self.options.skip_broken)

    def build(self, classes: int) -> Classifier:
        recipe, model = self.recipe, self.create(classes)
        if not isinstance(model, Classifier):
            raise TypeError(f"{recipe.model} is not a classifier: train it with segmentation/train.py")
        if recipe.pretrained:
            self.accelerator.print(start_from(model, recipe.pretrained))
        model.freeze(recipe.freeze)
        model.set_grad_checkpointing(self.options.gradient_checkpointing)
        return model

    def inputs(self, batch: Any, epoch: int, number: int) -> tuple[Tensor, Tensor]:
        images, labels, index = self.train_split.fetch(batch)
        images = self.preprocess.train(images, index, self.recipe.seed, epoch)
        if self.mixing is not None:
            return self.mixing(images, labels, self.recipe.seed, epoch, number, self.accelerator.process_index)
        return images, labels

    def loss(self, model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        smoothing = 0.0 if targets.is_floating_point() else self.recipe.label_smoothing  # mixed targets are smoothed
        return F.cross_entropy(model(images), targets, label_smoothing=smoothing)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        return evaluate(model, self.test_split, self.preprocess, self.recipe.metrics, accelerator=self.accelerator,
                        seed=self.recipe.seed, batch_size=self.options.eval_batch_size, crop=self.recipe.crop,
                        workers=self.options.dataloader_num_workers)  # fmt: skip


def start_from(model: HubModel, source: str) -> str:
    """Load the weights of a trained model, but the last layer if it is for other classes; returns what to say of it:
    also which arguments of that model this one does not have, since they may change what the weights compute."""
    fresh = load_weights(model, resolve_file(source, WEIGHTS_NAME), model.last_layer)
    said = f"weights of {source}"
    if fresh:
        said += f" but {', '.join(fresh)}: new for {model.config['num_classes']} classes"
    try:
        stored = read_config(resolve_file(source, CONFIG_NAME))
    except (FileNotFoundError, EntryNotFoundError):
        return said
    return said + compare_arguments(stored, model.config, "--model_args")
