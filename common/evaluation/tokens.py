"""What a shift by one pixel does to the tokens of every stage (fig. rep_stability)."""

import os
from typing import Any

import torch
from torch import Tensor

from ..models.classifier import Classifier
from ..shifts import roll

__all__ = ["plot_token_errors", "token_errors"]


@torch.no_grad()
def token_errors(model: Classifier, images: Tensor, shift: tuple[int, int] = (1, 1)) -> list[dict[str, Any]]:
    """Stage by stage, |tokens of the shifted images - tokens of the images|: ``mean`` of all, relative to the mean
    |token|, ``largest``, and a ``map`` (H, W) of the first image in the channel of most energy.

    Tokens of an adaptive model are compared where both grids say that they stand, those of a default model place by
    place: it has but one grid, which a shift by less than its stride does not move.
    """
    offset = torch.tensor(shift, device=images.device).expand(len(images), 2)
    still, moved = (
        model.forward_intermediates(x, intermediates_only=True, return_offsets=True)
        for x in (images, roll(images, offset))
    )
    rows = []
    for info, (before, at), (after, to) in zip(model.feature_info, still, moved, strict=True):
        steps = (to + offset - at) // info["reduction"] if model.adaptive else torch.zeros_like(at)
        error = (roll(before, steps) - after).double().abs()
        channel = before[0].double().square().sum((-2, -1)).argmax()
        size = before.double().abs().mean().clamp_min(1e-300)
        rows.append({"stage": info["module"], "mean": (error.mean() / size).item(),
                     "largest": error.amax().item(), "map": error[0, channel].cpu()})  # fmt: skip
    return rows


def plot_token_errors(errors: dict[str, list[dict[str, Any]]], target: str | os.PathLike[str]) -> None:
    """A row of maps per model, a column per stage, all of a column on one scale."""
    from matplotlib.figure import Figure

    stages = max(map(len, errors.values()))
    figure = Figure(figsize=(2.6 * stages, 2.6 * len(errors)), layout="constrained")
    axes = figure.subplots(len(errors), stages, squeeze=False)
    for i in range(stages):
        high = max(float(rows[i]["map"].max()) for rows in errors.values() if i < len(rows)) or 1.0
        for j, (name, rows) in enumerate(errors.items()):
            axes[j, i].set(xticks=[], yticks=[], title=f"{name}, stage {i + 1}: {100 * rows[i]['mean']:.2g} %")
            axes[j, i].imshow(rows[i]["map"], vmin=0, vmax=high, cmap="magma")
    figure.savefig(target, dpi=120)
