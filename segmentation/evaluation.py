"""One evaluation for all segmenters: counts over a split, gathered over processes without counting padding twice."""

import argparse
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from common.data.preprocess import PREPROCESSOR_NAME
from common.data.workers import outlive_sigterm
from common.evaluation.evaluate import compare_names, warn_of_fresh_weights
from common.evaluation.flags import add_precision, add_split, check_precision, count, whole
from common.evaluation.metrics import (
    circular_pixel_agreement,
    confusion_matrix,
    mean_iou,
    refuse_nan,
    standard_pixel_agreement,
    worst_pixel_agreement,
)
from common.evaluation.tables import format_table, precision_name, write_json
from common.models.hub import resolve_file
from common.models.registry import create_model, from_pretrained, is_fresh
from common.ops.choice import to_float64
from common.shifts import random_shifts

from .data import load_evaluation
from .inference import labels_at, pictures, slide
from .model import UperNet
from .preprocess import ScenePreprocess
from .splits import PixelSplit, Scenes

__all__ = ["METRICS", "evaluate", "main"]

METRICS = "miou, mascc, massc; mascc@K, massc@K for shifts up to K px; mascc_worst@K for all shifts below K px"
METRIC = re.compile(r"(miou|mascc|massc|mascc_worst)(?:@(\d+))?")

Model = Callable[[Tensor], Tensor]


def evaluate(model: Model, split: PixelSplit, preprocess: ScenePreprocess, metrics: Sequence[str], *,
             accelerator: Accelerator | None = None, batch_size: int = 8, seed: int = 0, workers: int = 0,
             progress: bool = True) -> dict[str, Any]:  # fmt: skip
    """Measure ``metrics`` (percent) on ``split``; ``model`` is in eval mode and, with several processes, prepared.

    mIoU compares masks with the labels as they are stored: logits are brought to their size. Scenes that are decoded on
    demand, and may differ in size, are taken one at a time.
    """
    accelerator = accelerator or Accelerator()
    parsed = {name: parse_metric(name) for name in metrics}
    split = split.prepared(preprocess).to(accelerator.device)
    in_memory = isinstance(split, Scenes)
    count, workers = (batch_size, 0) if in_memory else (1, workers)
    loader = DataLoader(split, batch_size=count, num_workers=workers, worker_init_fn=outlive_sigterm,
                        generator=torch.Generator())  # of its own: as in common.evaluation  # fmt: skip
    loader = accelerator.prepare(loader)
    classes = len(split.classes)
    matrix = torch.zeros(classes, classes, dtype=torch.long, device=accelerator.device)
    shares = to_float64(torch.zeros(len(parsed), device=accelerator.device))
    total = 0
    for batch in tqdm(loader, desc="evaluate", leave=False, disable=not (progress and accelerator.is_main_process)):
        pixels, labels, index = split.fetch(batch)
        images = preprocess.evaluate(pixels) if in_memory else preprocess.normalise(pixels)  # others have their size
        outcomes = []
        with torch.no_grad(), accelerator.autocast():
            for kind, reach in parsed.values():
                if kind == "miou":
                    masks = _masks(model(images), labels)
                    counts = [confusion_matrix(*pair, classes) for pair in zip(masks, labels, strict=True)]
                    matrix += accelerator.gather_for_metrics(torch.stack(counts)).sum(0)
                    outcomes.append(to_float64(torch.zeros(len(images), device=images.device)))
                elif kind == "mascc":
                    outcomes.append(circular_pixel_agreement(model, images, index, max_shift=reach, seed=seed))
                elif kind == "mascc_worst":
                    outcomes.append(worst_pixel_agreement(model, images, reach or 8))
                else:
                    outcomes.append(standard_pixel_agreement(model, images, index, max_shift=reach, seed=seed))
        gathered = accelerator.gather_for_metrics(torch.stack(outcomes, 1))  # images, metrics
        total += len(gathered)
        shares += gathered.sum(0)
    result = {name: 100.0 * share / total for name, share in zip(parsed, shares.tolist(), strict=True)}
    if "miou" in parsed:
        result["miou"] = mean_iou(matrix)
    return {**result, "images": total, "seed": seed}


def _masks(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, classes, H, W) -> (B, h, w) labels at the size of ``labels``."""
    return refuse_nan(labels_at(logits, (labels.shape[-2], labels.shape[-1])))


def parse_metric(name: str) -> tuple[str, int | None]:
    """Kind, and reach of the shifts."""
    match = METRIC.fullmatch(name)
    if not match or name.startswith("miou@"):
        raise ValueError(f"unknown metric {name!r}: choose among {METRICS}")
    reach = int(match[2]) if match[2] else None
    if reach is not None and reach < (2 if match[1] == "mascc_worst" else 1):
        raise ValueError(f"the metric {name!r} shifts nothing: choose among {METRICS}")
    return match[1], reach


def main(description: str, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """``evaluate.py``: measure a model on the evaluation split of a data set, print a table, write JSON, draw."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", required=True, help="directory, Hub id, or name (of a checkpoint here; "
                        "without one, fresh weights)")  # fmt: skip
    parser.add_argument("--data", default="digits", help="'digits', a folder, or a Hub id")
    add_split(parser)
    parser.add_argument("--metrics", nargs="*", default=["miou", "mascc", "massc"], help=METRICS)
    parser.add_argument("--slide", nargs=2, type=count, metavar=("WINDOW", "STRIDE"),
                        help="average over windows of this side instead of the whole image")  # fmt: skip
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw what shifts change in a few scenes")
    parser.add_argument("--compare", metavar="MODEL", help="a second model to draw beside the first")
    parser.add_argument("--scenes", type=count, default=4, help="how many scenes to draw")
    parser.add_argument("--batch_size", type=count, default=8, help="scenes at once, per process")
    parser.add_argument("--seed", type=whole, default=0, help="of the random shifts")
    parser.add_argument("--limit", type=count, help="use only the first scenes")
    parser.add_argument("--dataloader_num_workers", type=whole, default=min(8, os.cpu_count() or 1),
                        help="processes that decode scenes of different sizes")  # fmt: skip
    add_precision(parser)
    parser.add_argument("--json", help="file to write the results to")
    args = parser.parse_args(arguments)

    if args.compare and not args.pictures:
        raise ValueError("--compare draws a second model beside the first: say where with --pictures DIR")
    accelerator = check_precision(Accelerator(mixed_precision=args.mixed_precision))
    split = load_evaluation(args.data, args.split).head(args.limit)
    networks, preprocess = {}, None
    for source in filter(None, (args.model, args.compare)):
        network, stored = load_for_evaluation(source, len(split.classes))
        networks[source] = network.to(accelerator.device)
        fresh = is_fresh(source)  # which takes what the other one takes
        preprocess = stored if preprocess is None else preprocess if fresh else together(preprocess, stored)
        compare_names(network.class_names, split.classes)
    assert preprocess is not None
    models: dict[str, Model] = dict(networks)
    if args.slide:
        window, stride = ((side, side) for side in args.slide)
        models = {source: partial(slide, model, window=window, stride=stride) for source, model in models.items()}
    results: dict[str, Any] = {"model": args.model, "data": args.data}
    results |= {"split": args.split} if args.split else {}
    results |= {"slide": args.slide} if args.slide else {}
    if args.metrics:
        results |= evaluate(models[args.model], split, preprocess, args.metrics, accelerator=accelerator,
                            batch_size=args.batch_size, seed=args.seed,
                            workers=args.dataloader_num_workers)  # fmt: skip
    results |= {"precision": accelerator.mixed_precision,
                "parameters": sum(p.numel() for p in networks[args.model].parameters())}  # fmt: skip
    if accelerator.is_main_process:
        print(format_table([{**results, "precision": precision_name(results["precision"])}]))
        if args.pictures:
            order = sorted(models, key=lambda source: networks[source].adaptive)  # default before adaptive
            apart = len({Path(source).name for source in order}) == len(order)
            named = {Path(source).name if apart else source: models[source] for source in order}
            with accelerator.autocast():
                rows = draw(named, split, preprocess, args.pictures, args.scenes, args.seed, accelerator.device)
            results["pictures"] = rows
            print(format_table(rows))
            print(f"pictures: {args.pictures}; percent of pixels whose label changes, mean over the scenes drawn")
        if args.json:
            write_json(args.json, results)
    accelerator.end_training()  # else processes that still talk to each other may abort at exit
    return results


def load_for_evaluation(source: str, classes: int) -> tuple[UperNet, ScenePreprocess]:
    """A segmenter by directory, Hub id or name, and the preprocessing stored beside it (else the model's own size)."""
    fresh = is_fresh(source)
    model = create_model(source, num_classes=classes) if fresh else from_pretrained(source)
    warn_of_fresh_weights(source) if fresh else None
    if not isinstance(model, UperNet):
        raise TypeError(f"{source} is a {type(model).__name__}, not a segmenter: use its own folder's evaluate.py")
    if model.num_classes != classes:
        raise ValueError(f"{source} has {model.num_classes} classes, but the data have {classes}: fine-tune it on "
                         "them, or evaluate on its own data")  # fmt: skip
    try:
        if not fresh:
            return model.eval(), ScenePreprocess.load(resolve_file(source, PREPROCESSOR_NAME))
    except (FileNotFoundError, EntryNotFoundError):
        warnings.warn(f"{source} has no {PREPROCESSOR_NAME}: ImageNet's mean and std are used", stacklevel=2)
    return model.eval(), ScenePreprocess(size=model.img_size, multiple=model.multiple)


def together(one: ScenePreprocess, other: ScenePreprocess) -> ScenePreprocess:
    """What prepares images for two models at once: sides that both take."""
    rows, columns = (math.lcm(*pair) for pair in zip(one.multiple, other.multiple, strict=True))
    if (same := replace(one, multiple=(rows, columns))) != replace(other, multiple=(rows, columns)):
        raise ValueError(f"--compare draws both models on the same images, but they take different ones: {one} and "
                         f"{other}")  # fmt: skip
    return same


def draw(models: Mapping[str, Model], split: PixelSplit, preprocess: ScenePreprocess, directory: Path, count: int,
         seed: int, device: torch.device) -> list[dict[str, Any]]:  # fmt: skip
    """The paper's figure of scenes spread over the split, under both kinds of shift: a PNG per size of scene.

    Returns a row per PNG with the share of pixels that change, in percent, per model.
    """
    split = split.prepared(preprocess).to(device)
    chosen = torch.linspace(0, len(split) - 1, min(count, len(split)), dtype=torch.float64).round().long()
    groups: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
    for i in chosen.tolist():
        if isinstance(split, Scenes):
            image = preprocess.evaluate(split.images[i][None])
        else:
            image = preprocess.normalise(split[i][0].to(device)[None])
        groups.setdefault((image.shape[2], image.shape[3]), []).append((i, image))
    rows = []
    for (height, width), scenes in groups.items():
        index, images = torch.tensor([i for i, _ in scenes], device=device), torch.cat([image for _, image in scenes])
        reach = (height // 8, width // 8)
        shifts = {
            "circular": random_shifts(index, (0, 0), (height - 1, width - 1), seed, 1),
            "standard": random_shifts(index, (-reach[0], -reach[1]), reach, seed, 1),
        }
        for kind, shift in shifts.items():
            name = f"{kind}_{height}x{width}.png"
            changed = pictures(models, images, shift, directory / name, preprocess=preprocess,
                               kind=kind, names=split.classes)  # type: ignore[arg-type]  # fmt: skip
            rows.append({"picture": name, **{key: sum(values) / len(values) for key, values in changed.items()}})
    return rows
