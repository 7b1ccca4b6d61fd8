"""The Triton kernels where there is no GPU: in Triton's interpreter, which must be chosen before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

FILES = [file for file in sorted(Path(__file__).parent.glob("test_*.py")) if "\n@interpreted" in file.read_text()]
QUICK = [file for file in FILES if file.stem in ("test_activation", "test_ops", "test_residual", "test_rolling")]
SMALL = "activation or residual or rolling or add_norm or gelu or merge_patches or moments or pool_maximum or product"


LARGE = [file for file in FILES if file not in QUICK]


@pytest.mark.parametrize(("files", "which"), [
    pytest.param(QUICK, SMALL, id="quick"),
    pytest.param(QUICK, f"not ({SMALL})", id="others of these files", marks=pytest.mark.slow),
    pytest.param(LARGE[::2], "", id="first half", marks=pytest.mark.slow),
    pytest.param(LARGE[1::2], "", id="second half", marks=pytest.mark.slow),
])  # fmt: skip
def test_kernels_compute_what_the_readable_code_says(files: list[Path], which: str) -> None:
    """Else a GPU gives other results than a CPU. In a few processes, which may run at once."""
    assert files
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "interpreted", "-k", which, *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
