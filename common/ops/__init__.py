"""Operations that have a kernel: each is its reference in plain torch, and one rule says when its kernel runs instead.

A model or an anchor calls an operation and never asks where it runs. ``with reference():`` switches all kernels off.
"""

from .attention import attend_in_windows
from .depthwise import depthwise, kernel_weights, project
from .dispatch import op, product_dtype, reference
from .embed import embed
from .gelu import gelu
from .lookup import look_up
from .merge import merge_patches, reduce_patches
from .pooling import pool_heads, pool_maximum, with_positions
from .residual import add_norm, materialize, norm_ahead
from .roll import circular_pad, convolve, roll

__all__ = [
    "add_norm",
    "attend_in_windows",
    "circular_pad",
    "convolve",
    "depthwise",
    "embed",
    "gelu",
    "kernel_weights",
    "look_up",
    "materialize",
    "merge_patches",
    "norm_ahead",
    "op",
    "pool_heads",
    "pool_maximum",
    "product_dtype",
    "project",
    "reduce_patches",
    "reference",
    "roll",
    "with_positions",
]
