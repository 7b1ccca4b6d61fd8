"""One evaluation for all classifiers: counts over a split, gathered over processes without counting padding twice."""

import argparse
import json
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from ..data.preprocess import PREPROCESSOR_NAME, Preprocess, check_finite
from ..data.sources import load_evaluation, shown
from ..data.splits import Arrays, Split
from ..data.workers import outlive_sigterm
from ..models.classifier import Classifier
from ..models.hub import resolve_file
from ..models.registry import MODEL_ARGUMENTS, create_model, from_pretrained, is_fresh, parse_arguments
from ..models.timm_models import input_of_timm
from .flags import add_precision, add_split, check_precision, count, whole
from .metrics import circular_agreement, predict, same_labels, standard_agreement, worst_agreement
from .perturb import PERTURBATIONS, ShiftAverage
from .tables import format_table, precision_name, write_json

__all__ = ["CROP", "METRICS", "default_crop", "evaluate", "from_timm", "main", "read_training"]

METRICS = (
    "top1, c_cons, s_cons; c_cons@K, s_cons@K for shifts up to K px, c_cons@K/N for multiples of N px among them; "
    "c_cons_near@K for shifts of -K to K - 1 px, c_cons_worst@K for all shifts below K px; each metric also works "
    "on changed images: top1:erased@N (a patch of up to N px), c_cons:flipped, top1:half (moved by half a pixel); "
    "kept:half: share of images that keep their label"
)
CROP: Any = {"action": argparse.BooleanOptionalAction, "help": "standard shifts under a centre crop, not with zeros; "
             "if not given, as in the training of the model"}  # fmt: skip
METRIC = re.compile(
    r"(?P<kind>top1|c_cons|s_cons|c_cons_near|c_cons_worst|kept)(?:@(?P<reach>\d+))?(?:(?<=\d)/(?P<step>[1-9]\d*))?"
    r"(?::(?P<change>erased|flipped|half)(?:@(?P<amount>\d+))?)?"
)


def evaluate(model: Callable[[Tensor], Tensor], split: Split, preprocess: Preprocess, metrics: Sequence[str], *,
             accelerator: Accelerator | None = None, batch_size: int = 64, seed: int = 0, crop: bool = False,
             workers: int = 0, progress: bool = True) -> dict[str, Any]:  # fmt: skip
    """Measure ``metrics`` (percent) on ``split``; ``model`` is in eval mode and, with several processes, prepared.

    ``crop``: standard shifts move the resized image under a centre crop (ImageNet) instead of padding zeros.
    Images that the split could not read (label -1) do not count.
    """
    accelerator = accelerator or Accelerator()
    parsed = {name: parse_metric(name) for name in metrics}
    split = split.prepared(preprocess).to(accelerator.device)
    workers = 0 if isinstance(split, Arrays) else workers
    loader = accelerator.prepare(DataLoader(split, batch_size=batch_size, num_workers=workers,
                                            worker_init_fn=outlive_sigterm, generator=torch.Generator()))  # fmt: skip
    # a generator of its own: a loader draws a number whenever it begins, and training would go on with other ones
    right = {name: torch.zeros((), dtype=torch.long, device=accelerator.device) for name in metrics}
    counted = torch.zeros((), dtype=torch.long, device=accelerator.device)
    for batch in tqdm(loader, desc="evaluate", leave=False, disable=not (progress and accelerator.is_main_process)):
        pixels, labels, index = split.fetch(batch)
        canvas = preprocess.canvas(pixels)
        images = preprocess.crop(canvas)
        check_finite(images, "evaluate")
        outcomes = [labels >= 0]
        with torch.no_grad(), accelerator.autocast():
            for kind, reach, step, change, amount in parsed.values():
                x, size = (canvas, preprocess.size) if crop and kind == "s_cons" else (images, None)
                x = PERTURBATIONS[change](x, index, amount, seed) if change else x
                if kind == "top1":
                    outcomes.append(predict(model, x) == labels)
                elif kind == "kept":
                    outcomes.append(same_labels(predict(model, x), predict(model, images)))
                elif kind in ("c_cons", "c_cons_near"):
                    outcomes.append(circular_agreement(model, x, index, max_shift=reach, seed=seed, step=step,
                                                       near=kind == "c_cons_near"))  # fmt: skip
                elif kind == "c_cons_worst":
                    outcomes.append(worst_agreement(model, x, reach or 8))
                else:
                    outcomes.append(standard_agreement(model, x, index, max_shift=reach, seed=seed, crop=size))
        gathered = accelerator.gather_for_metrics(torch.stack(outcomes, 1))  # images, 1 + metrics
        gathered = gathered[gathered[:, 0]]
        counted += len(gathered)
        for i, name in enumerate(parsed, 1):
            right[name] += gathered[:, i].sum()
    total = int(counted)
    if not total:
        raise ValueError("no image to measure on: none could be read")
    result: dict[str, Any] = {name: 100.0 * count.item() / total for name, count in right.items()}
    broken = {"unreadable": len(split) - total} if total < len(split) else {}
    return {**result, "images": total, **broken, "seed": seed}


class Metric(NamedTuple):
    """What is measured, the reach of the shifts and what they are multiples of, how images are changed before, and by
    how much."""

    kind: str
    reach: int | None
    step: int
    change: str | None
    amount: int


def parse_metric(name: str) -> Metric:
    match = METRIC.fullmatch(name)
    if not match or (match["step"] and match["kind"] != "c_cons"):
        raise ValueError(f"unknown metric {name!r}: choose among {METRICS}")
    kind, change, step, amount = match["kind"], match["change"], int(match["step"] or 1), int(match["amount"] or 0)
    reach = int(match["reach"]) if match["reach"] else None
    least = 2 if kind == "c_cons_worst" else step
    unshifted = reach is not None and (kind in ("top1", "kept") or reach < least)
    if unshifted or (kind == "kept" and not change) or (change == "erased") != (amount > 0):
        raise ValueError(f"the metric {name!r} changes nothing, or its number is missing or unused: "
                         f"choose among {METRICS}")  # fmt: skip
    return Metric(kind, reach, step, change, amount)


def main(description: str, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """A folder's ``evaluate.py``: measure a model on the evaluation split of a data set, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", required=True, help="directory, Hub id, timm:NAME (its pretrained weights), or name "
                        "(of a checkpoint here; without one, fresh weights)")  # fmt: skip
    parser.add_argument("--data", default="digits", help="'digits', a folder, or a Hub id")
    add_split(parser)
    parser.add_argument("--metrics", nargs="+", default=["top1", "c_cons", "s_cons"], help=METRICS)
    parser.add_argument("--batch_size", type=count, default=64, help="images at once, per process")
    parser.add_argument("--seed", type=whole, default=0, help="of the random shifts")
    parser.add_argument("--limit", type=count, help="use only the first images")
    parser.add_argument("--crop", **CROP)
    parser.add_argument("--resize", type=count, help="side before the centre crop, if not the model's own")
    parser.add_argument("--dataloader_num_workers", type=whole, default=min(8, os.cpu_count() or 1),
                        help="processes that decode large images")  # fmt: skip
    parser.add_argument("--skip_broken", action="store_true", help="leave unreadable images out, and count them")
    parser.add_argument("--average_shifts", type=count, default=1, metavar="N",
                        help="average probabilities over N x N circular shifts, N^2 times the cost")  # fmt: skip
    parser.add_argument("--model_args", **MODEL_ARGUMENTS)
    add_precision(parser)
    parser.add_argument("--json", help="file to write the results to")
    args = parser.parse_args(arguments)

    accelerator = check_precision(Accelerator(mixed_precision=args.mixed_precision))
    split = load_evaluation(args.data, args.skip_broken, args.split).head(args.limit)
    arguments_of_model = parse_arguments(args.model_args)
    model, preprocess = load_for_evaluation(args.model, len(split.classes), args.resize, **arguments_of_model)
    crop = default_crop(args.model, preprocess, args.metrics) if args.crop is None else args.crop
    compare_names(getattr(model, "class_names", ()), split.classes)
    model = ShiftAverage(model, args.average_shifts) if args.average_shifts > 1 else model
    model.eval().to(accelerator.device)
    measured = evaluate(model, split, preprocess, args.metrics, accelerator=accelerator, batch_size=args.batch_size,
                        seed=args.seed, crop=crop, workers=args.dataloader_num_workers)  # fmt: skip
    facts = {key: getattr(model, key) for key in ("adaptive", "canonical") if hasattr(model, key)}
    facts |= {"average_shifts": args.average_shifts**2} if args.average_shifts > 1 else {}
    told = {"crop": crop, "resize": args.resize, "model_args": arguments_of_model, "split": args.split}
    facts |= {key: value for key, value in told.items() if value}
    results = {"model": args.model, "data": args.data, **facts, **measured, "precision": accelerator.mixed_precision,
               "parameters": sum(p.numel() for p in model.parameters())}  # fmt: skip
    if accelerator.is_main_process:
        print(format_table([{**results, "precision": precision_name(results["precision"])}]))
        if args.json:
            write_json(args.json, results)
    accelerator.end_training()  # else processes that still talk to each other may abort at exit
    return results


def read_training(source: str | Path) -> dict[str, Any]:
    """The ``results.json`` that training wrote beside a model; nothing where there is none."""
    path = Path(source) / "results.json"
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fetch the file anew, or remove it") from None
    return found if isinstance(found, dict) else {}


def default_crop(source: str | Path, preprocess: Preprocess, metrics: Sequence[str] = ("s_cons",)) -> bool:
    """Whether standard shifts of a model's images go under their centre crop, where no flag says: as in its training. A
    warning says so where that is not known."""
    if not preprocess.resize:
        return False  # there is no room
    settings = read_training(source).get("settings")
    crop = settings.get("crop") if isinstance(settings, dict) else None
    if crop is None and any(name.startswith("s_cons") for name in metrics):
        warnings.warn(f"images of {source} are cropped from {preprocess.resize} px, and standard shifts fill with "
                      "zeros: --crop shifts them under the crop, as on ImageNet", stacklevel=3)  # fmt: skip
    return bool(crop)


def compare_names(names: tuple[str, ...], classes: tuple[str, ...]) -> None:
    """Warn if the class names of the model and of the data differ."""
    if names and names != classes:
        warnings.warn(f"the model's classes are {shown(names)}; those of the data are {shown(classes)}: labels are "
                      "compared by number", stacklevel=3)  # fmt: skip


def load_for_evaluation(source: str, classes: int, resize: int | None = None,
                        **arguments: Any) -> tuple[nn.Module, Preprocess]:  # fmt: skip
    """A model by directory, Hub id, ``timm:NAME`` or name, and the preprocessing stored beside it (else ImageNet's)."""
    model: nn.Module
    if source.startswith("timm:"):
        model, preprocess = from_timm(source.removeprefix("timm:"), **arguments)
    elif is_fresh(source):
        model = create_model(source, **{"num_classes": classes, **arguments})
        warn_of_fresh_weights(source)
        preprocess = Preprocess(size=model.img_size)
    else:
        model = from_pretrained(source, **arguments)
        if not isinstance(model, Classifier):
            raise TypeError(f"{source} is a {type(model).__name__}, not a classifier: use segmentation/evaluate.py, or "
                            "'shiftvit evaluate segmentation'")  # fmt: skip
        try:
            preprocess = Preprocess.load(resolve_file(source, PREPROCESSOR_NAME))
        except (FileNotFoundError, EntryNotFoundError):
            preprocess = Preprocess(size=model.img_size)
        if "img_size" in arguments:
            preprocess = replace(preprocess, size=model.img_size, resize=None)
    has = getattr(model, "num_classes", None)
    if has != classes:
        raise ValueError(f"{source} has {has} classes, but the data have {classes}: fine-tune it on them, or "
                         "evaluate on its own data")  # fmt: skip
    return model, replace(preprocess, resize=resize) if resize else preprocess


def warn_of_fresh_weights(source: str) -> None:
    """Warn that the name of a model builds it with fresh weights."""
    warnings.warn(f"{source} is the name of a model without a checkpoint: it gets fresh weights", stacklevel=3)


def from_timm(name: str, **arguments: Any) -> tuple[nn.Module, Preprocess]:
    """timm's model with its pretrained weights (``local-dir:FOLDER`` for a folder), its sizes, mean and deviation.
    Images that are not square are squeezed, as all are here; timm cuts them, so figures are not those of its tables."""
    import timm

    try:
        model = timm.create_model(name, pretrained=True, **arguments)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:  # an unknown name or argument, or no weights
        raise ValueError(f"timm:{name} cannot be loaded: {error}") from error
    return model, Preprocess(**input_of_timm(model))
