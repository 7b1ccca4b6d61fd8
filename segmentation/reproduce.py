"""UperNet's rows of the paper: ``python segmentation/reproduce.py [--scale full|short|smoke] ...``"""

import re
from dataclasses import replace

import shiftvit  # first: it says so where another 'common' hides ours
from common.training.reproduce import main
from segmentation.recipes import RECIPES
from segmentation.task import Segmentation, SegmentationRecipe

SCALES = {
    "full": "the paper's schedule",
    "short": "8,000 of its 160,000 steps",
    "smoke": "two epochs of the micro model on some digit scenes: a CPU minute, to see that everything runs",
}
KNOWN = {"merve/scene_parse_150": (20_210, 2_000, 150)}


def rescale(recipe: SegmentationRecipe, scale: str) -> SegmentationRecipe:
    """A row at another length."""
    if scale == "full":
        return recipe
    if scale == "short":
        return replace(recipe, steps=8000, warmup_steps=75)
    micro = re.sub(r"_[a-z0-9]+$", "_micro", recipe.model)
    return replace(recipe, model=micro, data="digits", backbone=None, steps=0, epochs=2, batch_size=8, lr=2e-3,
                   warmup_steps=5, size=None, resize=None, multiple=0, ratio_range=None, photometric=False)  # fmt: skip


if __name__ == "__main__":
    shiftvit.run(main, RECIPES, __doc__ or "", task=Segmentation, rescale=rescale, scales=SCALES, known=KNOWN)
