"""What model cards import: see ``common.data.preprocess``."""

from .data.preprocess import PREPROCESSOR_NAME, Preprocess

__all__ = ["PREPROCESSOR_NAME", "Preprocess"]
