"""Write RESULTS.md from the JSON of runs that happened, paper beside ours; ``--check`` fails if it is old."""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import shiftvit
from common.evaluation.tables import format_table
from common.training.recipe import BaseRecipe
from cvt import recipes as cvt
from mvitv2 import recipes as mvitv2
from segmentation import recipes as segmentation
from swin import recipes as swin
from swinv2 import recipes as swinv2

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = {"swin": swin.RECIPES, "swinv2": swinv2.RECIPES, "cvt": cvt.RECIPES, "mvitv2": mvitv2.RECIPES}
TABLES = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "ImageNet": "imagenet"}
"""By title: how the names of a table's recipes begin."""
SMALL = "cifar10_mini"
ABLATION = ("cifar10_modules", "cifar10_no_token", "cifar10_no_window", "cifar10_no_merge")
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
    runs = [
        json.loads(path.read_text()) for data in TABLES.values() for path in sorted(folder.glob(f"*_{data}_*.json"))
    ]
    scenes = [json.loads(path.read_text()) for path in sorted(folder.glob("segmentation_*.json"))]
    digits = [json.loads(path.read_text()) for path in sorted(folder.glob("*_digits*.json"))
              if not path.name.startswith("segmentation_")]  # fmt: skip
    in_rows = [run for prefix in TABLES.values() for row in rows_of(prefix) for run in longest(runs, *row)]
    exact = [row for path in sorted(folder.glob("exactness_*.json")) for row in json.loads(path.read_text())]
    return "\n".join([
        "# Results", "",
        "Made by `python scripts/results.py` from the JSON of runs in `results/`. Percent; what was not run says so.",
        *(line for title, prefix in TABLES.items() for line in classification(title, prefix, runs)),
        "", "## Ablation", "",
        "The paper's modules on Swin-T, CIFAR-10, 30 epochs, canonical anchor off: top-1 and C-Cons by epoch, as the",
        "logs in `results/` have them. A run that ended before a measurement has none there.", "",
        format_table([ablation_row(name, swin.RECIPES[name], folder) for name in ABLATION]),
        "", "## Other runs", "",
        "On CIFAR-10 with other settings than a row has (see `docs/scores.md`), shorter, or of code that has changed.",
        "",
        format_table([other_row(run) for run in runs if run not in in_rows]),
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


CIFAR = [
    "The paper has five seeds of 100 epochs. Ours are as many seeds and epochs as the columns say, at the paper's",
    "batch of 96, on CIFAR-10 stored as JPEG of quality 75 with colours at half the resolution: our images have",
    "less detail than the paper's; how much top-1 that costs was not measured. C-Cons with the canonical anchor on",
    "/ off, or on alone; `cifar10_modules` and `cifar10_no_*` have it off. `cifar10` has the paper's score",
    "(`energy`, all channels), `cifar10_ours` our default (`docs/scores.md`). `cifar10_canonical` has the canonical",
    "anchor and none of the paper's modules.", "",
]  # fmt: skip
LEAST = 20  # epochs of a run that stands in a row
LENGTH = {"data", "epochs", "warmup_epochs", "seed", "metrics"}
"""Settings in which a run may differ from its row: how long, and with which random numbers."""


def rows_of(prefix: str) -> list[tuple[str, BaseRecipe]]:
    """Names and recipes of a table's rows, architecture by architecture."""
    return [(name, recipe) for recipes in PACKAGES.values() for name, recipe in recipes.items()
            if name.partition("_")[0] == prefix and not name.startswith(SMALL)]  # fmt: skip


def matches(run: dict[str, Any], name: str, recipe: BaseRecipe) -> bool:
    """Whether a run is of this row: the same recipe and settings. Its length may differ, and is told."""
    settings = json.loads(json.dumps(recipe.settings()))
    defaults = json.loads(json.dumps(type(recipe)(model="").settings()))  # of what a run does not say
    same = (run["settings"].get(key, defaults[key]) == settings[key] for key in settings if key not in LENGTH)
    return run["recipe"] == name and all(same)


def longest(runs: list[dict[str, Any]], name: str, recipe: BaseRecipe) -> list[dict[str, Any]]:
    """The runs of a row; of several lengths the longest, as a mean over lengths would say nothing. None that was too
    short to be compared."""
    found = [run for run in runs if matches(run, name, recipe) and run["epochs"] >= min(LEAST, recipe.epochs)]
    return [run for run in found if run["epochs"] == max(other["epochs"] for other in found)]


def classification(title: str, prefix: str, runs: list[dict[str, Any]]) -> list[str]:
    table = [paper_row(name, recipe, longest(runs, name, recipe)) for name, recipe in rows_of(prefix)]
    return ["", f"## {title}", "", *(CIFAR if prefix == "cifar10" else []), format_table(table)]


def paper_row(name: str, recipe: BaseRecipe, runs: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"row": name, "model": recipe.model}
    for metric in ("top1", "c_cons", "s_cons"):
        off = [run["canonical_off"][metric] for run in runs if metric == "c_cons" and "canonical_off" in run]
        ours = mean([run[metric] for run in runs if metric in run])
        row |= {f"{metric} paper": recipe.target.get(metric, "-"),
                f"{metric} ours": f"{ours} / {mean(off)}" if off else ours}  # fmt: skip
    return row | {"epochs": length(runs[0]) if runs else None, "seeds": len(runs) or None}


def ablation_row(name: str, recipe: BaseRecipe, folder: Path) -> dict[str, Any]:
    """What the log of a run measured, epoch by epoch, and the paper after 100."""
    log = folder / f"swin_cifar10_30ep_{name.removeprefix('cifar10_')}.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    found = {line["epoch"]: f"{line['top1']:.2f}, {line['c_cons']:.2f}" for line in lines if "top1" in line}
    paper = f"{recipe.target['top1']:.2f}, {recipe.target['c_cons']:.2f}"
    return {"row": name, "10": found.get(10), "20": found.get(20), "30": found.get(30), "paper, 100": paper}


def length(run: dict[str, Any]) -> str:
    """Epochs of a run, of those that its schedule has, where it was measured before its end."""
    whole = run["settings"]["epochs"]
    return str(whole) if run["epochs"] == whole else f"{run['epochs']} of {whole}"


def mean(values: list[float]) -> str | None:
    """With the deviation, where there are several."""
    if not values:
        return None
    several = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{several}"


def other_row(run: dict[str, Any]) -> dict[str, Any]:
    settings = run["settings"]
    arguments = ", ".join(f"{key}={value}" for key, value in settings["model_args"].items()) or "-"
    measured = {key: run.get(key) for key in ("top1", "c_cons", "s_cons")}
    return {"model": run["model"], "arguments": arguments, **measured,
            "epochs": run["epochs"], "batch": settings["batch_size"],
            "lr": f"{settings['lr'] * settings['batch_size'] / (settings['lr_batch'] or settings['batch_size']):.2g}",
            "mixup": settings.get("mixup", 0.0), "commit": run.get("commit", "-"),
            "note": run.get("note", "-")}  # fmt: skip


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
    shiftvit.run(main)
