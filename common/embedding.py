"""The convolution that makes tokens of an image, shared by all architectures."""

import torch.nn.functional as F
from torch import Tensor, nn

from . import kernels
from .anchors import Strided
from .shifts import convolve, roll

__all__ = ["embed"]


def embed(conv: nn.Conv2d, x: Tensor, offset: Tensor | None = None) -> Tensor:
    """``conv`` of an image, rolled by its ``offset`` (B, 2) in [0, side) if there is one, channels-last.

    With the few channels of an image a convolution is slow: where it can be, it is one matrix product of windows, which
    a GPU reads where they lie.

    Shapes: (B, C, H, W) -> (B, H/s, W/s, D).
    """
    (k, _), (s, _), (p, _) = Strided.of(conv)
    weight = conv.weight.flatten(1)
    if kernels.fits_image_windows(x, k, s) and 1 <= k - 2 * p <= s:  # one window per cell
        windows = kernels.image_windows(x, offset, k, s, p, conv.padding_mode == "circular", kernels.product_dtype(x))
        return F.linear(windows, F.pad(weight, (0, windows.shape[-1] - weight.shape[1])), conv.bias)
    x = x if offset is None else roll(x, offset, within=True)
    if k != s or p:
        return convolve(conv, x).permute(0, 2, 3, 1)
    b, c, h, w = x.shape
    x = x.view(b, c, h // s, s, w // s, s).permute(0, 2, 4, 1, 3, 5).reshape(b, h // s, w // s, -1)
    return F.linear(x, weight, conv.bias)
