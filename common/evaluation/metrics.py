"""The paper's measures, in percent: of a classifier ``top1``, ``c_cons`` (eq. ccons) and ``s_cons``; of a segmenter
``miou``, ``mascc`` (eq. mascc) and ``massc``.

Every function takes ``(model, data)``: ``model`` is any callable from images (B, C, H, W) to logits (B, classes), or
(B, classes, H, W) for a segmenter, and ``data`` a batch of images, a pair (images, labels), or an iterable of such
batches. Image i of the data gets the same shifts in every call with the same seed, however the data are batched.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.choice import to_float64
from ..seeding import derive_seed
from ..shifts import circular_shift, random_shifts, shift_and_crop, standard_shift

__all__ = ["IGNORE_INDEX", "c_cons", "circular_agreement", "circular_pixel_agreement", "confusion_matrix", "highest",
           "mascc", "massc", "mean_iou", "miou", "predict", "predict_pixels", "refuse_nan", "room_to_shift",
           "s_cons", "same_labels", "standard_agreement", "standard_pixel_agreement", "top1", "worst_agreement",
           "worst_pixel_agreement"]  # fmt: skip

IGNORE_INDEX = 255
"""The label of pixels that neither a loss nor a measure counts."""

Model = Callable[[Tensor], Tensor]
Data = Tensor | tuple[Tensor, Tensor] | Iterable[Any]


def top1(model: Model, data: Data) -> float:
    """Share of images whose highest logit is the label, in percent."""
    return _percent(predict(model, images) == _one_each(labels, len(images))
                    for images, labels, _ in _batches(data, needed_by="top1"))  # fmt: skip


def _one_each(labels: Tensor, count: int) -> Tensor:
    """``labels``, or a ValueError: others would be compared with every image, by broadcasting."""
    if tuple(labels.shape) != (count,):
        raise ValueError(f"labels have shape {tuple(labels.shape)} for {count} images: expected one class number each")
    return labels


def c_cons(model: Model, data: Data, *, max_shift: int | None = None, pairs: int = 1, seed: int = 0,
           worst: int | None = None, near: bool = False) -> float:  # fmt: skip
    """Circular consistency (eq. ccons): how often the labels under two random circular shifts agree, in percent.

    Shifts are uniform in [0, max_shift] per axis (None: the whole torus), ``pairs`` per image. With ``worst=k`` an
    image counts only if its label is the same for all k x k shifts in {0, ..., k - 1}^2: the worst case. With ``near``
    shifts are uniform in [-max_shift, max_shift) (None: a seventh of the side): the image stays about where it was.
    """
    if worst is not None:
        return _percent(worst_agreement(model, images, worst) for images, _, _ in _batches(data))
    return _over_pairs(circular_agreement, model, data, pairs, seed, max_shift=max_shift, near=near)


def s_cons(model: Model, data: Data, *, max_shift: int | None = None, pairs: int = 1, seed: int = 0,
           crop: tuple[int, int] | None = None) -> float:  # fmt: skip
    """Standard consistency: as ``c_cons``, with shifts that lose content at the border, in percent.

    Shifts are uniform in [-max_shift, max_shift] per axis. Without ``crop``, zeros come in (the paper's CIFAR setting;
    None: an eighth of the side). With ``crop``, images are larger, shifted, then cropped at the centre (ImageNet; None:
    the whole margin).
    """
    return _over_pairs(standard_agreement, model, data, pairs, seed, max_shift=max_shift, crop=crop)


def miou(model: Model, data: Data, *, ignore_index: int = IGNORE_INDEX) -> float:
    """Mean intersection over union, over the confusion matrix of all pixels of the data, in percent.

    Labels (B, H, W) of ``ignore_index`` do not count. A class that is neither predicted nor there is left out.
    """
    total: Tensor | None = None
    for images, labels, _ in _batches(data, needed_by="miou"):
        with torch.no_grad():
            logits = model(images)
        counts = confusion_matrix(refuse_nan(highest(logits)), labels, logits.shape[1], ignore_index)
        total = counts if total is None else total + counts
    if total is None:
        raise ValueError("no image to measure on: the data are empty")
    return mean_iou(total)


def mascc(model: Model, data: Data, *, max_shift: int | None = None, pairs: int = 1, seed: int = 0,
          worst: int | None = None) -> float:  # fmt: skip
    """Mean average segmentation circular consistency (eq. mascc): the share of pixels, averaged over images, that get
    one label under two random circular shifts, in percent. Masks are compared after shifting them back.

    Shifts are as in ``c_cons``. With ``worst=k`` a pixel counts only if its label is the same for all k x k shifts in
    {0, ..., k - 1}^2.
    """
    if worst is not None:
        return _percent(worst_pixel_agreement(model, images, worst) for images, _, _ in _batches(data))
    return _over_pairs(circular_pixel_agreement, model, data, pairs, seed, max_shift=max_shift)


def massc(model: Model, data: Data, *, max_shift: int | None = None, pairs: int = 1, seed: int = 0,
          crop: tuple[int, int] | None = None) -> float:  # fmt: skip
    """Mean average semantic segmentation consistency: as ``mascc``, with standard shifts, in percent.

    Only pixels that both shifted images show are compared: the border that a shift brings in is ignored. Shifts and
    ``crop`` are as in ``s_cons``.
    """
    return _over_pairs(standard_pixel_agreement, model, data, pairs, seed, max_shift=max_shift, crop=crop)


@torch.no_grad()
def predict(model: Model, images: Tensor) -> Tensor:
    logits = model(images)
    if logits.ndim != 2:  # of a segmenter: labels along its width would be compared
        raise ValueError(f"expected logits (B, classes) of a classifier, got {tuple(logits.shape)}: measure a "
                         "segmenter by miou, mascc or massc")  # fmt: skip
    return highest(logits)


@torch.no_grad()
def predict_pixels(model: Model, images: Tensor) -> Tensor:
    """(B, H, W) labels of a segmenter."""
    return refuse_nan(highest(model(images)))


def highest(logits: Tensor) -> Tensor:
    """The class of the highest logit, of logits (B, classes, ...); -1 where one is NaN, which would pass for it."""
    values, classes = logits.max(1)
    return classes.masked_fill(values.isnan(), -1)


def refuse_nan(labels: Tensor) -> Tensor:
    """Labels of ``highest`` as they are, or a ValueError; waits for the device. NaN is the same at all shifts."""
    if labels.numel() and labels.amin() < 0:
        raise ValueError("logits are NaN: measure in bf16 or float32 if this is fp16, which may overflow, else look "
                         "for NaN in the weights")  # fmt: skip
    return labels


def same_labels(*labels: Tensor) -> Tensor:
    """Where all those labels of ``highest`` are the same."""
    stacked = refuse_nan(torch.stack(labels))
    return (stacked == stacked[0]).all(0)


def circular_agreement(model: Model, images: Tensor, index: Tensor, *, max_shift: int | None, seed: int,
                       step: int = 1, near: bool = False) -> Tensor:  # fmt: skip
    """(B,) bool: whether image ``index[i]`` gets one label under two circular shifts, by multiples of ``step``."""
    height, width = images.shape[-2:]
    if near:
        max_shift = max_shift or min(height, width) // 7
        low, high = (-max_shift, -max_shift), (max_shift - 1, max_shift - 1)
    else:
        low, high = (0, 0), (height - 1, width - 1) if max_shift is None else (max_shift, max_shift)
    shifts = (step * random_shifts(index, low, (high[0] // step, high[1] // step), seed, which) for which in (1, 2))
    first, second = (predict(model, circular_shift(images, shift)) for shift in shifts)
    return same_labels(first, second)


def standard_agreement(model: Model, images: Tensor, index: Tensor, *, max_shift: int | None, seed: int,
                       crop: tuple[int, int] | None = None) -> Tensor:  # fmt: skip
    """(B,) bool: whether image ``index[i]`` gets one label under two standard shifts."""
    room = room_to_shift(images.shape[-2:], max_shift, crop)
    labels = []
    for which in (1, 2):
        shift = random_shifts(index, (-room[0], -room[1]), (room[0], room[1]), seed, which)
        moved = standard_shift(images, shift) if crop is None else shift_and_crop(images, shift, crop)
        labels.append(predict(model, moved))
    return same_labels(*labels)


def worst_agreement(model: Model, images: Tensor, reach: int) -> Tensor:
    """(B,) bool: whether an image gets one label under all circular shifts in {0, ..., reach - 1}^2."""
    shifts = ((h, w) for h in range(reach) for w in range(reach))
    return same_labels(*(predict(model, images.roll(shift, (-2, -1))) for shift in shifts))


def room_to_shift(sides: Sequence[int], max_shift: int | None, crop: tuple[int, int] | None) -> tuple[int, int]:
    """How far a standard shift of images with these sides may go, per axis."""
    room = [side // 8 if crop is None else (side - crop[axis]) // 2 for axis, side in enumerate(sides)]
    if max_shift is None and min(room) < 1:
        raise ValueError(f"images of {tuple(sides)} leave no room to shift"
                         + (f" around the crop {crop}: resize larger, or leave the crop out (--no-crop)" if crop else
                            ": use images of 8 px or more, or give max_shift"))  # fmt: skip
    if max_shift is None:
        return room[0], room[1]
    if crop is not None and max_shift > min(room):
        raise ValueError(f"a shift of {max_shift} px exceeds the margin of {min(room)} px between images of "
                         f"{tuple(sides)} and the crop {crop}: resize larger or shift less")  # fmt: skip
    return max_shift, max_shift


def confusion_matrix(predicted: Tensor, labels: Tensor, classes: int, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """(classes, classes) counts of pixels by label (row) and prediction (column); sums over batches and processes."""
    if predicted.shape != labels.shape:
        raise ValueError(f"predictions {tuple(predicted.shape)} and labels {tuple(labels.shape)} differ in size: "
                         "resize the logits or the labels")  # fmt: skip
    if 0 <= ignore_index < classes:
        raise ValueError(f"label {ignore_index} is one of {classes} classes, and cannot mark ignored pixels: use "
                         "another, such as ignore_index=-1")  # fmt: skip
    counted = labels != ignore_index
    labels, predicted = labels[counted].long(), predicted[counted]
    for wrong in (labels.min(), labels.max()) if labels.numel() else ():
        if not 0 <= wrong < classes:
            raise ValueError(f"a pixel has label {wrong}, but there are {classes} classes and {ignore_index} to ignore")
    return torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, classes)


def mean_iou(matrix: Tensor) -> float:
    """Mean over classes of |label and prediction| / |label or prediction| of a confusion matrix, in percent."""
    matrix = matrix.cpu().double()
    union = matrix.sum(0) + matrix.sum(1) - matrix.diag()
    if not union.any():
        raise ValueError("no pixel to measure on: all labels are ignored")
    return 100.0 * (matrix.diag() / union)[union > 0].mean().item()


def circular_pixel_agreement(model: Model, images: Tensor, index: Tensor, *, max_shift: int | None,
                             seed: int) -> Tensor:  # fmt: skip
    """(B,) shares, float64, of pixels of image ``index[i]`` that get one label under two circular shifts."""
    height, width = images.shape[-2:]
    high = (height - 1, width - 1) if max_shift is None else (max_shift, max_shift)
    masks = []
    for which in (1, 2):
        shift = random_shifts(index, (0, 0), high, seed, which)
        masks.append(circular_shift(predict_pixels(model, circular_shift(images, shift)), -shift))
    return to_float64((masks[0] == masks[1]).sum((1, 2))) / (height * width)


def standard_pixel_agreement(model: Model, images: Tensor, index: Tensor, *, max_shift: int | None, seed: int,
                             crop: tuple[int, int] | None = None) -> Tensor:  # fmt: skip
    """(B,) shares, float64, of pixels of image ``index[i]`` with one label, among those that both of two standard
    shifts show."""
    room = room_to_shift(images.shape[-2:], max_shift, crop)
    height, width = crop or images.shape[-2:]
    if 2 * room[0] >= height or 2 * room[1] >= width:
        raise ValueError(f"two shifts of up to {max(room)} px may share no pixel of {height}x{width}: shift less than "
                         "half a side")  # fmt: skip
    top, left = (images.shape[2] - height) // 2, (images.shape[3] - width) // 2
    margin = (left, images.shape[3] - width - left, top, images.shape[2] - height - top)
    masks = []
    for which in (1, 2):
        shift = random_shifts(index, (-room[0], -room[1]), room, seed, which)
        moved = standard_shift(images, shift) if crop is None else shift_and_crop(images, shift, crop)
        mask = F.pad(predict_pixels(model, moved)[:, None], margin, value=-1)  # -1: not seen
        masks.append(standard_shift(mask, -shift, fill=-1)[:, 0])
    seen = (masks[0] >= 0) & (masks[1] >= 0)
    agreed = to_float64(((masks[0] == masks[1]) & seen).sum((1, 2)))
    return agreed / to_float64(seen.sum((1, 2)))


def worst_pixel_agreement(model: Model, images: Tensor, reach: int) -> Tensor:
    """(B,) shares, float64, of pixels with the same label under all circular shifts in {0, ..., reach - 1}^2."""
    first = predict_pixels(model, images)
    same = torch.ones_like(first, dtype=torch.bool)
    for h in range(reach):
        for w in range(reach):
            if h or w:
                moved = predict_pixels(model, images.roll((h, w), (-2, -1)))
                same = same & (moved.roll((-h, -w), (-2, -1)) == first)
    return to_float64(same.sum((1, 2))) / (images.shape[-2] * images.shape[-1])


def _over_pairs(agreement: Callable[..., Tensor], model: Model, data: Data, pairs: int, seed: int,
                **settings: Any) -> float:  # fmt: skip
    """Percent of ``agreement`` over all images and ``pairs`` pairs of shifts each; the first is that of ``seed``."""
    return _percent(
        agreement(model, images, index, seed=derive_seed(seed, pair) if pair else seed, **settings)
        for images, _, index in _batches(data)
        for pair in range(pairs)
    )


def _percent(outcomes: Iterable[Tensor]) -> float:
    total, right = 0, torch.zeros((), dtype=torch.long)
    for outcome in outcomes:
        right = right.to(outcome.device) + outcome.sum()
        total += outcome.numel()
    if not total:
        raise ValueError("no image to measure on: the data are empty")
    return 100.0 * right.item() / total


def _batches(data: Data, needed_by: str = "") -> Iterator[tuple[Tensor, Any, Tensor]]:
    """(images, labels or None, running index) of each batch."""
    several = isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)
    is_pair = several and data[0].ndim == 4 and data[1].ndim < 4  # type: ignore[index]  # else two batches
    if isinstance(data, Tensor) or is_pair:
        data = [data]
    start = 0
    for batch in data:
        images, labels = (batch, None) if isinstance(batch, Tensor) else (batch[0], batch[1])
        if needed_by and labels is None:
            raise ValueError(f"{needed_by} needs labels: give (images, labels) batches")
        yield images, labels, torch.arange(start, start + len(images), device=images.device)
        start += len(images)
