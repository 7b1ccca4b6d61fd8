"""Image files as people have them: a model sees what a person sees."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from common.data.images import decode_image
from segmentation.splits import decode_labels

LEVELS = np.array([[0, 32768], [16384, 65535]], np.uint16)
SHADES = [[0, 128], [64, 255]]


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_tag(tag: int, old: int, new: int) -> bytes:
    """As TIFF, of which one tag is another."""
    entries = [struct.pack("<HHII", tag, 3, 1, value) for value in (old, new)]
    content = saved(Image.fromarray(LEVELS), "TIFF")
    assert content.count(entries[0]) == 1
    return content.replace(*entries)


def test_a_decompression_bomb_is_refused() -> None:
    small = saved(Image.new("RGB", (8, 8)), "PNG")
    header = bytearray(small)
    header[16:24] = (30000).to_bytes(4, "big") * 2  # width and height of the PNG: 900 million pixels
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    with pytest.raises((Image.DecompressionBombError, Image.DecompressionBombWarning)):
        decode_image(bytes(header))
    with pytest.raises(Image.DecompressionBombError, match="8 x 8 pixels, more than 63: shrink"):  # our own bound
        decode_image(small, most=63)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_are_scaled_not_cut(kind: str) -> None:
    """Else photographs of scanners and microscopes are white."""
    levels = np.linspace(0, 65535, 64 * 48).round().astype(np.uint16).reshape(64, 48)
    pixels = decode_image(saved(Image.fromarray(levels), kind))
    assert pixels.shape == (64, 48, 3)
    assert np.array_equal(pixels[..., 1], np.round(levels / 257).astype(np.uint8))
    assert abs(pixels.mean() - 127.5) < 0.5
    for odd in (np.ones((4, 4), np.float32), np.ones((4, 4), np.int32)):
        with pytest.raises(ValueError, match="32-bit .* save it with 8 or 16 bits"):
            decode_image(saved(Image.fromarray(odd), "TIFF"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_stand_upright(orientation: int) -> None:
    """Else what a phone held upright has taken lies on its side, and a model sees other objects than people do."""
    pixels = np.kron(np.array([[250, 90, 10], [60, 160, 200]], np.uint8), np.ones((16, 16), np.uint8))
    stored = Image.fromarray(pixels).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = orientation
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(saved(stored, "PNG", exif=exif)))))
    assert np.array_equal(decode_image(saved(stored, "PNG", exif=exif)), expected)
    seen = decode_image(saved(stored, "JPEG", exif=exif, quality=95)).astype(int)
    assert seen.shape == expected.shape
    assert np.abs(seen - expected).mean() < 4
    assert decode_image(saved(stored, "PNG", exif=exif), upright=False).shape == (32, 48, 3)
    assert decode_image(saved(stored, "JPEG", exif=b"Exif\0\0broken")).shape == (32, 48, 3)


@pytest.mark.parametrize("options", [{}, {"compression": "tiff_lzw"}])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_is_turned_once(orientation: int, options: dict[str, str]) -> None:
    """Pillow turns it while it loads it: turned by us again, scans lie on their head. Labels stay on their pixels."""
    levels = np.kron(np.array([[250, 90, 10], [60, 160, 200]], np.uint8), np.ones((16, 16), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = saved(Image.fromarray(levels), "TIFF", exif=exif, **options)
    expected = decode_image(saved(Image.fromarray(levels), "PNG", exif=exif))
    assert np.array_equal(decode_image(content), expected)
    assert np.array_equal(decode_image(content, upright=False)[..., 0], levels)
    assert np.array_equal(decode_labels(content), levels)


def test_transparent_parts_are_white() -> None:
    """Else what nobody sees, often black or noise, is what a model looks at."""
    hidden = Image.new("RGBA", (4, 4), (200, 30, 60, 0))
    hidden.putpixel((0, 0), (200, 30, 60, 255))
    hidden.putpixel((1, 0), (200, 30, 60, 128))
    for content in (saved(hidden, "PNG"), saved(hidden, "WEBP", lossless=True, exact=True), saved(hidden, "TIFF")):
        pixels = decode_image(content)
        assert pixels[0, 0].tolist() == [200, 30, 60]
        assert np.abs(pixels[0, 1].astype(int) - [227, 142, 157]).max() <= 1
        assert (pixels[1:] == 255).all()
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    for content in (saved(palette, "PNG", transparency=0), saved(palette, "GIF", transparency=0)):
        assert decode_image(content).tolist() == [[[255] * 3, [40, 50, 60]]]
    grey = Image.fromarray(np.array([[[0, 0], [90, 255]]], np.uint8), "LA")
    assert decode_image(saved(grey, "PNG")).tolist() == [[[255] * 3, [90] * 3]]


def test_colours_of_print_and_the_first_frame_of_several() -> None:
    """Else red is cyan, and an animation is an error."""
    red = decode_image(saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95))
    assert np.abs(red.astype(int) - [255, 0, 0]).max() < 8
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    for kind in ("GIF", "PNG", "TIFF"):
        content = saved(frames[0], kind, save_all=True, append_images=frames[1:])
        assert (decode_image(content) == [255, 0, 0]).all(), kind


def test_twelve_bits_are_not_taken_for_sixteen() -> None:
    content = with_tag(ExifTags.Base.BitsPerSample, 16, 12)
    rows = [LEVELS.tobytes()[i : i + 3] for i in (0, 3)]  # of two pixels: a row begins with a byte
    levels = [[(a << 4) + (b >> 4), ((b & 15) << 8) + c] for a, b, c in rows]
    assert decode_image(content)[..., 0].tolist() == [[round(level / 4095 * 255) for level in row] for row in levels]


def test_zero_may_be_white() -> None:
    content = with_tag(ExifTags.Base.PhotometricInterpretation, 1, 0)
    assert decode_image(content)[..., 0].tolist() == [[255 - shade for shade in row] for row in SHADES]


@pytest.mark.parametrize("level", [0, 16384])
def test_a_transparent_level_is_white(level: int) -> None:
    expected = np.where(level == LEVELS, 255, SHADES)
    assert decode_image(saved(Image.fromarray(LEVELS), "PNG", transparency=level))[..., 0].tolist() == expected.tolist()
