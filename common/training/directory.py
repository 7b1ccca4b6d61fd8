"""The output directory of a run: no run begins over the checkpoints of another."""

import re
from pathlib import Path

__all__ = ["check_directory", "set_aside", "set_later_aside"]

RUN_FILES = ("checkpoints", "best", "config.json", "model.safetensors", "preprocessor_config.json", "log.jsonl",
             "results.json", "curves.png", "tracking")  # fmt: skip


def check_directory(output: Path, resume: str | None, overwrite: bool) -> None:
    """Refuse to begin where checkpoints of another run are, unless they are to be set aside."""
    root = output / "checkpoints"
    own = bool(resume) and (resume == "latest" or Path(str(resume)).resolve().parent == root.resolve())
    found = sorted(path.name for path in root.glob("step_*"))
    if own and overwrite:
        raise ValueError(f"--resume_from_checkpoint {resume} goes on with the run in {output}, --overwrite_output_dir "
                         "sets it aside: leave out one of them")  # fmt: skip
    if found and not own and not overwrite:
        raise ValueError(f"{output} holds the checkpoints of a run ({found[0]} to {found[-1]}): go on with it by "
                         "--resume_from_checkpoint latest, set it aside by --overwrite_output_dir, or choose another "
                         "--output_dir")  # fmt: skip


def set_aside(output: Path) -> None:
    """Rename what a run has written: ``checkpoints`` to ``checkpoints.old-1`` and so on, with the first free number."""
    names = [name for name in RUN_FILES if (output / name).exists()]
    number = _free_number(output)
    for name in names:
        (output / name).rename(output / f"{name}.old-{number}")
    if names:
        print(f"set aside as *.old-{number} in {output}: {', '.join(names)}")


def set_later_aside(output: Path, step: int) -> None:
    """Move checkpoints after ``step``, which a resumed run has left behind: they are not its own."""
    matches = [(path, re.fullmatch(r"step_(\d+)", path.name)) for path in sorted((output / "checkpoints").iterdir())]
    later = [path for path, match in matches if match and int(match[1]) > step]
    if later:
        target = output / f"checkpoints.old-{_free_number(output)}"
        target.mkdir()
        for path in later:
            path.rename(target / path.name)
        print(f"set aside in {target}: {', '.join(path.name for path in later)}")


def _free_number(output: Path) -> int:
    taken = [int(match[1]) for path in output.glob("*.old-*") if (match := re.search(r"\.old-(\d+)$", path.name))]
    return max(taken, default=0) + 1
