"""The output directory of a run: one run at a time, and none begins over the checkpoints of another."""

import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator

from .checkpoints import checkpoints_in, on_main

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOGS", "TRAINED", "acquire", "check_directory", "locked", "release", "set_aside", "set_later_aside"]

LOCK_NAME = ".lock"
_DESCRIPTORS: set[int] = set()  # of the locks that this process holds
LOGS = ("checkpoints", "log.jsonl", "tracking")  # what a run writes from its beginning
TRAINED = ("best", "config.json", "model.safetensors", "preprocessor_config.json", "results.json", "curves.png")
"""What a run writes once it has measured something."""


def check_directory(output: Path, resume: str | None, overwrite: bool) -> bool:
    """Refuse to begin where checkpoints of another run are, unless they are to be set aside. Whether the run that goes
    on, if one does, is the one that is there."""
    root = output / "checkpoints"
    own = bool(resume) and (resume == "latest" or Path(str(resume)).resolve().parent == root.resolve())
    found = [path.name for path in checkpoints_in(root)]
    if own and overwrite:
        raise ValueError(f"--resume_from_checkpoint {resume} goes on with the run in {output}, --overwrite_output_dir "
                         "sets it aside: leave out one of them")  # fmt: skip
    if found and not own and not overwrite:
        raise ValueError(f"{output} holds the checkpoints of a run ({found[0]} to {found[-1]}): go on with it by "
                         "--resume_from_checkpoint latest, set it aside by --overwrite_output_dir, or choose another "
                         "--output_dir")  # fmt: skip
    return own


def set_aside(output: Path, files: Sequence[str] = LOGS + TRAINED, number: int = 0) -> int:
    """Rename what a run has written: ``checkpoints`` to ``checkpoints.old-1`` and so on, with this number or the first
    free one, which is returned."""
    names = [name for name in files if (output / name).exists()]
    number = number or _free_number(output)
    for name in names:
        (output / name).rename(output / f"{name}.old-{number}")
    if names:
        print(f"set aside as *.old-{number} in {output}: {', '.join(names)}")
    return number


def set_later_aside(output: Path, step: int) -> None:
    """Move checkpoints after ``step``, which a resumed run has left behind: they are not its own."""
    later = [path for path in checkpoints_in(output / "checkpoints") if int(path.name[5:]) > step]
    if later:
        target = output / f"checkpoints.old-{_free_number(output)}"
        target.mkdir()
        for path in later:
            path.rename(target / path.name)
        print(f"set aside in {target}: {', '.join(path.name for path in later)}")


def _free_number(output: Path) -> int:
    taken = [int(match[1]) for path in output.glob("*.old-*") if (match := re.search(r"\.old-(\d+)$", path.name))]
    return max(taken, default=0) + 1


@contextmanager
def locked(accelerator: Accelerator, output: Path) -> Iterator[None]:
    """Hold the directory: a second run is refused. The operating system lets go of it when the process dies."""
    held: list[int] = []
    on_main(accelerator, lambda: held.append(acquire(output)))
    try:
        yield
    finally:
        for descriptor in held:
            release(descriptor)


def acquire(output: Path) -> int:
    """Lock ``output/.lock`` and note this process in it; returns the descriptor to release."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(output / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise type(error)(f"{output} cannot be written ({error.strerror}): choose another --output_dir") from None
    try:
        if fcntl is None:
            raise OSError("Windows has no such locks")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise BlockingIOError(f"{output} is in use by {owner}: wait for it, stop it, or choose another "
                              "--output_dir") from None  # fmt: skip
    except OSError as error:
        print(f"{output} cannot be locked ({error}): see to it that no other run writes there")
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
    _DESCRIPTORS.add(descriptor)
    return descriptor


def release(descriptor: int) -> None:
    if descriptor in _DESCRIPTORS:  # not in a child, which has none
        _DESCRIPTORS.remove(descriptor)
        os.close(descriptor)


def _release_in_child() -> None:
    """A loader's worker must not hold the lock when its parent is gone."""
    for descriptor in list(_DESCRIPTORS):
        release(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
