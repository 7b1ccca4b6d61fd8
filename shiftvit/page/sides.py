"""What the page compares, and on what: the two models, images of its own, files of strangers."""

import base64
import html
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from common import from_pretrained
from common.data.images import decode_image
from common.data.preprocess import Preprocess
from common.data.splits import load_digits_data
from common.models.classifier import Classifier

__all__ = [
    "MAX_PIXELS",
    "Side",
    "draw_pixels",
    "fit",
    "load_examples",
    "load_photographs",
    "load_sides",
    "misfit",
    "read_upload",
]

DIGITS = tuple(map(str, range(10)))
PHOTOGRAPHS = ("cheetah1.jpg", "lion.jpg", "cheetah.jpg", "bus.png")
COLOURLESS = 8  # levels between the channels of a pixel, on average, up to which an image counts as grey
MAX_PIXELS = 25_000_000  # of an image, by its header: a small file may unfold to gigabytes


@dataclass(frozen=True)
class Side:
    """One of the two models, its name on the page, and how its images are normalised."""

    title: str
    model: Classifier
    preprocess: Preprocess

    @property
    def names(self) -> tuple[str, ...]:
        """Of the classes, in the order of the outputs; their numbers where nobody named them."""
        return self.model.class_names or tuple(map(str, range(self.model.num_classes)))

    @property
    def knows_digits(self) -> bool:
        return self.model.class_names == DIGITS

    @property
    def scope(self) -> str:
        """What the model knows, as a sentence."""
        if self.knows_digits:
            return "The models know light digits on dark ground."
        few = self.model.class_names if len(self.model.class_names) <= 20 else ()
        return f"The models know {len(few)} things: {html.escape(', '.join(few))}." if few else ""


def load_sides(default: str, adaptive: str) -> tuple[Side, Side]:
    """Both models, from directories or Hub repositories, without and with anchors whatever their config says."""
    sides = []
    for title, source in (("default", default), ("adaptive", adaptive)):
        model = from_pretrained(source, adaptive=title == "adaptive")
        if not isinstance(model, Classifier):
            raise ValueError(f"{source} holds a {type(model).__name__}: give a classifier")
        stored = model.stored_input or {"size": model.img_size}  # as predict.py prepares images of such a model
        sides.append(Side(title, model, Preprocess(**stored)))
    left, right = ((side.preprocess.size, side.model.num_classes) for side in sides)
    if left != right:
        raise ValueError(f"the default model has (size, classes) {left}, the adaptive one {right}: give two models of "
                         "one size for the same classes")  # fmt: skip
    canvas, other = (side.preprocess.canvas_size for side in sides)
    if canvas != other:
        raise ValueError(f"images are resized to {canvas} for the default model, to {other} for the adaptive one, and "
                         "one image cannot be both: give two models of one preprocessing")  # fmt: skip
    names = [side.model.class_names for side in sides]
    if all(names) and names[0] != names[1]:
        raise ValueError("the two models have different class names, or the same in another order: give two models of "
                         "the same classes")  # fmt: skip
    return sides[0], sides[1]


def fit(pixels: np.ndarray, preprocess: Preprocess) -> Tensor:
    """An image (h, w, 3) of any size -> (1, 3, H, W) uint8, as evaluation resizes and crops it."""
    return preprocess.denormalise(preprocess.image(pixels)[None])


def load_examples(side: Side) -> list[Tensor]:
    """For models of digits a held-out digit of each class, for others the middle of photographs."""
    if side.knows_digits:
        _, test = load_digits_data()
        first = [int((test.labels == label).nonzero()[0]) for label in range(len(test.classes))]
        pixels = [test.images[i].permute(1, 2, 0).numpy() for i in first]
    else:
        pixels = [_middle(photograph) for photograph in load_photographs()]
    return [fit(each, side.preprocess) for each in pixels]


def load_photographs() -> list[np.ndarray]:
    """Photographs (h, w, 3) that gradio brings along: two cheetahs, a lion, a bus."""
    from gradio.media import get_image

    return [decode_image(Path(get_image(name)).read_bytes(), MAX_PIXELS) for name in PHOTOGRAPHS]


def _middle(pixels: np.ndarray) -> np.ndarray:
    side = min(pixels.shape[:2])
    top, left = ((have - side) // 2 for have in pixels.shape[:2])
    return pixels[top : top + side, left : left + side]


def misfit(image: Tensor, side: Side) -> str:
    """A sentence where an image (1, 3, H, W), uint8, is not what the model was trained on; else nothing."""
    if not side.knows_digits:
        return ""
    levels = image.float()
    grey = float((levels.amax(1) - levels.amin(1)).mean()) <= COLOURLESS
    dark = float((levels.mean(1) < 64).float().mean())  # of the held-out digits: 0.67 to 0.82
    if grey and 0.5 <= dark <= 0.97:
        return ""
    return ("This does not look like a light digit on dark ground, and these models know nothing else: "
            "their labels mean little here.")  # fmt: skip


def read_upload(content: bytes) -> np.ndarray:
    """A stranger's file -> (h, w, 3) uint8, or a ValueError that says what is wrong with it."""
    try:
        return decode_image(content, MAX_PIXELS)
    except Exception as error:  # decoders fail in many ways
        reason = "unknown format" if isinstance(error, UnidentifiedImageError) else str(error).rstrip(".")
        raise ValueError(f"This file cannot be shown ({reason}). Choose a whole PNG, JPEG, WebP or BMP image of at "
                         f"most {MAX_PIXELS // 10**6} million pixels.") from None  # fmt: skip


def draw_pixels(image: Tensor, alt: str) -> str:
    """(1, 3, H, W) uint8 as an image inside the page itself: no file on the server, no further request."""
    buffer = io.BytesIO()
    Image.fromarray(image[0].permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
