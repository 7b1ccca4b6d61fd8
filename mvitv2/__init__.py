"""MViTv2, default and adaptive."""

import shiftvit  # noqa: F401, first: it says so where another 'common' hides ours

from .model import MViTv2, mvitv2_base, mvitv2_micro, mvitv2_small, mvitv2_tiny

__all__ = ["MViTv2", "mvitv2_base", "mvitv2_micro", "mvitv2_small", "mvitv2_tiny"]
