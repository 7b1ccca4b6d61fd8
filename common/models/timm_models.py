"""Our models under their names in timm: ``timm.create_model("a_swin_tiny")`` after ``import swin``.

A name that timm uses itself (``mvitv2_tiny``) stays timm's.
"""

import sys
from collections.abc import Callable
from typing import Any

import timm
from timm.models._features import FeatureGetterNet
from torch import nn

from .hub import WEIGHTS_NAME, HubModel, load_weights, resolve_file

__all__: list[str] = []


def expose(name: str, build: Callable[..., HubModel]) -> None:
    """Let timm build ``name``."""
    if timm.is_model(name):
        return

    def entry(pretrained: bool = False, pretrained_cfg: Any = None, pretrained_cfg_overlay: Any = None,
              cache_dir: str | None = None, features_only: bool = False, out_indices: Any = None,
              **kwargs: Any) -> nn.Module:  # fmt: skip
        model: Any = build(**kwargs)
        config = pretrained_cfg if isinstance(pretrained_cfg, dict) else getattr(pretrained_cfg, "to_dict", dict)()
        settings = {**model.default_cfg, **config, **(pretrained_cfg_overlay or {}), "architecture": name}
        model.pretrained_cfg = model.default_cfg = settings
        if pretrained:
            source = settings.get("file") or settings.get("hf_hub_id")
            if not source:
                raise RuntimeError(f"no weights of {name} are published yet: give pretrained_cfg={{'hf_hub_id': ...}} "
                                   "or {'file': directory}, or convert timm's (convert.py)")  # fmt: skip
            where = resolve_file(source, WEIGHTS_NAME, **({} if settings.get("file") else {"cache_dir": cache_dir}))
            load_weights(model, where, may_differ="head.")
        if not features_only:
            return model
        return FeatureGetterNet(model, out_indices=out_indices or len(model.feature_info))

    entry.__name__ = entry.__qualname__ = name
    entry.__module__ = __name__
    setattr(sys.modules[__name__], name, entry)
    timm.models.register_model(entry)
