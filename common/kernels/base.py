"""Where Triton kernels can run, and how they are launched."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

try:
    import triton  # noqa: F401
except ImportError:  # no Triton: the torch forms do everything
    AVAILABLE = False
else:
    AVAILABLE = True

__all__ = ["AVAILABLE", "ENABLED", "INTERPRETED", "launch", "power", "product_dtype", "usable"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ENABLED = True  # False: the torch forms everywhere, to compare with


def usable(x: Tensor) -> bool:
    """Whether kernels can run where ``x`` lies."""
    return AVAILABLE and ENABLED and (x.is_cuda or INTERPRETED)


def launch(kernel: Any, grid: Callable | tuple, *args: Any, **constants: Any) -> None:
    (kernel if INTERPRETED else wrap_triton(kernel))[grid](*args, **constants)


def power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def product_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product of x would be taken in: that of autocast, which leaves float64 alone, or its own."""
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if cast else x.dtype
