"""The tab *pan*: a window glides over a larger picture, as a camera does, so that content leaves and enters at every
border; both models' answers are drawn over time."""

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .sides import Side, draw_pixels, misfit

__all__ = ["FRAMES", "Pan", "choose_pan", "digit_scene", "draw_pan", "glide", "photograph_scene"]

FRAMES = 97
BATCH = 32
LONGEST = 4  # windows along the longer side of a photograph: what is beyond is cut off
REACH_DIGITS, REACH_PHOTOGRAPHS = 0.25, 0.5  # of the window's sides: a digit stays in view, a photograph goes by
WIDTH, HEIGHT = 960, 200  # units of the drawing of the curves


@dataclass(frozen=True)
class Pan:
    """A picture (1, 3, H, W), uint8, where the window's corner is in each frame (T, 2; row and column), the class that
    is drawn, and per model the probabilities (T, classes)."""

    scene: Tensor
    places: Tensor
    label: int
    probabilities: list[Tensor]

    def flips(self, model: int) -> Tensor:
        """Frames (1 to T - 1) whose label is not that of the frame before."""
        labels = self.probabilities[model].argmax(1)
        return (labels[1:] != labels[:-1]).nonzero()[:, 0] + 1


def digit_scene(digits: Sequence[Tensor], label: int) -> Tensor:
    """Three rows of five digits, (1, 3, 3 H, 5 W), with that of ``label`` in the middle."""
    rows = [torch.cat([digits[(label + 3 * (y - 1) + 7 * (x - 2)) % len(digits)] for x in range(5)], dim=3)
            for y in range(3)]  # fmt: skip
    return torch.cat(rows, dim=2)


def photograph_scene(pixels: np.ndarray, window: tuple[int, int]) -> Tensor:
    """An image (h, w, 3) as a picture (1, 3, H, W) of two windows and more along either side."""
    scale = max(2 * side / have for side, have in zip(window, pixels.shape, strict=False))
    image = Image.fromarray(pixels)
    most = [max(1, round(LONGEST * side / scale)) for side in window]  # in pixels of the image
    top, left = ((have - min(have, limit)) // 2 for have, limit in zip(pixels.shape, most, strict=False))
    box = (left, top, image.width - left, image.height - top)
    size = [max(round(scale * (end - begin)), 2 * side)
            for begin, end, side in zip(box[:2], box[2:], window[::-1], strict=True)]  # fmt: skip
    image = image.resize((size[0], size[1]), Image.Resampling.BICUBIC, box=box)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]


@torch.no_grad()
def glide(sides: Sequence[Side], scene: Tensor, reach: float, label: int | None = None) -> Pan:
    """Both models on a window that goes around the middle of ``scene``, as far as ``reach`` of its sides. Without a
    ``label`` the class is drawn which both models together find likeliest over all frames."""
    height, width = sides[0].preprocess.size
    angle = torch.linspace(0, 2 * math.pi, FRAMES)
    middle = torch.tensor([(scene.shape[2] - height) // 2, (scene.shape[3] - width) // 2])
    around = torch.stack([(2 * angle).sin(), angle.sin()], dim=1) * torch.tensor([height, width]) * reach
    places = middle + around.round().long()
    windows = torch.cat([scene[..., top : top + height, left : left + width] for top, left in places.tolist()])
    probabilities = []
    for side in sides:
        x = replace(side.preprocess, resize=None).evaluate(windows)
        probabilities.append(torch.cat([side.model(part).softmax(1) for part in x.split(BATCH)]))
    if label is None:
        label = int((probabilities[0] + probabilities[1]).mean(0).argmax())
    return Pan(scene, places, label, probabilities)


def choose_pan(pans: Iterable[Pan]) -> Pan:
    """The one with which the tab opens: where the default model has the most flips beyond those of the adaptive one."""
    return max(pans, key=lambda pan: len(pan.flips(0)) - len(pan.flips(1)))


def draw_pan(sides: Sequence[Side], pan: Pan) -> str:
    """The window, the picture that it glides over, both verdicts and the curves; the browser moves what ``data-frames``
    says, and the rest is there without it."""
    height, width = sides[0].preprocess.size
    names, shown = sides[0].names, html.escape(sides[0].names[pan.label])
    picture = draw_pixels(pan.scene, "the whole picture")
    frames = [[left, top] for top, left in pan.places.tolist()]
    for p in pan.probabilities:
        for frame, sure, now in zip(frames, *(part.tolist() for part in p.max(1)), strict=True):
            frame += [names[now], f"{100 * sure:.1f} % sure", now == pan.label]
    lines = "".join(draw_line(pan, k, side.title) for k, side in enumerate(sides))
    verdicts = "".join(
        f'<div class="{side.title}" data-flips="{len(pan.flips(k))}"><b>{side.title}</b> <span class="now"></span> '
        f'<small class="sure"></small><small>{plural(len(pan.flips(k)), "flip")} of the label</small></div>'
        for k, side in enumerate(sides)
    )
    middle = pan.scene[..., (pan.scene.shape[2] - height) // 2 :, (pan.scene.shape[3] - width) // 2 :]
    note = misfit(middle[..., :height, :width], sides[0])
    style = f"--w:{width};--h:{height};--sw:{pan.scene.shape[3]};--sh:{pan.scene.shape[2]};--x:0;--y:0;--t:0"
    data = f'data-label="{pan.label}" data-frames="{html.escape(json.dumps(frames))}"'
    return (f'<div class="pan" {data} style="{style}">'
            f'<div class="stage"><div class="window">{picture}</div><div class="verdicts always">{verdicts}</div>'
            f'<div class="scene">{picture}<i></i></div></div>'
            f'<div class="player"><button class="play">pause</button>'
            f'<input class="time" type="range" min="0" max="{FRAMES - 1}" value="0" aria-label="time"></div>'
            f'<h4>probability of {shown} over time; a mark below a curve is a flip of the label</h4>'
            f'<div class="plot"><div class="axis"><span>100 %</span><span>50</span><span>0</span></div>'
            f'<div class="curves"><svg viewBox="0 0 {WIDTH} {HEIGHT + 30}" preserveAspectRatio="none">{lines}</svg>'
            f"<b></b></div></div>{f'<p class=note>{note}</p>' if note else ''}</div>")  # fmt: skip


def draw_line(pan: Pan, model: int, title: str) -> str:
    """A curve, and below it a mark for every flip."""
    step = WIDTH / (FRAMES - 1)
    heights = HEIGHT * (1 - pan.probabilities[model][:, pan.label])
    points = " ".join(f"{i * step:.1f},{y:.1f}" for i, y in enumerate(heights.tolist()))
    marks = "".join(f"M{(i - 0.5) * step:.1f} {HEIGHT + 6 + 12 * model}v8" for i in pan.flips(model).tolist())
    return f'<g class="{title}"><polyline points="{points}"/><path d="{marks or "M0 0"}"/></g>'


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
