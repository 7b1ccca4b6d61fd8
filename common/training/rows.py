"""What recipes of the four architectures share. A folder's ``recipes.py`` adds model, schedule and target to it.

Mixup of 0.8 and cutmix of 1.0 are the originals'. On CIFAR, and on ImageNet under circular shifts, they are our choice:
the paper's table of that preprocessing (tab. supp_class_aug_circular) names a flip and nothing else. What they are
worth was not measured.
"""

from collections.abc import Mapping
from typing import Any

from .recipe import BaseRecipe, Recipe

__all__ = ["CIFAR10", "DIGITS", "IMAGENET", "MINI", "OURS", "PAPER", "PHOTOGRAPHS", "STANDARD", "recipes_in"]

PAPER: Mapping[str, Any] = {"score": "energy", "sketch": 0}
"""What the paper's anchors look at: the energy of all outputs of the layer behind; for windows, of the tokens that come
in. Ours: docs/scores.md."""

OURS: Mapping[str, Any] = {"model_args": {}, "target": {}}
"""A row with our own default score (``docs/scores.md``), which kernels take: as exact, and faster."""

DIGITS = Recipe(model="", data="digits", batch_size=64, lr_batch=64, warmup_lr=1e-5, min_lr=1e-5, label_smoothing=0.1,
                mean=(0.0, 0.0, 0.0), std=(0.35, 0.35, 0.35), rotate=10.0, scale=0.1)  # fmt: skip
"""Embedded digits, for a laptop: epochs of 22 steps of 64 images, one process.

The black background is zero after normalisation: what an anchor weighs is the digit, and what a standard shift brings
in is more background.
"""

MINI = Recipe(model="", data="uoft-cs/cifar10", epochs=100, batch_size=256, lr=1.5e-3, lr_batch=0, warmup_epochs=7,
              warmup_lr=1e-6, min_lr=1e-5, label_smoothing=0.1, ema_decay=0.999, flip=True, shift=4,
              rand_augment="rand-m9-n1-mstd0.5-inc1", mean=(0.491, 0.482, 0.447),
              std=(0.247, 0.243, 0.262))  # fmt: skip
"""CIFAR-10 at its own 32 px, for models of two million parameters: 195 steps an epoch, minutes on a large GPU.

Mean and deviation are those of CIFAR-10's pixels. How much augmentation is best depends on the epochs. In 24 epochs
a smaller A-Swin reaches 64.4 %, 66.9 without drop path, 68.8 without RandAugment and with shifts of 3 px; learning
rates of 7.5e-4 and 3e-3 give 64.6 and 62.9. In 72 epochs, with two operations of RandAugment, cutmix of all batches
takes it from 77.7 to 68.5. In 400 epochs without drop path it reaches 88.4 (epoch 380), and its default model 88.5.
With more epochs, more augmentation pays: see Swin's recipe.
"""

CIFAR10 = Recipe(model="", data="uoft-cs/cifar10", epochs=100, batch_size=96, label_smoothing=0.1, resize=256,
                 flip=True, mixup=0.8, cutmix=1.0, model_args=PAPER)  # fmt: skip
"""CIFAR-10 in the paper: two GPUs x 48 images, 100 epochs, five seeds. Warm-up is a third of the originals', as the
epochs are of their 300.

Images are resized to 256 and cropped to 224 at the centre (SwinV2: 292 and 256); augmentation is a horizontal flip
(tab. supp_class_aug_circular). The supplement says so of all experiments on CIFAR; the section on standard shifts says
default augmentation, and its top-1 are those of other trainings. We train once, for both columns. Resizing is bilinear.
"""

IMAGENET = Recipe(model="", data="ILSVRC/imagenet-1k", epochs=300, label_smoothing=0.1, resize=256, flip=True,
                  mixup=0.8, cutmix=1.0, metrics=("top1", "c_cons"), model_args=PAPER)  # fmt: skip
"""ImageNet under circular shifts in the paper: eight A100, 300 epochs, one seed. Sizes and flip are CIFAR-10's."""

STANDARD: Mapping[str, Any] = {"rand_augment": "rand-m9-mstd0.5-inc1", "erase": 0.25, "crop": True,
                               "metrics": ("top1", "s_cons")}  # fmt: skip
"""The same under standard shifts: sizes and flip as there, no random crop, then RandAugment and random erasing (tabs.
supp_class_aug_standard_*). RandAugment is timm's, which has one operation more than the paper lists, SolarizeAdd.
S-Cons shifts the resized image under the centre crop."""

PHOTOGRAPHS: Mapping[str, Any] = {**OURS, "data": "", "epochs": 100, "batch_size": 64, "warmup_epochs": 5,
                                  "metrics": ("top1", "c_cons", "s_cons")}  # fmt: skip
"""A row of ImageNet for photographs of your own, of any size: with ImageNet's mean and std, a flip, RandAugment,
erasing, mixup and cutmix. Few photographs need weights to start from: ``--pretrained``."""


def recipes_in(module: Mapping[str, Any]) -> dict[str, Any]:
    """The recipes among the variables of a module, by their names in lower case, as ``--recipe`` takes them."""
    return {name.lower(): value for name, value in module.items() if isinstance(value, BaseRecipe)}
