"""What the results.json of a training run says: its measures, its data, its recipe and what was changed of it."""

import importlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..models.hub import embedded, is_hub_id
from ..models.registry import PACKAGES
from ..training.recipe import BaseRecipe

__all__ = ["MEASURES", "RESULTS_NAME", "changes_of", "command", "data_of", "is_segmenter", "measured", "package_of",
           "paper_of", "public_results", "read_results", "recipes_of"]  # fmt: skip

RESULTS_NAME = "results.json"

DIGITS = "scikit-learn's handwritten digits"
DATA = {
    "digits": (None, DIGITS, "test"),
    "cifar10": ("uoft-cs/cifar10", "CIFAR-10", "test"),
    "cifar100": ("uoft-cs/cifar100", "CIFAR-100", "test"),
    "imagenet-1k": ("ILSVRC/imagenet-1k", "ImageNet-1k", "validation"),
    "scene_parse_150": ("merve/scene_parse_150", "ADE20K, 150 classes", "validation"),
    "camvid": (None, "CamVid, 11 classes", "test"),
}
"""By the last part of a folder's path: the data set's id on the Hub, its name, the split that is measured on."""

MEASURES = {
    "top1": ("top-1", "accuracy", "images whose highest logit is the label"),
    "c_cons": ("C-Cons", "c_cons", "images that get one label under two random circular shifts"),
    "c_cons_near": ("near C-Cons", "c_cons_near", "images that get one label under two small random circular shifts"),
    "c_cons_worst": (
        "worst C-Cons",
        "c_cons_worst",
        "images that get one label under all circular shifts of the range",
    ),
    "s_cons": ("S-Cons", "s_cons", "images that get one label under two random standard shifts"),
    "miou": ("mIoU", "mean_iou", "mean over classes of intersection over union"),
    "mascc": ("mASCC", "mascc", "pixels that get one label under two random circular shifts"),
    "mascc_worst": ("worst mASCC", "mascc_worst", "pixels that get one label under all circular shifts of the range"),
    "massc": ("mASSC", "massc", "pixels that get one label under two random standard shifts"),
}
"""By metric: its name, its identifier on the Hub (ours, where the Hub has none) and what it counts."""


def read_results(path: Path) -> dict[str, Any]:
    """``results.json`` of a training run, or a ValueError that says what is missing from it."""
    try:
        results = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"no {path}: give the output directory of a finished training run") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): train again, or fetch the file anew") from None
    needed = ("model", "recipe", "settings", "parameters", "images")
    if not isinstance(results, dict) or (missing := [key for key in needed if key not in results]):
        lacks = "is no JSON object" if not isinstance(results, dict) else f"lacks {missing}"
        raise ValueError(f"{path} {lacks}: expected what train.py writes")
    return results


def public_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """Results as they may be shown: data sets and weights by their Hub id or name, not by a path on a disk."""
    settings = dict(results["settings"])
    if not _from_hub(results, "data"):
        name = Path(settings["data"]).name
        own = name == "digits" != settings["data"]  # somebody's folder: the name alone means the embedded ones
        settings["data"] = data_of(results)[0] or ("./" * own + name)
    for key in ("pretrained", "backbone"):
        source = settings.get(key)
        if source and not _from_hub(results, key, is_hub_id(source)) and not embedded(source):
            settings[key] = Path(source).name
    return {**results, "settings": settings}


def measured(results: Mapping[str, Any]) -> dict[str, float]:
    """The metrics among results."""
    return {key: float(results[key]) for key in results if key.partition("@")[0] in MEASURES}


def _from_hub(results: Mapping[str, Any], key: str, older: bool = False) -> bool:
    """Whether a setting named a repository of the Hub when the run was made; ``older`` results do not say."""
    return key in results["from_hub"] if "from_hub" in results else older


def data_of(results: Mapping[str, Any]) -> tuple[str | None, str, str]:
    """The row of ``DATA`` of a run's data set; of one that is not there, its name."""
    given = results["settings"]["data"]
    repository = given.partition("@")[0]
    if _from_hub(results, "data"):  # where anybody may have a data set of a known name
        official = {row[0]: row for row in DATA.values()}
        return official.get(repository, (repository, repository, "evaluation"))
    name = Path(repository).name
    known = {key: row for key, row in DATA.items() if key != "digits" or given == key}  # digits are no folder
    identifier, data, split = known.get(name.lower(), (None, name, "evaluation"))
    return identifier, f"scenes of {data}" if data == DIGITS and is_segmenter(results) else data, split


def is_segmenter(results: Mapping[str, Any]) -> bool:
    return package_of(results["model"]) == "segmentation"


def package_of(model: str) -> str:
    """The folder of a model by its name: ``a_swin_tiny`` is in swin, ``upernet_a_swin_tiny`` in segmentation."""
    return PACKAGES[model.removeprefix("a_").split("_")[0]]


def recipes_of(package: str) -> Mapping[str, BaseRecipe]:
    return importlib.import_module(f"{package}.recipes").RECIPES


def changes_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that are not its recipe's; data that only lie elsewhere are the same."""
    recipe = recipes_of(package_of(results["model"])).get(results["recipe"])
    settings = results["settings"]
    if recipe is None:
        return dict(settings)
    stated = json.loads(json.dumps(recipe.settings()))
    changes = {key: value for key, value in settings.items() if value != stated.get(key)}
    if "data" in changes and data_of(results) == data_of({**results, "settings": stated}):
        del changes["data"]
    return changes


def paper_of(results: Mapping[str, Any]) -> dict[str, float]:
    """What the paper reports for the model, data and recipe of a run; nothing where it has no such row."""
    recipe = recipes_of(package_of(results["model"])).get(results["recipe"])
    same = recipe is not None and recipe.model == results["model"] and "data" not in changes_of(results)
    return dict(recipe.target) if recipe is not None and same else {}


def _word(value: Any) -> str:
    """A model argument as ``--model_args`` reads it."""
    if isinstance(value, list):
        return ",".join(map(_word, value)) + ("," if len(value) == 1 else "")
    return "none" if value is None else json.dumps(value).strip('"')


def command(results: Mapping[str, Any]) -> str:
    """The command line that trains a run again: its recipe, and what was changed of it."""
    words = ["accelerate", "launch", f"{package_of(results['model'])}/train.py"]
    words += [] if results["recipe"] == "digits" else ["--recipe", results["recipe"]]
    shown = public_results(results)["settings"]
    for key in changes_of(results):
        value = shown[key]
        if key == "model_args":
            words += ["--model_args", *(f"{name}={_word(each)}" for name, each in value.items())]
        elif isinstance(value, bool):
            words.append(f"--{key}" if value else f"--no-{key}")
        elif value is not None or not is_segmenter(results):  # pairs cannot be left out again
            words += [f"--{key}", *map(str, value if isinstance(value, list) else ["none" if value is None else value])]
    words += ["--limit", str(results["limit"])] if results.get("limit") else []
    if results.get("precision", "no") != "no":
        words += ["--mixed_precision", results["precision"]]
    return shlex.join(words)
