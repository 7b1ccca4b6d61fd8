"""Patches of an image that is rolled by an offset of its own, cut out where it lies."""

import torch
from torch import Tensor
from torch.library import triton_op

from .base import AVAILABLE, launch, power, usable

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["fits_patch_kernel", "rolled_patches"]


def fits_patch_kernel(x: Tensor, side: int) -> bool:
    """Whether ``rolled_patches`` takes these: no gradient for the image, and not too many numbers in a patch."""
    return usable(x) and not (x.requires_grad and torch.is_grad_enabled()) and x.shape[1] * side**2 <= 256


if AVAILABLE:

    @triton.jit
    def _rolled_patches(x, offset, out, height, width, sb, sc, sh, sw, P: tl.constexpr, SIZE: tl.constexpr,
                        K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        image, i = tl.program_id(0), tl.program_id(1)
        j, k = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, K)
        down, right = tl.load(offset + 2 * image).to(tl.int32), tl.load(offset + 2 * image + 1).to(tl.int32)
        row = (i * P + down + k // P % P) % height
        column = (j[:, None] * P + right + (k % P)[None, :]) % width
        keep = (j * P < width)[:, None] & (k < SIZE)[None, :]
        place = x + image.to(tl.int64) * sb + (k // (P * P) * sc + row * sh)[None, :] + column * sw
        patch = (image.to(tl.int64) * (height // P) + i) * (width // P) + j
        tl.store(out + patch[:, None] * SIZE + k[None, :], tl.load(place, keep, 0.0).to(out.dtype.element_ty), keep)


@triton_op("shift_vits::rolled_patches", mutates_args={})
def rolled_patches(x: Tensor, offset: Tensor, side: int, dtype: torch.dtype) -> Tensor:
    """Patches of ``side`` x ``side`` pixels of x (B, C, H, W) rolled by ``offset`` (B, 2) in [0, side of x), as
    (B, H/p, W/p, C p p) in (channel, row, column), of the type given."""
    b, c, h, w = x.shape
    size, across = c * side**2, w // side
    block = max(2, min(32, power(across)))
    out = torch.empty((b, h // side, across, size), dtype=dtype, device=x.device)
    launch(_rolled_patches, (b, h // side, -(-across // block)), x, offset, out, h, w, *x.stride(), P=side, SIZE=size,
           K=power(size), BLOCK=block, num_warps=4)  # fmt: skip
    return out
