"""Model cards and manifests, written from the JSON of runs: no measured number in them stands elsewhere.

``python -m common.cards`` writes the cards and manifests of all ``checkpoints/`` folders anew; ``--check`` fails if one
of them is old.
"""

import argparse
import hashlib
import importlib
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ..data.preprocess import PREPROCESSOR_NAME
from ..evaluation.tables import format_table
from ..models.hub import CONFIG_NAME, WEIGHTS_NAME, HubModel
from ..models.registry import PACKAGES, from_pretrained
from ..training.recipe import BaseRecipe

__all__ = ["CARD_NAME", "FILES", "RESULTS_NAME", "command", "digests", "entry", "manifest", "model_card",
           "public_results", "read_results"]  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
CARD_NAME = "README.md"
RESULTS_NAME = "results.json"
FILES = (CONFIG_NAME, WEIGHTS_NAME, PREPROCESSOR_NAME)
LIBRARY = "shift-equivariant-vits"

ARCHITECTURES = {"swin": "Swin Transformer", "swinv2": "Swin Transformer V2", "cvt": "CvT", "mvitv2": "MViTv2",
                 "upernet": "UperNet"}  # fmt: skip

DIGITS = "scikit-learn's handwritten digits"
DATA = {
    "digits": (None, DIGITS, "test"),
    "cifar10": ("uoft-cs/cifar10", "CIFAR-10", "test"),
    "cifar100": ("uoft-cs/cifar100", "CIFAR-100", "test"),
    "imagenet-1k": ("ILSVRC/imagenet-1k", "ImageNet-1k", "validation"),
    "scene_parse_150": ("merve/scene_parse_150", "ADE20K, 150 classes", "validation"),
    "camvid": (None, "CamVid, 11 classes", "test"),
}
"""By the last part of a data set's path or id: its id on the Hub, its name, the split that is measured on."""

MEASURES = {
    "top1": ("top-1", "accuracy", "images whose highest logit is the label"),
    "c_cons": ("C-Cons", "c_cons", "images that get one label under two random circular shifts"),
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

CITATION = """\
@inproceedings{rojasgomez2024making,
  title     = {Making Vision Transformers Truly Shift-Equivariant},
  author    = {Rojas-Gomez, Renan A. and Lim, Teck-Yian and Do, Minh N. and Yeh, Raymond A.},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  year      = {2024}
}"""


# results


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
    """Results as they may be shown: data sets by their Hub id or name, not by a path on somebody's disk."""
    settings = dict(results["settings"])
    settings["data"] = _data(results)[0] or Path(settings["data"]).name
    for key in ("pretrained", "backbone"):
        source = settings.get(key)
        if source and (Path(source).is_absolute() or source.startswith((".", "~"))):
            settings[key] = Path(source).name
    return {**results, "settings": settings}


def measured(results: Mapping[str, Any]) -> dict[str, float]:
    """The metrics among results."""
    return {key: float(results[key]) for key in results if key.partition("@")[0] in MEASURES}


def _data(results: Mapping[str, Any]) -> tuple[str | None, str, str]:
    """The row of ``DATA`` of a run's data set; of one that is not there, its name."""
    name = Path(results["settings"]["data"].partition("@")[0]).name
    identifier, data, split = DATA.get(name.lower(), (None, name, "test"))
    return identifier, f"scenes of {data}" if data == DIGITS and _is_segmenter(results) else data, split


def _is_segmenter(results: Mapping[str, Any]) -> bool:
    return _package(results["model"]) == "segmentation"


def _package(model: str) -> str:
    """The folder of a model by its name: ``a_swin_tiny`` is in swin, ``upernet_a_swin_tiny`` in segmentation."""
    return PACKAGES[model.removeprefix("a_").split("_")[0]]


def _recipes(package: str) -> Mapping[str, BaseRecipe]:
    return importlib.import_module(f"{package}.recipes").RECIPES


def _changes(results: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that are not its recipe's; data that only lie elsewhere are the same."""
    recipe = _recipes(_package(results["model"])).get(results["recipe"])
    settings = results["settings"]
    if recipe is None:
        return dict(settings)
    stated = json.loads(json.dumps(recipe.settings()))
    changes = {key: value for key, value in settings.items() if value != stated.get(key)}
    if "data" in changes and _data(results) == _data({**results, "settings": stated}):
        del changes["data"]
    return changes


def command(results: Mapping[str, Any]) -> str:
    """The command line that trains a run again: its recipe, and what was changed of it."""
    words = [f"accelerate launch {_package(results['model'])}/train.py"]
    words += [] if results["recipe"] == "digits" else [f"--recipe {results['recipe']}"]
    shown = public_results(results)["settings"]
    for key in _changes(results):
        value = shown[key]
        if isinstance(value, bool):
            words.append(f"--{key}" if value else f"--no-{key}")
        elif value is not None and key != "model_args":
            words.append(f"--{key} {' '.join(map(str, value)) if isinstance(value, list) else value}")
    if results.get("precision", "no") != "no":
        words.append(f"--mixed_precision {results['precision']}")
    return " ".join(words)


# cards


def model_card(model: HubModel, results: Mapping[str, Any], *, source: str, exactness: Sequence[Mapping[str, Any]] = (),
               checks: Sequence[Mapping[str, Any]] = ()) -> str:  # fmt: skip
    """README.md of a model's repository: metadata for the Hub, use, metrics beside the paper's, training, limits.

    ``source`` is the Hub id or directory that the card tells people to load; ``exactness`` holds rows of
    ``scripts/exactness.py``, ``checks`` those of ``scripts/publish.py``.
    """
    name, (_, data, split), dense = results["model"], _data(results), _is_segmenter(results)
    kind = "adaptive: exactly shift-equivariant" if model.adaptive else "default: not shift-equivariant"
    what = "A label per pixel" if dense else "A label per image"
    sections = [
        f"# {name}",
        _wrap(
            f"{ARCHITECTURES[model.model_type]}, {kind}. {what}, {model.num_classes} classes, "
            f"{results['parameters']:,} parameters, trained on {data}. A model of the reference implementation of "
            "*Making Vision Transformers Truly Shift-Equivariant* (CVPR 2024)."
        ),
        "## Use",
        _fence("python", snippet(model, source, results["settings"]["data"])),
        f"`common` is part of the package `{LIBRARY}`"
        + ("; the path is that from the root of its repository." if (ROOT / source).is_dir() else "."),
        "## Results",
        _metrics(results, split),
    ]
    if exactness:
        columns = ["precision", "device", "images", "bit-identical", "same label"]
        sections += [
            _wrap(
                "Images whose logits are bit-identical, and whose label is the same, at their place and at two "
                "random circular shifts (`scripts/exactness.py`):"
            ),
            format_table(exactness, columns),
        ]
    if checks:
        sections += ["Measured again before publishing (`scripts/publish.py`):", format_table(checks)]
    sections += ["## Training", _training(results), "## Limits", "\n".join(map(_wrap, _limits(model, results)))]
    sections += ["## Citation", _fence("bibtex", CITATION), "MIT licence."]
    metadata = card_data(model, results).to_yaml()
    return f"---\n{metadata}\n---\n\n" + "\n\n".join(sections) + "\n"


def card_data(model: HubModel, results: Mapping[str, Any]) -> ModelCardData:
    """The metadata of a card. Metrics that the Hub has no identifier for go by their own names."""
    identifier, data, split = _data(results)
    task = "image-segmentation" if _is_segmenter(results) else "image-classification"
    values = measured(results)
    return ModelCardData(
        license="mit",
        library_name=LIBRARY,
        pipeline_tag=task,
        tags=[
            "vision-transformer",
            "shift-equivariance",
            model.model_type,
            "adaptive" if model.adaptive else "default",
        ],
        datasets=[identifier] if identifier else None,
        metrics=[MEASURES[metric.partition("@")[0]][1] for metric in values],
        model_name=results["model"],
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type=identifier or data.replace("'s ", "-").replace(" ", "-").lower(),
                dataset_name=data,
                dataset_split=split,
                metric_type=MEASURES[metric.partition("@")[0]][1],
                metric_name=_label(metric),
                metric_value=round(value, 2),
            )
            for metric, value in values.items()
        ],
    )


def snippet(model: Any, source: str, data: str) -> str:
    """Python that loads the model, classifies images and moves them; it runs as it is."""
    dense = model.model_type == "upernet"
    module, kind = ("segmentation.preprocess", "ScenePreprocess") if dense else ("common.data", "Preprocess")
    load, where = ("load_scenes", "segmentation.data") if dense else ("load_data", "common.data")
    names = f"PREPROCESSOR_NAME, {kind}" if not dense else "PREPROCESSOR_NAME"
    imports = ["from common import from_pretrained", "from common.hub import resolve_file"]
    imports += [f"from common.preprocess import {names}"] + ([f"from {module} import {kind}"] if dense else [])
    images = "torch.randint(256, (2, 3, 480, 640), dtype=torch.uint8)  # yours: uint8, any size"
    if data == "digits":
        imports.append(f"from {where} import {load}")
        images = f'{load}("digits")[1].images[:4]  # uint8, any size'
    lines = [
        "import torch",
        *sorted(imports),
        "",
        f'source = "{source}"',
        "model = from_pretrained(source)",
        f"preprocess = {kind}.load(resolve_file(source, PREPROCESSOR_NAME))",
        f"images = {images}",
        "x = preprocess.evaluate(images)  # resized and normalised",
        "logits = model(x)  # " + ("images, classes, height, width" if dense else "images, classes"),
        "labels = logits.argmax(1)",
    ]
    if model.adaptive:
        moved = "logits.roll((5, -3), (2, 3))" if dense else "logits"
        lines += [
            "",
            "moved = x.roll((5, -3), (2, 3))  # any circular shift",
            f"assert torch.equal(model(moved), {moved})"
            if model.canonical
            else f"torch.testing.assert_close(model(moved), {moved})",
        ]
    else:
        lines += ["", "adaptive = from_pretrained(source, adaptive=True)  # the same weights, with anchors"]
    return "\n".join(lines)


def _metrics(results: Mapping[str, Any], split: str) -> str:
    recipe = _recipes(_package(results["model"])).get(results["recipe"])
    paper = dict(recipe.target) if recipe is not None and recipe.model == results["model"] else {}
    rows = [
        {"metric": _label(metric), "ours": value, "paper": paper.get(metric, "-"), "percent of": _meaning(metric)}
        for metric, value in measured(results).items()
    ]
    text = [
        format_table(rows),
        "",
        f"{results['images']:,} images of the {split} split, seed {results.get('seed', 0)}.",
    ]
    if recipe is None or not paper:
        text[-1] += " The paper has no such row."
    elif changes := [key for key in ("epochs", "steps", "batch_size") if key in _changes(results)]:
        settings = results["settings"]
        said = ", ".join(
            f"{key.replace('_', ' ')} {settings[key]:,} instead of {getattr(recipe, key):,}" for key in changes
        )
        text[-1] += f" This run is not the paper's: {said}."
    return "\n".join(text)


def _training(results: Mapping[str, Any]) -> str:
    settings = public_results(results)["settings"]
    rows = [{"setting": "recipe", "value": f"`{results['recipe']}` of `{_package(results['model'])}/recipes.py`"}]
    for key in ("data", "epochs", "steps", "batch_size", "lr", "weight_decay", "label_smoothing", "seed"):
        if settings.get(key) or key == "seed":
            rows.append({"setting": key.replace("_", " "), "value": str(settings[key])})
    for key in ("precision", "processes", "device", "train_seconds"):
        if key in results:
            value = "float32" if results[key] == "no" else str(results[key])
            rows.append({"setting": key.replace("_", " "), "value": value})
    return f"{_fence('sh', command(results))}\n\n{format_table(rows)}"


def _limits(model: Any, results: Mapping[str, Any]) -> list[str]:
    height, width = model.multiple
    side = f"multiples of {height}" if height == width else f"multiples of {height} (height) and {width} (width)"
    values = measured(results)
    circular, standard = (next((m for m in names if m in values), None) for names in
                          (("c_cons", "mascc"), ("s_cons", "massc")))  # fmt: skip
    if model.adaptive:
        lost = f" ({_label(standard)} {values[standard]:.2f} %)" if standard else ""
        said = [
            "- Exactness holds for circular shifts: what leaves the image on one side comes in on the other. Under "
            f"standard shifts content is lost at the border, and labels may change{lost}.",
            "- Bits are equal at equal batch size, on one device, in one precision."
            if model.canonical
            else "- Outputs are equal up to rounding; built with `canonical=True` they are equal to the bit.",
        ]
    else:
        kept = f": {_label(circular)} is {values[circular]:.2f} %" if circular else ""
        said = [f"- Labels change when the image moves{kept}. `adaptive=True` gives the adaptive model with the same "
                "weights; its accuracy is not measured here."]  # fmt: skip
    try:
        model.check_size((2 * model.img_size[0], 2 * model.img_size[1]))
        said.append(f"- Sides of images are {side} px; other sizes are an error that names the nearest valid ones.")
    except ValueError:
        said.append(f"- Images are {model.img_size[0]} x {model.img_size[1]} px, no other size: its tables of relative "
                    "positions have that size.")  # fmt: skip
    if results["settings"]["data"] == "digits":
        said.append("- Digits are a toy: this model is for tests, demonstrations and learning.")
    return said


def _label(metric: str) -> str:
    name, _, reach = metric.partition("@")
    return MEASURES[name][0] + (f" ({reach} px)" if reach else "")


def _meaning(metric: str) -> str:
    return MEASURES[metric.partition("@")[0]][2]


def _wrap(text: str) -> str:
    return textwrap.fill(text, 120, subsequent_indent="  " if text.startswith("- ") else "", break_on_hyphens=False)


def _fence(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


# manifests


def digests(directory: Path) -> dict[str, str]:
    """sha256 of the files that make a model."""
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in FILES}


def entry(results: Mapping[str, Any], /, **facts: Any) -> dict[str, Any]:
    """What a manifest says about a model that was trained. ``facts``: name, status, hub_id, revision, sha256, ..."""
    recipe = _recipes(_package(results["model"])).get(results["recipe"])
    row = bool(recipe is not None and recipe.target and recipe.model == results["model"])
    whole = row and not _changes(results)
    name = results["model"] if results["recipe"] == "digits" else f"{results['model']}_{results['recipe']}"
    name += "" if whole or results["recipe"] == "digits" else f"_{results['epochs']}ep"
    return {
        "name": name,
        "model": results["model"],
        "data": public_results(results)["settings"]["data"],
        "recipe": results["recipe"],
        "command": command(results),
        "status": "trained",
        "published": False,
        "hub_id": None,
        "revision": None,
        "path": None,
        "sha256": None,
        "parameters": results["parameters"],
        "metrics": {metric: round(value, 2) for metric, value in measured(results).items()},
        "paper": dict(recipe.target) if recipe is not None and row else None,
        "results": None,
    } | facts


def _untrained(package: str, name: str, recipe: BaseRecipe) -> dict[str, Any]:
    """A row of the paper that nobody has trained here yet."""
    facts: dict[str, Any] = dict.fromkeys(("hub_id", "revision", "path", "sha256", "parameters", "metrics"))
    return {"name": f"{recipe.model}_{name}", "model": recipe.model, "data": recipe.data, "recipe": name,
            "command": f"accelerate launch {package}/reproduce.py --rows {name}", "status": "not trained",
            "published": False, **facts, "paper": dict(recipe.target), "results": None}  # fmt: skip


def manifest(package: str, old: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All models of a folder: those it holds, those that were trained, the paper's rows that were not.

    What ``old`` says about published models stays.
    """
    runs = [(path, run) for path, run in _runs() if _package(run["model"]) == package]
    models = []
    for directory in _checkpoints(package):
        path, run = _run_of(directory, runs)
        models.append(entry(run, status="embedded", path=directory.relative_to(ROOT).as_posix(),
                            sha256=digests(directory), results=path.relative_to(ROOT).as_posix()))  # fmt: skip
    embedded = {model["name"] for model in models}
    trained = [entry(run, results=path.relative_to(ROOT).as_posix()) for path, run in runs]
    models += [model for model in trained if model["name"] not in embedded]
    known = {model["name"] for model in models}
    models += [_untrained(package, name, recipe) for name, recipe in _recipes(package).items()
               if recipe.target and f"{recipe.model}_{name}" not in known]  # fmt: skip
    published = {model["name"]: model for model in (old or {"models": []})["models"] if model["published"]}
    models = [published.pop(model["name"], model) for model in models]
    return {"folder": package, "models": [*models, *published.values()]}


def _runs() -> list[tuple[Path, dict[str, Any]]]:
    """The training runs among ``results/``."""
    found = ((path, json.loads(path.read_text())) for path in sorted((ROOT / "results").glob("*.json")))
    return [(path, run) for path, run in found if isinstance(run, dict) and "settings" in run and "recipe" in run]


def _run_of(directory: Path, runs: Iterable[tuple[Path, dict[str, Any]]]) -> tuple[Path, dict[str, Any]]:
    """The run that made an embedded checkpoint, by the model's name."""
    for path, run in runs:
        if run["model"] == directory.name and run["recipe"] == "digits":
            return path, run
    raise ValueError(f"no file in results/ tells how {directory.relative_to(ROOT)} was trained: add its results.json")


def _checkpoints(package: str) -> list[Path]:
    return sorted(path.parent for path in (ROOT / package / "checkpoints").glob(f"*/{CONFIG_NAME}"))


def _exactness(source: str) -> list[dict[str, Any]]:
    rows = [row for path in sorted((ROOT / "results").glob("exactness_*.json")) for row in json.loads(path.read_text())]
    return [row for row in rows if row["model"] == source]


def render() -> dict[Path, str]:
    """Text by path: the card of every embedded checkpoint and the manifest of every folder."""
    texts = {}
    runs = _runs()
    for package in PACKAGES.values():
        for directory in _checkpoints(package):
            source = directory.relative_to(ROOT).as_posix()
            texts[directory / CARD_NAME] = model_card(from_pretrained(str(directory)), _run_of(directory, runs)[1],
                                                      source=source, exactness=_exactness(source))  # fmt: skip
        path = ROOT / package / "checkpoints" / "manifest.json"
        old = json.loads(path.read_text()) if path.is_file() else None
        texts[path] = json.dumps(manifest(package, old), indent=2) + "\n"
    return texts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not as it would be")
    args = parser.parse_args(arguments)
    texts = render()
    old = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
    if args.check and old:
        names = ", ".join(path.relative_to(ROOT).as_posix() for path in old)
        raise SystemExit(f"out of date: {names}; run python -m common.cards")
    for path in old:
        path.write_text(texts[path])
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
