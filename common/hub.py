"""What model cards import: see ``common.models.hub``."""

from .models.hub import HubModel, resolve_file

__all__ = ["HubModel", "resolve_file"]
