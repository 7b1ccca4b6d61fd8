"""Pictures of a run, drawn without a screen."""

import json
import os
from pathlib import Path

__all__ = ["plot_curves"]


def plot_curves(log: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Loss and metrics over optimizer steps, from a run's log.jsonl."""
    from matplotlib.figure import Figure  # the object interface: no backend, no global state

    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    losses = [row for row in rows if "loss" in row]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([row["step"] for row in losses], [row["loss"] for row in losses], lw=1)
    left.set(xlabel="optimizer step", ylabel="training loss")
    for name in ("top1", "c_cons", "s_cons", "miou", "mascc", "massc"):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            right.plot(*zip(*points, strict=True), marker=".", label=name)
    right.set(xlabel="optimizer step", ylabel="%", ylim=(0, 102))
    if right.get_legend_handles_labels()[0]:
        right.legend(frameon=False)
    figure.savefig(target, dpi=150)
