"""The command ``shiftvit``, and a clear word where a package of another's hides one of ours.

Our packages have common names. If ``common`` is another's, ``import shiftvit`` raises an ImportError with its path.
"""

from importlib.util import find_spec
from pathlib import Path

__all__ = ["check_ours"]

ROOT = Path(__file__).resolve().parents[1]


def check_ours(package: str) -> None:
    """Raise an ImportError unless Python would import ``package`` from beside this one."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(f"the package {package!r} is missing: install shift-equivariant-vits again")
    if Path(spec.origin).resolve().parent != ROOT / package:
        raise ImportError(f"{spec.origin} hides the package {package!r} of shift-equivariant-vits: rename it, or take "
                          "its folder off sys.path and PYTHONPATH")  # fmt: skip


check_ours("common")
