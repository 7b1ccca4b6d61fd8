"""A recipe for photographs, and a word where a recipe does not fit the images. Else photographs are shrunk to 32 px and
normalised as digits, and nobody is told."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from segmentation_helpers import scene, write_parquet
from sklearn.datasets import load_sample_images
from test_class_names import make_folder

from common.data.preprocess import IMAGENET_MEAN
from common.data.sources import load_data
from common.training.recipe import RunOptions
from common.training.task import Classification, misfit
from segmentation import recipes as segmentation_recipes
from segmentation.data import load_scenes
from segmentation.task import Segmentation
from swin.recipes import RECIPES


@pytest.mark.parametrize("folder", ["swin", "swinv2", "cvt", "mvitv2"])
def test_photographs_have_a_recipe(folder: str, tmp_path: Path) -> None:
    recipe = import_module(f"{folder}.recipes").RECIPES["photographs"]
    with pytest.raises(ValueError, match="give a folder or a Hub id by --data"):
        load_data(recipe.data)
    data = str(make_folder(tmp_path, side=260, count=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task = Classification(replace(recipe, data=data), RunOptions(), Accelerator(cpu=True))
    size = task.model.img_size
    assert min(size) >= 224
    assert task.preprocess.mean == IMAGENET_MEAN
    assert task.model.pretrained_cfg["mean"] == IMAGENET_MEAN
    split: Any = task.train_split
    batch = torch.utils.data.default_collate([split[(0, i)] for i in range(4)])
    images, targets = task.inputs(batch, 0, 0)
    assert images.shape == (4, 3, *size)
    assert targets.shape == (4, 3)  # mixed labels


def test_scenes_have_a_recipe(tmp_path: Path) -> None:
    recipe = segmentation_recipes.RECIPES["photographs"]
    with pytest.raises(ValueError, match="give a folder or a Hub id by --data"):
        load_scenes(recipe.data)
    for part in ("train", "val"):
        write_parquet(tmp_path / f"{part}.parquet", [scene(i, (200, 300 + i), classes=3) for i in range(2)])
    (tmp_path / "classes.txt").write_text("road\ncar\nsky\n")
    small = replace(recipe, data=str(tmp_path), model="upernet_a_swin_micro", size=(64, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task = Segmentation(small, RunOptions(), Accelerator(cpu=True))
    assert task.model.class_names == ("road", "car", "sky")
    batch = torch.utils.data.default_collate([task.train_split[(0, i)] for i in range(2)])  # type: ignore[index]
    images, labels = task.inputs(batch, 0, 0)
    assert images.shape == (2, 3, 64, 64)
    assert labels.shape == (2, 64, 64)
    digits = replace(segmentation_recipes.RECIPES["digits"], data=str(tmp_path))
    with pytest.warns(UserWarning, match="they are 200 px or larger.*--recipe photographs"):
        Segmentation(digits, RunOptions(), Accelerator(cpu=True))


@pytest.mark.filterwarnings("ignore")
def test_a_crop_without_room_is_refused_before_training(tmp_path: Path) -> None:
    """Else S-Cons, under a crop as large as the image, ends a run at its first evaluation: epochs are lost."""
    data = str(make_folder(tmp_path, side=100, count=2))
    recipe = replace(RECIPES["photographs"], data=data, model="a_swin_micro", resize=32, mixup=0, cutmix=0)
    with pytest.raises(ValueError, match=r"leave no room to shift around the crop \(32, 32\): .*--no-crop"):
        Classification(recipe, RunOptions(), Accelerator(cpu=True))
    with pytest.raises(ValueError, match="a shift of 9 px exceeds the margin of 4 px"):
        Classification(replace(recipe, resize=40, metrics=("s_cons@9",)), RunOptions(), Accelerator(cpu=True))
    Classification(replace(recipe, crop=False), RunOptions(), Accelerator(cpu=True))


@pytest.mark.filterwarnings("ignore")
def test_the_recipe_of_digits_warns(tmp_path: Path, train_digits: Callable[..., dict[str, Any]]) -> None:
    data = str(make_folder(tmp_path / "data", side=100, count=2))
    with pytest.warns(UserWarning, match="they are 100 px or larger, but the model sees 32x32.*--recipe photograph"):
        train_digits(tmp_path / "run", "--data", data, "--batch_size", "2", "--limit", "2")
    split: Any = load_data("digits")[0]
    assert misfit(RECIPES["digits"], (32, 32), split) == ""
    photographs = torch.stack([torch.tensor(image[:64, :64]).permute(2, 0, 1) for image in load_sample_images().images])
    small = replace(split, images=photographs, labels=split.labels[:2])
    assert "their mean colour is" in misfit(RECIPES["digits"], (32, 32), small)
    assert misfit(RECIPES["cifar10"], (224, 224), small) == ""
    advised = misfit(RECIPES["cifar10_mini"], (32, 32), split)
    assert "their mean colour is" in advised
    assert advised.endswith("For grey digits: --recipe digits")
    photograph = RECIPES["photographs"]
    assert misfit(photograph, (224, 224), small) == ""
    assert "32 px, enlarged to 256x256. For images so small: --recipe" in misfit(photograph, (224, 224), split)
    # a small model, for a laptop: of 256 x 256 pixels, it would learn from 32 x 32 in the middle
    assert "the model sees 32x32 at the centre. For the whole image: --resize 32" in misfit(photograph, (32, 32), small)
    assert misfit(photograph, (32, 32), small).endswith("--resize 32 --no-crop")
    assert misfit(replace(photograph, resize=32), (32, 32), small) == ""
