"""Our models in timm: ``timm.create_model("a_swin_tiny")`` after ``import swin``, and what we saved by
``timm.create_model("local-dir:FOLDER", pretrained=True)`` or ``"hf-hub:OWNER/NAME"`` after ``import common``.

A name that timm uses itself (``mvitv2_tiny``) stays timm's.
"""

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import timm
import torch
from timm.models import PretrainedCfg
from timm.models._features import FeatureGetterNet
from torch import nn

from .hub import WEIGHTS_NAME, HubModel, has_config, read_input, resolve_file
from .weights import load_weights

__all__ = ["expose", "expose_saved", "finish", "input_of_timm", "timm_of_input"]

SIZE = ("depths", "embed_dim", "embed_dims")
"""Arguments by which the variants of an architecture are told apart."""

INPUT = {"input_size", "mean", "std", "crop_pct"}
"""What timm's configuration and a preprocessor file both say."""

Source = tuple[str, dict[str, Any]]
"""A directory or Hub id, and where on the Hub."""


def expose(name: str, build: Callable[..., HubModel]) -> None:
    """Let timm build ``name``."""

    def load(source: Source | None, pretrained: bool, **kwargs: Any) -> HubModel:
        if not pretrained:
            return build(**kwargs)
        if source is None:
            raise RuntimeError(f"no weights of {name} are published yet: give pretrained_cfg={{'hf_hub_id': ...}} "
                               "or {'file': directory}, or convert timm's (convert.py)")  # fmt: skip
        arguments, names = _stored_arguments(name, build, source, kwargs)
        model = build(**arguments | kwargs)
        if fresh := load_weights(model, resolve_file(source[0], WEIGHTS_NAME, **source[1]), model.last_layer):
            warnings.warn(f"{', '.join(fresh)} of {source[0]} belong to other classes: they start anew and need "
                          "training", stacklevel=2)  # fmt: skip
        elif len(names) == model.config["num_classes"]:
            model.class_names = names
        model.take_input(read_input(model.input_fields, source[0], **source[1]), "img_size" in kwargs)
        return model

    _register(name, load)


def _stored_arguments(name: str, build: Callable[..., HubModel], source: Source,
                      kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:  # fmt: skip
    """The arguments that our config.json beside some weights says they were trained with, and the names of the classes;
    none where there is none, as beside timm's. The name says whether the model is adaptive, how many classes it has,
    and its size, which must be that of the stored one."""
    if not has_config(source[0], **source[1]):
        return {}, ()
    with torch.device("meta"):
        named = build()
    stored, names = type(named).read_arguments(source[0], {}, **source[1])
    for key in SIZE:
        own = named.config.get(key)
        if key not in kwargs and (found := stored.get(key, own)) != own:
            raise ValueError(f"{source[0]} holds a model of {key} {found}, not {own} as {name}: create "
                             "'local-dir:FOLDER' or 'hf-hub:OWNER/NAME', which takes the size from "
                             "config.json")  # fmt: skip
    zeros = {"padding_mode"} if stored.get("padding_mode") == "zeros" else set()  # the default's own
    return {key: value for key, value in stored.items() if key not in {"adaptive", "num_classes", *zeros}}, names


def expose_saved(name: str, find: Callable[[], type[HubModel]]) -> None:
    """Let timm build what a config.json of architecture ``name`` describes; ``find`` gives its class."""

    def load(source: Source | None, pretrained: bool, **kwargs: Any) -> HubModel:
        if source is None:
            raise RuntimeError(f"{name} is the architecture of saved models: create 'local-dir:FOLDER' or "
                               "'hf-hub:OWNER/NAME', or a model of common.list_models()")  # fmt: skip
        if pretrained:
            return find().from_pretrained(source[0], **source[1], **kwargs)
        arguments, names = find().read_arguments(source[0], kwargs, **source[1])
        model = find()(**{**arguments, **kwargs})
        model.class_names = names if model.config["num_classes"] == arguments.get("num_classes") else ()
        model.take_input(read_input(model.input_fields, source[0], **source[1]), "img_size" in kwargs)
        return model

    _register(name, load)


def _register(name: str, load: Callable[..., HubModel]) -> None:
    if timm.is_model(name):
        return

    def entry(pretrained: bool = False, pretrained_cfg: Any = None, pretrained_cfg_overlay: Any = None,
              cache_dir: str | None = None, features_only: bool = False, out_indices: Any = None,
              global_pool: str | None = None, pretrained_model_args: Any = None,
              **kwargs: Any) -> nn.Module:  # fmt: skip
        found, given = _given(pretrained_cfg), dict(pretrained_cfg_overlay or {})
        source = _source(found | given, cache_dir)
        read = source is not None and "source" in found and has_config(source[0], **source[1])  # of ours, by timm
        model: Any = load(source, pretrained, **kwargs)  # kwargs hold pretrained_model_args, of a config.json of timm's
        stored, drop = pretrained_model_args or {}, set[str]()
        if any(kwargs.get(key) != stored.get(key) for key in ("img_size", "in_chans")):  # of the model's own size
            drop |= {"input_size", "crop_pct"}
        if read and model.stored_input:  # the preprocessor file has the say
            drop |= INPUT
        config = {key: value for key, value in found.items() if key not in drop} | given
        model.pretrained_cfg = model.default_cfg = {**model.default_cfg, **config, "architecture": name}
        _take_given(model, given if read else config)
        return finish(model, features_only, out_indices, global_pool, stacklevel=4)

    entry.__name__ = entry.__qualname__ = name
    entry.__module__ = __name__
    setattr(sys.modules[__name__], name, entry)
    timm.models.register_model(entry)


def finish(model: Any, features_only: bool, out_indices: Any, global_pool: str | None, stacklevel: int = 3) -> Any:
    """What timm's arguments, which are none of a model's own, ask for: the model, or its maps alone."""
    if isinstance(getattr(model, "head", None), nn.Module):  # a classifier
        pool = getattr(getattr(model.head, "global_pool", None), "pool_type", "token")
        if global_pool not in (None, pool):
            raise ValueError(f"global_pool is {global_pool!r}, and a model is built and saved with {pool!r} alone: "
                             "leave it out. reset_classifier(NUM_CLASSES, global_pool=...) changes a built one without "
                             "a class token; forward_features(x) gives the tokens before pooling")  # fmt: skip
    elif features_only or global_pool is not None:
        raise ValueError("features_only and global_pool are for classifiers: a segmenter's maps are those that "
                         "model.forward_backbone(x) gives")  # fmt: skip
    if not features_only:
        if out_indices is not None:
            raise TypeError("out_indices chooses maps, which features_only=True gives")
        return model
    if model.adaptive:
        warnings.warn("maps of an adaptive model begin where its anchors chose, not at the corner of the image: to "
                      "know where, create the whole model and call forward_intermediates(x, return_offsets=True)",
                      stacklevel=stacklevel)  # fmt: skip
    return FeatureGetterNet(model, out_indices=len(model.feature_info) if out_indices is None else out_indices)


def _given(pretrained_cfg: Any) -> dict[str, Any]:
    """A configuration as a dictionary; of timm's own class, what is not its default."""
    if not isinstance(pretrained_cfg, PretrainedCfg):
        return pretrained_cfg if isinstance(pretrained_cfg, dict) else {}
    return {key: value for key, value in vars(pretrained_cfg).items() if value != getattr(PretrainedCfg, key)}


def _take_given(model: Any, given: dict[str, Any]) -> None:
    """Have the preprocessor file of a model say what its user told timm of its images. How they are cropped it cannot
    say, so config.json does."""
    if not given.keys() & {"mean", "std", "crop_pct"} or model.in_chans != 3:
        return
    stored = model.stored_input if "crop_pct" not in given else None
    sizes = {key: stored.get(key) for key in ("size", "resize")} if stored else {}
    model.stored_input = input_of_timm(model, model.img_size) | sizes
    crop = timm.data.resolve_model_data_config(model)["crop_mode"]
    model.pretrained_cfg = model.default_cfg = {**model.default_cfg, "crop_mode": crop}


def _source(config: dict[str, Any], cache_dir: str | None) -> Source | None:
    if config.get("file"):
        return config["file"], {}
    repository, _, revision = (config.get("hf_hub_id") or "").partition("@")  # as timm writes it
    return (repository, {"revision": revision or None, "cache_dir": cache_dir}) if repository else None


def input_of_timm(model: nn.Module, size: tuple[int, int] | None = None) -> dict[str, Any]:
    """How a timm model's images are prepared, as a file beside ours says it. ``size``: if not as timm says."""
    config = timm.data.resolve_model_data_config(model)
    size = size or tuple(config["input_size"][1:])
    resize = math.floor(max(size) / config["crop_pct"])  # as timm rounds
    return {"size": size, "resize": resize if resize > max(size) else None, "mean": _for_colours(config["mean"]),
            "std": _for_colours(config["std"])}  # fmt: skip


def timm_of_input(channels: int, *, size: tuple[int, int], resize: int | None = None,
                  **normalisation: Any) -> dict[str, Any]:  # fmt: skip
    """What timm's configuration says where a preprocessor file says this."""
    share = size[0] / (resize or size[0])
    if resize and math.floor(size[0] / share) < resize:  # rounded up: timm would resize to a pixel less
        share = math.nextafter(share, 0)
    return {**normalisation, "crop_pct": share, "crop_mode": "squash", "input_size": (channels, *size)}


def _for_colours(levels: float | Sequence[float]) -> tuple[float, ...]:
    """A mean or deviation of red, green and blue; timm takes one for all, too."""
    each = (levels,) if isinstance(levels, int | float) else tuple(levels)
    return each * 3 if len(each) == 1 else each
