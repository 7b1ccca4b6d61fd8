"""Write RESULTS.md from the JSON of runs that happened, paper beside ours; ``--check`` fails if it is old."""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shiftvit
from common.evaluation.battery import AVERAGED, metrics_of
from common.evaluation.plots import plot_pairs, read_log
from common.evaluation.tables import format_table, precision_name
from common.publishing.paper import ERASED, FLIPPED, PRETRAINED, SENSITIVITY
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
PAIR = ("cifar10_default", "cifar10_ours")
PEERS = ("cifar10_canonical", "cifar10_augmented", "cifar10_antialiased")
TITLES = {"top-1": "top1", "C-Cons": "c_cons", "S-Cons": "s_cons"}
SCENES = {name: recipe for name, recipe in segmentation.RECIPES.items() if recipe.target}
FIGURE = "cifar10.png"
STUDY = {"default": "Swin", "augmented": "Swin, trained on circular shifts", "antialiased": "Swin, blurred at strides",
         "averaged_4": "Swin, averaged over 4 shifts", "averaged_16": "Swin, averaged over 16 shifts",
         "canonical": "canonical anchor alone", "ours": "A-Swin, our score",
         "paper": "A-Swin, the paper's score", "modules": "A-Swin, the paper's score, canonical anchor off",
         "no_token": "- without A-token", "no_window": "- without A-WSA", "no_merge": "- without A-PMerge"}  # fmt: skip
"""Rows of the study on digits: recipes ``digits_*`` of Swin, and ``evaluate.py --average_shifts``."""
DIGITS = ("model", "top1", "c_cons", "s_cons", "epochs", "parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing: fail if RESULTS.md is old")
    args = parser.parse_args()
    folder = ROOT / "results"
    text = render(folder)
    target = ROOT / "RESULTS.md"
    if args.check and target.read_text(encoding="utf-8") != text:
        raise SystemExit("RESULTS.md is out of date: run python scripts/results.py")
    target.write_text(text, encoding="utf-8")
    if not args.check:
        models = {name: tuple(recipes[row].model for row in PAIR) for name, recipes in PACKAGES.items()}
        pairs = {models[name]: [logs[row] for row in PAIR] for name, logs in logs_of_pairs(folder).items()}
        plot_pairs(pairs, TITLES, folder / FIGURE)


def load(folder: Path, names: str) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(names))]


def render(folder: Path) -> str:
    runs = [run for data in TABLES.values() for run in load(folder, f"*_{data}_*.json")]
    scenes = load(folder, "segmentation_*.json")
    digits = [run for run in load(folder, "*_digits*.json") if run not in scenes]
    in_rows = [run for prefix in TABLES.values() for row in rows_of(prefix) for run in longest(runs, *row)]
    exact = [row for rows in load(folder, "exactness_*.json") for row in rows]
    return "\n".join([
        "# Results", "",
        "`python scripts/results.py` makes this page from the JSON of runs in `results/`. Measures are in percent.",
        *(line for title, prefix in TABLES.items() for line in classification(title, prefix, runs)),
        "", f"![Top-1, C-Cons and S-Cons by epoch, default and adaptive](results/{FIGURE})",
        "", "### When adaptive models catch up", "",
        "Points of top-1 by which models lead their default after each fifth of the schedule. Models that give one",
        "label at every place learn more slowly at first, adaptive or not: perhaps as objects of CIFAR-10 are centred,",
        "which only the default model can exploit. A-SwinV2-T was still behind at the end. Small models take longer:",
        "`a_swin_mini` is 3.0 points behind `swin_mini` after 72 epochs, level in a run of 400 (epoch 200: 88.05 and",
        "87.88, 360: 88.41, 88.43). Epochs of warm-up: Swin-T's pair 5.3, others 6.7, CvT-13 1.7, MViTv2-T 23.3.", "",
        format_table([row for pair in logs_of_pairs(folder).items() for row in lead_rows(*pair)]),
        "", "## A trained model made adaptive", "",
        "CvT-13 on CIFAR-10 (tab. supp_pretrained): the default model of the row above, made adaptive, then trained on",
        "for 0, 10 and 20 epochs with our score; A-CvT-13 from scratch. Top-1, C-Cons.", "",
        format_table(pretrained_rows(runs, folder)),
        "", "## Other shifts, other images", "",
        "What `scripts/battery.py` measures of a model trained on CIFAR-10 (tab. supp_sensitivity, supp_ood_patches,",
        "supp_ood_flips, fig. rep_stability). Canonical anchor on / off, or on alone. Lengths are shares of the side.",
        "The paper has two values for the C-Cons of its default models under shifts of any length, in tab. class_cifar",
        "and in tab. supp_sensitivity: Swin-T 83.30 and 88.13, SwinV2-T 89.16 and 88.75, CvT-13 75.80 and 86.84,",
        "MViTv2-T 86.55 and 90.22. It does not say why. Shifts by whole pixels of CIFAR-10, 8 px after resizing to",
        "256, raise that of our CvT-13 from 66 to 79.",
        *batteries(runs),
        "", "## Ablation", "",
        "The paper's modules on Swin-T, CIFAR-10, 30 epochs, canonical anchor off: top-1 and C-Cons by epoch, as the",
        "logs in `results/` have them. Older code produced the last two runs.", "",
        format_table([ablation_row(name, swin.RECIPES[name], folder) for name in ABLATION]),
        "", "## Other runs", "",
        "On CIFAR-10: runs with other settings than a row (`docs/scores.md`), shorter runs, runs of older code. Mini",
        "models see images at 32 px. Those measured in float32 come with the code, all but `mvitv2_mini`.", "",
        format_table([other_row(run) for run in runs if run not in in_rows]),
        "", "## Digits", "",
        "Micro models, 360 held-out digits, trained on one CPU thread. Adaptive models but A-Swin have sketch=16, the",
        "default at that time. Default models pad with zeros, adaptive ones circularly.", "",
        format_table([{key: run.get(key) for key in DIGITS} for run in digits]),
        "", "### Modules and peers", "",
        "Swin micro, 45 epochs, mean and deviation over seeds: the paper's ablation, and other ways to the same end.",
        "C-Cons with the canonical anchor on / off, or as the row says. A row takes three minutes of a core per seed:",
        '`python scripts/side_by_side.py "swin/digits_modules --seed 0" swin/digits_ours ... --data digits --jobs 2`.',
        "Without A-PMerge nothing is lost at this size: windows of 4 tokens at their best offset leave a",
        "merging only one of its 2 phases. Digits are centred: default models can learn that, adaptive ones cannot.",
        "",
        format_table(study_rows(folder)),
        "", "## Segmentation", "",
        "UperNet from scratch: held-out digit scenes, CamVid's 233 test scenes; one recipe for all models of a set and",
        "size (tiny models on one H200, 450 steps of 16; micro models on a CPU, 700 steps of 8, digits 1,000).",
        "Default models pad with zeros on digits, circularly on CamVid.",
        "",
        format_table([scene_row(run) for run in scenes]), "",
        "The paper's rows on ADE20K, 160,000 steps; consistency is mASCC under circular, mASSC under standard shifts.",
        "",
        format_table([ade20k_row(name, recipe, scenes) for name, recipe in SCENES.items()]),
        "", "## Exactness", "",
        "Images whose logits are bit-identical, and whose label is the same, at their place and at two random shifts",
        "(`scripts/exactness.py`, random weights for full-size models).", "",
        format_table(exact), "",
        "The same of models trained on CIFAR-10, the canonical anchor on and off.", "",
        format_table([{"row": run["recipe"], "model": run["model"], "device": run["device"], **row} for run in in_rows
                      for row in run.get("bits", ())]), "",
    ])  # fmt: skip


CIFAR = [
    "The paper has five seeds of 100 epochs. The last columns show epochs and number of our runs, of seed 0, in bf16,",
    "at the paper's batch of 96. Our CIFAR-10 is stored as JPEG (quality 75, colours at half the resolution); we did",
    "not measure what that costs. C-Cons is given with the canonical anchor on / off, or only with it on; for",
    "`cifar10_modules` and `cifar10_no_*` it is off. `cifar10` has the paper's score (`energy`, all channels),",
    "`cifar10_ours` our default (`docs/scores.md`). `cifar10_canonical` has the canonical anchor and none of the",
    "paper's modules. Standard shifts reach an eighth of the side (the paper does not say), zeros fill the border. The",
    "paper's S-Cons come from separate trainings (recipes name their top-1); ours are of the same model. **Our default",
    "models are far less consistent than the paper's**, so gaps are not comparable. How far shifts go matters: C-Cons",
    "of `mvitv2_mini` is 56.82 for ours, of any length, and 91.04 for -4 to 3 of its 32 px, of `swin_mini` 72.18 and",
    "90.42 (10,000 images). Earlier code of the authors draws -32 to 31 of 224 px; the paper does not say, and tab.",
    "supp_sensitivity has 87 to 92 for shifts of any length. Also suspect: it names RandAugment for ImageNet alone",
    "(a `swin_mini` has 81 % S-Cons with it, 60 without); its table resizes to 256 and crops 224, its text to 224.", "",
]  # fmt: skip
STRENGTHS = {"shift": 0, "mixup": 0, "cutmix": 0, "mixup_prob": 1, "erase": 0, "rand_augment": ""}  # if not that
LEAST = 20  # epochs of a run that stands in a row
LENGTH = {"data", "epochs", "warmup_epochs", "seed", "metrics"}
"""Settings in which a run may differ from its row: how long, and with which random numbers."""


def rows_of(prefix: str) -> list[tuple[str, BaseRecipe]]:
    """Names and recipes of a table's rows, architecture by architecture."""
    return [(name, recipe) for recipes in PACKAGES.values() for name, recipe in recipes.items()
            if name.partition("_")[0] == prefix and not name.startswith(SMALL)]  # fmt: skip


def matches(run: dict[str, Any], name: str, recipe: BaseRecipe) -> bool:
    """Whether a run is of this row: the same recipe and settings, all images. Its length may differ, and is told."""
    settings = json.loads(json.dumps(recipe.settings()))
    defaults = json.loads(json.dumps(type(recipe)(model="").settings()))  # of what a run does not say
    same = (run["settings"].get(key, defaults[key]) == settings[key] for key in settings if key not in LENGTH)
    return run["recipe"] == name and not run.get("limit") and all(same)


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
    for metric in TITLES.values():
        off = [run["canonical_off"][metric] for run in runs if metric == "c_cons" and "canonical_off" in run]
        ours = mean([run[metric] for run in runs if metric in run])
        row |= {f"{metric} paper": recipe.target.get(metric, "-"),
                f"{metric} ours": f"{ours} / {mean(off)}" if off else ours}  # fmt: skip
    return row | {"epochs": length(runs[0]) if runs else None, "runs": len(runs) or None}


def pretrained_rows(runs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    untrained = folder / "cvt_adapted_untrained.json"
    names = ("cifar10_default", None, "cifar10_adapted_ours_10", "cifar10_adapted_ours", "cifar10_ours")
    rows = []
    for (title, paper), name in zip(PRETRAINED.items(), names, strict=True):
        if name:
            found = longest(runs, name, cvt.RECIPES[name])
            found = [run for run in found if "bits" in run] or found  # the one whose weights were adapted
        else:
            found = [json.loads(untrained.read_text())] if untrained.exists() else []
        values = [mean([run[metric] for run in found]) for metric in ("top1", "c_cons")]
        rows.append({"model": title, "paper": "{:.2f}, {:.2f}".format(*paper),
                     "ours": ", ".join(filter(None, values)) or None})  # fmt: skip
    return rows


def batteries(runs: list[dict[str, Any]]) -> Iterator[str]:
    """A table for each architecture: its pair, run or not, and peers that were measured."""
    for recipes in PACKAGES.values():
        group = []
        for name in (row for row in (*PAIR, *PEERS) if row in recipes):
            stand_in = {"model": recipes[name].model, "recipe": name, "config": {"img_size": 256}, "epochs": None}
            found = [run for run in longest(runs, name, recipes[name]) if "bits" in run]
            found = [run for run in found if name in PAIR or {*run} & {*measures(run).values()}]
            group += found[-1:] or ([stand_in] if name in PAIR else [])
        yield from ("", format_table(battery_rows(group)))


def battery_rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per measure, a column per model and, where the paper has numbers of it, one of these."""
    columns: dict[str, dict[str, Any]] = {}
    for run in runs:
        name, paper, peer = run["model"], dict[str, float](), run["recipe"] not in PAIR
        target = run["recipe"] if peer else name
        for part, known in ((" shifts up to ", SENSITIVITY), (" flipped", FLIPPED), (" erased", ERASED)):
            if target in known:
                paper |= zip([title for title in measures(run) if part in title], known[target], strict=True)
        skipped = "averaged" if name.startswith("a_") else "nothing"  # an adaptive model has no use for it
        values = {title: shown(run, metric) for title, metric in measures(run).items() if skipped not in metric}
        for stage, row in enumerate(run.get("token_errors", []), 1):
            values[f"mean token error after stage {stage}, one pixel on"] = f"{100 * row['mean']:.2g}"
        label = f"{name}, {run['recipe']}" if peer else name
        label += f", {run['epochs']} epochs" if run["epochs"] else ""
        columns |= {label: values, **({f"{target} paper": paper} if paper else {})}
    titles = dict.fromkeys(title for values in columns.values() for title in values)
    return [{"measure": title, **{name: values.get(title, "-") for name, values in columns.items()}}
            for title in titles]  # fmt: skip


def measures(run: dict[str, Any]) -> dict[str, str]:
    """Metrics of the battery by titles that do not depend on the size of images."""
    size = run["config"]["img_size"]
    side = size if isinstance(size, int) else min(size)
    shifts = [*(f"C-Cons, shifts up to {share}" for share in ("1/4", "1/2", "3/4", "1")), "C-Cons, shifts within 1/7"]
    averaged = {f"{title}, averaged over {n**2} shifts": f"{metric}:averaged@{n**2}" for n in AVERAGED
                for title, metric in TITLES.items()}  # fmt: skip
    kinds = [f"{kind}, a patch of up to {share} erased" for share in ("1/8", "3/16", "1/4", "5/16")
             for kind in ("top-1", "C-Cons")]  # fmt: skip
    return {**dict(zip(shifts, metrics_of("magnitudes", side), strict=True)),
            "C-Cons, multiples of 8 px": f"c_cons@{side - 1}/8",
            "label kept at all shifts below 8 px": "c_cons_worst@8",
            "top-1, flipped": "top1:flipped", "C-Cons, flipped": "c_cons:flipped",
            **dict(zip(kinds, metrics_of("erased", side), strict=True)),
            "top-1, half a pixel on": "top1:half", "label kept half a pixel on": "kept:half", **averaged}  # fmt: skip


def shown(run: dict[str, Any], metric: str) -> str:
    found = [f"{part[metric]:.2f}" for part in (run, run.get("canonical_off", {})) if metric in part]
    return " / ".join(found) or "not run"


def logs_of_pairs(folder: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Of each architecture that was trained in both forms: what the longest run of each row measured on its way."""
    pairs = {}
    for name, recipes in PACKAGES.items():
        files = {path: json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}_cifar10_*ep_*.json"))}
        runs = {row: longest(list(files.values()), row, recipes[row]) for row in (*PAIR, *PEERS) if row in recipes}
        logs = {row: [path.with_suffix(".jsonl") for path, run in files.items() if run in found]
                for row, found in runs.items()}  # fmt: skip
        read = {row: [line for line in read_log(found[0]) if "top1" in line] for row, found in logs.items() if found}
        pairs |= {name: read} if {*PAIR} <= read.keys() else {}
    return pairs


def lead_rows(name: str, logs: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Points by which the other rows lead the default one, where they were trained for as long."""
    default, *others = ({line["epoch"]: line["top1"] for line in lines} for lines in logs.values())
    whole = max(default)
    for row, other in zip([*logs][1:], others, strict=True):
        lead = {epoch: f"{other[epoch] - top1:+.2f}" for epoch, top1 in default.items() if epoch in other}
        if max(other) == whole:
            yield {"row": row, "model": PACKAGES[name][row].model, "epochs": str(whole),
                   **{f"{20 * part} %": lead.get(whole * part // 5) for part in range(1, 6)}}  # fmt: skip


def ablation_row(name: str, recipe: BaseRecipe, folder: Path) -> dict[str, Any]:
    """What the log of a run measured, epoch by epoch, and the paper after 100."""
    log = folder / f"swin_cifar10_30ep_{name.removeprefix('cifar10_')}.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    found = {line["epoch"]: f"{line['top1']:.2f}, {line['c_cons']:.2f}" for line in lines if "top1" in line}
    paper = f"{recipe.target['top1']:.2f}, {recipe.target['c_cons']:.2f}"
    return {"row": name, "10": found.get(10), "20": found.get(20), "30": found.get(30), "paper, 100": paper}


def study_rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "modules_and_peers.json"
    runs, rows = json.loads(path.read_text())["runs"] if path.exists() else [], []
    for name, title in STUDY.items():
        found = [run for run in runs if run["row"] == name]
        top1, c_cons, off, s_cons = (mean([run[metric] for run in found if metric in run])
                                     for metric in ("top1", "c_cons", "c_cons_off", "s_cons"))  # fmt: skip
        rows.append({"model": title, "top1": top1, "c_cons": f"{c_cons} / {off}" if off else c_cons, "s_cons": s_cons,
                     "seeds": len(found) or None})  # fmt: skip
    return rows


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
    return {"model": run["model"], "arguments": arguments, **{key: run.get(key) for key in TITLES.values()},
            "epochs": length(run), "batch": settings["batch_size"],
            "lr": f"{settings['lr'] * settings['batch_size'] / (settings['lr_batch'] or settings['batch_size']):.2g}",
            "augmentation": ", ".join(f"{key} {settings[key]}" for key, none in STRENGTHS.items()
                                      if settings.get(key, none) != none) or "flip",
            "commit": run.get("commit", "-"), "note": run.get("note", "-")}  # fmt: skip


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
    keys = ("precision", "miou", "mascc", "massc", "images", "epochs")
    found = {key: run.get(key, "-") for key in keys}
    return row | found | {"precision": precision_name(found["precision"])}


if __name__ == "__main__":
    shiftvit.run(main)
