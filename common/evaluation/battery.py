"""All that the tables need of one trained model, in one go: measured where it was trained, written as one JSON.

What the paper defines: top-1, C-Cons, S-Cons, C-Cons by the magnitude of shifts (tab. supp_sensitivity), erased patches
(tab. supp_ood_patches), vertical flips (tab. supp_ood_flips), token errors (fig. rep_stability). What is our choice:
standard shifts reach an eighth of the side, as the paper does not say how far; erased pixels are zero after
normalisation; the worst case over shifts below 8 px; half-pixel shifts; bits in four precisions; of a default model
also what averaging over 4 and 16 shifts brings. Consistency of an adaptive model is measured with the canonical anchor
on and off: on, any network would be consistent.
"""

import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from ..data.preprocess import Preprocess
from ..data.sources import load_evaluation
from ..data.splits import Split
from ..models.classifier import Classifier
from .evaluate import default_crop, evaluate, load_for_evaluation, read_training
from .exactness import PRECISIONS, count_identical
from .flags import check_precision
from .perturb import ShiftAverage
from .tables import write_json
from .tokens import plot_token_errors, token_errors

__all__ = ["AVERAGED", "FULL", "battery", "battery_of", "canonical_off", "circumstances"]

QUARTERS = (0.25, 0.5, 0.75, 1.0)
ERASED = (0.125, 0.1875, 0.25, 0.3125)  # of the side: 28, 42, 56 and 70 of 224 px
SHORT = ("top1", "c_cons", "s_cons")
FULL = ("plain", "bits", "magnitudes", "flipped", "half", "erased", "tokens", "worst", "averaged")  # the longest last
AVERAGED = (2, 4)  # shifts a side
OF_TRAINING = ("model", "recipe", "settings", "from_hub", "epochs", "limit", "training_images", "train_seconds",
               "parameters")  # fmt: skip
"""What a battery takes over from the ``results.json`` of a training. What that measured is not the battery's."""


def metrics_of(part: str, side: int) -> list[str]:
    """The metrics of a part of the battery, for images with this ``side``."""
    if part == "magnitudes":
        return [*(f"c_cons@{min(round(share * side), side - 1)}" for share in QUARTERS), f"c_cons_near@{side // 7}"]
    if part == "erased":
        return [f"{kind}:erased@{round(share * side)}" for share in ERASED for kind in ("top1", "c_cons")]
    return {"plain": list(SHORT), "worst": ["c_cons_worst@8"], "flipped": ["top1:flipped", "c_cons:flipped"],
            "half": ["top1:half", "kept:half"]}.get(part, [])  # fmt: skip


def battery(model: Classifier, split: Split, preprocess: Preprocess, *, parts: tuple[str, ...] = FULL,
            accelerator: Accelerator | None = None, batch_size: int = 250, exact_images: int = 1000, seed: int = 0,
            crop: bool = False, compiled: Any = None, figure: Path | None = None,
            report: Callable[[dict[str, Any]], None] = lambda results: None) -> dict[str, Any]:  # fmt: skip
    """Measure ``parts`` on ``split``. ``compiled`` is the model as ``torch.compile`` has it, for the long passes.
    ``report`` gets the results so far after every part: a run that is cut keeps what it has."""
    accelerator = accelerator or Accelerator()
    run, begun = model if compiled is None else compiled, time.time()
    common: Any = {"accelerator": accelerator, "batch_size": batch_size, "seed": seed, "crop": crop}
    results: dict[str, Any] = {"config": dict(model.config), "precision": accelerator.mixed_precision}
    switchable = model.adaptive and model.canonical
    images = first(split, exact_images, preprocess, accelerator.device)
    for part in parts:
        if metrics := metrics_of(part, min(model.img_size)):
            results |= evaluate(run, split, preprocess, metrics, **common)
            kept = [metric for metric in metrics if metric.startswith("c_cons") or metric in SHORT]
            if switchable and kept:
                with canonical_off(model):
                    off = evaluate(model, split, preprocess, kept, **common)
                results.setdefault("canonical_off", {}).update({metric: off[metric] for metric in kept})
        elif part == "bits":
            known = [name for name in PRECISIONS if images.is_cuda or name not in ("tf32", "fp16")]
            results["bits"] = [bits(model, images, preprocess, precision, batch_size) for precision in known]
            if switchable:
                with canonical_off(model):
                    results["bits"] += [bits(model, images, preprocess, precision, batch_size) for precision in known]
        elif part == "averaged" and not model.adaptive:
            for side in AVERAGED:
                averaged = evaluate(ShiftAverage(run, side), split, preprocess, list(SHORT), **common)
                results |= {f"{metric}:averaged@{side**2}": averaged[metric] for metric in SHORT}
        elif part == "tokens":
            with canonical_off(model):
                rows = token_errors(model, preprocess.evaluate(images[:8]))
            results["token_errors"] = [{key: row[key] for key in ("stage", "mean", "largest")} for row in rows]
            if figure is not None:
                plot_token_errors({model.model_type: rows}, figure)
        results |= {**circumstances(accelerator), "evaluation_seconds": round(time.time() - begun, 1)}
        report(results)
    return results


def first(split: Split, count: int, preprocess: Preprocess, device: torch.device) -> Tensor:
    """Pixels of the first images, decoded as ``evaluate`` has them."""
    split = split.head(count).prepared(preprocess).to(device)
    return torch.cat([split.fetch(batch)[0] for batch in DataLoader(split, batch_size=250)])


def battery_of(source: str | Path, data: str, *, mixed_precision: str | None = None, compile: bool = False,
               limit: int | None = None, split: str | None = None, target: Path | None = None,
               arguments: Mapping[str, Any] | None = None, crop: bool | None = None,
               **options: Any) -> dict[str, Any]:  # fmt: skip
    """``battery`` of a trained model by its directory or Hub id, with what its training wrote beside it (recipe,
    settings, seed, seconds); written to ``target``, a figure of token errors beside that, by the first process."""
    accelerator = check_precision(Accelerator(mixed_precision=mixed_precision))
    images = load_evaluation(data, split=split).head(limit)
    model, preprocess = load_for_evaluation(str(source), len(images.classes), **(arguments or {}))
    if not isinstance(model, Classifier):
        raise ValueError(f"{source} is not one of our classifiers: the battery needs their layers")
    model.eval().to(accelerator.device)
    trained, crop = read_training(source), default_crop(source, preprocess) if crop is None else crop
    known = {key: trained[key] for key in OF_TRAINING if key in trained} or {"model": str(source)}
    known |= {"data": data, **({"split": split} if split else {}), **({"crop": True} if crop else {})}
    compiled, target = torch.compile(model) if compile else None, target if accelerator.is_main_process else None
    figure = target and target.with_suffix(".png")

    def report(results: dict[str, Any]) -> None:
        if target is not None:
            write_json(target, {**known, **results})

    options = {**options, "accelerator": accelerator, "crop": crop, "compiled": compiled, "figure": figure,
               "report": report}  # fmt: skip
    return {**known, **battery(model, images, preprocess, **options)}


def bits(model: Classifier, images: Tensor, preprocess: Preprocess, precision: str, batch_size: int) -> dict[str, Any]:
    same, labels = count_identical(model, images, preprocess, precision, batch_size)
    return {"precision": precision, "canonical": model.canonical and model.adaptive, "images": len(images),
            "bit-identical": same, "same label": labels}  # fmt: skip


@contextmanager
def canonical_off(model: Classifier) -> Iterator[None]:
    """Without the canonical anchor, for as long as this lasts."""
    before, model.canonical = model.canonical, False
    try:
        yield
    finally:
        model.canonical = before


def circumstances(accelerator: Accelerator) -> dict[str, Any]:
    """What a number depends on besides the model: code, libraries, hardware."""
    import timm

    root = Path(__file__).resolve().parents[2]
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    cuda = accelerator.device.type == "cuda"
    return {"commit": git.stdout.strip() or None, "torch": torch.__version__, "timm": timm.__version__,
            "python": platform.python_version(), "processes": accelerator.num_processes,
            "device": torch.cuda.get_device_name(accelerator.device) if cuda else platform.machine()}  # fmt: skip
