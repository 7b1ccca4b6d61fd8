"""Checkpoints of a run: written under a temporary name and renamed, the last few kept, found again by "latest".

A checkpoint is whole if every file has the digest that ``manifest.json``, which is written last, has for it.
"""

import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from safetensors import SafetensorError

from shiftvit import death

from ..seeding import derive_seed

__all__ = ["Progress", "checkpoints_in", "latest_checkpoint", "load_checkpoint", "on_main", "read_checkpoint",
           "save_checkpoint", "write_manifest"]  # fmt: skip

PROGRESS_NAME = "progress.json"
MANIFEST_NAME = "manifest.json"

T = TypeVar("T")


@dataclass
class Progress:
    """Where a run stands: optimizer steps done in all, epoch, images done in that epoch, over all processes."""

    step: int = 0
    epoch: int = 0
    images: int = 0

    def check(self, batch_size: int, steps_per_epoch: int) -> None:
        """Refuse a place that no run of such epochs comes by."""
        if self.images != (self.step - self.epoch * steps_per_epoch) * batch_size:
            raise ValueError(f"{self} is not a position in epochs of {steps_per_epoch} steps of {batch_size} images: "
                             "take another checkpoint")  # fmt: skip


def save_checkpoint(accelerator: Accelerator, root: Path, progress: Progress, identity: dict[str, Any],
                    keep: int) -> Path:  # fmt: skip
    """Write ``root/step_N``: whole, or not at all. Older checkpoints go only after the new one is in place."""
    final = root / f"step_{progress.step:08d}"
    temporary = root / f".{final.name}"
    try:
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(temporary), safe_serialization=True)
        accelerator.wait_for_everyone()  # every process has written its random state
        if accelerator.is_main_process:
            state = {"progress": asdict(progress), "identity": identity, "processes": accelerator.num_processes,
                     "parts": accelerator.gradient_accumulation_steps,
                     "precision": accelerator.mixed_precision}  # fmt: skip
            (temporary / PROGRESS_NAME).write_text(json.dumps(state, default=str))
            write_manifest(temporary)
            if final.exists():
                final.rename(root / f".{final.name}.old")
            temporary.rename(final)
    except (OSError, RuntimeError, SafetensorError) as error:
        if death(error):  # of a worker or another process, which may still write there
            raise
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"could not write checkpoint {final} ({error}): free some disk space and resume with "
                      "--resume_from_checkpoint latest; earlier checkpoints are untouched") from error  # fmt: skip
    if accelerator.is_main_process:
        found = checkpoints_in(root)
        kept = [path for path in found if (path / MANIFEST_NAME).is_file()][-keep:]
        for old in (*found, *root.glob(".step_*")):  # also what a killed run has left half written
            if old not in kept:
                (old / MANIFEST_NAME).unlink(missing_ok=True)  # first: no longer whole
                shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()
    return final


def checkpoints_in(root: Path) -> list[Path]:
    """What runs have written there, by step. A copy by another name, ``step_best``, is its owner's."""
    steps = {path: int(path.name[5:]) for path in root.glob("step_*") if re.fullmatch(r"step_[0-9]+", path.name)}
    return sorted(steps, key=steps.__getitem__)


def write_manifest(path: Path) -> None:
    """Digests of all files of a checkpoint."""
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    digests = {name: _digest(path / name) for name in names if name != MANIFEST_NAME}
    (path / MANIFEST_NAME).write_text(json.dumps({"sha256": digests}, indent=1))


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Progress, identity and number of processes of a checkpoint; an error that names what is broken."""
    if not (path / PROGRESS_NAME).is_file():
        raise FileNotFoundError(f"{path} is not a checkpoint (no {PROGRESS_NAME}): give a step_* directory or 'latest'")
    if not (path / MANIFEST_NAME).is_file():
        raise ValueError(f"{path} is unfinished, or older than manifests (no {MANIFEST_NAME}): take an earlier one")
    digests = _json(path / MANIFEST_NAME).get("sha256")
    if not isinstance(digests, dict) or PROGRESS_NAME not in digests:
        raise ValueError(f"{path} is broken ({MANIFEST_NAME} lists no digests): take an earlier one")
    faults = [f"{name} is missing" for name in digests if not (path / name).is_file()]
    faults += [f"{name} is not what was written" for name, digest in digests.items()
               if (path / name).is_file() and _digest(path / name) != digest]  # fmt: skip
    if faults:
        raise ValueError(f"{path} is broken ({', '.join(faults[:5])}): take an earlier one")
    state = _json(path / PROGRESS_NAME)
    progress, names = state.get("progress"), {field.name for field in fields(Progress)}
    if not isinstance(progress, dict) or progress.keys() != names or not all(map(_is_count, progress.values())):
        raise ValueError(f"{path / PROGRESS_NAME} is invalid: progress is {str(progress)[:100]}, not a whole number "
                         f"from 0 on for each of {', '.join(sorted(names))}")  # fmt: skip
    processes = state.get("processes")
    if not isinstance(state.get("identity"), dict) or not _is_count(processes) or not processes:
        raise ValueError(f"{path / PROGRESS_NAME} is invalid: it must name its run and how many processes wrote it")
    missing = (i for i in range(processes) if f"random_states_{i}.pkl" not in digests)
    if some := list(itertools.islice(missing, 5)):  # there may be any number
        raise ValueError(f"{path} has no random states of processes {some}: it cannot resume exactly")
    return state


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.parent} is broken ({file.name}: {error}): take an earlier one") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file.parent} is broken ({file.name} holds no object): take an earlier one")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def latest_checkpoint(root: Path, report: Callable[[str], None] = print) -> Path | None:
    """The newest whole checkpoint of a run, or None where there is none at all; says which it passes over."""
    faults = []
    for path in reversed(checkpoints_in(root)):
        try:
            read_checkpoint(path)
        except (OSError, ValueError) as error:
            faults.append(str(error))
            report(f"passed over: {error}")
        else:
            return path
    if faults:
        raise ValueError(f"no checkpoint under {root} is whole ({faults[0]}): begin anew by --overwrite_output_dir")
    return None


def load_checkpoint(accelerator: Accelerator, path: Path, identity: dict[str, Any]) -> Progress:
    """Restore model, optimizer, schedule and random states; refuse a checkpoint of another model or recipe."""
    state = on_main(accelerator, lambda: read_checkpoint(path))
    ours = json.loads(json.dumps(identity, default=str))
    ordered, order = (each.pop("order", None) for each in (state["identity"], ours))
    if differing := _differences(state["identity"], ours):
        shown = ", ".join(differing[:3]) + (f" and {len(differing) - 3} more" if len(differing) > 3 else "")
        raise ValueError(f"{path} belongs to another run ({shown}): use the same flags, or another --output_dir")
    try:
        accelerator.load_state(str(path))
    except Exception as error:
        raise ValueError(f"{path} is whole, but could not be loaded ({type(error).__name__}: {str(error)[:200]}): was "
                         "it written with another --mixed_precision, or by other versions?") from error  # fmt: skip
    accelerator.step = 0  # a checkpoint lies between optimizer steps, whatever the accumulation was or is
    progress = Progress(**state["progress"])
    if accelerator.num_processes != state["processes"]:
        images = "the same images, but " if ordered in (None, order) else ""
        accelerator.print(f"{state['processes']} processes wrote {path}, {accelerator.num_processes} go on: with "
                          f"{images}other random numbers (drop path)")  # fmt: skip
        if accelerator.process_index >= state["processes"]:  # has no state of its own
            set_seed(derive_seed(progress.step, accelerator.process_index))
    before, now = state.get("parts"), accelerator.gradient_accumulation_steps  # older checkpoints do not say
    if _is_count(before) and before != now:
        accelerator.print(f"{path} was written with batches in {before} parts, now they are in {now}: the same images, "
                          "but other random numbers (drop path)")  # fmt: skip
    if ordered not in (None, order):
        accelerator.print(f"{path} was written with {ordered}, now it is {order}: images come in another order, and in "
                          "the rest of this epoch some twice, others not at all")  # fmt: skip
    if (written := state.get("precision")) not in (None, accelerator.mixed_precision):
        accelerator.print(f"{path} was written with --mixed_precision {written}, now it is "
                          f"{accelerator.mixed_precision}: the run goes on with other roundings, and its results name "
                          "the last precision alone")  # fmt: skip
    return progress


def _differences(there: Any, here: Any, name: str = "") -> list[str]:
    """What differs in objects of JSON, by name, as people read it."""
    if there == here:
        return []
    if isinstance(there, dict) and isinstance(here, dict):
        return [line for key in sorted(there.keys() | here.keys())
                for line in _differences(there.get(key), here.get(key), key)]  # fmt: skip
    return [f"{name[:30]}: {repr(there)[:40]} there, {repr(here)[:40]} here"]


def on_main(accelerator: Accelerator, f: Callable[[], T]) -> T:
    """What ``f`` returns or raises on the main process, on every process."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = f()
        except (OSError, ValueError) as error:
            outcome[1] = error
    result, fault = broadcast_object_list(outcome)
    if fault is not None:
        raise fault
    return result
