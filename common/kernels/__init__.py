"""Triton kernels for CUDA: what the compiler does not fuse. Each has a plain torch form, which is its reference."""

from .base import AVAILABLE, INTERPRETED, product_dtype, usable
from .canonical import canonical_offset, fits_canonical_kernel
from .depthwise import depthwise, fits_depthwise_kernel, plain_depthwise
from .merging import fits_merge_kernel, rolled_merge
from .patches import fits_image_windows, image_windows
from .scores import (
    best_phase,
    best_window,
    fits_token_kernel,
    fits_window_scores,
    image_moments,
    token_energies,
    token_moments,
    window_energies,
)
from .windows import fits_window_kernel, window_attention

__all__ = [
    "AVAILABLE",
    "INTERPRETED",
    "best_phase",
    "best_window",
    "canonical_offset",
    "depthwise",
    "fits_canonical_kernel",
    "fits_depthwise_kernel",
    "fits_image_windows",
    "fits_merge_kernel",
    "fits_token_kernel",
    "fits_window_kernel",
    "fits_window_scores",
    "image_moments",
    "image_windows",
    "plain_depthwise",
    "product_dtype",
    "rolled_merge",
    "token_energies",
    "token_moments",
    "usable",
    "window_attention",
    "window_energies",
]
