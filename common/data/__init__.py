"""Data: splits, where they come from, and what turns uint8 images into a model's input."""

from .preprocess import Preprocess
from .sources import load_data
from .splits import Arrays, Encoded, Split

__all__ = ["Arrays", "Encoded", "Preprocess", "Split", "load_data"]
