"""One evaluation for all classifiers: counts over a split, gathered over processes without counting padding twice."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from .data import Arrays, Preprocess, check_finite
from .metrics import circular_agreement, predict, standard_agreement, worst_agreement

__all__ = ["METRICS", "evaluate"]

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
