"""The tab *move*: an image moves, and a card for each model says what became of its answer."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace

import matplotlib
import torch
from torch import Tensor

from common.shifts import circular_shift, roll, standard_shift

from .sides import Side, draw_pixels, misfit

__all__ = ["MOVES", "Outcome", "choose_opening", "draw", "draw_card", "draw_view", "examine", "move_pixels"]

MOVES = {"circular": circular_shift, "standard": standard_shift}
OPENINGS = ((-2, 4), (3, 2), (2, -3), (-3, -2))  # right and down: small, so that the image is still whole
SCALE = 1.5  # the error that is drawn brightest: two unrelated tokens of typical size lie 1.4 apart
BARS = 10


@dataclass(frozen=True)
class Outcome:
    """What a model makes of a moved image: probabilities in place and moved (classes,), a map of token errors per
    stage, on the pixels of the moved image (H, W), NaN where a standard shift brought nothing to compare, and whether
    both logits agree in every bit."""

    still: Tensor
    moved: Tensor
    errors: list[Tensor]
    identical: bool


@torch.no_grad()
def examine(side: Side, image: Tensor, dx: int, dy: int, kind: str = "circular") -> Outcome:
    """Compare a model on ``image`` (1, 3, H, W), uint8, in place and moved right by ``dx`` and down by ``dy`` pixels.

    The error of a token is the norm of its change, over the root mean square of the token norms of its stage in place.
    """
    model, shift = side.model, torch.tensor([[dy, dx]])
    x = replace(side.preprocess, resize=None).evaluate(image)
    final, still = model.forward_intermediates(x, return_offsets=True)
    final_moved, moved = model.forward_intermediates(MOVES[kind](x, shift), return_offsets=True)
    logits, logits_moved = model.forward_head(final), model.forward_head(final_moved)
    seen = MOVES[kind](torch.ones(1, 1, *x.shape[2:]), shift)[0, 0] > 0
    errors = []
    for (before, origin), (after, origin_moved), info in zip(still, moved, model.feature_info, strict=True):
        stride = info["reduction"]
        # Token h lies at origin + stride h. The grid of a default model stays where it is: take the nearest token.
        aligned = roll(after, torch.round((origin + shift - origin_moved) / stride).long())
        error = (aligned - before).norm(dim=1) / before.norm(dim=1).square().mean().sqrt()  # 1, H/s, W/s
        error = error.repeat_interleave(stride, 1).repeat_interleave(stride, 2)
        error = roll(error, -(origin + shift))[0]  # from the grid in place to the pixels of the moved image
        errors.append(torch.where(seen, error, torch.nan))
    return Outcome(logits.softmax(1)[0], logits_moved.softmax(1)[0], errors, torch.equal(logits, logits_moved))


@torch.no_grad()
def choose_opening(side: Side, images: Sequence[Tensor]) -> tuple[int, int, int]:
    """Image, dx and dy with which the page opens: where the default model is surest of another label."""
    x = replace(side.preprocess, resize=None).evaluate(torch.cat(list(images)))
    still = side.model(x).argmax(1)
    sure = torch.zeros(len(OPENINGS), len(x))
    for k, (dx, dy) in enumerate(OPENINGS):
        top, label = side.model(circular_shift(x, torch.tensor([[dy, dx]] * len(x)))).softmax(1).max(1)
        sure[k] = torch.where(label != still, top, 0)
    best = int(sure.argmax())
    return best % len(x), *OPENINGS[best // len(x)]


def draw(sides: Sequence[Side], image: Tensor, dx: int, dy: int, kind: str = "circular") -> tuple[str, str]:
    """The two parts of the page that follow the image: the image itself, and a card for each model."""
    outcomes = [examine(side, image, dx, dy, kind) for side in sides]
    said = []
    for side, outcome in zip(sides, outcomes, strict=True):
        label, sure, kept = describe(outcome, side.names)
        said.append((side.title, f"{label} <small>{sure} sure</small>", kept))
    picture = draw_pixels(move_pixels(image, dx, dy, kind, sides[0].preprocess.mean), "the moved image")
    cards = "".join(draw_card(side.title, outcome, side.names) for side, outcome in zip(sides, outcomes, strict=True))
    return (draw_view(picture, said, misfit(image, sides[0])),
            f'<div class="cards" data-shift="{dx},{dy},{kind}">{cards}</div>')  # fmt: skip


def move_pixels(image: Tensor, dx: int, dy: int, kind: str, mean: Sequence[float]) -> Tensor:
    """An image (1, 3, H, W), uint8, moved; what comes in has the mean colour, which models see as zeros."""
    shift = torch.tensor([[dy, dx]])
    seen = MOVES[kind](torch.ones(1, 1, *image.shape[2:]), shift) > 0
    ground = (255 * torch.tensor(mean)).round().byte().view(1, 3, 1, 1)
    return torch.where(seen, circular_shift(image, shift), ground)


def draw_view(picture: str, said: Sequence[tuple[str, str, bool]], note: str = "") -> str:
    """A picture that can be dragged and, for narrow screens, what each model says of it: (title, words, kept)."""
    lines = "".join(f'<div class="{"yes" if kept else "no"}"><b>{title}</b> {words}</div>'
                    for title, words, kept in said)  # fmt: skip
    return (f'<div class="view"><div class="picture">{picture}</div><div class="verdicts">{lines}</div></div>'
            + (f'<p class="note">{note}</p>' if note else ""))  # fmt: skip


def describe(outcome: Outcome, names: Sequence[str]) -> tuple[str, str, bool]:
    """The label, or "before → now" where it changed; how sure the model is now; whether the label is kept."""
    before, now = int(outcome.still.argmax()), int(outcome.moved.argmax())
    label = html.escape(names[now])
    if before != now:
        label = f"{html.escape(names[before])} → {label}"
    return label, f"{100 * float(outcome.moved[now]):.1f} %", before == now


def draw_card(title: str, outcome: Outcome, names: Sequence[str]) -> str:
    """Label, bit-identical or not, probabilities as bars with marks where they were in place, errors as maps."""
    label, sure, kept = describe(outcome, names)
    now = int(outcome.moved.argmax())
    each = BARS if len(outcome.moved) <= BARS else BARS // 2  # of many classes: the likeliest in place and moved
    likely = {i for p in (outcome.still, outcome.moved) for i in p.argsort(descending=True)[:each].tolist()}
    bars = ""
    for i in sorted(likely):
        moved, still = 100 * float(outcome.moved[i]), 100 * float(outcome.still[i])
        bars += (f'<span>{html.escape(names[i])}</span><div class="bar{" top" if i == now else ""}">'
                 f'<i style="width:{moved:.1f}%"></i><b style="left:{still:.1f}%"></b></div>'
                 f"<span>{moved:.1f}</span>")  # fmt: skip
    maps = ""
    heat = matplotlib.colormaps["inferno"].with_extremes(bad="grey")
    for i, error in enumerate(outcome.errors, 1):
        pixels = heat((error / SCALE).clamp(0, 1).numpy(), bytes=True)[..., :3]
        picture = draw_pixels(torch.from_numpy(pixels).permute(2, 0, 1)[None], f"token errors of stage {i}")
        largest = float(error.nan_to_num(0).max())
        maps += f"<figure>{picture}<figcaption>stage {i}<br>largest {largest:.3g}</figcaption></figure>"
    word, bits = ("yes", "kept") if kept else ("no", "changed"), "yes" if outcome.identical else "no"
    return (f'<section class="card" data-model="{title}" data-label="{now}"><header><h3>{title}</h3>'
            f'<em class="{word[0]}">label {word[1]}</em><em class="bits {bits}">bit-identical: {bits}</em></header>'
            f'<div class="label">{label}</div><p class="sure">{sure} sure</p><div class="bars">{bars}</div>'
            f'<h4>token errors</h4><div class="maps">{maps}</div></section>')  # fmt: skip
