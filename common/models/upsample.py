"""Equivariant upsampling on the torus, for decoders: bilinear, and the paper's unpooling."""

import torch.nn.functional as F
from torch import Tensor

from ..shifts import circular_pad

__all__ = ["unpool", "upsample"]


def unpool(x: Tensor, factor: int) -> Tensor:
    """(B, C, H, W) -> (B, C, fH, fW): every value at the origin of its f x f cell, zeros elsewhere.

    The paper's upsampling: with the encoder's offset rolled back, features return to the places they were taken from.
    """
    batch, channels, height, width = x.shape
    x = F.pad(x[..., None, :, None], (0, factor - 1, 0, 0, 0, factor - 1))  # B, C, H, f, W, f
    return x.reshape(batch, channels, height * factor, width * factor)


def upsample(x: Tensor, factor: int) -> Tensor:
    """(B, C, H, W) -> (B, C, fH, fW), bilinear on the torus: circular pad by one, interpolate, crop. Moves nothing."""
    x = F.interpolate(circular_pad(x, (1, 1, 1, 1)), scale_factor=factor, mode="bilinear", align_corners=False)
    return x[..., factor:-factor, factor:-factor]
