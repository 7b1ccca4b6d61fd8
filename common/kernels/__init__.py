"""Triton kernels for CUDA: what the compiler does not fuse. Each has a plain torch form, which is its reference."""

from .activation import fits_gelu_kernel, gelu
from .base import AVAILABLE, INTERPRETED, product_dtype
from .canonical import canonical_offset, fits_canonical_kernel
from .choices import best_phase, best_window, fits_window_scores, token_moments
from .convolving import convolved, fits_convolved
from .depthwise import (
    depthwise_kernel,
    depthwise_norm_kernel,
    fits_depthwise_kernel,
    fits_depthwise_norm,
)
from .folding import normed_taps
from .image_conv import fits_image_phases, fits_image_tokens, image_phases, image_tokens
from .image_pieces import all_phases, in_pieces
from .merge_product import fits_merged_product, merged_product
from .merge_weights import Mergings, best_window_fused, fits_fused_windows, merging_weights
from .merging import fits_merge_kernel, rolled_merge
from .pixels import fits_image_windows, image_windows, is_packed, packed
from .pooling import fits_pooled, fits_pooled_maximum, fits_positioned, pooled, pooled_maximum, positioned
from .residual import add_norm, fits_add_norm
from .rolling import fits_roll_kernel, rolled
from .sketching import Pooled, convolution_taps, depthwise_taps, fits_sketch, pooled_taps, sketched
from .token_energy import fits_token_kernel, token_energies
from .token_scores import best_of_tokens, fits_token_scores, in_one_pass
from .windows import fits_window_kernel, window_attention

__all__ = [
    "AVAILABLE",
    "INTERPRETED",
    "Mergings",
    "Pooled",
    "add_norm",
    "all_phases",
    "best_of_tokens",
    "best_phase",
    "best_window",
    "best_window_fused",
    "canonical_offset",
    "convolution_taps",
    "convolved",
    "depthwise_kernel",
    "depthwise_norm_kernel",
    "depthwise_taps",
    "fits_add_norm",
    "fits_canonical_kernel",
    "fits_convolved",
    "fits_depthwise_kernel",
    "fits_depthwise_norm",
    "fits_fused_windows",
    "fits_gelu_kernel",
    "fits_image_phases",
    "fits_image_tokens",
    "fits_image_windows",
    "fits_merge_kernel",
    "fits_merged_product",
    "fits_pooled",
    "fits_pooled_maximum",
    "fits_positioned",
    "fits_roll_kernel",
    "fits_sketch",
    "fits_token_kernel",
    "fits_token_scores",
    "fits_window_kernel",
    "fits_window_scores",
    "gelu",
    "image_phases",
    "image_tokens",
    "image_windows",
    "in_one_pass",
    "in_pieces",
    "is_packed",
    "merged_product",
    "merging_weights",
    "normed_taps",
    "packed",
    "pooled",
    "pooled_maximum",
    "pooled_taps",
    "positioned",
    "product_dtype",
    "rolled",
    "rolled_merge",
    "sketched",
    "token_energies",
    "token_moments",
    "window_attention",
]
