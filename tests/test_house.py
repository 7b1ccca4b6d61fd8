"""The floors of ``common``: an import never runs up, and only operations and kernels ask where they run. Else a reader
has to know everything to understand anything."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

FLOORS = (
    "kernels",
    "ops",
    "grid",
    "seeding",
    "shifts",
    "anchors",
    "models",
    "data",
    "evaluation",
    "training",
    "publishing",
)
"""From the ground up. Files beside the packages (``common/metrics.py``) name what people type, and stand on top."""


def imports(path: Path) -> Iterator[str]:
    """Parts of ``common`` that a file of it imports, anywhere in it."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            parts = (*base, *(node.module or "").split(".")) if node.module else base
            names = (
                [alias.name for alias in node.names] if parts == ("common",) else [parts[1] if len(parts) > 1 else ""]
            )
            yield from names if parts[0] == "common" else ()


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_run_downward(floor: str) -> None:
    place = ROOT / "common" / floor
    files = sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    assert files
    for file in files:
        for name in imports(file):
            assert name in FLOORS[: FLOORS.index(floor) + 1], f"{file.relative_to(ROOT)} imports common.{name}"


def test_only_operations_ask_where_they_run() -> None:
    pattern = re.compile(r"\b(fits_[a-z_]+|usable|is_compiling|is_grad_enabled)\b")
    folders = ("common", "swin", "swinv2", "cvt", "mvitv2", "segmentation")
    files = {str(file.relative_to(ROOT)) for folder in folders for file in (ROOT / folder).rglob("*.py")
             if pattern.search(file.read_text())}  # fmt: skip
    asking = {file for file in files if not file.startswith(("common/ops/", "common/kernels/"))}
    assert not asking


def test_anchors_read_beside_the_paper() -> None:
    """Each on a page of its own, and models on a few: else the paper cannot be found in the code."""
    for file in (ROOT / "common" / "anchors").glob("*.py"):
        assert len(file.read_text().splitlines()) <= 80, file
    for folder in ("swin", "swinv2", "cvt", "mvitv2", "segmentation"):
        assert len((ROOT / folder / "model.py").read_text().splitlines()) <= 300, folder


def test_files_are_short() -> None:
    folders = ("common", "swin", "swinv2", "cvt", "mvitv2", "segmentation", "scripts", "shiftvit", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 150
    assert not [file.name for file in files if len(file.read_text().splitlines()) > 350]
