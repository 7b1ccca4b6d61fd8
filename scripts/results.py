"""Write RESULTS.md from the JSON of runs that happened, paper beside ours; ``--check`` fails if it is old."""

import argparse
import json
from pathlib import Path
from typing import Any

from common.evaluation.tables import format_table
from common.training.recipe import BaseRecipe
from cvt import recipes as cvt
from mvitv2 import recipes as mvitv2
from segmentation import recipes as segmentation
from swin import recipes as swin
from swinv2 import recipes as swinv2

ROOT = Path(__file__).resolve().parents[1]

ROWS = [recipe for recipes in (swin.RECIPES, swinv2.RECIPES, cvt.RECIPES, mvitv2.RECIPES)
        for recipe in (recipes["cifar10_default"], recipes["cifar10"])]  # fmt: skip
SCENES = {name: recipe for name, recipe in segmentation.RECIPES.items() if recipe.target}
DIGITS = ("model", "top1", "c_cons", "s_cons", "epochs", "parameters", "train_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = render(ROOT / "results")
    target = ROOT / "RESULTS.md"
    if args.check and target.read_text() != text:
        raise SystemExit("RESULTS.md is out of date: run python scripts/results.py")
    target.write_text(text)


def render(folder: Path) -> str:
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*_cifar10_*.json"))]
    scenes = [json.loads(path.read_text()) for path in sorted(folder.glob("segmentation_*.json"))]
    digits = [json.loads(path.read_text()) for path in sorted(folder.glob("*_digits*.json"))
              if not path.name.startswith("segmentation_")]  # fmt: skip
    exact = [row for path in sorted(folder.glob("exactness_*.json")) for row in json.loads(path.read_text())]
    return "\n".join([
        "# Results", "",
        "Made by `python scripts/results.py` from the JSON of runs in `results/`. Percent; what was not run says so.",
        "", "## CIFAR-10", "",
        "The paper trains 100 epochs with batches of 96 and reports five seeds. Our rows are one seed of the same",
        "recipe, shortened as the epochs column says, on CIFAR-10 stored as JPEG.", "",
        format_table([cifar_row(recipe, runs) for recipe in ROWS]),
        "", "## Digits", "",
        "Micro models, 360 held-out digits, trained on one CPU thread.",
        "",
        format_table([{key: run.get(key) for key in DIGITS} for run in digits]),
        "", "## Segmentation", "",
        "UperNet from scratch: held-out digit scenes, CamVid's 233 test scenes; one recipe for all models of a set and",
        "size (tiny models on one H200, 450 steps of 16; micro models on a CPU, 700 steps of 8).",
        "",
        format_table([scene_row(run) for run in scenes]), "",
        "The paper's rows on ADE20K, 160,000 steps; consistency is mASCC under circular, mASSC under standard shifts.",
        "",
        format_table([ade20k_row(name, recipe, scenes) for name, recipe in SCENES.items()]),
        "", "## Exactness", "",
        "Images whose logits are bit-identical, and whose label is the same, at their place and at two random shifts",
        "(`scripts/exactness.py`, random weights for full-size models).", "",
        format_table(exact), "",
    ])  # fmt: skip


def cifar_row(recipe: BaseRecipe, runs: list[dict[str, Any]]) -> dict[str, Any]:
    ours = next((run for run in runs if run["model"] == recipe.model), {})
    row: dict[str, Any] = {"model": recipe.model}
    for metric, paper in recipe.target.items():
        row |= {f"{metric} paper": paper, f"{metric} ours": ours.get(metric)}
    return {**row, "epochs": ours.get("epochs")}


def ade20k_row(name: str, recipe: BaseRecipe, runs: list[dict[str, Any]]) -> dict[str, Any]:
    consistency = recipe.metrics[1]
    ours: dict[str, Any] = next((run for run in runs if run.get("recipe") == name), {})
    return {"model": recipe.model, "shifts": "circular" if consistency == "mascc" else "standard",
            "miou paper": recipe.target["miou"], "miou ours": ours.get("miou"),
            "consistency paper": recipe.target[consistency],
            "consistency ours": ours.get(consistency)}  # fmt: skip


def scene_row(run: dict[str, Any]) -> dict[str, Any]:
    """A run of ``train.py`` or of ``evaluate.py``, which knows less about the training."""
    settings = run.get("settings", run)
    size = settings.get("resize") or settings.get("size") or "-"
    row = {"data": Path(settings["data"]).name, "model": Path(run["model"]).name,
           "size": size if isinstance(size, (str, int)) else "x".join(map(str, size))}  # fmt: skip
    keys = ("precision", "miou", "mascc", "massc", "images", "epochs", "train_seconds")
    return row | {key: run.get(key, "-") for key in keys}


if __name__ == "__main__":
    main()
