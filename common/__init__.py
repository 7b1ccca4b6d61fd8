"""Shared parts of the truly shift-equivariant vision transformers."""

from .adaptation import adapt
from .registry import create_model, from_pretrained, list_models, register_model

__all__ = ["adapt", "create_model", "from_pretrained", "list_models", "register_model"]
