"""The tab *segmentation*: a scene moves, and the pixels are marked whose label changed after shifting back."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common import from_pretrained
from common.data.preprocess import PREPROCESSOR_NAME
from common.evaluation.metrics import predict_pixels
from common.models.hub import resolve_file
from common.shifts import circular_shift, standard_shift
from segmentation import UperNet
from segmentation.data import load_digit_scenes
from segmentation.inference import palette
from segmentation.preprocess import ScenePreprocess

from .move import MOVES, draw_view, move_pixels
from .sides import draw_pixels

__all__ = ["Segmenter", "compare", "draw_masks", "draw_names", "load_scene_images", "load_segmenters"]

SCENES, OPENING_SCENE = 8, 5  # four digits, which both models label right in place
CHANGED, UNSEEN, GROUND = (255, 0, 0), (128, 128, 128), (24, 24, 27)


@dataclass(frozen=True)
class Segmenter:
    """One of the two models of masks, its name on the page, and how its images are normalised."""

    title: str
    model: UperNet
    preprocess: ScenePreprocess


def load_segmenters(default: str, adaptive: str) -> tuple[Segmenter, Segmenter]:
    """Both models, from directories or Hub repositories, without and with anchors whatever their config says."""
    scenes, found = load_digit_scenes(1, 1)[1], []
    names, side = scenes.classes, (scenes.images.shape[2], scenes.images.shape[3])
    for title, source in (("default", default), ("adaptive", adaptive)):
        model = from_pretrained(source, adaptive=title == "adaptive")
        if not isinstance(model, UperNet) or model.class_names != names:
            raise ValueError(f"{source} is not a UperNet for digit scenes, whose classes are {', '.join(names)}")
        preprocess = ScenePreprocess.load(resolve_file(source, PREPROCESSOR_NAME))
        if (seen := preprocess.evaluation_size(side)) != side:  # else it is moved by other distances than the scene
            raise ValueError(f"the {title} segmenter {source} takes a scene at {seen[0]}x{seen[1]}, and the page moves "
                             f"it at {side[0]}x{side[1]}: give one of that size")  # fmt: skip
        found.append(Segmenter(title, model, preprocess))
    return found[0], found[1]


def load_scene_images() -> list[Tensor]:
    """Scenes of held-out digits, (1, 3, 64, 64) uint8 each."""
    return list(load_digit_scenes(1, SCENES)[1].images.split(1))


@torch.no_grad()
def compare(side: Segmenter, image: Tensor, dx: int, dy: int, kind: str = "circular") -> tuple[Tensor, Tensor]:
    """Labels (H, W) of a scene (1, 3, H, W), uint8: in place, and those of the moved scene, shifted back. These are -1
    where a standard shift lost the pixel."""
    x, shift = side.preprocess.evaluate(image), torch.tensor([[dy, dx]])
    before, after = (predict_pixels(side.model, each) for each in (x, MOVES[kind](x, shift)))
    back = circular_shift(after[:, None], -shift) if kind == "circular" else standard_shift(after[:, None], -shift, -1)
    return before[0], back[0, 0]


def draw_masks(sides: Sequence[Segmenter], image: Tensor, dx: int, dy: int, kind: str = "circular") -> tuple[str, str]:
    """The two parts of the page that follow the scene: the scene itself, and a card for each model."""
    said, cards = [], ""
    for side in sides:
        before, back = compare(side, image, dx, dy, kind)
        changed, seen = int(((back != before) & (back >= 0)).sum()), int((back >= 0).sum())
        said.append((side.title, f"{changed:,} <small>pixels changed</small>", not changed))
        figures = ""
        for mask, alt in ((before, "mask in place"), (back, "mask of the moved scene, shifted back")):
            pixels = colour(before, mask, side.model.num_classes)
            figures += f"<figure>{draw_pixels(pixels, alt)}<figcaption>{alt}</figcaption></figure>"
        share = f"{changed:,} of {seen:,} pixels changed ({100 * changed / seen:.1f} %)"
        cards += (f'<section class="card" data-model="{side.title}" data-changed="{changed}"><header>'
                  f'<h3>{side.title}</h3><em class="{"no" if changed else "yes"}">{share}</em></header>'
                  f'<div class="maps">{figures}</div></section>')  # fmt: skip
    picture = draw_pixels(move_pixels(image, dx, dy, kind, sides[0].preprocess.mean), "the moved scene")
    return draw_view(picture, said), f'<div class="cards" data-shift="{dx},{dy},{kind}">{cards}</div>'


def colour(before: Tensor, mask: Tensor, classes: int) -> Tensor:
    """A mask as pixels (1, 3, H, W), uint8: red where it differs from ``before``, grey where it is -1."""
    table = torch.from_numpy(colours(classes))
    pixels = table[mask.clamp_min(0)]
    pixels[mask != before] = torch.tensor(CHANGED, dtype=torch.uint8)
    pixels[mask < 0] = torch.tensor(UNSEEN, dtype=torch.uint8)
    return pixels.permute(2, 0, 1)[None].contiguous()


def colours(classes: int) -> np.ndarray:
    """(classes, 3) uint8: the ground dark, the rest bright."""
    table = (255 * palette(classes)).round().astype(np.uint8)
    table[0] = GROUND
    return table


def draw_names(names: Sequence[str]) -> str:
    """What the colours of the masks mean."""
    marks = [*zip(colours(len(names)).tolist(), names, strict=True), (CHANGED, "changed"), (UNSEEN, "not in view")]
    return '<div class="names">' + "".join(
        f'<span><i style="background:rgb({r},{g},{b})"></i>{html.escape(name)}</span>' for (r, g, b), name in marks
    ) + "</div>"  # fmt: skip
