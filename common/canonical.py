"""The canonical anchor, by the name that people type: see ``common.anchors.canonical``."""

from .anchors.canonical import Canonical

__all__ = ["Canonical"]
