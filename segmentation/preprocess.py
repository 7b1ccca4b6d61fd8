"""From uint8 scenes and their labels to what a segmenter takes: resize, crop, flip, distort, normalise.

What happens to image i in epoch e depends on (seed, e, i) alone. Resizing and cropping work image by image, where the
image is (in the loader's workers, or on the device); colours and normalisation on whole batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Normalisation
from common.evaluation.metrics import IGNORE_INDEX
from common.seeding import constants, hashed_uniform

__all__ = ["ScenePreprocess", "distort_colours", "resize_image", "resize_labels"]

COLOURS = 9  # random numbers that the colours of an image take
CROPS = 10  # crops to choose from where one class fills too much of it
COLUMNS = 2 + COLOURS + 2 * CROPS


@dataclass(frozen=True)
class ScenePreprocess(Normalisation):
    """uint8 images (B, 3, h, w), or a list of (3, h, w), and labels (B, h, w) -> normalised images, labels (B, H, W).

    Evaluation resizes to ``size`` or, with ``resize = (long, short)``, keeps the ratio: as large as fits into these
    sides; then each side is rounded up to a multiple of ``multiple`` (the paper's circular setting; an adaptive model
    is exact only for these). Labels stay as they are: masks are brought to their size.

    Training, per image: resize (to ``resize`` or its own size, times a factor in ``ratio_range``, keeping the ratio),
    a random crop of ``size`` in which no class fills more than ``max_class_share`` (of ten tries), what is missing
    filled with the mean colour and label 255; a flip; the colours of MMSegmentation (``photometric``), also of what was
    filled in, which MMSegmentation keeps at the mean.
    """

    size: tuple[int, int]
    resize: tuple[int, int] | None = None
    multiple: tuple[int, int] = (1, 1)
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    ratio_range: tuple[float, float] | None = None
    max_class_share: float = 1.0
    flip: bool = False
    photometric: bool = False

    STORED = ("size", "resize", "multiple", "mean", "std")

    def target_size(self, size: tuple[int, int], ratio: float = 1.0) -> tuple[int, int]:
        """What an image of ``size`` is resized to, before it is cropped or rounded up."""
        factor = ratio
        if self.resize is not None:
            factor = min(ratio * max(self.resize) / max(size), ratio * min(self.resize) / min(size))
        return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))

    def evaluation_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """(H, W) at which an image of ``size`` is evaluated."""
        height, width = self.size if self.resize is None else self.target_size(size)
        rows, columns = self.multiple
        return math.ceil(height / rows) * rows, math.ceil(width / columns) * columns

    def evaluate(self, images: Tensor | Sequence[Tensor]) -> Tensor:
        """Normalised images (B, 3, H, W) of one size."""
        sizes = [self.evaluation_size((image.shape[-2], image.shape[-1])) for image in images]
        if len(set(sizes)) > 1:
            raise ValueError(f"images of one batch come out at different sizes ({sorted(set(sizes))[:3]}...): evaluate "
                             "them with a batch size of 1, or give no 'resize', so that all get one size")  # fmt: skip
        if isinstance(images, Tensor):
            return self.normalise(resize_image(images, sizes[0]))
        return self.normalise(torch.stack([resize_image(image, sizes[0]) for image in images]))

    def train(self, images: Tensor | Sequence[Tensor], labels: Tensor | Sequence[Tensor], index: Tensor, *seeds: int,
              cropped: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Normalised images (B, 3, H, W) and labels (B, H, W), long. ``cropped``: ``crop`` was already called on each,
        as ``EncodedScenes`` does in the workers."""
        if not cropped:
            rows = hashed_uniform(index, COLUMNS, *seeds).tolist()
            pairs = [self._crop(x, y, row) for x, y, row in zip(images, labels, rows, strict=True)]
            images, labels = (torch.stack(part) for part in zip(*pairs, strict=True))
        assert isinstance(images, Tensor)
        assert isinstance(labels, Tensor)
        u = hashed_uniform(index.to(images.device), COLUMNS, *seeds).float()
        if self.flip:
            mirrored = u[:, 1] < 0.5
            images = torch.where(mirrored.view(-1, 1, 1, 1), images.flip(-1), images)
            labels = torch.where(mirrored.view(-1, 1, 1), labels.flip(-1), labels)
        if self.photometric:
            images = distort_colours(images, u[:, 2 : 2 + COLOURS])
        return self.normalise(images), labels.long()

    def crop(self, image: Tensor, label: Tensor, index: int, *seeds: int) -> tuple[Tensor, Tensor]:
        """The training crop of one image (3, h, w) uint8 and its labels (h, w): resized, cut, filled up to ``size``."""
        return self._crop(image, label, hashed_uniform(torch.tensor([index]), COLUMNS, *seeds)[0].tolist())

    def _crop(self, image: Tensor, label: Tensor, u: list[float]) -> tuple[Tensor, Tensor]:
        low, high = self.ratio_range or (1.0, 1.0)
        size = (image.shape[-2], image.shape[-1])
        if self.ratio_range is not None or self.resize is not None:
            size = self.target_size(size, low + (high - low) * u[0])
            image, label = resize_image(image, size), resize_labels(label, size)
        height, width = min(size[0], self.size[0]), min(size[1], self.size[1])
        for i in range(CROPS):
            top = int((size[0] - height + 1) * u[2 + COLOURS + 2 * i])
            left = int((size[1] - width + 1) * u[3 + COLOURS + 2 * i])
            cut = label[top : top + height, left : left + width]
            if self.max_class_share >= 1:
                break
            counts = torch.bincount(cut[cut != IGNORE_INDEX].long())
            if (counts > 0).sum() > 1 and counts.max() < self.max_class_share * counts.sum():
                break
        image, label = image[:, top : top + height, left : left + width], cut
        if (height, width) != self.size:
            canvas = constants(tuple(self.mean), image.device).mul(255).round().to(image.dtype)
            canvas = canvas.view(3, 1, 1).repeat(1, *self.size)
            canvas[:, :height, :width] = image
            missing = (0, self.size[1] - width, 0, self.size[0] - height)
            image, label = canvas, F.pad(label, missing, value=IGNORE_INDEX)
        return image, label


def resize_image(image: Tensor, size: tuple[int, int]) -> Tensor:
    """(..., 3, h, w) uint8 -> (..., 3, H, W) uint8, bilinear, antialiased where it shrinks."""
    if image.shape[-2:] == size:
        return image
    shrink = image.shape[-2] > size[0] or image.shape[-1] > size[1]
    x = image.float() if image.ndim == 4 else image[None].float()
    x = F.interpolate(x, size, mode="bilinear", antialias=shrink, align_corners=False).round().clamp(0, 255)
    return x.to(image.dtype).view(*image.shape[:-2], *size)


def resize_labels(label: Tensor, size: tuple[int, int]) -> Tensor:
    """(..., h, w) -> (..., H, W), each pixel that of the nearest centre."""
    if label.shape[-2:] == size:
        return label
    rows, columns = (
        ((torch.arange(new, device=label.device) + 0.5) * (old / new)).long().clamp_max(old - 1)
        for old, new in zip(label.shape[-2:], size, strict=True)
    )
    return label[..., rows[:, None], columns]


def distort_colours(images: Tensor, u: Tensor) -> Tensor:
    """MMSegmentation's photometric distortion: (B, 3, H, W) in [0, 255] and (B, 9) uniform numbers -> float images.

    Each with probability 1/2: brightness plus up to 32, contrast times 0.5 to 1.5 (before or after the others),
    saturation times 0.5 to 1.5, hue turned by up to 36 degrees (18 in OpenCV's unit).
    """
    x = images.float()
    u = u.float()[:, :, None, None, None]  # B, 9, 1, 1, 1

    def spread(column: int) -> Tensor:
        return torch.where(u[:, column] < 0.5, 2 * u[:, column + 1] - 1, 0)  # in [-1, 1); 0: left as it is

    contrast, first = 1 + 0.5 * spread(2), u[:, 8] < 0.5
    x = (x + 32 * spread(0)).clamp(0, 255)
    x = torch.where(first, (x * contrast).clamp(0, 255), x)
    # a colour is value - chroma * (how far a channel is from the highest): saturation scales chroma
    value, chroma, hue = _value_chroma_hue(x)
    chroma = torch.minimum(chroma * (1 + 0.5 * spread(4)), value)
    hue = hue + 0.6 * spread(6)  # sixths of a turn
    sector = (constants((5.0, 3.0, 1.0), x.device).view(1, 3, 1, 1) + hue) % 6
    x = value - chroma * torch.minimum(sector, 4 - sector).clamp(0, 1)
    return torch.where(first, x, (x * contrast).clamp(0, 255))


def _value_chroma_hue(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The highest channel, its distance to the lowest, and the hue in sixths of a turn from red: (B, 1, H, W) each."""
    value, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    chroma = value - low
    red, green, blue = x.split(1, 1)
    hue = torch.where(value == red, green - blue, torch.where(value == green, blue - red, red - green))
    start = torch.where(value == red, 0.0, torch.where(value == green, 2.0, 4.0))
    return value, chroma, start + hue / chroma.clamp_min(1e-6)
