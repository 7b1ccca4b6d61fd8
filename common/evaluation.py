"""One evaluation for all classifiers: counts over a split, gathered over processes without counting padding twice."""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from .classifier import Classifier
from .data import PREPROCESSOR_NAME, Arrays, Preprocess, check_finite, load_data
from .hub import resolve_file
from .metrics import circular_agreement, predict, standard_agreement, worst_agreement
from .registry import create_model, from_pretrained, list_models
from .tables import format_table, write_json

__all__ = ["METRICS", "evaluate", "main"]

METRICS = "top1, c_cons, s_cons; c_cons@K, s_cons@K for shifts up to K px; c_cons_worst@K for all shifts below K px"
METRIC = re.compile(r"(top1|c_cons|s_cons|c_cons_worst)(?:@(\d+))?")


def evaluate(model: Callable[[Tensor], Tensor], split: Arrays, preprocess: Preprocess, metrics: Sequence[str], *,
             accelerator: Accelerator | None = None, batch_size: int = 64, seed: int = 0, crop: bool = False,
             progress: bool = True) -> dict[str, Any]:  # fmt: skip
    """Measure ``metrics`` (percent) on ``split``; ``model`` is in eval mode and, with several processes, prepared.

    ``crop``: standard shifts move the resized image under a centre crop (ImageNet) instead of padding zeros.
    """
    accelerator = accelerator or Accelerator()
    parsed = {name: _parse(name) for name in metrics}
    split = split.to(accelerator.device)
    loader = accelerator.prepare(DataLoader(split, batch_size=batch_size))
    right = {name: torch.zeros((), dtype=torch.long, device=accelerator.device) for name in metrics}
    for index in tqdm(loader, desc="evaluate", leave=False, disable=not (progress and accelerator.is_main_process)):
        canvas = preprocess.canvas(split.images[index])
        images = preprocess.crop(canvas)
        check_finite(images, "evaluate")
        outcomes = []
        with torch.no_grad(), accelerator.autocast():
            for kind, reach in parsed.values():
                if kind == "top1":
                    outcomes.append(predict(model, images) == split.labels[index])
                elif kind == "c_cons":
                    outcomes.append(circular_agreement(model, images, index, max_shift=reach, seed=seed))
                elif kind == "c_cons_worst":
                    outcomes.append(worst_agreement(model, images, reach or 8))
                else:
                    source, size = (canvas, preprocess.size) if crop else (images, None)
                    outcomes.append(standard_agreement(model, source, index, max_shift=reach, seed=seed, crop=size))
        gathered = accelerator.gather_for_metrics(torch.stack(outcomes, 1))  # images, metrics
        for i, name in enumerate(metrics):
            right[name] += gathered[:, i].sum()
    result: dict[str, Any] = {name: 100.0 * count.item() / len(split) for name, count in right.items()}
    return {**result, "images": len(split), "seed": seed}


def _parse(name: str) -> tuple[str, int | None]:
    match = METRIC.fullmatch(name)
    if not match:
        raise ValueError(f"unknown metric {name!r}: choose among {METRICS}")
    return match[1], int(match[2]) if match[2] else None


def main(description: str, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """A folder's ``evaluate.py``: measure a model on the evaluation split of a data set, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", required=True, help="directory, Hub id, or name (fresh weights)")
    parser.add_argument("--data", default="digits", help="'digits' or a folder")
    parser.add_argument("--metrics", nargs="+", default=["top1", "c_cons", "s_cons"], help=METRICS)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="use only the first images")
    parser.add_argument("--crop", action="store_true", help="standard shifts under a centre crop, not with zeros")
    parser.add_argument("--resize", type=int, help="side before the centre crop, if not the model's own")
    parser.add_argument("--mixed_precision", choices=("no", "fp16", "bf16"))
    parser.add_argument("--json", help="file to write the results to")
    args = parser.parse_args(arguments)

    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    split = load_data(args.data)[1].head(args.limit)
    model, preprocess = load_for_evaluation(args.model, len(split.classes), args.resize)
    model.eval().to(accelerator.device)
    measured = evaluate(model, split, preprocess, args.metrics, accelerator=accelerator, batch_size=args.batch_size,
                        seed=args.seed, crop=args.crop)  # fmt: skip
    results = {"model": args.model, "data": args.data, **measured, "precision": accelerator.mixed_precision,
               "parameters": sum(p.numel() for p in model.parameters())}  # fmt: skip
    if accelerator.is_main_process:
        print(format_table([results]))
        if args.json:
            write_json(args.json, results)
    return results


def load_for_evaluation(source: str, classes: int, resize: int | None = None) -> tuple[Classifier, Preprocess]:
    """A model by directory, Hub id or name, and the preprocessing stored beside it (else ImageNet's)."""
    if source in list_models():
        model = create_model(source, num_classes=classes)
        stored = None
    else:
        model = from_pretrained(source)
        try:
            stored = Preprocess.load(resolve_file(source, PREPROCESSOR_NAME))
        except FileNotFoundError:
            stored = None
    if not isinstance(model, Classifier):
        raise TypeError(f"{source} is a {type(model).__name__}, not a classifier")
    if model.num_classes != classes:
        raise ValueError(f"{source} tells {model.num_classes} classes apart, the data have {classes}: fine-tune it on "
                         "them, or evaluate on its own data")  # fmt: skip
    return model, stored or Preprocess(size=model.img_size, resize=resize)
