"""Predict the labels of images, and show how they change when an image moves.

``python scripts/predict.py --model DEFAULT --model ADAPTIVE --shift-report IMAGE...``

Images of any size and format that Pillow reads go through the preprocessing stored beside the model. The shift report
classifies every image at a grid of shifts: a table of labels, and a heat map of the probability of the label that the
image has in place. A file that is no readable image is named, the others are predicted, and the exit code is 1.

A segmenter writes a mask for every image, a PNG of the same size, and says how many pixels change their label when the
image moves by one pixel: ``python scripts/predict.py --model SEGMENTER --masks DIR IMAGE...``
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import EntryNotFoundError
from matplotlib.figure import Figure
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor, nn
from tqdm.auto import tqdm

import shiftvit
from common import from_pretrained
from common.data.images import read_image
from common.data.preprocess import PREPROCESSOR_NAME, Preprocess
from common.evaluation.evaluate import from_timm
from common.evaluation.flags import add_device, count
from common.evaluation.tables import format_table, write_json
from common.models.hub import resolve_file
from common.models.registry import is_fresh
from common.shifts import circular_shift, standard_shift
from segmentation import UperNet
from segmentation.inference import write_masks
from segmentation.preprocess import ScenePreprocess

BATCH = 32  # images that a model sees at once
DRAWN = 12  # images in the heat map, at most
MOVES = {"circular": circular_shift, "standard": standard_shift}


@dataclass(frozen=True)
class Predictor:
    """A model with its preprocessing and the names of its classes."""

    name: str
    model: nn.Module
    preprocess: Any
    classes: list[str]

    def restore(self, x: Tensor) -> np.ndarray:
        """A normalised image (3, H, W) -> colours (H, W, 3) in [0, 1]."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.preprocess.mean, self.preprocess.std))
        return (x * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()


@dataclass(frozen=True)
class Report:
    """What a model makes of B images in place, probabilities (B, classes), and at G x G shifts: labels, the probability
    of the label in place, and whether the logits are bit-identical to those in place, (B, G, G) each."""

    still: Tensor
    labels: Tensor
    probabilities: Tensor
    identical: Tensor


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="files to classify")
    parser.add_argument("--model", action="append", required=True,
                        help="directory, Hub id, timm:NAME, or name of a checkpoint here; repeat it for a second "
                        "model")  # fmt: skip
    parser.add_argument("--top", type=count, default=5, help="most likely classes to show (%(default)s)")
    parser.add_argument("--classes", help="class names, instead of those stored with the model: a "
                        "file with one per line, or 'imagenet-1k'")  # fmt: skip
    parser.add_argument(
        "--shift-report", "--shift_report", action="store_true", help="also predict at a grid of shifts"
    )
    parser.add_argument("--shifts", choices=MOVES, default="circular",
                        help="circular: pixels wrap around; standard: filled with zeros (%(default)s)")  # fmt: skip
    parser.add_argument("--grid", type=count, default=8, help="shifts per axis (%(default)s)")
    parser.add_argument("--step", type=count, default=4, help="pixels of the input between shifts (%(default)s)")
    parser.add_argument(
        "--plot", type=Path, default=Path("outputs/shift_report.png"), help="picture of the shift report (%(default)s)"
    )
    parser.add_argument(
        "--masks", type=Path, default=Path("outputs/masks"), help="folder for masks of segmenters (%(default)s)"
    )
    parser.add_argument("--json", type=Path, help="file to write everything to")
    add_device(parser)
    args = parser.parse_args(arguments)

    predictors = [load(source, args.classes, args.device) for source in dict.fromkeys(args.model)]
    segmenters = [isinstance(predictor.model, UperNet) for predictor in predictors]
    if any(segmenters):
        if not all(segmenters) or args.shift_report:
            raise ValueError("segmenters are predicted without classifiers and without --shift-report")
        return segment(predictors, args)
    images, broken = read_images(args.images, predictors)
    shifts = make_shifts(args.grid if args.shift_report else 0, args.step, args.shifts)
    reports = [examine(predictor, [inputs[k] for inputs in images.values()], shifts, args.shifts, args.device)
               for k, predictor in enumerate(predictors) if images]  # fmt: skip
    rows = []
    for i, path in enumerate(images):
        for predictor, report in zip(predictors, reports, strict=True):
            row = describe(predictor, report, i, str(path), args.top)
            print(f"\n{path}, {predictor.name}")
            print(format_table([{"label": best["name"], "probability": f"{100 * best['probability']:.2f} %"}
                                for best in row["predictions"]]))  # fmt: skip
            if args.shift_report:
                row["shifts"] = {"kind": args.shifts, "pixels": shifts[0, :, 1].tolist(), **tally(report, i)}
                print(f"\nlabel, and probability (%) of {row['predictions'][0]['name']!r}, by {args.shifts} shift in "
                      f"pixels\n{format_grid(predictor, report, i, shifts)}")  # fmt: skip
            rows.append(row)
    if args.shift_report and rows:
        draw(predictors, reports, images, shifts, args.shifts, args.plot)
        print(f"\n{format_table([summarise(row) for row in rows])}\nheat map: {args.plot}")
    return finish(rows, broken, len(images), args.json)


def segment(predictors: list[Predictor], args: argparse.Namespace) -> dict[str, Any]:
    """Masks, in a folder for each model if there are several."""
    images, broken = read_images(args.images, [])
    rows, names = [], [Path(predictor.name).name for predictor in predictors]
    if len(set(names)) < len(names):
        raise ValueError(f"two models are called {max(names, key=names.count)}, and their masks would be the same "
                         "files: predict with one at a time, each with its --masks")  # fmt: skip
    for predictor, name in zip(predictors, names, strict=True):
        directory = args.masks / name if len(predictors) > 1 else args.masks
        found = write_masks(predictor.model, {path: pixels for path, (pixels,) in images.items()}, directory,
                            preprocess=predictor.preprocess, names=predictor.classes, device=args.device)  # fmt: skip
        rows += [{"model": predictor.name, **row} for row in found]
    shown = [{**row, "classes": ", ".join(f"{name} {share:.1f}" for name, share in sorted(
              row["classes"].items(), key=lambda pair: -pair[1])[: args.top])} for row in rows]  # fmt: skip
    if rows:
        print(f"{format_table(shown)}\npercent of pixels: classes; changed when the image moves by one pixel")
    return finish(rows, broken, len(images), args.json)


def finish(rows: list[dict[str, Any]], broken: dict[Path, str], read: int, target: Path | None) -> dict[str, Any]:
    """Write what was found, and name what could not be read."""
    results = {"predictions": rows, "unreadable": [{"image": str(p), "error": error} for p, error in broken.items()]}
    if target:
        write_json(target, results)
    for path, error in broken.items():
        print(f"{path}: {error}", file=sys.stderr)
    if broken:
        raise SystemExit(f"{len(broken)} of {len(broken) + read} images could not be read")
    return results


def load(source: str, classes: str | None, device: str) -> Predictor:
    model: Any
    if source.startswith("timm:"):
        model, preprocess = from_timm(source.removeprefix("timm:"))
        model.eval()
        subset = None if classes or getattr(model, "class_names", ()) else infer_imagenet_subset(model)
        classes = "imagenet-1k" if subset == "imagenet-1k" else classes
    elif is_fresh(source):
        raise ValueError(f"{source} is the name of a model with fresh weights, whose labels mean nothing: give a "
                         "directory, a Hub id or timm:NAME")  # fmt: skip
    else:
        model = from_pretrained(source)
        dense = isinstance(model, UperNet)
        try:
            preprocess = (ScenePreprocess if dense else Preprocess).load(resolve_file(source, PREPROCESSOR_NAME))
        except (FileNotFoundError, EntryNotFoundError):
            warnings.warn(f"{source} has no {PREPROCESSOR_NAME}: images are normalised with ImageNet's mean and std",
                          stacklevel=2)  # fmt: skip
            preprocess = (ScenePreprocess(size=model.img_size, multiple=model.multiple) if dense
                          else Preprocess(size=model.img_size))  # fmt: skip
    stored = getattr(model, "class_names", ())
    names = read_classes(classes) if classes else list(stored or map(str, range(model.num_classes)))
    if len(names) != model.num_classes:
        raise ValueError(f"{source} has {model.num_classes} classes, but {classes} names {len(names)}: give "
                         "one name per class, in the order of its outputs")  # fmt: skip
    return Predictor(source, model.to(device), preprocess, names)


def read_classes(source: str) -> list[str]:
    if source == "imagenet-1k":
        return [str(name).split(",")[0] for name in ImageNetInfo(source).label_descriptions()]
    try:
        return Path(source).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read names of classes from {source} ({error}): give a text file with one name per "
                         "line, or 'imagenet-1k'") from None  # fmt: skip


def read_images(paths: Sequence[Path], predictors: list[Predictor]) -> tuple[dict[Path, list[Any]], dict[Path, str]]:
    """Each readable image as every classifier takes it or, without any, its pixels as they are stored; and why the
    others cannot be read."""
    images, broken = {}, {}
    for path in tqdm(paths, desc="read", leave=False, disable=len(paths) < BATCH):
        try:
            pixels = read_image(path, upright=bool(predictors))
            images[path] = [predictor.preprocess.image(pixels) for predictor in predictors] or [pixels]
        except ValueError as error:
            broken[path] = str(error)
    return images, broken


def make_shifts(grid: int, step: int, kind: str) -> Tensor:
    """(grid, grid, 2) pixels down and right; circular ones start in place, standard ones lie around it."""
    along = (torch.arange(grid) - (grid // 2 if kind == "standard" else 0)) * step
    return torch.stack(torch.meshgrid(along, along, indexing="ij"), -1)


@torch.no_grad()
def examine(predictor: Predictor, images: list[Tensor], shifts: Tensor, kind: str, device: str) -> Report:
    """Classify images in place and at ``shifts`` (G, G, 2), always in the same batches: bits compare at equal size."""
    parts = []
    steps = tqdm(total=-(-len(images) // BATCH) * len(shifts) ** 2, desc=Path(predictor.name).name, leave=False,
                 disable=not len(shifts))  # fmt: skip
    for start in range(0, len(images), BATCH):
        x = torch.stack(images[start : start + BATCH]).to(device)
        logits = predictor.model(x)
        best, shape = logits.argmax(1, keepdim=True), (len(x), *shifts.shape[:2])
        labels, probabilities, identical = (torch.zeros(shape, dtype=t) for t in (torch.long, torch.float, torch.bool))
        for h, w in np.ndindex(shape[1:]):
            moved = predictor.model(MOVES[kind](x, shifts[h, w].to(device).expand(len(x), 2)))
            labels[:, h, w] = moved.argmax(1)
            probabilities[:, h, w] = moved.softmax(1).gather(1, best)[:, 0]
            identical[:, h, w] = (moved == logits).all(1)
            steps.update()
        parts.append((logits.softmax(1).cpu(), labels, probabilities, identical))
    steps.close()
    return Report(*(torch.cat(column) for column in zip(*parts, strict=True)))


def describe(predictor: Predictor, report: Report, i: int, image: str, top: int) -> dict[str, Any]:
    values, classes = report.still[i].topk(min(top, len(predictor.classes)))
    predictions = [{"class": c, "name": predictor.classes[c], "probability": p}
                   for p, c in zip(values.tolist(), classes.tolist(), strict=True)]  # fmt: skip
    return {"image": image, "model": predictor.name, "predictions": predictions}


def tally(report: Report, i: int) -> dict[str, Any]:
    labels = report.labels[i]
    return {"labels": labels.tolist(), "probabilities": report.probabilities[i].tolist(), "count": labels.numel(),
            "label_kept": int((labels == report.still[i].argmax()).sum()),
            "bit_identical": int(report.identical[i].sum())}  # fmt: skip


def summarise(row: dict[str, Any]) -> dict[str, Any]:
    shifts, best = row["shifts"], row["predictions"][0]
    percent = [100 * p for line in shifts["probabilities"] for p in line]
    return {"image": row["image"], "model": row["model"], "label": best["name"],
            "probability in place": f"{100 * best['probability']:.2f} %",
            "at shifts": f"{min(percent):.2f} to {max(percent):.2f} %",
            "labels seen": len({label for line in shifts["labels"] for label in line}),
            "label kept": f"{shifts['label_kept']} of {shifts['count']}",
            "bit-identical": f"{shifts['bit_identical']} of {shifts['count']}"}  # fmt: skip


def format_grid(predictor: Predictor, report: Report, i: int, shifts: Tensor) -> str:
    """The label at every shift, and the probability of the label in place."""
    rows = []
    for h, line in enumerate(shifts.tolist()):
        names = [predictor.classes[label][:12] for label in report.labels[i, h].tolist()]
        cells = [f"{name} {100 * p:.0f}" for name, p in zip(names, report.probabilities[i, h].tolist(), strict=True)]
        rows.append({"down \\ right": str(line[0][0])} | {str(at[1]): c for at, c in zip(line, cells, strict=True)})
    return format_table(rows)


def draw(predictors: list[Predictor], reports: list[Report], images: dict[Path, list[Tensor]], shifts: Tensor,
         kind: str, target: Path) -> None:  # fmt: skip
    """A row per image: what the first model sees, then a heat map per model; cells whose label changed carry it."""
    along, shown = shifts[0, :, 1].tolist(), list(images.items())[:DRAWN]
    figure = Figure(figsize=(3.6 * (1 + len(predictors)) + 0.6, 3.7 * len(shown) + 0.5), layout="constrained")
    axes = figure.subplots(len(shown), 1 + len(predictors), squeeze=False)
    heat: Any = None
    for i, (path, inputs) in enumerate(shown):
        axes[i, 0].imshow(predictors[0].restore(inputs[0]))
        axes[i, 0].set(xticks=[], yticks=[])
        axes[i, 0].set_title(path.name, fontsize=9, parse_math=False)  # a name may hold dollar signs
        for axis, predictor, report in zip(axes[i, 1:], predictors, reports, strict=True):
            best = int(report.still[i].argmax())
            changed = report.labels[i] != best
            heat = axis.imshow(report.probabilities[i], vmin=0, vmax=1, cmap="viridis")
            axis.set(xticks=range(len(along)), xticklabels=along, yticks=range(len(along)), yticklabels=along,
                     xlabel="px right", ylabel="px down")  # fmt: skip
            kind_of = "adaptive" if getattr(predictor.model, "adaptive", False) else "default"
            axis.set_title(f"{Path(predictor.name).name} ({kind_of})\n"
                           f"{predictor.classes[best]!r} kept at {int((~changed).sum())} of {changed.numel()} shifts",
                           fontsize=9, parse_math=False)  # fmt: skip
            for h, w in changed.nonzero().tolist():
                axis.text(w, h, predictor.classes[int(report.labels[i, h, w])][:8], ha="center", va="center",
                          fontsize=7, color="white", parse_math=False,
                          bbox={"boxstyle": "round", "color": "firebrick"})  # fmt: skip
    figure.colorbar(heat, ax=axes[:, 1:], label="probability of the label in place", shrink=0.8)
    figure.suptitle(f"{kind} shifts; red: another label" + (f"; the first {DRAWN} images" * (len(images) > DRAWN)),
                    fontsize=10)  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    suffix = target.suffix[1:].lower()
    figure.savefig(target, dpi=130, format=suffix if suffix in figure.canvas.get_supported_filetypes() else "png")


if __name__ == "__main__":
    shiftvit.run(main)
