"""Triton kernels for CUDA: what the compiler does not fuse. Each has a plain torch form, which is its reference."""

from .base import AVAILABLE, INTERPRETED, usable
from .scores import fits_offset_kernel, fits_phase_kernel, phase_energies, window_offset
from .windows import fits_window_kernel, window_attention

__all__ = ["AVAILABLE", "INTERPRETED", "fits_offset_kernel", "fits_phase_kernel", "fits_window_kernel",
           "phase_energies", "usable", "window_attention", "window_offset"]  # fmt: skip
