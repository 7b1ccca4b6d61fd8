"""Windows of an image that is rolled by an offset of its own, cut out where it lies: a convolution of a few channels is
then one matrix product, which is faster than a convolution, and needs no padded or rolled copy."""

import torch
from torch import Tensor
from torch.library import triton_op

from .base import AVAILABLE, launch, power, usable

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["fits_image_windows", "image_windows"]


def fits_image_windows(x: Tensor, size: int, stride: int) -> bool:
    """Whether ``image_windows`` takes these: a few channels, whole strides, no gradient for the image."""
    whole = x.shape[1] < 16 and x.shape[2] % stride == 0 and x.shape[3] % stride == 0 and size <= min(x.shape[2:])
    return usable(x) and x.dtype != torch.float64 and whole and not (x.requires_grad and torch.is_grad_enabled())


if AVAILABLE:

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
        if PLACED:
            row += tl.load(offset + 2 * image).to(tl.int32)
            column += tl.load(offset + 2 * image + 1).to(tl.int32)
        row, column = (row + height) % height, (column + width) % width
        place = x + image.to(tl.int64) * sb + (k // (SIZE * SIZE) * sc + row * sh)[None, :] + column * sw
        window = (image.to(tl.int64) * (height // STRIDE) + i) * (width // STRIDE) + j
        inside = (j * STRIDE < width)[:, None] & (k < WIDE)[None, :]
        tl.store(out + window[:, None] * WIDE + k[None, :], tl.load(place, keep, 0.0).to(out.dtype.element_ty), inside)


@triton_op("shift_vits::image_windows", mutates_args={})
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
    k = min(64, power(wide))
    block, chunks = max(2, min(2048 // k, power(across))), -(-wide // k)
    out = torch.empty((b, h // stride, across, wide), dtype=dtype, device=x.device)
    grid = (b, h // stride, -(-across // block) * chunks)
    launch(_image_windows, grid, x, x if offset is None else offset, out, h, w, *x.stride(), SIZE=size, STRIDE=stride,
           PAD=padding, CIRCULAR=circular, PLACED=offset is not None, COUNT=count, WIDE=wide, CHUNKS=chunks, K=k,
           BLOCK=block, num_warps=4)  # fmt: skip
    return out
