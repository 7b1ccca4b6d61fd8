"""The page as a Hugging Face Space: metadata, requirements and entry file, made from the wheel."""

import asyncio
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from app_helpers import announce, free_port, listening
from conftest import ROOT
from huggingface_hub import SpaceCard
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from test_wheel import build_wheel

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
METADATA = """Metadata-Version: 2.4
Requires-Python: >=3.11
Requires-Dist: torch>=2.11
Requires-Dist: gradio>=6.31; extra == "app"
Requires-Dist: pytest>=8; extra == "test"
"""


def make_wheel(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in ({"shiftvit/page/build.py": "", "a-1.dist-info/METADATA": METADATA} | files).items():
            wheel.writestr(name, text)
    return path


def test_a_space_has_all_that_it_needs(tmp_path: Path, call: Callable[..., None]) -> None:
    """Else the Space says "configuration error", or fails while it installs."""
    space = tmp_path / "space"
    call("scripts/space.py", str(make_wheel(tmp_path / "a.whl")), str(space), "--code_url", "https://code.test")
    check_card(space, gradio="gradio>=6.31", python=">=3.11")
    lines = (space / "requirements.txt").read_text().splitlines()
    assert lines[0].startswith("--extra-index-url https://")
    assert lines[1:] == ["torch>=2.11"]  # gradio is the Space's own, pytest is for tests
    assert "'--host', '0.0.0.0', '--code_url', 'https://code.test'" in (space / "app.py").read_text()


def check_card(space: Path, gradio: str, python: str) -> None:
    data = SpaceCard.load(space / "README.md").data
    assert data.sdk == "gradio"
    assert (space / data.app_file).is_file()
    assert Requirement(gradio).specifier.contains(data.sdk_version)
    assert re.fullmatch(r"\d+\.\d+\.\d+", data.sdk_version)
    assert SpecifierSet(python).contains(data.python_version)
    assert {data["colorFrom"], data["colorTo"]} <= COLOURS
    assert len(data["short_description"]) <= 60
    assert data.license == PROJECT["license"].lower()


def test_what_is_no_wheel_of_ours_is_refused(
    tmp_path: Path, call: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a Space is made that cannot start, or somebody's folder is overwritten."""
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as wheel:
        wheel.writestr("a-1.dist-info/METADATA", METADATA)
    (tmp_path / "text.whl").write_text("no zip")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for wheel_name, folder, reason in (
        ("other.whl", "new", "is no wheel of ours"),
        ("text.whl", "new", "is no wheel of ours"),
        ("none.whl", "new", "is no wheel of ours"),
        ("other.whl", "full", "is not empty"),
    ):
        with pytest.raises(AssertionError, match="ended with 2"):
            call("scripts/space.py", str(tmp_path / wheel_name), str(tmp_path / folder))
        assert reason in capsys.readouterr().err
    with pytest.raises(AssertionError, match="ended with 2"):  # the page would not start with it
        call("scripts/space.py", str(make_wheel(tmp_path / "a.whl")), str(tmp_path / "space"), "--code_url", "a.test")
    assert "begins with https://" in capsys.readouterr().err


def test_visitors_are_told_apart_behind_the_proxy() -> None:
    """Else all visitors share the quota of one, or one takes many by claiming addresses."""
    proxy = pytest.importorskip("uvicorn.middleware.proxy_headers", reason="it comes with gradio")
    seen = []

    async def page(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"][0])

    server = proxy.ProxyHeadersMiddleware(page, trusted_hosts=runpy.run_path(str(ROOT / "scripts/space.py"))["PROXIES"])
    for near in ("10.20.30.40", "203.0.113.9"):  # the Space's proxy; a stranger without one
        headers = [(b"x-forwarded-for", b"198.51.100.1, 203.0.113.7")]  # as claimed, then as the proxy saw it
        asyncio.run(server({"type": "http", "client": (near, 1), "headers": headers}, None, None))
    assert seen == ["203.0.113.7", "203.0.113.9"]


@pytest.mark.slow
def test_the_space_starts_from_the_wheel(tmp_path: Path, call: Callable[..., None]) -> None:
    """Else nobody sees the page: files that the wheel lacks are missed here, away from the repository."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'shift-equivariant-vits[app]'")
    space, port = tmp_path / "space", free_port()
    call("scripts/space.py", str(build_wheel(tmp_path)), str(space))
    check_card(space, gradio=PROJECT["optional-dependencies"]["app"][0], python=PROJECT["requires-python"])
    assert (space / "requirements.txt").read_text().splitlines()[1:] == PROJECT["dependencies"]
    environment = {**os.environ, "PYTHONPATH": str(space), "OMP_NUM_THREADS": "1", "SYSTEM": "spaces",
                   "SPACE_ID": "owner/name", "GRADIO_SERVER_PORT": str(port),
                   "GRADIO_TEMP_DIR": str(tmp_path / "gradio")}  # fmt: skip
    with listening(subprocess.Popen([sys.executable, "app.py"], cwd=space, env=environment, text=True,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT)):  # fmt: skip
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/config", timeout=30) as answer:
            config = json.load(answer)
        tabs = [each["props"]["label"] for each in config["components"] if each["type"] == "tabitem"]
        assert tabs == ["move", "pan", "segmentation"]
        assert announce(port, 2**30).startswith("HTTP/1.1 413")  # strangers are held to their quotas
