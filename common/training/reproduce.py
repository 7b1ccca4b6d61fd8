"""One command per folder for its rows of the paper: train (or load what was trained), evaluate, paper beside ours."""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from ..data.sources import KNOWN
from ..evaluation.battery import battery_of
from ..evaluation.flags import add_precision, whole
from ..evaluation.tables import format_table, write_json
from ..models.registry import MODEL_ARGUMENTS, parse_arguments
from .engine import train
from .recipe import BaseRecipe, Recipe, RunOptions
from .task import Classification, Task

__all__ = ["main", "rescale"]

R = TypeVar("R", bound=BaseRecipe)

SCALES = {
    "full": "the paper's schedule",
    "short": "30 epochs of CIFAR, 3 of ImageNet, in batches of 256: one H200 does two CIFAR rows in half an hour",
    "smoke": "two epochs of the micro model on some digits: a CPU minute, to see that everything runs",
}


def rescale(recipe: Recipe, scale: str) -> Recipe:
    """A row at another length; learning rates follow the batch by the recipe's own rule, warm-up the epochs."""
    if scale == "full":
        return recipe
    if scale == "short":
        epochs = min(recipe.epochs, 3 if "imagenet" in recipe.data else 30)
        return replace(recipe, epochs=epochs, batch_size=256,
                       warmup_epochs=recipe.warmup_epochs * epochs / recipe.epochs)  # fmt: skip
    micro = re.sub(r"_[a-z0-9]+$", "_micro", recipe.model)
    return replace(recipe, model=micro, data="digits", epochs=2, batch_size=32, warmup_epochs=1.0, resize=None,
                   crop=False)  # fmt: skip


def main(recipes: Mapping[str, R], description: str, arguments: Sequence[str] | None = None, *,
         task: type[Task] = Classification, rescale: Callable[[R, str], R] = rescale,  # type: ignore[assignment]
         scales: Mapping[str, str] = SCALES,
         known: Mapping[str, tuple[int, int, int]] = KNOWN) -> list[dict[str, Any]]:  # fmt: skip
    """A folder's ``reproduce.py``. ``rescale`` knows the ``scales``, ``known`` the rows of whole data sets."""
    rows = [name for name, recipe in recipes.items() if recipe.target]
    cifar10 = [name for name in rows if recipes[name].data == "uoft-cs/cifar10"]
    meaning = "; ".join(f"{name}: {what}" for name, what in scales.items())
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=rows, default=cifar10 or rows, help="rows of the paper's tables")
    parser.add_argument("--scale", choices=scales, default="full", help=meaning)
    parser.add_argument("--data", help="a folder, if the data set of these rows is not to come from the Hub")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/reproduce"), help="where the runs go")
    add_precision(parser)
    parser.add_argument("--compile", action="store_true", help="train with torch.compile")
    parser.add_argument(
        "--battery", action="store_true", help="all that the tables need of a classifier, as battery.json"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=whole, default=[0], help="one training each: the paper's CIFAR has five"
    )
    parser.add_argument("--model_args", **MODEL_ARGUMENTS)
    args = parser.parse_args(arguments)

    model_args = parse_arguments(args.model_args)
    if args.battery and not all(isinstance(recipes[row], Recipe) for row in args.rows):
        raise ValueError("--battery measures classifiers: leave it out for segmenters")

    def directory(row: str, seed: int) -> Path:
        name = "_".join([rescale(recipes[row], args.scale).model, row, *args.model_args])
        return args.output_dir / args.scale / (f"{name}_seed{seed}" if seed else name)

    smoke = args.scale == "smoke"
    table: list[dict[str, Any]] = []
    names, seeds = (list(dict.fromkeys(each)) for each in (args.rows, args.seeds))  # one named twice is no second one
    for name, seed in product(names, seeds):
        recipe, output = rescale(recipes[name], args.scale), directory(name, seed)
        recipe = replace(recipe, model_args={**recipe.model_args, **model_args}, seed=seed)
        expected = None if smoke else known.get(recipe.data)
        if args.data and not smoke:
            recipe = replace(recipe, data=args.data)
        if recipe.pretrained and recipe.pretrained.startswith("row:"):  # a row that starts from another one's weights
            recipe = replace(recipe, pretrained=str(directory(recipe.pretrained.removeprefix("row:"), seed)))
        results = _finished(output, recipe, args.mixed_precision) or train(name, recipe, RunOptions(
            output_dir=str(output), mixed_precision=args.mixed_precision, compile=args.compile,
            limit=160 if smoke else None, expected_rows=expected, resume_from_checkpoint="latest",
            checkpointing_minutes=0 if smoke else 10), task)  # fmt: skip
        if "stopped_at" in results:  # by a signal, which is meant for all rows
            print(f"stopped in row {name}: the same command goes on from there")
            return table
        if args.battery and isinstance(recipe, Recipe):
            battery_of(output, recipe.data, mixed_precision=args.mixed_precision, compile=args.compile,
                       limit=8 if smoke else None, exact_images=8 if smoke else 1000, crop=recipe.crop,
                       seed=recipe.seed, target=output / "battery.json")  # fmt: skip
        length = {"steps": recipe.steps} if recipe.steps else {"epochs": recipe.epochs}
        row: dict[str, Any] = {"row": name, "model": recipe.model, **model_args, **length, "seed": seed}
        for metric in dict.fromkeys(metric for other in rows for metric in recipes[other].target):
            row |= {f"{metric} paper": recipe.target.get(metric, "-"), f"{metric} ours": results.get(metric)}
        table.append(row)
        _add(args.output_dir / f"{args.scale}.json", row)
    print(format_table(table if len(seeds) < 2 else _means(table)))
    print(f"all rows of this scale: {args.output_dir / args.scale}.json")
    return table


def _means(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for all seeds of one: means and deviations of what was measured."""
    rows = []
    for _, group in groupby(table, itemgetter("row")):
        first, *others = group
        values = {key: [row[key] for row in (first, *others)] for key in first if key.endswith(" ours")}
        means = {key: f"{statistics.mean(each):.2f} ± {statistics.stdev(each):.2f}"
                 for key, each in values.items() if None not in each}  # fmt: skip
        rows.append({**first, **means, "seed": f"{1 + len(others)} seeds"})
    return rows


def _add(path: Path, row: dict[str, Any]) -> None:
    """Write a row into a JSON of rows, in place of one of the same model, seed and arguments: all folders share the
    file."""

    def key(row: dict[str, Any]) -> dict[str, Any]:
        told = {name for name in row if name.endswith((" paper", " ours"))} | {"epochs", "steps"}
        return json.loads(json.dumps({name: value for name, value in row.items() if name not in told}))

    rows = json.loads(path.read_text()) if path.exists() else []
    write_json(path, [*(other for other in rows if key(other) != key(row)), row])


def _finished(directory: Path, recipe: BaseRecipe, precision: str | None) -> dict[str, Any] | None:
    """Results of an earlier, whole run of the same recipe; a ValueError if that was in another precision."""
    path = directory / "results.json"
    if not path.exists():
        return None
    results = json.loads(path.read_text())
    same = results["settings"] == json.loads(json.dumps(recipe.settings()))
    if same and precision not in (None, results["precision"]):
        raise ValueError(f"{directory} holds this run with --mixed_precision {results['precision']}: give another "
                         "--output_dir")  # fmt: skip
    return results if same else None
