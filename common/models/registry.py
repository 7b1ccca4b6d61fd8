"""Names of models: ``create_model("a_swin_tiny")``, ``list_models("*micro")``, ``from_pretrained(directory)``."""

import ast
import difflib
import importlib
import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shiftvit import check_ours

from .hub import CONFIG_NAME, OURS, HubModel, embedded, read_config, resolve_file
from .timm_models import expose, expose_saved, finish

__all__ = [
    "MODEL_ARGUMENTS",
    "class_of",
    "create_model",
    "defaults",
    "from_pretrained",
    "is_fresh",
    "list_models",
    "parse_arguments",
    "register_model",
]

PACKAGES = {"swin": "swin", "swinv2": "swinv2", "cvt": "cvt", "mvitv2": "mvitv2", "upernet": "segmentation"}
"""The ``model_type`` values that a config may name, and the package of each, which registers models when imported."""

_BUILDERS: dict[str, Callable[..., HubModel]] = {}


M = TypeVar("M", bound=HubModel)


def register_model(build: Callable[..., M]) -> Callable[..., M]:
    """Register ``build`` under its own name (default model) and with ``a_`` before it (adaptive model).

    A segmenter is adaptive in its backbone: ``upernet_swin_tiny`` and ``upernet_a_swin_tiny``.
    """

    def build_adaptive(**kwargs: Any) -> M:
        return build(adaptive=True, **kwargs)

    decoder = "upernet_" if build.__name__.startswith("upernet_") else ""
    adaptive = f"{decoder}a_{build.__name__.removeprefix(decoder)}"
    _BUILDERS[build.__name__] = build
    _BUILDERS[adaptive] = build_adaptive
    if not decoder:
        expose(build.__name__, build)
        expose(adaptive, build_adaptive)
    return build


def defaults(kwargs: dict[str, Any], **values: Any) -> dict[str, Any]:
    """``values`` where ``kwargs`` does not say otherwise: a variant's arguments under the caller's."""
    return values | kwargs


def _builders() -> dict[str, Callable[..., HubModel]]:
    for package in PACKAGES.values():
        check_ours(package)
        importlib.import_module(package)
    return _BUILDERS


def list_models(pattern: str = "*", exclude_filters: str | Sequence[str] = ()) -> list[str]:
    """Names of all models that match a shell pattern, sorted; without those that match one of ``exclude_filters``."""
    excluded = [exclude_filters] if isinstance(exclude_filters, str) else exclude_filters
    return sorted(
        name for name in _builders() if fnmatch(name, pattern) and not any(fnmatch(name, e) for e in excluded)
    )


def create_model(name: str, *, features_only: bool = False, out_indices: Any = None, global_pool: str | None = None,
                 **kwargs: Any) -> HubModel:  # fmt: skip
    """Build a model with fresh weights; ``kwargs`` override its arguments (num_classes, img_size, ...).

    With ``features_only`` it is timm's module of feature maps, of the stages ``out_indices``, as timm would build it.
    """
    builders = _builders()
    if kwargs.pop("pretrained", False):  # as in timm
        raise ValueError(f"create_model gives {name!r} fresh weights: for trained ones, from_pretrained(DIRECTORY) or "
                         "from_pretrained('OWNER/NAME')")  # fmt: skip
    if name not in builders:
        near = difflib.get_close_matches(name, builders, n=3, cutoff=0.5)
        raise ValueError(f"unknown model {name!r}: did you mean {' or '.join(near)}?" if near else
                         f"unknown model {name!r}: list_models() names all {len(builders)}")  # fmt: skip
    try:
        model = builders[name](**kwargs)
    except (ArithmeticError, RuntimeError, TypeError) as error:  # of Python or torch: they do not name the argument
        if not kwargs:
            raise
        raise TypeError(f"{name} cannot be built with {str(kwargs)[:200]}: {error}") from error
    return finish(model, features_only, out_indices, global_pool)


def from_pretrained(source: str, **kwargs: Any) -> HubModel:
    """Load a model from a directory or Hub repository; its class is the one that config.json names."""
    hub = {k: kwargs[k] for k in ("revision", "token", "cache_dir", "local_files_only") if k in kwargs}
    config = read_config(resolve_file(source, CONFIG_NAME, **hub))
    named = config.get("model_type", "")
    if "architectures" in config and not named.startswith(OURS):
        raise ValueError(f"{source} is a model of transformers: weights of its Swin, SwinV2 and CvT become ours by "
                         "--source transformers of the folder's convert.py")  # fmt: skip
    architecture = str(config.get("architecture", ""))  # for timm: of ours, and the class says what is missing
    if not named and architecture and not architecture.startswith(OURS):
        _builders()  # which timm knows from now on
        place = f"{'local-dir' if os.path.isdir(source) else 'hf-hub'}:{source}"
        raise ValueError(f"{source} was saved by timm: timm.create_model({place!r}, pretrained=True) loads it, and "
                         "adapt() makes timm's Swin, SwinV2 or MViTv2 one of ours")  # fmt: skip
    model_type = (named or architecture).removeprefix(OURS)
    if model_type not in PACKAGES:
        raise ValueError(f"{source}: model_type is {model_type!r}, expected one of {tuple(OURS + t for t in PACKAGES)}")
    return class_of(model_type).from_pretrained(source, **kwargs)


def is_fresh(source: str) -> bool:
    """Whether ``source`` names a model and neither a checkpoint of ours nor a directory: it gets fresh weights."""
    return source in list_models() and not embedded(source) and not Path(source).is_dir()


def class_of(model_type: str) -> type[HubModel]:
    """The class of models of a type."""
    check_ours(PACKAGES[model_type])
    importlib.import_module(PACKAGES[model_type])
    return {cls.model_type: cls for cls in _subclasses(HubModel) if "model_type" in vars(cls)}[model_type]


def _subclasses(cls: type[HubModel]) -> list[type[HubModel]]:
    return [sub for child in cls.__subclasses__() for sub in (child, *_subclasses(child))]


for _type in PACKAGES:
    if _type != "upernet":  # timm has classifiers only
        expose_saved(OURS + _type, partial(class_of, _type))


MODEL_ARGUMENTS: dict[str, Any] = {
    "nargs": "+",
    "default": [],
    "metavar": "NAME=VALUE",
    "help": "arguments of the model: canonical=false score=energy anchors=token,window",
}
"""What argparse needs to know of ``--model_args``, for ``parse_arguments``."""


def parse_arguments(items: Sequence[str]) -> dict[str, Any]:
    """Arguments of a model from a command line: ``canonical=false score=peak anchors=token,window img_size=256``.

    A value is a word, a number, true, false or none; with a comma (``anchors=token,``), or for ``anchors``, a tuple.
    """
    arguments: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"cannot read the model argument {item!r}: write NAME=VALUE, such as canonical=false")
        several = "," in text or key == "anchors"
        values = tuple(_value(part) for part in text.split(",") if part)
        arguments[key] = values if several else _value(text)
    return arguments


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
