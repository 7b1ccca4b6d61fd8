"""Pictures of a run, drawn without a screen."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot_curves", "plot_pairs", "read_log"]


def read_log(log: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Rows of a run's log.jsonl. A torn line, as a killed run or a full disk leaves one, is left out, and said."""
    rows, path = [], Path(log)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int):
                raise TypeError
            rows.append(row)
        except (ValueError, TypeError, KeyError):
            print(f"{path}: left out line {number} of {len(lines)}, which is torn: {line[:60]!r}")
    return rows


def plot_curves(log: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Loss and metrics over optimizer steps, from a run's log.jsonl."""
    from matplotlib.figure import Figure  # the object interface: no backend, no global state

    rows = read_log(log)
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


def plot_pairs(pairs: Mapping[tuple[str, ...], Sequence[list[dict[str, Any]]]], metrics: Mapping[str, str],
               target: str | os.PathLike[str]) -> None:  # fmt: skip
    """Default and adaptive models side by side, epoch by epoch: the logs of each pair by its names, and ``metrics`` by
    their titles."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3 * len(pairs)), layout="constrained")
    rows = figure.subplots(len(pairs), len(metrics), squeeze=False, sharey="col")
    for axes, (names, logs) in zip(rows, pairs.items(), strict=True):
        for axis, (title, metric) in zip(axes, metrics.items(), strict=True):
            for name, log, colour in zip(names, logs, ("tab:red", "tab:green"), strict=True):
                points = [(line["epoch"], line[metric]) for line in log if metric in line]
                axis.plot(*zip(*points, strict=True), color=colour, marker=".", label=name)
            axis.set(title=title, xlabel="epoch", ylabel="%")
            axis.grid(alpha=0.3)
        axes[0].legend(frameon=False)
    figure.savefig(target, dpi=110)
