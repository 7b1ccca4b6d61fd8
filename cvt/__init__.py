"""Convolutional vision Transformer (CvT), default and adaptive."""

import shiftvit  # noqa: F401, first: it says so where another 'common' hides ours

from .model import CvT, cvt_13, cvt_21, cvt_micro, cvt_w24

__all__ = ["CvT", "cvt_13", "cvt_21", "cvt_micro", "cvt_w24"]
