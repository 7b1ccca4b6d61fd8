"""Images with more than eight bits, as scanners and microscopes write them: also where the header says what is white.
Else they are black, inverted, or show what should be transparent."""

import io
import struct

import numpy as np
import pytest
from PIL import ExifTags, Image

from common.data.sources import decode_image

LEVELS = np.array([[0, 32768], [16384, 65535]], np.uint16)
SHADES = [[0, 128], [64, 255]]


def saved(kind: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(LEVELS).save(buffer, kind, **options)
    return buffer.getvalue()


def with_tag(tag: int, old: int, new: int) -> bytes:
    """As TIFF, of which one tag is another."""
    entries = [struct.pack("<HHII", tag, 3, 1, value) for value in (old, new)]
    content = saved("TIFF")
    assert content.count(entries[0]) == 1
    return content.replace(*entries)


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
    assert decode_image(saved("PNG", transparency=level))[..., 0].tolist() == expected.tolist()
