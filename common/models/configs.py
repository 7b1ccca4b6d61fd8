"""JSON files of models, read within bounds: config.json and preprocessor_config.json."""

import json
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["StoredInput", "check_names", "check_types", "read_config", "read_fields",
           "read_labels"]  # fmt: skip

# what no file of a model has more of; each is several times the largest of our own
MAX_JSON = 2**20  # bytes of a JSON file
MAX_ITEMS = 64  # entries of a list in a config
MAX_NUMBER = 2**16  # a number in a config
MAX_SIDE = 2**12  # pixels of an image's side
MAX_BLOCKS = 512  # the sum of depths
MAX_NAME = 256  # characters of the name of a class
SIDES = ("img_size", "resize", "size")
TEXT = re.compile(r"[\w.-]{0,64}")


class StoredInput(NamedTuple):
    """What preprocessor_config.json holds for a classifier: images are resized to a square of ``resize`` (None: to
    ``size``), then cropped to ``size`` at the centre, and normalised."""

    size: tuple[int, int]
    resize: int | None
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json or preprocessor_config.json: an object of names, numbers and lists of them, within bounds.

    JSON lists come back as the tuples they were.
    """
    config = _object(path)
    if not isinstance(config.get("model_type", ""), str):
        raise ValueError(f"{path}: model_type is {type(config['model_type']).__name__}, expected the name of a model")
    return {key: _names(value, f"{path}: {key}") if key == "id2label" else _plain(value, key, f"{path}: {key[:64]}")
            for key, value in config.items()}  # fmt: skip


def read_labels(path: Path) -> tuple[str, ...]:
    """The names of classes in another library's config.json: ``id2label`` of transformers, ``label_names`` of timm.
    None where there are none, or such as transformers makes up (LABEL_0)."""
    config = _object(path)
    listed = config.get("label_names")
    labels = check_names(listed, f"{path}: label_names") if isinstance(listed, list) else ()
    labels = _names(config["id2label"], f"{path}: id2label") if config.get("id2label") else labels
    return () if all(name == f"LABEL_{i}" for i, name in enumerate(labels)) else labels


def _object(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        content = file.read(MAX_JSON + 1)
    if len(content) > MAX_JSON:
        raise ValueError(f"{path} has more than {MAX_JSON:,} bytes: too many for a model's config, so it is not read")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): save the model again or fetch the file anew") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def _names(value: Any, where: str) -> tuple[str, ...]:
    """Names of classes by number, ``{"0": "cat", "1": "dog"}``, in the order of the numbers."""
    if not isinstance(value, dict) or set(value) != {str(i) for i in range(len(value))} or len(value) > MAX_NUMBER:
        raise ValueError(f"{where} must name the classes by their numbers from 0, such as {{'0': 'cat', '1': 'dog'}}")
    return check_names([value[str(i)] for i in range(len(value))], where)


def check_names(names: Sequence[Any], where: str) -> tuple[str, ...]:
    """``names``, or a ValueError if one of them is no name of a class."""
    for name in names:
        if not isinstance(name, str) or not name.isprintable() or len(name) > MAX_NAME:
            raise ValueError(f"{where}: {str(name)[:40]!r} is not a class name: expected up to {MAX_NAME} printable "
                             "characters")  # fmt: skip
    return tuple(names)


def _plain(value: Any, key: str, where: str, depth: int = 0) -> Any:
    """``value`` with tuples for lists; raises unless it is plain: numbers, names, and lists or objects of them."""
    if isinstance(value, (list, dict)):
        if depth == 2 or len(value) > MAX_ITEMS:
            raise ValueError(f"{where} is nested too deeply or has more than {MAX_ITEMS} entries: no argument of a "
                             "model is like that")  # fmt: skip
        if isinstance(value, list):
            value = tuple(_plain(v, key, where, depth + 1) for v in value)
            if key == "depths" and sum(v for v in value if isinstance(v, (int, float))) > MAX_BLOCKS:
                raise ValueError(f"{where} is {value}: more than {MAX_BLOCKS} blocks are refused")
            return value
        return {k: _plain(v, k, f"{where}.{k[:64]}", depth + 1) for k, v in value.items()}
    if isinstance(value, str) and not TEXT.fullmatch(value):
        raise ValueError(f"{where} is {value[:64]!r}: a config names things by letters, digits and '._-', it holds "
                         "neither paths nor code")  # fmt: skip
    most = MAX_SIDE if key in SIDES else MAX_NUMBER
    if isinstance(value, (int, float)) and not abs(value) <= most:  # also refuses NaN
        raise ValueError(f"{where} is {str(value)[:24]}: numbers beyond {most:,} are refused here")
    return value


def check_types(cls: type[Any], config: dict[str, Any], where: str) -> None:
    """Raise a ValueError unless every entry of a config has the type that the constructor of ``cls`` declares."""
    hints = typing.get_type_hints(vars(cls)["__init__"])
    for key, value in config.items():
        if not _fits(value, hints[key]):
            raise ValueError(f"config of {where}: {key} is {repr(value)[:100]}, expected {_shown(hints[key])}")


def _shown(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union, typing.Literal):
        return " or ".join(repr(a) if origin is typing.Literal else _shown(a) for a in arguments)
    return str(annotation) if origin else "None" if annotation is type(None) else annotation.__name__


def read_fields(kind: type, keys: Sequence[str], path: Path) -> dict[str, Any]:
    """Read preprocessor_config.json: fields ``keys`` of a data class, each of its type, sizes and scales positive."""
    stored, hints = read_config(path), typing.get_type_hints(kind)
    if unknown := sorted(set(stored) - set(keys)):
        raise ValueError(f"{path} has unknown keys {str(unknown)[:100]}: {kind.__name__} takes {list(keys)}")
    if "size" not in stored:
        raise ValueError(f"{path} names no size: expected [height, width]")
    for key, value in stored.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not _fits(value, hints[key]) or (key != "mean" and any(n is not None and n <= 0 for n in numbers)):
            positive = "" if key == "mean" else ", positive"
            raise ValueError(f"{path}: {key} is {str(value)[:80]}, expected {_shown(hints[key])}{positive}: fix "
                             "the file, or save the model again")  # fmt: skip
    return stored


def _fits(value: Any, annotation: Any) -> bool:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, a) for a in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is tuple:
        kinds = arguments[:1] * len(value) if isinstance(value, tuple) and arguments[-1] is Ellipsis else arguments
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if annotation in (int, float):
        return isinstance(value, int if annotation is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, origin or annotation)
