"""Save, load and publish: config.json plus model.safetensors, by directory or by Hub repository.

Weights travel as safetensors only. Nothing is ever unpickled, every tensor must be there with its shape, and a config
may only hold the arguments of the model's constructor.
"""

import inspect
import json
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import HfApi, hf_hub_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = ["CONFIG_NAME", "WEIGHTS_NAME", "HubModel", "load_weights", "read_config", "resolve_file"]

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
PICKLES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")


class HubModel(nn.Module):
    """A module whose constructor arguments are its config. Subclasses call ``super().__init__(locals())`` first."""

    model_type: ClassVar[str]

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        names = inspect.signature(type(self).__init__).parameters
        self.config = {name: arguments[name] for name in names if name != "self"}

    def save_pretrained(self, save_directory: str | os.PathLike[str],
                        state_dict: dict[str, Tensor] | None = None) -> Path:  # fmt: skip
        """Write config.json and model.safetensors; each file appears whole or not at all.

        ``state_dict``: other weights of the same model, for instance averaged or gathered ones.
        """
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        config = {"model_type": self.model_type, **self.config}
        state = {name: tensor.contiguous() for name, tensor in (state_dict or self.state_dict()).items()}
        for name, write in (
            (CONFIG_NAME, lambda path: Path(path).write_text(json.dumps(config, indent=2) + "\n")),
            (WEIGHTS_NAME, lambda path: save_file(state, path, metadata={"format": "pt"})),
        ):
            temporary = directory / f".{name}.{os.getpid()}"
            write(temporary)
            os.replace(temporary, directory / name)
        return directory

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None,
                        cache_dir: str | None = None, local_files_only: bool = False,
                        **overrides: Any) -> Self:  # fmt: skip
        """Load from a directory or a Hub repository. ``overrides`` replace config entries, for instance
        ``adaptive=True``: an adaptive model has exactly the weights of its default."""
        hub = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        config = read_config(resolve_file(source, CONFIG_NAME, **hub))
        model_type = config.pop("model_type", None)
        if model_type != cls.model_type:
            raise ValueError(f"{source} holds a {model_type!r} model, not {cls.model_type!r}: "
                             "use common.from_pretrained, which picks the class")  # fmt: skip
        known = set(inspect.signature(cls.__init__).parameters) - {"self"}
        if unknown := sorted((set(config) | set(overrides)) - known):
            raise ValueError(f"config of {source} has unknown keys {unknown}: {cls.__name__} takes {sorted(known)}")
        model = cls(**{**config, **overrides})
        load_weights(model, resolve_file(source, WEIGHTS_NAME, **hub))
        return model.eval()

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None,
                    revision: str | None = None, commit_message: str = "Upload model") -> str:  # fmt: skip
        """Create the repository where needed and upload config and weights; returns the commit's address."""
        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as directory:
            self.save_pretrained(directory)
            commit = api.upload_folder(repo_id=repo_id, folder_path=directory, revision=revision,
                                       commit_message=commit_message)  # fmt: skip
        return str(commit)


def resolve_file(source: str | os.PathLike[str], name: str, **hub: Any) -> Path:
    """The local path of a file of a model directory or, if there is no such directory, of a Hub repository."""
    directory = Path(source)
    if directory.is_dir():
        if (directory / name).is_file():
            return directory / name
        pickles = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLES)
        advice = (f"; {pickles} are pickles and are never loaded: convert them to safetensors with the architecture's "
                  "convert.py" if pickles else "")  # fmt: skip
        raise FileNotFoundError(f"{directory} has no {name}{advice}")
    if directory.exists():
        raise ValueError(f"{directory} is a file: give the directory that holds {CONFIG_NAME} and {WEIGHTS_NAME}")
    if directory.is_absolute() or str(source).startswith((".", "~")) or str(source).count("/") != 1:
        raise FileNotFoundError(f"no directory {source}, and it is not a Hub id of the form 'owner/name'")
    return Path(hf_hub_download(str(source), name, **hub))


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json; JSON lists come back as the tuples they were."""
    try:
        config = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): save the model again or fetch the file anew") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return {key: _tuples(value) for key, value in config.items()}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def load_weights(model: nn.Module, path: Path, may_differ: str | tuple[str, ...] | None = None) -> list[str]:
    """Load a safetensors file into ``model``: all names, all shapes, nothing else.

    ``may_differ``: tensors whose name begins so keep their own values where the file has other shapes (a classifier for
    other classes). Returns their names.
    """
    try:
        state = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}): fetch or save it again") from None
    own = model.state_dict()
    kept = [name for name, tensor in own.items() if may_differ and name.startswith(may_differ)
            and name in state and state[name].shape != tensor.shape]  # fmt: skip
    state |= {name: own[name] for name in kept}
    check_state(own, state, str(path))
    model.load_state_dict(state, strict=True)
    return kept


def check_state(expected: dict[str, Tensor], state: dict[str, Tensor], where: str) -> None:
    """Raise a ValueError that names missing, extra and wrongly shaped tensors."""
    problems = [f"missing {name}" for name in expected.keys() - state.keys()]
    problems += [f"unexpected {name}" for name in state.keys() - expected.keys()]
    problems += [
        f"{name} has shape {tuple(state[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != torch.Size(tensor.shape)
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ValueError(f"{where} does not fit the model: {shown}")
