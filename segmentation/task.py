"""Segmentation as a task of the training loop: recipe, model, loss, measurements."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from common.evaluation.metrics import IGNORE_INDEX
from common.training.recipe import BaseRecipe, RunOptions
from common.training.task import Task, start_from, warn_of_misfit

from .data import load_scenes
from .evaluation import evaluate, parse_metric
from .model import UperNet
from .preprocess import ScenePreprocess
from .splits import PixelSplit, check_labels

__all__ = ["Segmentation", "SegmentationRecipe"]


@dataclass(frozen=True, kw_only=True)
class SegmentationRecipe(BaseRecipe):
    """One row of a segmentation table. Images: see ``ScenePreprocess``."""

    backbone: str | None = None  # where its weights start: directory or Hub id of a classifier
    auxiliary: float = 0.4  # weight of the auxiliary head's loss
    size: tuple[int, int] | None = None  # training crop; None: the model's own
    resize: tuple[int, int] | None = None  # long, short side; none: no resize in training; to --size in evaluation
    multiple: int = 0  # sides to evaluate at are rounded up to a multiple of this; 0: of the model's
    ratio_range: tuple[float, float] | None = None  # random factor of the size in training
    max_class_share: float = 1.0  # of a training crop that one class may fill
    photometric: bool = False  # random colours, as in MMSegmentation
    metrics: tuple[str, ...] = ("miou", "mascc", "massc")  # what is measured, see evaluate.py --help


class Segmentation(Task[SegmentationRecipe]):
    """Images to a label per pixel."""

    best = "miou"
    model: UperNet
    preprocess: ScenePreprocess
    train_split: PixelSplit

    def __init__(self, recipe: SegmentationRecipe, options: RunOptions, accelerator: Accelerator) -> None:
        super().__init__(recipe, options, accelerator)
        for name in recipe.metrics:
            parse_metric(name)  # now: else a misspelt one ends the run after its last step
        if recipe.max_class_share > 1:
            raise ValueError(f"--max_class_share {recipe.max_class_share:g} is not a share: give 0.75 for 75 %")
        if recipe.ratio_range is not None and recipe.ratio_range[0] > recipe.ratio_range[1]:
            raise ValueError(f"--ratio_range {recipe.ratio_range} runs downwards: give the lower end first")
        together = accelerator.num_processes * accelerator.gradient_accumulation_steps
        if recipe.batch_size < 2 * together and not self.batches_are_joined():
            raise ValueError(f"--batch_size {recipe.batch_size} in {together} parts leaves one scene in a part: batch "
                             "norm needs two in each part")  # fmt: skip
        train, test = self.load()
        check_labels(train, f"the training split of {recipe.data}", classes=2)
        check_labels(test, f"the evaluation split of {recipe.data}", classes=1)
        self.model = self.build(len(train.classes))
        warn_of_misfit(recipe, recipe.resize or self.model.img_size, train, accelerator)
        self.model.name_classes(train.classes)
        keys = ("resize", "mean", "std", "ratio_range", "max_class_share", "flip", "photometric")
        multiple = (recipe.multiple, recipe.multiple) if recipe.multiple else self.model.multiple
        if recipe.multiple or recipe.resize:  # else all scenes have the model's own size
            self.model.check_size(multiple)
        self.preprocess = ScenePreprocess(size=self.model.img_size, multiple=multiple,
                                          **{key: getattr(recipe, key) for key in keys})  # fmt: skip
        self.train_split = train.prepared(self.preprocess, seed=recipe.seed).to(accelerator.device)
        self.test_split = test.to(accelerator.device)

    def read(self) -> tuple[PixelSplit, PixelSplit]:
        if self.options.streaming or self.options.skip_broken:
            raise ValueError("scenes can be neither streamed nor skipped: leave out --streaming and --skip_broken")
        return load_scenes(self.recipe.data)

    def build(self, classes: int) -> UperNet:
        recipe = self.recipe
        model = self.create(classes, **({} if recipe.size is None else {"img_size": recipe.size}))
        if not isinstance(model, UperNet):
            folder = recipe.model.removeprefix("a_").split("_")[0]
            raise TypeError(f"{recipe.model} is not a segmenter: train it with {folder}/train.py")
        if recipe.backbone:
            try:
                self.accelerator.print(model.load_backbone(recipe.backbone))
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{error}: --backbone takes the directory or Hub id of a classifier; "
                                        '--backbone "" starts from scratch') from None  # fmt: skip
        if recipe.pretrained:
            self.accelerator.print(start_from(model, recipe.pretrained))
        model.backbone.freeze(recipe.freeze)
        model.set_grad_checkpointing(self.options.gradient_checkpointing)
        if self.batches_are_joined():
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # in place: a few crops per process are too few
        return model

    def batches_are_joined(self) -> bool:
        """Whether batch norm sees the scenes of all processes."""
        return self.accelerator.num_processes > 1 and self.accelerator.device.type == "cuda"

    def inputs(self, batch: Any, epoch: int, number: int) -> tuple[Tensor, Tensor]:
        images, labels, index = self.train_split.fetch(batch)
        seeds = (self.recipe.seed, epoch)
        return self.preprocess.train(images, labels, index, *seeds, cropped=self.train_split.cropped)

    def loss(self, model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of both heads. The mean is over all pixels, ignored ones as zeros (as in MMSegmentation): the
        parts of a batch add up to the whole."""
        if not self.recipe.auxiliary:
            return _cross_entropy(model(images), targets)
        logits, auxiliary = model(images, auxiliary=True)
        return _cross_entropy(logits, targets) + self.recipe.auxiliary * _cross_entropy(auxiliary, targets)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        batch_size = min(self.options.eval_batch_size, self.recipe.batch_size)
        return evaluate(model, self.test_split, self.preprocess, self.recipe.metrics, accelerator=self.accelerator,
                        batch_size=batch_size, seed=self.recipe.seed,
                        workers=self.options.dataloader_num_workers)  # fmt: skip


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none").mean()
