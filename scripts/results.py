"""Write RESULTS.md from the JSON of runs that happened, paper beside ours; ``--check`` fails if it is old."""

import argparse
import json
from pathlib import Path
from typing import Any

from common.recipe import Recipe
from common.tables import format_table
from cvt import recipes as cvt
from mvitv2 import recipes as mvitv2
from swin import recipes as swin
from swinv2 import recipes as swinv2

ROOT = Path(__file__).resolve().parents[1]

ROWS = [recipe for recipes in (swin.RECIPES, swinv2.RECIPES, cvt.RECIPES, mvitv2.RECIPES)
        for recipe in (recipes["cifar10_default"], recipes["cifar10"])]  # fmt: skip


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
    digits = [json.loads(path.read_text()) for path in sorted(folder.glob("*_digits*.json"))]
    exact = [row for path in sorted(folder.glob("exactness_*.json")) for row in json.loads(path.read_text())]
    return "\n".join([
        "# Results", "",
        "Made by `python scripts/results.py` from the JSON of runs in `results/`. Percent; what was not run says so.",
        "", "## CIFAR-10", "",
        "The paper trains 100 epochs with batches of 96 and reports five seeds. Our rows are one seed of the same",
        "recipe, shortened as the epochs column says, on CIFAR-10 stored as JPEG.", "",
        format_table([cifar_row(recipe, runs) for recipe in ROWS]),
        "", "## Digits", "",
        "Micro models, 360 held-out digits, on two cores: Swin with one thread (now the default), the rest with two.",
        "",
        format_table([{key: run.get(key) for key in DIGITS} for run in digits]),
        "", "## Exactness", "",
        "Images whose logits are bit-identical, and whose label is the same, at their place and at two random shifts",
        "(`scripts/exactness.py`, random weights for full-size models).", "",
        format_table(exact), "",
    ])  # fmt: skip


def cifar_row(recipe: Recipe, runs: list[dict[str, Any]]) -> dict[str, Any]:
    ours = next((run for run in runs if run["model"] == recipe.model), {})
    row: dict[str, Any] = {"model": recipe.model}
    for metric, paper in recipe.target.items():
        row |= {f"{metric} paper": paper, f"{metric} ours": ours.get(metric)}
    return {**row, "epochs": ours.get("epochs")}


if __name__ == "__main__":
    main()
