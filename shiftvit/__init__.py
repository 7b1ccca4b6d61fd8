"""What stands before our packages: whether they are ours, and how their commands end.

Our packages have common names. If ``common`` is another's, ``import shiftvit`` raises an ImportError with its path.
"""

import os
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["check_ours", "run"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("common", "cvt", "mvitv2", "scripts", "segmentation", "shiftvit", "swin", "swinv2")


def check_ours(package: str) -> None:
    """Raise an ImportError unless Python would import ``package`` from beside this one."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(f"the package {package!r} is missing: install shift-equivariant-vits again")
    if Path(spec.origin).resolve().parent != ROOT / package:
        raise ImportError(f"{spec.origin} hides the package {package!r} of shift-equivariant-vits: rename it, or take "
                          "its folder off sys.path and PYTHONPATH")  # fmt: skip


def run(main: Callable[..., Any], *arguments: Any) -> None:
    """Call a command. An error that we raise becomes one line and exit status 2; what nobody expected keeps its
    traceback, as everything does with SHIFTVIT_TRACEBACK=1."""
    try:
        main(*arguments)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        if os.environ.get("SHIFTVIT_TRACEBACK") or not (isinstance(error, OSError) or _ours(error)):
            raise
        print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


def _ours(error: BaseException) -> bool:
    """Whether a line of our own raised it."""
    path = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES


check_ours("common")
