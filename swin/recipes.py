"""Swin's recipes: one per row of the paper."""

from common.recipe import Recipe

DIGITS = Recipe(model="a_swin_micro", data="digits", epochs=40, batch_size=64, lr=2e-3, lr_batch=64, warmup_epochs=5,
                warmup_lr=1e-5, min_lr=1e-5, clip_grad=5.0, label_smoothing=0.1, mean=(0.5, 0.5, 0.5),
                std=(0.5, 0.5, 0.5), rotate=10.0, scale=0.1)  # fmt: skip

RECIPES = {"digits": DIGITS}
