"""UperNet's recipes, one per row of the paper: table, hardware, batch arithmetic, target, command.

Optimizer and schedule of the ADE20K rows are MMSegmentation's for UperNet on Swin: AdamW, learning rate 6e-5 for a
batch of 16, weight decay 0.01, betas 0.9/0.999, no clipping, 1,500 steps of warm-up, then a straight line to zero over
160,000 steps; drop path 0.3, auxiliary loss 0.4. Their backbones come from ImageNet: ``--backbone DIR_OR_REPO`` names
the classifier, ``--backbone ""`` starts from scratch.
"""

from dataclasses import replace

from common.training.rows import recipes_in
from segmentation.task import SegmentationRecipe

DIGITS = SegmentationRecipe(model="upernet_a_swin_micro", data="digits", epochs=8, batch_size=8, lr=2e-3, lr_batch=0,
                            warmup_steps=60, warmup_lr=2e-5, min_lr=2e-5, weight_decay=0.05, clip_grad=5.0,
                            mean=(0.0, 0.0, 0.0), std=(0.35, 0.35, 0.35))  # fmt: skip
"""Embedded digit scenes, for a laptop: 8 epochs x 125 steps of 8 scenes, one process.

The black background is zero after normalisation, as in the classifiers' recipe for digits.

``accelerate launch segmentation/train.py``
"""

CAMVID = SegmentationRecipe(model="upernet_a_swin_tiny", data="data/camvid", steps=2000, batch_size=16, lr=3e-4,
                            lr_batch=0, warmup_steps=200, warmup_lr=3e-6, min_lr=3e-6, weight_decay=0.05,
                            clip_grad=5.0, drop_path=0.1, size=(448, 448), resize=(672, 448), ratio_range=(0.75, 1.75),
                            flip=True, photometric=True, model_args={"padding_mode": "circular"})  # fmt: skip
"""CamVid, from scratch, in minutes on one GPU: 367 street scenes to train, 233 to test, 11 classes. Not in the paper.

2,000 steps of 16 crops, 91 epochs. As in the paper's circular rows, 480 x 360 is resized with its ratio, here to
597 x 448, and crops of 448 x 448 train; to test, sides are rounded up to multiples of 224, 672 x 448, and masks are
brought back to 480 x 360. Convolutions are circular in the default model too. SwinV2 needs multiples of 256:
``--size 512 512 --resize 768 512``.

``accelerate launch segmentation/train.py --recipe camvid --data DIR --mixed_precision bf16 --compile``
"""

PHOTOGRAPHS = replace(CAMVID, data="", steps=0, epochs=100, resize=(1792, 448), ratio_range=(0.5, 2.0), model_args={})
"""Photographs of your own, of any size: as for ADE20K, they are resized to fit 1,792 x 448, scaled by 0.5 to 2 and
cropped to 448 x 448, with ImageNet's mean and std.

One GPU, 100 epochs, batches of 16. Few photographs need weights to start from: ``--backbone``, a classifier.

``accelerate launch segmentation/train.py --recipe photographs --data DIR``
"""

ADE20K = SegmentationRecipe(model="upernet_a_swin_tiny", data="merve/scene_parse_150", steps=160_000, batch_size=16,
                            backbone="outputs/reproduce/full/a_swin_tiny_imagenet", lr=6e-5, lr_batch=0,
                            schedule="poly", warmup_steps=1500, warmup_lr=6e-11, min_lr=0.0, weight_decay=0.01,
                            clip_grad=0.0, drop_path=0.3, size=(448, 448), resize=(1792, 448), multiple=224,
                            ratio_range=(0.5, 2.0), max_class_share=0.75, flip=True, photometric=True,
                            model_args={"padding_mode": "circular"}, metrics=("miou", "mascc"),
                            target={"miou": 43.44, "mascc": 100.0})  # fmt: skip
"""ADE20K, circular shifts, A-Swin-T (tab. seg_acc_combined): 43.44 % mIoU, 100 % mASCC.

Four A100 x 4 crops = 16, 160,000 steps, 127 epochs. Scenes are resized to fit 1,792 x 448, scaled by 0.5 to 2 and
cropped to 448 x 448, then flipped and distorted in colour; to test, sides are rounded up to multiples of 224 (tab.
supp_seg_aug_circular_swin). All convolutions are circular, also in the default model. The backbone is that of the
ImageNet row, as ``python swin/reproduce.py --rows imagenet`` leaves it.

``accelerate launch --num_processes 4 segmentation/train.py --recipe ade20k``
"""

ADE20K_DEFAULT = replace(ADE20K, model="upernet_swin_tiny",
                         backbone="outputs/reproduce/full/swin_tiny_imagenet_default",
                         target={"miou": 42.93, "mascc": 87.32})  # fmt: skip
"""ADE20K, circular shifts, Swin-T: 42.93 % mIoU, 87.32 % mASCC."""

ADE20K_V2 = replace(ADE20K, model="upernet_a_swinv2_tiny",
                    backbone="outputs/reproduce/full/a_swinv2_tiny_imagenet",
                    size=(512, 512), resize=(2048, 512), multiple=256,
                    target={"miou": 44.42, "mascc": 100.0})  # fmt: skip
"""ADE20K, circular shifts, A-SwinV2-T: 44.42 % mIoU, 100 % mASCC.

Scenes fit 2,048 x 512, crops are 512 x 512, test sides multiples of 256 (tab. supp_seg_aug_circular_swinv2); the
backbone from ``python swinv2/reproduce.py --rows imagenet``.

``accelerate launch --num_processes 4 segmentation/train.py --recipe ade20k_v2``
"""

ADE20K_V2_DEFAULT = replace(ADE20K_V2, model="upernet_swinv2_tiny",
                            backbone="outputs/reproduce/full/swinv2_tiny_imagenet_default",
                            target={"miou": 43.86, "mascc": 88.16})  # fmt: skip
"""ADE20K, circular shifts, SwinV2-T: 43.86 % mIoU, 88.16 % mASCC."""

ADE20K_STANDARD = replace(ADE20K, backbone="outputs/reproduce/full/a_swin_tiny_imagenet_standard", multiple=0,
                          model_args={}, metrics=("miou", "massc"), target={"miou": 44.43, "massc": 93.48})  # fmt: skip
"""ADE20K, standard shifts, A-Swin-T (tab. seg_acc_combined): 44.43 % mIoU, 93.48 % mASSC.

The paper trains on crops of 512 and tests at 2,048 x 512 (tab. supp_seg_aug_standard). A-Swin is exact for multiples
of 224 only, so that its crops are 448 and its test scenes fit 1,792 x 448, rounded up, as under circular shifts.

``accelerate launch --num_processes 4 segmentation/train.py --recipe ade20k_standard``
"""

ADE20K_STANDARD_DEFAULT = replace(ADE20K_STANDARD, model="upernet_swin_tiny", size=(512, 512), resize=(2048, 512),
                                  backbone="outputs/reproduce/full/swin_tiny_imagenet_standard_default",
                                  target={"miou": 44.2, "massc": 93.37})  # fmt: skip
"""ADE20K, standard shifts, Swin-T: 44.20 % mIoU, 93.37 % mASSC. MMSegmentation's own setting: crops of 512, zeros
around, test scenes that fit 2,048 x 512 (sides rounded up to the patch of 4)."""

ADE20K_STANDARD_V2 = replace(ADE20K_STANDARD_DEFAULT, model="upernet_a_swinv2_tiny",
                             backbone="outputs/reproduce/full/a_swinv2_tiny_imagenet_standard",
                             target={"miou": 46.11, "massc": 93.59})  # fmt: skip
"""ADE20K, standard shifts, A-SwinV2-T: 46.11 % mIoU, 93.59 % mASSC. Test sides are rounded up to multiples of 256."""

ADE20K_STANDARD_V2_DEFAULT = replace(ADE20K_STANDARD_DEFAULT, model="upernet_swinv2_tiny",
                                     backbone="outputs/reproduce/full/swinv2_tiny_imagenet_standard_default",
                                     target={"miou": 44.26, "massc": 93.23})  # fmt: skip
"""ADE20K, standard shifts, SwinV2-T: 44.26 % mIoU, 93.23 % mASSC."""

RECIPES = recipes_in(globals())
