"""Files of a person's own that have the names of our packages: an error names the path that hides ours."""

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from conftest import ROOT

import shiftvit


@pytest.mark.parametrize(("file", "command"), [
    ("common/__init__.py", ["-c", "import swin"]),
    ("common.py", [str(ROOT / "swin" / "train.py"), "--help"]),
    pytest.param("cvt.py", ["-c", "import common; common.create_model('swin_micro')"], marks=pytest.mark.slow),
    pytest.param("segmentation/__init__.py", ["-c", "import common; common.list_models()"], marks=pytest.mark.slow),
    pytest.param("segmentation/__init__.py", [str(ROOT / "scripts" / "predict.py"), "--help"], marks=pytest.mark.slow),
    ("segmentation.py", ["-m", "shiftvit", "app", "--help"]),
    ("segmentation.py", [str(ROOT / "segmentation" / "train.py"), "--help"]),
    ("swin.py", [str(ROOT / "swin" / "train.py"), "--help"]),
    ("shiftvit.py", [str(ROOT / "swin" / "train.py"), "--help"]),
    pytest.param("segmentation.py", ["-c", "import common.transformers_models"], marks=pytest.mark.slow),
])  # fmt: skip
def test_what_hides_ours_is_named(file: str, command: list[str], tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode
    assert f"ImportError: {path} hides the package" in done.stderr, done.stderr[-1000:]


def test_a_folder_without_init_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prefers it to a package that an editable install finds; the error asked to install again."""
    found = ModuleSpec("common", None, is_package=True)
    found.submodule_search_locations = ["/home/me/common"]
    monkeypatch.setattr(shiftvit, "find_spec", lambda name: found)
    with pytest.raises(ImportError, match="^/home/me/common hides the package 'common' of shift-equivariant-vits"):
        shiftvit.check_ours("common")
    monkeypatch.setattr(shiftvit, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="^the package 'common' is missing"):
        shiftvit.check_ours("common")


@pytest.mark.slow
def test_a_package_of_that_name_may_be_where_ours_is_not_used(tmp_path: Path) -> None:
    """Else people with a ``segmentation`` of their own cannot use our classifiers from a tool beside our packages, as
    ``python -m pytest`` is in site-packages."""
    (tmp_path / "segmentation.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    code = f"import sys; sys.argv[0] = {str(ROOT / 'tool' / '__main__.py')!r}; import swin; print(swin.Swin.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.stdout == "Swin\n", done.stderr[-1000:]
