"""Model cards, written from the JSON of runs: all measured numbers in them come from there."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ..evaluation.tables import format_table
from ..models.hub import HubModel
from .results import (
    MEASURES,
    changes_of,
    command,
    data_of,
    is_segmenter,
    measured,
    package_of,
    paper_of,
    public_results,
    recipes_of,
)

__all__ = ["CARD_NAME", "card_data", "model_card", "snippet"]

ROOT = Path(__file__).resolve().parents[2]
CARD_NAME = "README.md"
LIBRARY = "shift-equivariant-vits"

ARCHITECTURES = {"swin": "Swin Transformer", "swinv2": "Swin Transformer V2", "cvt": "CvT", "mvitv2": "MViTv2",
                 "upernet": "UperNet"}  # fmt: skip

CITATION = """\
@inproceedings{rojasgomez2024making,
  title     = {Making Vision Transformers Truly Shift-Equivariant},
  author    = {Rojas-Gomez, Renan A. and Lim, Teck-Yian and Do, Minh N. and Yeh, Raymond A.},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  year      = {2024}
}"""


def model_card(model: HubModel, results: Mapping[str, Any], *, source: str, exactness: Sequence[Mapping[str, Any]] = (),
               checks: Sequence[Mapping[str, Any]] = (), revision: str | None = None) -> str:  # fmt: skip
    """README.md of a model's repository: metadata for the Hub, use, metrics beside the paper's, training, limits.

    ``source`` is the Hub id or directory that the card tells people to load, and ``revision`` its branch; ``exactness``
    holds rows of ``scripts/exactness.py``, ``checks`` those of ``scripts/publish.py``.
    """
    name, (_, data, split), dense = results["model"], data_of(results), is_segmenter(results)
    kind = "adaptive: exactly shift-equivariant" if model.adaptive else "default: not shift-equivariant"
    what = "A label per pixel" if dense else "A label per image"
    sections = [
        f"# {name}",
        _wrap(
            f"{ARCHITECTURES[model.model_type]}, {kind}. {what}, {model.num_classes} classes, "
            f"{results['parameters']:,} parameters, trained on {data}. A model of an independent reimplementation "
            "of *Making Vision Transformers Truly Shift-Equivariant* (CVPR 2024)."
        ),
        "## Use",
        _fence("python", snippet(model, source, results["settings"]["data"], revision)),
        f"`common` is part of the package `{LIBRARY}`"
        + ("; the path is that from the root of its repository." if (ROOT / source).is_dir() else "."),
        *_classes(model),
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
    identifier, data, split = data_of(results)
    task = "image-segmentation" if is_segmenter(results) else "image-classification"
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


def snippet(model: Any, source: str, data: str, revision: str | None = None) -> str:
    """Python that loads the model, classifies images and moves them; it runs as it is."""
    branch = f', revision="{revision}"' if revision else ""  # else that of main is loaded, another model or none
    dense = model.model_type == "upernet"
    module, kind = ("segmentation.preprocess", "ScenePreprocess") if dense else ("common.preprocess", "Preprocess")
    load, where = ("load_scenes", "segmentation.data") if dense else ("load_data", "common.data")
    names = f"PREPROCESSOR_NAME, {kind}" if not dense else "PREPROCESSOR_NAME"
    imports = ["from common import from_pretrained", "from common.hub import resolve_file"]
    imports += [f"from common.preprocess import {names}"] + ([f"from {module} import {kind}"] if dense else [])
    digits, shape = f'{load}("digits")[1].images[:4]', "3, 480, 640" if dense else "480, 640, 3"
    images, x = f"torch.randint(256, (2, {shape}), dtype=torch.uint8)", "preprocess.evaluate(images)"
    if data == "digits":
        imports.append(f"from {where} import {load}")
        images = digits if dense else f"{digits}.permute(0, 2, 3, 1)"
    if not dense:  # one by one, as predict.py: large photographs are not resized as a batch is
        images, x = f"{images}.numpy()", "torch.stack([preprocess.image(image) for image in images])"
    lines = [
        "import torch",
        *sorted(imports),
        "",
        f'source = "{source}"',
        f"model = from_pretrained(source{branch})",
        f"preprocess = {kind}.load(resolve_file(source, PREPROCESSOR_NAME{branch}))",
        f"images = {images}  # or yours: uint8, {'(3, h, w)' if dense else '(h, w, 3)'}, any size",
        f"x = {x}  # resized and normalised",
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
        lines += ["", f"adaptive = from_pretrained(source{branch}, adaptive=True)  # the same weights, with anchors"]
    return "\n".join(lines)


def _metrics(results: Mapping[str, Any], split: str) -> str:
    recipe, paper = recipes_of(package_of(results["model"])).get(results["recipe"]), paper_of(results)
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
    else:
        settings, changes = results["settings"], [key for key in changes_of(results) if key not in ("metrics", "seed")]
        changes += ["limit"] if results.get("limit") else []
        said = [f"{key.replace('_', ' ')} {settings[key]:,} instead of {getattr(recipe, key):,}"
                for key in ("epochs", "steps", "batch_size") if key in changes]  # fmt: skip
        others = [key.replace("_", " ") for key in changes if key not in ("epochs", "steps", "batch_size")]
        text[-1] += f" This run is not the paper's: {', '.join(said)}." if said else ""
        text[-1] += f" Not as in the paper's recipe: {', '.join(others)} (see the command below)." if others else ""
    return "\n".join(text)


def _training(results: Mapping[str, Any]) -> str:
    settings = public_results(results)["settings"]
    if results.get("epochs", settings.get("epochs")) != settings.get("epochs"):  # of another moment than the end
        settings["epochs"] = f"{results['epochs']} of {settings['epochs']}, measured before the end of its schedule"
    rows = [{"setting": "recipe", "value": f"`{results['recipe']}` of `{package_of(results['model'])}/recipes.py`"}]
    for key in ("data", "epochs", "steps", "batch_size", "lr", "weight_decay", "label_smoothing", "seed"):
        if settings.get(key) or key == "seed":
            rows.append({"setting": key.replace("_", " "), "value": str(settings[key])})
    for key in ("precision", "processes", "device", "train_seconds", "note"):
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


def _classes(model: HubModel) -> list[str]:
    """The names of the classes, the first twenty of many."""
    names = [f"`{name}`" for name in model.class_names[:20]] + ["..."] * (len(model.class_names) > 20)
    return [_wrap(f"Classes, in the order of the outputs (`model.class_names`): {', '.join(names)}.")] if names else []


def _label(metric: str) -> str:
    name, _, reach = metric.partition("@")
    return MEASURES[name][0] + (f" ({reach} px)" if reach else "")


def _meaning(metric: str) -> str:
    return MEASURES[metric.partition("@")[0]][2]


def _wrap(text: str) -> str:
    return textwrap.fill(text, 120, subsequent_indent="  " if text.startswith("- ") else "", break_on_hyphens=False)


def _fence(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"
