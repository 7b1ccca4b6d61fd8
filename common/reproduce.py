"""One command per folder for its rows of the paper: train (or load what was trained), evaluate, paper beside ours."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .engine import train
from .recipe import Recipe, RunOptions
from .tables import format_table, write_json

__all__ = ["main", "rescale"]

SCALES = {
    "full": "the paper's schedule",
    "short": "30 epochs in batches of 256: about half an hour for two rows on one H200",
    "smoke": "two epochs of the micro model on some digits: a CPU minute, to see that everything runs",
}


def rescale(recipe: Recipe, scale: str) -> Recipe:
    """A row at another length; learning rates follow the batch by the recipe's own rule, warm-up the epochs."""
    if scale == "full":
        return recipe
    if scale == "short":
        return replace(recipe, epochs=30, batch_size=256, warmup_epochs=recipe.warmup_epochs * 30 / recipe.epochs)
    micro = re.sub(r"_[a-z0-9]+$", "_micro", recipe.model)
    return replace(recipe, model=micro, data="digits", epochs=2, batch_size=32, warmup_epochs=1.0, resize=None)


def main(
    recipes: Mapping[str, Recipe], description: str, arguments: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """A folder's ``reproduce.py``."""
    rows = [name for name, recipe in recipes.items() if recipe.target]
    scales = "; ".join(f"{name}: {what}" for name, what in SCALES.items())
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows)
    parser.add_argument("--scale", choices=SCALES, default="full", help=scales)
    parser.add_argument("--data", help="a folder, if the data set is not to come from where the recipe says")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/reproduce"))
    parser.add_argument("--mixed_precision", choices=("no", "fp16", "bf16"))
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args(arguments)

    table = []
    for name in args.rows:
        recipe = rescale(recipes[name], args.scale)
        if args.data and args.scale != "smoke":
            recipe = replace(recipe, data=args.data)
        directory = args.output_dir / args.scale / f"{recipe.model}_{name}"
        results = _finished(directory, recipe) or train(name, recipe, RunOptions(
            output_dir=str(directory), mixed_precision=args.mixed_precision, compile=args.compile,
            limit=160 if args.scale == "smoke" else None, resume_from_checkpoint="latest",
            checkpointing_steps=0 if args.scale == "smoke" else 1000))  # fmt: skip
        row: dict[str, Any] = {"row": name, "model": recipe.model, "epochs": recipe.epochs}
        for metric, paper in recipe.target.items():
            row |= {f"{metric} paper": paper, f"{metric} ours": results.get(metric)}
        table.append(row)
        write_json(args.output_dir / f"{args.scale}.json", table)
    print(format_table(table))
    return table


def _finished(directory: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Results of an earlier, whole run of the same recipe."""
    path = directory / "results.json"
    if not path.exists():
        return None
    results = json.loads(path.read_text())
    same = results["settings"] == json.loads(json.dumps(recipe.settings()))
    return results if same else None
