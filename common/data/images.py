"""Image files as pixels: what a person sees of them."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

__all__ = ["decode_image", "open_image", "read_image", "see", "turn_of"]

MAX_PIXELS = 90_000_000
MAX_BYTES = 2**28  # of an image file that is read by itself
BACKGROUND = (255, 255, 255)  # what shows through where an image is transparent: white, as on a page
UPRIGHT = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
           5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
           8: Image.Transpose.ROTATE_90}  # by EXIF orientation  # fmt: skip


def open_image(content: bytes, most: int = MAX_PIXELS) -> Image.Image:
    """Read the header of an encoded image; refuses what would unfold to more than ``most`` pixels."""
    try:
        image = Image.open(io.BytesIO(content))
    except UnidentifiedImageError:
        raise UnidentifiedImageError("no image in a format that Pillow reads") from None  # its own names an address
    if image.width * image.height > most:
        raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels, more than {most:,}: "
                                           "shrink the image first")  # fmt: skip
    return image


def decode_image(content: bytes, most: int = MAX_PIXELS, upright: bool = True) -> np.ndarray:
    """Encoded image -> (H, W, 3) uint8 as a person sees it: turned as its EXIF data say (``upright``), 16 bits scaled
    to 8, transparent parts on white, of an animation the first frame. Labels of pixels belong to pixels as they are
    stored, so their images are read with ``upright=False``."""
    with open_image(content, most) as image:
        return see(image, upright)


def read_image(path: Path, upright: bool = True) -> np.ndarray:
    """(h, w, 3) uint8, or a ValueError that says why not."""
    if not path.is_file():
        raise ValueError("a directory: give the images in it" if path.is_dir() else "no such file")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"has {path.stat().st_size:,} bytes, more than {MAX_BYTES:,}: shrink it")
    try:
        return decode_image(path.read_bytes(), upright=upright)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError("unfolds to more than 90 million pixels, which is refused: shrink it") from None
    except UnidentifiedImageError:
        raise ValueError("not an image in a format that Pillow reads (PNG, JPEG, WebP, ...)") from None
    except Exception as error:  # decoders fail in many ways
        raise ValueError(f"broken image ({error}): fetch it again") from None


def see(image: Image.Image, upright: bool = True) -> np.ndarray:
    """What ``decode_image`` makes of an opened image."""
    turn = turn_of(image, upright)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        levels = np.asarray(image).astype(np.uint32)  # Pillow would cut off what exceeds 255
        tags = getattr(image, "tag_v2", {})  # of TIFF: 12 bits look like 16, and 0 may be white
        most = 2 ** tags.get(ExifTags.Base.BitsPerSample, (16,))[0] - 1
        shades = (levels * 255 + most // 2) // most
        shades = 255 - shades if tags.get(ExifTags.Base.PhotometricInterpretation) == 0 else shades
        shades = np.where(levels == image.info.get("transparency", -1), 255, shades)
        seen = Image.fromarray(shades.astype(np.uint8)).convert("RGB")
    elif image.mode in ("I", "F"):
        raise ValueError(f"its pixels are 32-bit {'integers' if image.mode == 'I' else 'fractions'}, and nothing "
                         "says which of them is white: save it with 8 or 16 bits")  # fmt: skip
    elif image.has_transparency_data:
        seen = Image.new("RGB", image.size, BACKGROUND)
        pixels = image.convert("RGBA")
        seen.paste(pixels, mask=pixels)
    else:
        seen = image.convert("RGB")
    return np.asarray(seen if turn is None else seen.transpose(turn))


def turn_of(image: Image.Image, upright: bool) -> Image.Transpose | None:
    """How to transpose an opened image, which is loaded here, so that it stands ``upright`` as its EXIF data say, or is
    as it was stored. Pillow turns a TIFF itself when it loads it, and forgets the orientation."""
    stored = _orientation(image)
    image.load()
    left = _orientation(image)
    if upright:
        return UPRIGHT.get(left)
    return UPRIGHT.get({6: 8, 8: 6}.get(stored, stored)) if left != stored else None


def _orientation(image: Image.Image) -> Any:
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # broken EXIF data say nothing, and the pixels may be whole
        return None
