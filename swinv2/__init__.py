"""Swin Transformer V2, default and adaptive."""

import shiftvit  # noqa: F401, first: it says so where another 'common' hides ours

from .model import SwinV2, swinv2_base, swinv2_micro, swinv2_small, swinv2_tiny

__all__ = ["SwinV2", "swinv2_base", "swinv2_micro", "swinv2_small", "swinv2_tiny"]
