"""What stands before our packages: whether they are ours, and how their commands end.

Our packages have common names. If ``common`` is another's, ``import shiftvit`` raises an ImportError with its path.
"""

import argparse
import io
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["check_all", "check_ours", "death", "run"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("common", "cvt", "mvitv2", "scripts", "segmentation", "shiftvit", "swin", "swinv2")
WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (is killed by signal: \w+|exited unexpectedly)")
PEER = re.compile(r"gloo.*(Connection closed|Connection reset|Broken pipe)|ncclRemoteError", re.I | re.S)
CAUGHT = re.compile(r'Caught \w+ in DataLoader worker process .*\n  File "([^"]+)", line \d+, in [^\n]+\n'
                    r"    (raise[^\n]*)\n(?:    [^\n]*\n)*[\w.]+: (.*)", re.S)  # fmt: skip
PATIENCE = 5.0  # seconds that a process waits for the first one to say what is wrong


def check_ours(package: str) -> None:
    """Raise an ImportError unless Python would import ``package`` from beside this one."""
    spec = find_spec(package)
    folders = list((spec and spec.submodule_search_locations) or ())
    if spec is None or not (spec.origin or folders):
        raise ImportError(f"the package {package!r} is missing: install shift-equivariant-vits again")
    found = spec.origin or folders[0]  # a folder without __init__.py has no origin
    if Path(found).resolve().parent != ROOT / package:
        raise ImportError(f"{found} hides the package {package!r} of shift-equivariant-vits: rename it, or take "
                          "its folder off sys.path and PYTHONPATH")  # fmt: skip


def check_all() -> None:
    """As ``check_ours``, for all packages that a command imports."""
    for package in PACKAGES:
        if package != "scripts":
            check_ours(package)


def run(main: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    """Call a command. An error that we raise becomes one line and exit status 2; what nobody expected keeps its
    traceback, as everything does with SHIFTVIT_TRACEBACK=1."""
    # torch's, thirty lines long, on a CPU without bf16: it computes the same in another way
    warnings.filterwarnings("ignore", "mkldnn_matmul failed, switching to BLAS")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name of a class that it cannot write, as a Windows pipe may not
        sys.stdout.reconfigure(errors="backslashreplace")
    parsers_own = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = _refuse  # type: ignore[assignment, method-assign]
    try:
        main(*arguments, **keywords)
    except (FloatingPointError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        other = death(error) or _caught(error)
        if os.environ.get("SHIFTVIT_TRACEBACK") or not (other or isinstance(error, OSError) or _ours(error)):
            raise
        from tqdm import tqdm  # its bar may stand in the line

        tqdm.write(_line(other or str(error)), file=sys.stderr)
        raise SystemExit(2) from None
    except SystemExit as end:
        raise SystemExit(_line(end.code) if isinstance(end.code, str) else end.code) from None
    finally:
        argparse.ArgumentParser.error = parsers_own  # type: ignore[method-assign]


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """In place of argparse's own, which prints on every process, and a usage of many lines before."""
    raise ValueError(f"{message} (--help lists the flags)")


def death(error: BaseException | None) -> str:
    """What an error says of the death of a process that this one works with; empty if it comes of something else."""
    said = ""
    while error is not None:
        if match := WORKER.search(str(error)):  # the first error in a chain knows the signal
            why = ("the launcher ends all where one process is gone, and names it" if "Terminated" in match[2] else
                   "out of memory? Try fewer --dataloader_num_workers")  # fmt: skip
            said = f"worker {match[1]} of the loader {match[2]}: {why}"
        elif not said and PEER.search(str(error)):
            said = "another process of this run is gone: its launcher names it"
        error = error.__cause__ or error.__context__
    return said


def _line(message: str) -> str:
    line = f"{Path(sys.argv[0]).name}: error: "
    if rank := int(os.environ.get("RANK", 0)):
        # what all processes meet, the first one says, and the launcher ends the others while they wait
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PATIENCE)
        line = f"\n{line}rank {rank}: "  # below the bar of the first
    return line + " ".join(message.split())


def _ours(error: BaseException) -> bool:
    """Whether a statement ``raise`` of our own raised it; what Python or torch raise in our lines is a bug."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return _raised(last.filename, last.line or "")


def _raised(file: str, line: str) -> bool:
    path = Path(file).resolve()
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES and line.startswith("raise ")


def _caught(error: BaseException) -> str:
    """The message of an error that we raised in a worker of the loader: torch hands on its traceback as text."""
    match = CAUGHT.match(str(error))
    return match[3] if match and _raised(match[1], match[2]) else ""


check_ours("common")
if Path(*sys.argv[:1]).resolve().parent in [ROOT / package for package in PACKAGES]:  # a command of ours
    check_all()
