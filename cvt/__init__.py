"""Convolutional vision Transformer (CvT), default and adaptive."""

from .model import CvT, cvt_13, cvt_21, cvt_micro, cvt_w24

__all__ = ["CvT", "cvt_13", "cvt_21", "cvt_micro", "cvt_w24"]
