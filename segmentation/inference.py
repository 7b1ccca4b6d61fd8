"""Masks of whole images and by sliding windows, as files, and the paper's picture of what a shift changes."""

import colorsys
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from tqdm.auto import tqdm

from common.evaluation.metrics import highest, predict_pixels
from common.shifts import circular_shift, standard_shift

from .preprocess import ScenePreprocess

__all__ = ["labels_at", "palette", "pictures", "slide", "whole", "write_masks"]

Model = Callable[[Tensor], Tensor]

AT_ONCE = 2**27  # logits that are brought to the size of an image at once: 512 MiB


def whole(model: Model, images: Tensor, multiple: tuple[int, int] = (1, 1)) -> Tensor:
    """Logits (B, classes, H, W) of images (B, 3, H, W) of any size, in one piece.

    Sides are stretched to the next multiple of ``multiple`` (a model's ``multiple``), the logits back to the image.
    """
    size = (images.shape[2], images.shape[3])
    valid = (math.ceil(size[0] / multiple[0]) * multiple[0], math.ceil(size[1] / multiple[1]) * multiple[1])
    if valid == size:
        return model(images)
    logits = model(F.interpolate(images, valid, mode="bilinear", align_corners=False))
    return F.interpolate(logits, size, mode="bilinear", align_corners=False)


def slide(model: Model, images: Tensor, window: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """Logits (B, classes, H, W), averaged over all windows that see a pixel; the last of a row ends at the border."""
    sides = (images.shape[2], images.shape[3])
    for side, w, s in zip(sides, window, stride, strict=True):
        if side < w:
            raise ValueError(f"images of {sides[0]}x{sides[1]} are smaller than the window {window[0]}x{window[1]}: "
                             "resize them, or use a smaller window")  # fmt: skip
        if not 0 < s <= w:
            raise ValueError(f"a stride of {stride} skips pixels between windows {window}: use 1 to the window")
    rows, columns = (
        [min(i * s, side - w) for i in range(math.ceil((side - w) / s) + 1)]
        for side, w, s in zip(sides, window, stride, strict=True)
    )
    total, seen = None, torch.zeros(1, 1, *sides, device=images.device)  # in float32: hundreds of windows add up
    for top in rows:
        for left in columns:
            place = (..., slice(top, top + window[0]), slice(left, left + window[1]))
            logits = model(images[place]).float()
            if total is None:
                total = logits.new_zeros(*logits.shape[:2], *sides)
            total[place] += logits
            seen[place] += 1
    assert total is not None
    return total / seen


def labels_at(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, H, W) classes of the highest of logits (B, classes, h, w) brought to ``size``; -1 where one is NaN. A few
    classes at a time: all 150 of a photograph of 20 million pixels would take 12 GB."""
    if logits.shape[-2:] == size:
        return highest(logits)
    each = max(1, AT_ONCE // (len(logits) * math.prod(size)))
    best = torch.full((len(logits), *size), -math.inf, device=logits.device)
    labels = torch.zeros_like(best, dtype=torch.long)
    for first in range(0, logits.shape[1], each):
        some = F.interpolate(logits[:, first : first + each].float(), size, mode="bilinear", align_corners=False)
        values, found = some.max(1)
        better = (values > best) | values.isnan()
        best, labels = torch.where(better, values, best), torch.where(better, first + found, labels)
    return labels.masked_fill(best.isnan(), -1)


def palette(classes: int) -> np.ndarray:
    """(classes, 3) colours in [0, 1], told apart by hue and, in turn, by lightness; no red, which marks changes."""
    golden = (5**0.5 - 1) / 2
    hues = [0.08 + 0.84 * ((i * golden) % 1) for i in range(classes)]
    return np.array([colorsys.hls_to_rgb(hue, (0.45, 0.65, 0.3)[i % 3], 0.6) for i, hue in enumerate(hues)])


@torch.no_grad()
def write_masks(model: Model, images: Mapping[Path, np.ndarray], directory: Path, *, preprocess: ScenePreprocess,
                names: Sequence[str], device: str) -> list[dict[str, Any]]:  # fmt: skip
    """A PNG for each image (h, w, 3), uint8, and as large: a pixel's number is its class, the palette gives colours.

    Returns where each mask is, the share of every class that appears, and the share of pixels whose label changes when
    the image, as the model takes it, moves by one pixel down and right on the torus; in percent.
    """
    if len({path.stem for path in images}) < len(images):
        raise ValueError("two images have the same name, and so would their masks: predict them one by one")
    targets = {path: directory / f"{path.stem}.png" for path in images}
    if same := [path for path, target in targets.items() if target.exists() and target.samefile(path)]:
        raise ValueError(f"the mask of {same[0]} would replace the image itself: choose another folder for masks")
    directory.mkdir(parents=True, exist_ok=True)
    colours, rows = (255 * palette(len(names))).round().astype(np.uint8), []
    for path, pixels in tqdm(images.items(), desc="masks", leave=False, disable=None):
        x = preprocess.evaluate(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].to(device))
        logits, one = model(x), torch.ones(1, 2, dtype=torch.long, device=device)
        back = circular_shift(predict_pixels(model, circular_shift(x, one)), -one)
        mask = labels_at(logits, (pixels.shape[0], pixels.shape[1]))[0].cpu()
        picture = Image.fromarray(mask.numpy().astype(np.uint8 if len(names) <= 256 else np.uint16))
        if len(names) <= 256:
            picture.putpalette(colours.tobytes())
        picture.save(targets[path])
        shares = {names[c]: 100 * (mask == c).float().mean().item() for c in mask.unique().tolist()}
        changed = 100 * (back != logits.argmax(1)).float().mean().item()
        rows.append({"image": str(path), "mask": str(targets[path]), "classes": shares, "changed": changed})
    return rows


@torch.no_grad()
def pictures(models: Mapping[str, Model], images: Tensor, shift: Tensor, target: str | os.PathLike[str], *,
             preprocess: ScenePreprocess, kind: Literal["circular", "standard"] = "circular",
             names: Sequence[str] = ()) -> dict[str, list[float]]:  # fmt: skip
    """The paper's figure as one PNG: a row per image (B, 3, H, W), normalised; ``shift`` (B, 2) moves it.

    Columns: the image, the shifted image, and for every model its mask of the one and, shifted back, of the other, with
    pixels whose label changed in red. A standard shift's border, which only one of the two shows, is grey. ``names`` of
    the classes that appear stand below. Returns the share of changed pixels per model and image, in percent.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch  # the object interface: no backend, no global state

    if kind not in ("circular", "standard"):
        raise ValueError(f"unknown kind of shift {kind!r}: choose 'circular' or 'standard'")
    moved = circular_shift(images, shift) if kind == "circular" else standard_shift(images, shift)
    pixels = [preprocess.denormalise(x).permute(0, 2, 3, 1).cpu().numpy() for x in (images, moved)]
    count, height, width = len(images), images.shape[2], images.shape[3]
    figure = Figure(figsize=(2.2 * (2 + 2 * len(models)), 2.4 * count * height / width + 0.4), layout="constrained")
    axes = figure.subplots(count, 2 + 2 * len(models), squeeze=False)
    for i in range(count):
        axes[i, 0].imshow(pixels[0][i])
        axes[i, 1].imshow(pixels[1][i])
    axes[0, 0].set_title("image", fontsize=9)
    axes[0, 1].set_title("shifted image", fontsize=9)
    changes: dict[str, list[float]] = {}
    seen: dict[int, Patch] = {}
    for k, (name, model) in enumerate(models.items()):
        logits = model(images)
        table = palette(logits.shape[1])
        before, after = logits.argmax(1), predict_pixels(model, moved)
        back = circular_shift(after, -shift) if kind == "circular" else standard_shift(after[:, None], -shift, -1)[:, 0]
        if names:
            present = before.unique().tolist()
            seen |= {c: Patch(color=table[c], label=names[c].replace("$", r"\$")) for c in present}
        unseen = (back < 0).cpu().numpy()
        changed = ((back != before) & (back >= 0)).cpu().numpy()
        masks = [table[mask.clamp_min(0).cpu().numpy()] for mask in (before, back)]
        masks[1][unseen] = 0.5
        masks[1][changed] = (1.0, 0.0, 0.0)
        changes[name] = (100.0 * changed.sum((1, 2)) / np.maximum(1, (~unseen).sum((1, 2)))).tolist()
        axes[0, 2 + 2 * k].set_title(name, fontsize=9)
        axes[0, 3 + 2 * k].set_title("shifted and back", fontsize=9)
        for i in range(count):
            axes[i, 2 + 2 * k].imshow(masks[0][i], interpolation="nearest")
            axes[i, 3 + 2 * k].imshow(masks[1][i], interpolation="nearest")
            axes[i, 3 + 2 * k].set_xlabel(f"{changes[name][i]:.2f} % changed", fontsize=8)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    if seen:
        figure.legend(handles=[seen[c] for c in sorted(seen)], loc="outside lower center", ncols=6, fontsize=8)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150, format="png")
    return changes
