"""Swin Transformer, default and adaptive."""

from .model import Swin, swin_base, swin_micro, swin_small, swin_tiny

__all__ = ["Swin", "swin_base", "swin_micro", "swin_small", "swin_tiny"]
