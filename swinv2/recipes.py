"""SwinV2's recipes, one per row of the paper: table, hardware, batch arithmetic, target, command.

Optimizer and schedule are the original's (AdamW, weight decay 0.05, betas 0.9/0.999, clipping at 5, cosine decay after
20 of 300 epochs of warm-up, learning rate 5e-4 x batch / 512), drop path 0.2 for tiny.

What all architectures share, such as images and augmentation, is in ``common.training.rows``.
"""

from dataclasses import replace

from common.training import rows

DIGITS = replace(rows.DIGITS, model="a_swinv2_micro", epochs=60, lr=4e-3, warmup_epochs=5)
"""Embedded digits, for a laptop: 60 epochs x 22 steps of 64 images, one process.

``accelerate launch swinv2/train.py``
"""

CIFAR10_MINI = replace(rows.MINI, model="a_swinv2_mini", epochs=190, drop_path=0.0)
"""CIFAR-10 at its own 32 px, a small model of photographs: 190 epochs of 195 steps, 9 minutes on an H200 beside four
other runs: 84.98 % top-1 in bf16, where it was trained, 85.16 in float32; 85.18 after epoch 120. So many epochs could
take more augmentation, as Swin's have.

``accelerate launch swinv2/train.py --recipe cifar10_mini``
"""

CIFAR10 = replace(rows.CIFAR10, model="a_swinv2_tiny", lr=5e-4, lr_batch=512, warmup_epochs=20 / 3, warmup_lr=5e-7,
                  min_lr=5e-6, drop_path=0.2, resize=292,
                  target={"top1": 91.64, "c_cons": 99.99, "s_cons": 95.81})  # fmt: skip
"""CIFAR-10, circular and standard shifts (tab. class_cifar): 91.64 % top-1, 99.99 % C-Cons; 91.91 %, 95.81 % S-Cons.

Two GPUs x 48 images, 100 epochs, five seeds; the original's 20 warm-up epochs of 300 become 6.7 of 100. Images are
resized to 292 and cropped to 256.

``accelerate launch --num_processes 2 swinv2/train.py --recipe cifar10``
"""

CIFAR10_DEFAULT = replace(CIFAR10, model="swinv2_tiny",
                          model_args={}, target={"top1": 89.08, "c_cons": 89.16, "s_cons": 91.68})  # fmt: skip
"""CIFAR-10, default model: 89.08 % top-1, 89.16 % C-Cons; 89.08 %, 91.68 % S-Cons."""

CIFAR10_OURS = replace(CIFAR10, **rows.OURS)
"""CIFAR-10 with our own default score (``docs/scores.md``), which kernels take: as exact, and faster."""

CIFAR100 = replace(CIFAR10, data="uoft-cs/cifar100",
                   target={"top1": 72.73, "c_cons": 99.96, "s_cons": 88.74})  # fmt: skip
"""CIFAR-100 (tab. class_cifar): 72.73 % top-1, 99.96 % C-Cons; 72.98 %, 88.74 % S-Cons."""

CIFAR100_DEFAULT = replace(CIFAR10_DEFAULT, data="uoft-cs/cifar100",
                           target={"top1": 69.78, "c_cons": 75.23, "s_cons": 80.42})  # fmt: skip
"""CIFAR-100, default model: 69.78 % top-1, 75.23 % C-Cons; 69.67 %, 80.42 % S-Cons."""

IMAGENET = replace(rows.IMAGENET, model="a_swinv2_tiny", batch_size=1024, lr=5e-4, lr_batch=512, warmup_epochs=20,
                   warmup_lr=5e-7, min_lr=5e-6, drop_path=0.2, resize=292,
                   target={"top1": 79.91, "c_cons": 99.98})  # fmt: skip
"""ImageNet, circular shifts (tab. class_imagenet): 79.91 % top-1, 99.98 % C-Cons.

Eight A100 x 128 images = 1024, learning rate 5e-4 x 1024/512 = 1e-3, 300 epochs, one seed.

``accelerate launch --config_file scripts/accelerate/eight_gpus.yaml swinv2/train.py --recipe imagenet``
"""

IMAGENET_DEFAULT = replace(IMAGENET, model="swinv2_tiny",
                           model_args={}, target={"top1": 78.95, "c_cons": 87.68})  # fmt: skip
"""ImageNet, circular shifts, default model: 78.95 % top-1, 87.68 % C-Cons."""

IMAGENET_STANDARD = replace(IMAGENET, **rows.STANDARD, target={"top1": 82.1, "s_cons": 94.04})
"""ImageNet, standard shifts (tab. class_imagenet): 82.10 % top-1, 94.04 % S-Cons.

``accelerate launch --config_file scripts/accelerate/eight_gpus.yaml swinv2/train.py --recipe imagenet_standard``
"""

IMAGENET_STANDARD_DEFAULT = replace(IMAGENET_STANDARD, model="swinv2_tiny",
                                    model_args={}, target={"top1": 81.76, "s_cons": 93.24})  # fmt: skip
"""ImageNet, standard shifts, default model: 81.76 % top-1, 93.24 % S-Cons."""

PHOTOGRAPHS = replace(IMAGENET_STANDARD, **rows.PHOTOGRAPHS)
"""Photographs of your own, of any size: the tiny model at 256 px (``rows.PHOTOGRAPHS``). One GPU, 100
epochs, batches of 64.

``accelerate launch swinv2/train.py --recipe photographs --data DIR``
"""

RECIPES = rows.recipes_in(globals())
