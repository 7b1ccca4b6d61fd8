"""Images as kernels read them: their windows, for a product that is differentiated or taken in float32
(``image_windows``), or their pixels in half precision, channels side by side, so that eight bytes are a pixel, wherever
it is (``packed``)."""

import torch
from torch import Tensor

from .base import AVAILABLE, launch, next_power_of_2, operator

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import wrap

__all__ = ["fits_image_windows", "image_windows", "is_packed", "packed"]

PACKING = {"pixels": 1024, "num_warps": 4}


def fits_image_windows(x: Tensor, size: int, stride: int) -> bool:
    """Whether ``image_windows`` takes these: a few channels, whole strides, no gradient for the image."""
    whole = x.shape[1] < 16 and x.shape[2] % stride == 0 and x.shape[3] % stride == 0 and size <= min(x.shape[2:])
    return x.dtype != torch.float64 and whole and not (x.requires_grad and torch.is_grad_enabled())


def is_packed(x: Tensor) -> bool:
    """Whether the channels of a pixel lie side by side, with room for a power of two, and so do all pixels."""
    c = next_power_of_2(x.shape[1])
    return x.stride(1) == 1 and x.stride(3) == c and x.stride(0) % c == 0 and x.stride(2) % c == 0


def packed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Images (B, C, H, W) in the type given, the channels of a pixel side by side, unless they are so already. Behind
    the last channel there are zeros up to a power of two, so that a pixel is read at once."""
    if x.dtype == dtype and is_packed(x):
        return x
    return image_pixels(x, dtype).permute(0, 3, 1, 2)[:, : x.shape[1]]


if AVAILABLE:

    @triton.jit
    def beginning(offset, image, PLACED: tl.constexpr):
        """Row and column where an image begins."""
        row, column = 0, 0
        if PLACED:
            row, column = tl.load(offset + 2 * image).to(tl.int32), tl.load(offset + 2 * image + 1).to(tl.int32)
        return row, column

    @triton.jit
    def _image_windows(x, offset, out, height, width, sb, sc, sh, sw, SIZE: tl.constexpr, STRIDE: tl.constexpr,
                       PAD: tl.constexpr, CIRCULAR: tl.constexpr, PLACED: tl.constexpr, COUNT: tl.constexpr,
                       WIDE: tl.constexpr, CHUNKS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        image, i = tl.program_id(0), tl.program_id(1)
        j = tl.program_id(2) // CHUNKS * BLOCK + tl.arange(0, BLOCK)
        k = tl.program_id(2) % CHUNKS * K + tl.arange(0, K)
        row = i * STRIDE - PAD + k // SIZE % SIZE
        column = j[:, None] * STRIDE - PAD + (k % SIZE)[None, :]
        keep = (j * STRIDE < width)[:, None] & (k < COUNT)[None, :]
        if not CIRCULAR:
            keep = keep & ((row >= 0) & (row < height))[None, :] & (column >= 0) & (column < width)
        down, right = beginning(offset, image, PLACED)
        row, column = wrap(wrap(row, height) + down, height), wrap(wrap(column, width) + right, width)
        place = x + image.to(tl.int64) * sb + (k // (SIZE * SIZE) * sc + row * sh)[None, :] + column * sw
        window = (image.to(tl.int64) * (height // STRIDE) + i) * (width // STRIDE) + j
        inside = (j * STRIDE < width)[:, None] & (k < WIDE)[None, :]
        tl.store(out + window[:, None] * WIDE + k[None, :], tl.load(place, keep, 0.0).to(out.dtype.element_ty), inside)

    @triton.jit
    def _image_pixels(x, out, area, parts, sb, sc, SW: tl.constexpr, CHANNELS: tl.constexpr, C: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
        image, c = (tl.program_id(0) // parts).to(tl.int64), tl.arange(0, C)
        pixel = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
        keep = (pixel < area)[:, None]
        value = tl.load(x + image * sb + (pixel * SW)[:, None] + (c * sc)[None, :], keep & (c < CHANNELS)[None, :], 0.0)
        tl.store(out + image * area * C + (pixel * C)[:, None] + c[None, :], value.to(out.dtype.element_ty), keep)


@operator("shift_vits::image_windows")
def image_windows(x: Tensor, offset: Tensor | None, size: int, stride: int, padding: int, circular: bool,
                  dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Windows of ``size`` x ``size`` pixels at every ``stride``-th, the first ``padding`` before the first pixel; of
    images rolled by ``offset`` (B, 2) in [0, side), beyond their sides with ``circular`` themselves, else zeros.

    Shapes: x (B, C, H, W), any strides -> (B, H/stride, W/stride, n) of the type given, (channel, row, column) and then
    zeros up to a multiple of 8.
    """
    b, c, h, w = x.shape
    count, across = c * size**2, w // stride
    wide = -(-count // 8) * 8
    k = min(64, next_power_of_2(wide))
    block, chunks = max(2, min(2048 // k, next_power_of_2(across))), -(-wide // k)
    out = torch.empty((b, h // stride, across, wide), dtype=dtype, device=x.device)
    grid = (b, h // stride, -(-across // block) * chunks)
    launch(_image_windows, grid, x, x if offset is None else offset, out, h, w, *x.stride(), SIZE=size, STRIDE=stride,
           PAD=padding, CIRCULAR=circular, PLACED=offset is not None, COUNT=count, WIDE=wide, CHUNKS=chunks, K=k,
           BLOCK=block, num_warps=4)  # fmt: skip
    return out


@operator("shift_vits::image_pixels")
def image_pixels(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Images (B, C, H, W) as (B, H, W, c) of the type given, c the next power of two, with zeros behind channel C."""
    b, c, h, w = x.shape
    x = x if x.stride(2) == w * x.stride(3) else x.contiguous()
    out = torch.empty((b, h, w, next_power_of_2(c)), dtype=dtype, device=x.device)
    block = min(PACKING["pixels"], next_power_of_2(h * w))
    parts = -(-h * w // block)
    launch(_image_pixels, (b * parts,), x, out, h * w, parts, *x.stride()[:2], SW=x.stride(3), CHANNELS=c,
           C=next_power_of_2(c), BLOCK=block, num_warps=PACKING["num_warps"])  # fmt: skip
    return out
