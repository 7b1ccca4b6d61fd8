"""Shared parts of the truly shift-equivariant vision transformers."""

try:
    from shiftvit import check_all  # noqa: F401
except ImportError as error:  # a shiftvit.py of somebody else
    raise ImportError(f"{error.path} hides the package 'shiftvit' of shift-equivariant-vits: rename it, or take its "
                      "folder off sys.path and PYTHONPATH") from None  # fmt: skip

from .models.adaptation import adapt
from .models.registry import create_model, from_pretrained, list_models, register_model

__all__ = ["adapt", "create_model", "from_pretrained", "list_models", "register_model"]
