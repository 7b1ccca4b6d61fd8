"""The paper's measures of a classifier, in percent: ``top1``, ``c_cons`` (eq. ccons), ``s_cons``.

Every function takes ``(model, data)``: ``model`` is any callable from images (B, C, H, W) to logits (B, classes), and
``data`` a batch of images, a pair (images, labels), or an iterable of such batches. Image i of the data gets the same
shifts in every call with the same seed, however the data are batched.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .shifts import circular_shift, random_shifts, shift_and_crop, standard_shift

__all__ = ["c_cons", "circular_agreement", "predict", "s_cons", "standard_agreement", "top1", "worst_agreement"]

Model = Callable[[Tensor], Tensor]
Data = Tensor | tuple[Tensor, Tensor] | Iterable[Any]


def top1(model: Model, data: Data) -> float:
    """Share of images whose highest logit is the label, in percent."""
    return _percent(predict(model, images) == labels for images, labels, _ in _batches(data, labelled=True))


def c_cons(model: Model, data: Data, *, max_shift: int | None = None, pairs: int = 1, seed: int = 0,
           worst: int | None = None) -> float:  # fmt: skip
    """Circular consistency (eq. ccons): how often the labels under two random circular shifts agree, in percent.

    Shifts are uniform in [0, max_shift] per axis (None: the whole torus), ``pairs`` per image. With ``worst=k`` an
    image counts only if its label is the same for all k x k shifts in {0, ..., k - 1}^2: the worst case.
    """
    if worst is not None:
        return _percent(worst_agreement(model, images, worst) for images, _, _ in _batches(data))
    return _percent(
        circular_agreement(model, images, index, max_shift=max_shift, seed=seed + pair)
        for images, _, index in _batches(data)
        for pair in range(pairs)
    )


def s_cons(model: Model, data: Data, *, max_shift: int | None = None, pairs: int = 1, seed: int = 0,
           crop: tuple[int, int] | None = None) -> float:  # fmt: skip
    """Standard consistency: as ``c_cons``, with shifts that lose content at the border, in percent.

    Shifts are uniform in [-max_shift, max_shift] per axis. Without ``crop``, zeros come in (the paper's CIFAR setting;
    None: an eighth of the side). With ``crop``, images are larger, shifted, then cropped at the centre (ImageNet; None:
    the whole margin).
    """
    return _percent(
        standard_agreement(model, images, index, max_shift=max_shift, seed=seed + pair, crop=crop)
        for images, _, index in _batches(data)
        for pair in range(pairs)
    )


@torch.no_grad()
def predict(model: Model, images: Tensor) -> Tensor:
    return model(images).argmax(-1)


def circular_agreement(model: Model, images: Tensor, index: Tensor, *, max_shift: int | None, seed: int) -> Tensor:
    """(B,) truth of "two circular shifts of image ``index[i]`` get one label"."""
    height, width = images.shape[-2:]
    high = (height - 1, width - 1) if max_shift is None else (max_shift, max_shift)
    first, second = (
        predict(model, circular_shift(images, random_shifts(index, (0, 0), high, seed, which))) for which in (1, 2)
    )
    return first == second


def standard_agreement(model: Model, images: Tensor, index: Tensor, *, max_shift: int | None, seed: int,
                       crop: tuple[int, int] | None = None) -> Tensor:  # fmt: skip
    """(B,) truth of "two standard shifts of image ``index[i]`` get one label"."""
    sides = images.shape[-2:]
    room = [side // 8 if crop is None else (side - crop[axis]) // 2 for axis, side in enumerate(sides)]
    if max_shift is not None:
        if crop is not None and max_shift > min(room):
            raise ValueError(f"a shift of {max_shift} leaves the margin of {min(room)} px between images of "
                             f"{tuple(sides)} and the crop {crop}: resize larger or shift less")  # fmt: skip
        room = [max_shift, max_shift]
    labels = []
    for which in (1, 2):
        shift = random_shifts(index, (-room[0], -room[1]), (room[0], room[1]), seed, which)
        moved = standard_shift(images, shift) if crop is None else shift_and_crop(images, shift, crop)
        labels.append(predict(model, moved))
    return labels[0] == labels[1]


def worst_agreement(model: Model, images: Tensor, reach: int) -> Tensor:
    """(B,) truth of "the label is one and the same for all circular shifts in {0, ..., reach - 1}^2"."""
    first, same = predict(model, images), torch.ones(len(images), dtype=torch.bool, device=images.device)
    for h in range(reach):
        for w in range(reach):
            if h or w:
                same = same & (predict(model, images.roll((h, w), (-2, -1))) == first)
    return same


def _percent(outcomes: Iterable[Tensor]) -> float:
    total, right = 0, torch.zeros((), dtype=torch.long)
    for outcome in outcomes:
        right = right.to(outcome.device) + outcome.sum()
        total += outcome.numel()
    if not total:
        raise ValueError("no image to measure on: the data are empty")
    return 100.0 * right.item() / total


def _batches(data: Data, labelled: bool = False) -> Iterator[tuple[Tensor, Any, Tensor]]:
    """(images, labels or None, running index) of each batch."""
    if isinstance(data, Tensor) or (isinstance(data, tuple) and len(data) == 2 and data[0].ndim == 4):
        data = [data]
    start = 0
    for batch in data:
        images, labels = (batch, None) if isinstance(batch, Tensor) else (batch[0], batch[1])
        if labelled and labels is None:
            raise ValueError("top1 needs labels: give (images, labels) batches")
        yield images, labels, torch.arange(start, start + len(images), device=images.device)
        start += len(images)
