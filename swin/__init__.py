"""Swin Transformer, default and adaptive."""

import shiftvit  # noqa: F401, first: it says so where another 'common' hides ours

from .model import Swin, swin_base, swin_micro, swin_small, swin_tiny

__all__ = ["Swin", "swin_base", "swin_micro", "swin_small", "swin_tiny"]
