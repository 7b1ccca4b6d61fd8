"""Files of weights: whole, of the right names and shapes, and finite."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = ["Entry", "check_state", "compare_arguments", "load_weights", "read_header", "without"]

REGULARISERS = re.compile(r"num_classes|.*drop.*_rate")  # arguments that a new training may well choose anew
MAX_HEADER = 2**24  # bytes of the header of a safetensors file: several times that of our largest


class Entry(NamedTuple):
    """A tensor as the header of a file describes it."""

    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file by its header, which must account for every byte. Reads no tensor."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
    claimed = int.from_bytes(start, "little")
    if len(start) < 8 or claimed > min(size - 8, MAX_HEADER):
        looks = "a pickle, which is never loaded" if start[:1] == b"\x80" or start[:2] == b"PK" else "cut or broken"
        raise ValueError(f"{path} is not a whole safetensors file: of its {size:,} bytes the header claims "
                         f"{claimed:,}; it is {looks}: fetch or save it again, as safetensors")  # fmt: skip
    try:
        with safe_open(path, framework="pt") as file:
            return {name: Entry(tuple(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({str(error)[:200]}): fetch or save it "
                         "again") from None  # fmt: skip


def load_weights(model: nn.Module, path: Path, may_differ: str | tuple[str, ...] | None = None, *,
                 allow_nonfinite: bool = False) -> list[str]:  # fmt: skip
    """Load a safetensors file into ``model``: all names, all shapes, nothing else, and no NaN or Inf unless
    ``allow_nonfinite``.

    ``may_differ``: tensors whose name begins so keep their own values where the file has other shapes (a classifier for
    other classes) or none of them. Returns their names.
    """
    read_header(path)
    state = load_file(path)
    own = model.state_dict()
    if may_differ and not any(name.startswith(may_differ) for name in own):  # a model without a last layer
        state = without(state, may_differ)
    headless = may_differ is not None and not any(name.startswith(may_differ) for name in state)
    kept = [name for name, tensor in own.items() if may_differ and name.startswith(may_differ)
            and (headless or (name in state and state[name].shape != tensor.shape))]  # fmt: skip
    state |= {name: own[name] for name in kept}
    check_state(own, state, str(path))
    broken = [name for name, tensor in state.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken and not allow_nonfinite:
        raise ValueError(f"{path} holds NaN or Inf in {len(broken)} of {len(state)} tensors, such as {broken[0]}: take "
                         "weights from before, or load these as they are with allow_nonfinite=True")  # fmt: skip
    model.load_state_dict(state, strict=True)
    return kept


def without(state: Mapping[str, Any], prefix: str | tuple[str, ...] | None) -> dict[str, Any]:
    """A state dict without the names that begin with ``prefix``."""
    return {name: value for name, value in state.items() if not (prefix and name.startswith(prefix))}


def check_state(expected: Mapping[str, Tensor], state: Mapping[str, Tensor | Entry], where: str) -> None:
    """Raise a ValueError that names missing, extra and wrongly shaped tensors, and integers where floats belong."""
    problems = [f"missing {name}" for name in expected.keys() - state.keys()]
    problems += [f"unexpected {name}" for name in state.keys() - expected.keys()]
    problems += [
        f"{name} has shape {tuple(state[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and tuple(state[name].shape) != tuple(tensor.shape)
    ]
    problems += [
        f"{name} holds {found.dtype}, expected {tensor.dtype}"
        for name, tensor in expected.items()
        if isinstance(found := state.get(name), Tensor) and found.is_floating_point() != tensor.is_floating_point()
    ]
    if problems:
        shown = "; ".join(problem[:100] for problem in sorted(problems)[:4])
        shown += f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(f"{where} does not fit the model: {shown}")


def compare_arguments(theirs: Mapping[str, Any], ours: Mapping[str, Any], setting: str) -> str:
    """What to say where weights of a model with other arguments go on in this one, which ``setting`` may change, since
    they may compute something else there; nothing if the arguments are the same."""
    other = [key for key, value in theirs.items() if key in ours and value != ours[key]
             and not REGULARISERS.fullmatch(key)]  # fmt: skip
    there, here = (", ".join(f"{key}={known[key]}" for key in other) for known in (theirs, ours))
    return f"\nthat model has {there}; this one {here} ({setting} changes it)" if other else ""
