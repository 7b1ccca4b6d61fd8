"""The tab *move*: an image moves, and a card for each model says what became of its answer."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace

import matplotlib
import torch
from torch import Tensor

from common.shifts import circular_shift, roll

from .sides import Side, draw_pixels

__all__ = ["Outcome", "draw", "draw_card", "examine"]

SCALE = 1.5  # the error that is drawn brightest: two unrelated tokens of typical size lie 1.4 apart
BARS = 10


@dataclass(frozen=True)
class Outcome:
    """What a model makes of a moved image: probabilities in place and moved (classes,), a map of token errors per
    stage, on the pixels of the moved image (H, W), and whether both logits agree in every bit."""

    still: Tensor
    moved: Tensor
    errors: list[Tensor]
    identical: bool


@torch.no_grad()
def examine(side: Side, image: Tensor, dx: int, dy: int) -> Outcome:
    """Compare a model on ``image`` (1, 3, H, W), uint8, in place and moved right by ``dx`` and down by ``dy`` pixels.

    The error of a token is the norm of its change, over the root mean square of the token norms of its stage in place.
    """
    model, shift = side.model, torch.tensor([[dy, dx]])
    x = replace(side.preprocess, resize=None).evaluate(image)
    final, still = model.forward_intermediates(x, return_offsets=True)
    final_moved, moved = model.forward_intermediates(circular_shift(x, shift), return_offsets=True)
    logits, logits_moved = model.forward_head(final), model.forward_head(final_moved)
    errors = []
    for (before, origin), (after, origin_moved), info in zip(still, moved, model.feature_info, strict=True):
        stride = info["reduction"]
        # Token h lies at origin + stride h. The grid of a default model stays where it is: take the nearest token.
        aligned = roll(after, torch.round((origin + shift - origin_moved) / stride).long())
        error = (aligned - before).norm(dim=1) / before.norm(dim=1).square().mean().sqrt()  # 1, H/s, W/s
        error = error.repeat_interleave(stride, 1).repeat_interleave(stride, 2)
        errors.append(roll(error, -(origin + shift))[0])  # from the grid in place to the pixels of the moved image
    return Outcome(logits.softmax(1)[0], logits_moved.softmax(1)[0], errors, torch.equal(logits, logits_moved))


def draw(sides: Sequence[Side], image: Tensor, dx: int, dy: int) -> tuple[str, str]:
    """The two parts of the page that follow the image: the image itself, and a card for each model."""
    moved = circular_shift(image, torch.tensor([[dy, dx]]))
    cards = "".join(draw_card(side.title, examine(side, image, dx, dy), side.model.class_names) for side in sides)
    return draw_pixels(moved, "the moved image"), f'<div class="cards" data-shift="{dx},{dy}">{cards}</div>'


def draw_card(title: str, outcome: Outcome, names: Sequence[str] = ()) -> str:
    """Label, bit-identical or not, probabilities as bars with marks where they were in place, errors as maps."""
    shown = [html.escape(name) for name in names] or [str(i) for i in range(len(outcome.moved))]
    label, before = int(outcome.moved.argmax()), int(outcome.still.argmax())
    each = BARS if len(outcome.moved) <= BARS else BARS // 2  # of many classes: the likeliest in place and moved
    likely = {i for p in (outcome.still, outcome.moved) for i in p.argsort(descending=True)[:each].tolist()}
    bars = ""
    for i in sorted(likely):
        moved, still = 100 * float(outcome.moved[i]), 100 * float(outcome.still[i])
        bars += (f'<span>{shown[i]}</span><div class="bar{" top" if i == label else ""}">'
                 f'<i style="width:{moved:.1f}%"></i><b style="left:{still:.1f}%"></b></div>'
                 f"<span>{moved:.1f}</span>")  # fmt: skip
    maps = ""
    for i, error in enumerate(outcome.errors, 1):
        heat = matplotlib.colormaps["inferno"]((error / SCALE).clamp(0, 1).numpy(), bytes=True)[..., :3]
        picture = draw_pixels(torch.from_numpy(heat).permute(2, 0, 1)[None], f"token errors of stage {i}")
        maps += f"<figure>{picture}<figcaption>stage {i}<br>largest {float(error.max()):.3g}</figcaption></figure>"
    kept, bits = ("yes", "kept") if label == before else ("no", "changed"), "yes" if outcome.identical else "no"
    return (f'<section class="card" data-model="{title}" data-label="{label}"><header><h3>{title}</h3>'
            f'<em class="{kept[0]}">label {kept[1]}</em><em class="bits {bits}">bit-identical: {bits}</em></header>'
            f'<div class="label">{shown[label]}</div><div class="bars">{bars}</div>'
            f'<h4>token errors</h4><div class="maps">{maps}</div></section>')  # fmt: skip
