"""MViTv2, default and adaptive."""

from .model import MViTv2, mvitv2_base, mvitv2_micro, mvitv2_small, mvitv2_tiny

__all__ = ["MViTv2", "mvitv2_base", "mvitv2_micro", "mvitv2_small", "mvitv2_tiny"]
