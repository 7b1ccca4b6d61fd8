"""Save, load and publish: config.json plus model.safetensors, by directory or by Hub repository.

Weights travel as safetensors only. Nothing is ever unpickled, every tensor must be there with its shape, and a config
may only hold the arguments of the model's constructor, plain and within bounds, the names of its classes (``id2label``)
and what timm reads (``architecture``, ``pretrained_cfg``). No memory is allocated for a model until the header of its
weights has shown that they fit it: so a repository can make us allocate no more than about its own size.
"""

import inspect
import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from huggingface_hub import _CACHED_NO_EXIST, CommitInfo, HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import save_file
from torch import Tensor, nn

from shiftvit import PACKAGES, ROOT

from ..ops.ahead import compile_kernels
from .configs import MAX_JSON, StoredInput, check_names, check_types, read_config, read_fields
from .weights import check_state, load_weights, read_header, without

__all__ = ["CONFIG_NAME", "FOR_TIMM", "OURS", "PREPROCESSOR_NAME", "WEIGHTS_NAME", "HubModel", "StoredInput",
           "compile_options", "embedded", "has_config", "read_config", "read_fields", "read_input", "resolve_file",
           "upload_directory"]  # fmt: skip

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
PREPROCESSOR_NAME = "preprocessor_config.json"
OURS = "shiftvit_"  # stands before the type of a model in config.json: transformers has a "swin" of its own
FOR_TIMM = ("architecture", "pretrained_cfg")  # what config.json holds for timm, and we do not read
PICKLES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")

MAX_BUFFERS = 2**28  # bytes of what a model computes from its config and does not store: several times our largest


class HubModel(nn.Module):
    """A module whose constructor arguments are its config. Subclasses call ``super().__init__(locals())`` first."""

    model_type: ClassVar[str]
    img_size: tuple[int, int]
    in_chans: int
    last_layer: ClassVar[tuple[str, ...]] = ("head.",)  # how the names of weights begin that belong to the classes
    class_names: tuple[str, ...] = ()  # in the order of the outputs; empty: not known
    input_fields: ClassVar[type[Any]] = StoredInput  # what the preprocessor file of such a model holds
    stored_input: dict[str, Any] | None = None  # that of the file which the model came with, saved with it

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        names = inspect.signature(type(self).__init__).parameters
        self.config = {name: plain(arguments[name]) for name in names if name != "self"}
        check_types(type(self), self.config, type(self).__name__)
        for name in ("num_classes", "sketch"):
            if self.config.get(name, 0) < 0:
                raise ValueError(f"{name} is {self.config[name]}, expected 0 or more")

    def to_empty(self, *, device: str | torch.device | int | None, recurse: bool = True) -> Self:
        """As ``nn.Module.to_empty``, for a model that was built without memory and is loaded next. What a state_dict
        does not hold, such as tables of positions, is filled, since nothing would load it."""
        from accelerate import init_empty_weights  # takes long to import

        super().to_empty(device=device, recurse=recurse)
        cls = next(c for c in type(self).__mro__ if "model_type" in vars(c))  # sharded models have a class of their own
        with init_empty_weights(include_buffers=False):
            twin = cls(**self.config)
        own, stored = dict(self.named_buffers()), twin.state_dict().keys()
        for name, table in twin.named_buffers():
            if name not in stored and not own[name].is_meta:
                own[name].copy_(table)
        return self

    def save_pretrained(self, save_directory: str | os.PathLike[str], state_dict: dict[str, Tensor] | None = None, *,
                        is_main_process: bool = True, save_function: Any = None) -> Path:  # fmt: skip
        """Write config.json and model.safetensors, each whole or not at all; and the preprocessor file, where the model
        came with one.

        ``state_dict``: other weights of the same model, for instance averaged or gathered ones. Of several processes
        only the one that ``is_main_process`` writes. ``save_function`` is taken as Accelerate's examples give it, and
        has no effect: weights are always written as safetensors.
        """
        directory = Path(save_directory)
        if not is_main_process:
            return directory
        directory.mkdir(parents=True, exist_ok=True)
        config, state = self.stored_config(), dict(self.state_dict() if state_dict is None else state_dict)
        with torch.device("meta"):
            outline = type(self)(**self.config).state_dict()
        check_state(outline, state, "what is to be saved, which could not be loaded again (after a layer was replaced, "
                    "pruned or wrapped; reset_classifier replaces a head)")  # fmt: skip
        state = {name: tensor.contiguous() for name, tensor in state.items()}
        text, file = json.dumps(config, indent=2) + "\n", directory / CONFIG_NAME
        replaced = file.is_file() and file.read_text(encoding="utf-8", errors="replace") != text
        for name, write in (
            (CONFIG_NAME, lambda path: Path(path).write_text(text)),
            (WEIGHTS_NAME, lambda path: save_file(state, path, metadata={"format": "pt"})),
        ):
            temporary = directory / f".{name}.{os.getpid()}"
            write(temporary)
            os.replace(temporary, directory / name)
        if self.stored_input is not None:
            (directory / PREPROCESSOR_NAME).write_text(json.dumps(self.stored_input, indent=2) + "\n")
        elif replaced and (directory / PREPROCESSOR_NAME).exists():
            warnings.warn(
                f"{directory} held another model, and its {PREPROCESSOR_NAME} is still there: images of "
                "this one will be prepared as that says. Write its own, or remove it",
                stacklevel=2,
            )
        return directory

    def stored_config(self) -> dict[str, Any]:
        """What config.json holds: the arguments, the names of the classes, and what timm needs to know."""
        names = self.class_names
        if names:  # which may have been set to anything
            self.name_classes(names)
        labels = {"id2label": {str(i): name for i, name in enumerate(names)}} if names else {}
        switched = {"canonical": self.canonical} if "canonical" in self.config else {}  # may be set on a built model
        return {"model_type": OURS + self.model_type, **self.config, **switched, **labels, **self.timm_config()}

    def take_input(self, stored: dict[str, Any] | None, resized: bool = False) -> None:
        """Keep what the preprocessor file beside a model says; ``resized``: but for images of the model's own size."""
        self.stored_input = stored

    def fit_input(self, resized: bool = False) -> None:
        """Have ``stored_input`` describe images that the model takes, if it is adaptive or of another size by now."""

    def name_classes(self, names: Sequence[str]) -> None:
        """Set ``class_names``, which are saved with the model."""
        if len(names) != self.config["num_classes"]:
            raise ValueError(f"the model has {self.config['num_classes']} classes, but {len(names)} names are given")
        self.class_names = check_names(names, "class_names")

    def timm_config(self) -> dict[str, Any]:
        """The entries of config.json that timm reads; none where timm has no such model."""
        return {}

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None,
                        cache_dir: str | None = None, local_files_only: bool = False, allow_nonfinite: bool = False,
                        **overrides: Any) -> Self:  # fmt: skip
        """Load from a directory or a Hub repository. ``overrides`` replace config entries, for instance
        ``adaptive=True``: an adaptive model has exactly the weights of its default. With another ``num_classes`` the
        last layer starts anew, and a warning says so. Weights with NaN or Inf are refused, unless ``allow_nonfinite``.
        """
        hub = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        config, names = cls.read_arguments(source, overrides, **hub)
        arguments, weights = {**config, **overrides}, resolve_file(source, WEIGHTS_NAME, **hub)
        same = arguments.get("num_classes") == config.get("num_classes")
        may_differ = None if same else cls.last_layer
        check_outline(cls, arguments, weights, str(source), may_differ)
        model = cls(**arguments)
        if fresh := load_weights(model, weights, may_differ, allow_nonfinite=allow_nonfinite):
            warnings.warn(f"{', '.join(fresh)} of {source} belong to {config['num_classes']} classes: they start anew "
                          f"for {arguments['num_classes']} and need training", stacklevel=2)  # fmt: skip
        model.class_names = names if same else ()
        model.take_input(read_input(cls.input_fields, source, **hub), "img_size" in overrides)
        return model.eval()

    @classmethod
    def read_arguments(cls, source: str | os.PathLike[str], overrides: Mapping[str, Any],
                       **hub: Any) -> tuple[dict[str, Any], tuple[str, ...]]:  # fmt: skip
        """The arguments of a stored model and the names of its classes, checked. ``overrides`` must be known, too."""
        config = read_config(resolve_file(source, CONFIG_NAME, **hub))
        model_type = config.pop("model_type", "").removeprefix(OURS)
        if not model_type and "architecture" in config:
            raise ValueError(f"{source} was saved by a function of timm, which leaves out the arguments of this model: "
                             "save it by model.save_pretrained(DIRECTORY)")  # fmt: skip
        if model_type != cls.model_type:
            raise ValueError(f"{source} holds a {model_type!r} model, not {cls.model_type!r}: "
                             "use common.from_pretrained, which picks the class")  # fmt: skip
        names: tuple[str, ...] = config.pop("id2label", ())
        config = {key: value for key, value in config.items() if key not in FOR_TIMM}
        known = set(inspect.signature(cls.__init__).parameters) - {"self"}
        if unknown := sorted(set(overrides) - known):
            raise ValueError(f"unknown arguments {unknown}: {cls.__name__} takes {sorted(known)}")
        if unknown := sorted(set(config) - known):
            raise ValueError(f"config of {source} has unknown keys {str(unknown)[:100]}: "
                             f"{cls.__name__} takes {sorted(known)}")  # fmt: skip
        check_types(cls, config, str(source))
        if names and len(names) != config.get("num_classes"):
            raise ValueError(f"config of {source}: id2label has {len(names)} names for {config.get('num_classes')} "
                             "classes")  # fmt: skip
        return config, names

    def compile(self, *, mode: str | None = None, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """As ``nn.Module.compile``. Each call then checks that images and model are such as were compiled, but not that
        every function and constant of the code still is: hundreds of checks, which count where images come singly."""
        inductor = kwargs.get("backend", "inductor") == "inductor"
        if mode is None or (inductor and options is None):
            mode, options = None, compile_options(mode or "default") | (options or {})
        super().compile(mode=mode, options=options, **kwargs)

    def warm_up(self, batch: int, size: int | tuple[int, int] | None = None, *, training: bool = False) -> int:
        """Compile the kernels that a batch of images of ``size`` (the model's own, if not given) will need, on all
        processors at once, and return how many there are; else they are compiled one by one as they are first used.
        Call it under the autocast of the images to come. ``training``: also those of the backward pass. A model that
        ``torch.compile`` has compiled needs none of these: the compiler makes its own."""
        sides = size or self.img_size
        height, width = (sides, sides) if isinstance(sides, int) else sides
        return compile_kernels(self, (batch, self.in_chans, height, width), training)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None,
                    revision: str | None = None, commit_message: str = "Upload model",
                    files: Mapping[str, str] | None = None) -> str:  # fmt: skip
        """Create the repository where needed and upload config and weights; returns the commit's address.

        ``files``: further text files by name, such as README.md. ``scripts/publish.py`` writes a card and checks first.
        """
        with tempfile.TemporaryDirectory() as directory:
            for name, text in (files or {}).items():
                (Path(directory) / Path(name).name).write_text(text, encoding="utf-8")
            self.save_pretrained(directory)
            commit = upload_directory(directory, repo_id, private=private, token=token, revision=revision,
                                      commit_message=commit_message)  # fmt: skip
        return str(commit)


def compile_options(mode: str) -> dict[str, Any]:
    """What ``torch.compile`` takes for one of its modes, and for no checks of code in each call."""
    return {"guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe, **torch._inductor.list_mode_options(mode)}


def upload_directory(directory: str | os.PathLike[str], repo_id: str, *, private: bool | None = None,
                     token: str | None = None, revision: str | None = None,
                     commit_message: str = "Upload model") -> CommitInfo:  # fmt: skip
    """Create the repository, and the branch ``revision``, where needed and upload all files in one commit."""
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return api.upload_folder(repo_id=repo_id, folder_path=Path(directory), revision=revision,
                             commit_message=commit_message)  # fmt: skip


def resolve_file(source: str | os.PathLike[str], name: str, **hub: Any) -> Path:
    """The local path of a file of a model directory or, if there is no such directory, of a Hub repository.

    A JSON file is within the bounds of ``read_config``, whoever reads it next.
    """
    path = _locate(source, name, **hub)
    if path.suffix == ".json":
        read_config(path)
    return path


def embedded(source: str | os.PathLike[str]) -> Path | None:
    """A checkpoint that comes with our packages, by its name, ``a_swin_micro``, or its path from beside them,
    ``swin/checkpoints/a_swin_micro``."""
    name = Path(source).name
    paths = [f"{package}/checkpoints/{name}" for package in PACKAGES if re.fullmatch(r"\w+", name)]
    found = (path for path in paths if str(source) in (name, path) and (ROOT / path / CONFIG_NAME).is_file())
    return next((ROOT / path for path in found), None)


def is_hub_id(source: str | os.PathLike[str]) -> bool:
    """Whether ``source`` means a repository on the Hub, ``owner/name``, as it is no path to something here."""
    name = str(source)
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def _locate(source: str | os.PathLike[str], name: str, **hub: Any) -> Path:
    directory = Path(source) if Path(source).exists() else embedded(source) or Path(source)
    if directory.is_dir():
        if (directory / name).is_file():
            return directory / name
        pickles = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLES)
        advice = (f"; {pickles} are pickles and are never loaded: convert them to safetensors with the architecture's "
                  "convert.py" if pickles else "")  # fmt: skip
        raise FileNotFoundError(f"{directory} has no {name}{advice}")
    if directory.exists():
        raise ValueError(f"{directory} is a file: give the directory that holds {CONFIG_NAME} and {WEIGHTS_NAME}")
    if not is_hub_id(source):
        raise FileNotFoundError(f"no directory {source}, and it is not a Hub id of the form 'owner/name'"
                                + ("" if "/" in str(source) else ": create_model(NAME) builds a model with fresh "
                                   "weights"))  # fmt: skip
    return Path(hf_hub_download(str(source), name, **hub))


def has_config(source: str | os.PathLike[str], **hub: Any) -> bool:
    """Whether weights have a config.json that names the type of a model: timm's do not."""
    try:
        with _locate(source, CONFIG_NAME, **hub).open("rb") as file:
            return b'"model_type"' in file.read(MAX_JSON)
    except LocalEntryNotFoundError:  # nobody could be asked
        raise
    except (FileNotFoundError, EntryNotFoundError):
        return False


def plain(value: Any) -> Any:
    """A NumPy number as a Python number, which JSON can hold; a list as a tuple, as when it is loaded."""
    if isinstance(value, (list, tuple)):
        return tuple(plain(v) for v in value)
    return value.item() if isinstance(value, np.generic) else value


def read_input(kind: type[Any], source: str | os.PathLike[str], **hub: Any) -> dict[str, Any] | None:
    """The fields of ``kind`` in the preprocessor file of a model, if it has one. A warning says where the Hub could not
    be asked whether it has."""
    try:
        path = resolve_file(source, PREPROCESSOR_NAME, **hub)
    except LocalEntryNotFoundError:  # nobody could be asked now; the cache may know from earlier
        place = {key: value for key, value in hub.items() if key in ("cache_dir", "revision")}
        if try_to_load_from_cache(str(source), PREPROCESSOR_NAME, **place) is not _CACHED_NO_EXIST:
            warnings.warn(f"no {PREPROCESSOR_NAME} of {source} was downloaded, and the Hub cannot be asked for it: "
                          "images are prepared with ImageNet's mean and std, which may be wrong. Load the model once "
                          "with a network", stacklevel=3)  # fmt: skip
        return None
    except (FileNotFoundError, EntryNotFoundError):
        return None
    return read_fields(kind, getattr(kind, "STORED", None) or kind._fields, path)


def check_outline(cls: type[HubModel], arguments: dict[str, Any], weights: Path, where: str,
                  may_differ: tuple[str, ...] | None = None) -> None:  # fmt: skip
    """Raise a ValueError unless ``cls(**arguments)`` has just the tensors that the header of ``weights`` lists; those
    whose name begins with ``may_differ`` may have other shapes.

    The model is built without memory for this, so that a config of absurd size costs nothing.
    """
    found = read_header(weights)
    try:
        with torch.device("meta"):
            outline = cls(**arguments)
    except Exception as error:
        raise ValueError(f"config of {where} describes no {cls.__name__}: {str(error)[:300]}") from error
    stored = outline.state_dict()
    check_state(without(stored, may_differ), without(found, may_differ), str(weights))
    computed = sum(b.numel() * b.element_size() for name, b in outline.named_buffers() if name not in stored)
    if computed > MAX_BUFFERS:
        raise ValueError(f"config of {where} asks for {computed:,} bytes of tables besides the weights, more than "
                         f"{MAX_BUFFERS:,}: windows that large are refused")  # fmt: skip
