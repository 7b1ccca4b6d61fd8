"""Checkpoints of a run: written under a temporary name and renamed, the last few kept, found again by "latest"."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError

__all__ = ["Progress", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]

PROGRESS_NAME = "progress.json"


@dataclass
class Progress:
    """Where a run stands: optimizer steps done in all, epoch, loader batches done in that epoch."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


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
        if accelerator.is_main_process:
            state = {"progress": asdict(progress), "identity": identity}
            (temporary / PROGRESS_NAME).write_text(json.dumps(state, default=str))
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"could not write checkpoint {final} ({error}): free some disk space and resume with "
                      "--resume_from_checkpoint latest; earlier checkpoints are untouched") from error  # fmt: skip
    if accelerator.is_main_process:
        kept = _checkpoints(root)[-keep:]
        for old in root.glob("*step_*"):  # also what a killed run has left half written or half deleted
            if old not in kept:
                (old / PROGRESS_NAME).unlink(missing_ok=True)  # first: no longer whole
                shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()
    return final


def _checkpoints(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("step_*") if (path / PROGRESS_NAME).is_file())


def latest_checkpoint(root: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    found = _checkpoints(root)
    return found[-1] if found else None


def load_checkpoint(accelerator: Accelerator, path: Path, identity: dict[str, Any]) -> Progress:
    """Restore model, optimizer, schedule and random states; refuse a checkpoint of another model or recipe."""
    if not (path / PROGRESS_NAME).is_file():
        raise FileNotFoundError(f"{path} is not a checkpoint (no {PROGRESS_NAME}): give a step_* directory or 'latest'")
    state = json.loads((path / PROGRESS_NAME).read_text())
    ours = json.loads(json.dumps(identity, default=str))
    if differing := sorted(key for key in ours.keys() | state["identity"].keys()
                           if ours.get(key) != state["identity"].get(key)):  # fmt: skip
        shown = ", ".join(f"{key}: {state['identity'].get(key)!r} there, {ours.get(key)!r} here" for key in differing)
        raise ValueError(f"{path} belongs to another run ({shown}): use the same flags, or another --output_dir")
    accelerator.load_state(str(path))
    return Progress(**state["progress"])
