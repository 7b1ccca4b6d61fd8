"""Shared parts of the truly shift-equivariant vision transformers."""

from .models.adaptation import adapt
from .models.registry import create_model, from_pretrained, list_models, register_model

__all__ = ["adapt", "create_model", "from_pretrained", "list_models", "register_model"]
