"""UperNet for semantic segmentation, default and adaptive."""

import shiftvit  # noqa: F401, first: it says so where another 'common' hides ours

from .model import (
    UperNet,
    upernet_swin_base,
    upernet_swin_micro,
    upernet_swin_small,
    upernet_swin_tiny,
    upernet_swinv2_base,
    upernet_swinv2_micro,
    upernet_swinv2_small,
    upernet_swinv2_tiny,
)

__all__ = [
    "UperNet",
    "upernet_swin_base",
    "upernet_swin_micro",
    "upernet_swin_small",
    "upernet_swin_tiny",
    "upernet_swinv2_base",
    "upernet_swinv2_micro",
    "upernet_swinv2_small",
    "upernet_swinv2_tiny",
]
