"""What the tests of the page share: its models and images, files of strangers, a server, a browser."""

import io
import os
import shutil
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

from shiftvit.page.masks import load_segmenters
from shiftvit.page.sides import load_examples, load_sides

SCRIPT = ROOT / "scripts" / "app.py"
DEFAULT, ADAPTIVE = (str(ROOT / "swin" / "checkpoints" / name) for name in ("swin_micro", "a_swin_micro"))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SIDES = load_sides(DEFAULT, ADAPTIVE)
SEGMENTER = str(ROOT / "segmentation" / "checkpoints" / "upernet_a_swin_micro")
SEGMENTERS = load_segmenters(SEGMENTER, SEGMENTER)
EXAMPLES = load_examples(SIDES[0])


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def bomb(side: int) -> bytes:
    """A PNG of a few bytes that claims to unfold to side x side pixels."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(999))),
              (b"IEND", b""))  # fmt: skip
    parts = (struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
             for kind, data in chunks)  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@contextmanager
def serving(directory: Path, *flags: str) -> Iterator[str]:
    """The page as people start it, on a free port; without flags, the embedded models of digits come first."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'shift-equivariant-vits[app]'")
    pytest.importorskip("playwright", reason="the page is tested with playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("the page is tested in Chromium, and none is on the path: apt-get install chromium")
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GRADIO_TEMP_DIR": str(directory)}
    flags = flags or ("--default", DEFAULT, "--adaptive", ADAPTIVE)
    command = [sys.executable, str(SCRIPT), "--port", str(port), *flags]
    with listening(subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE,
                                    stderr=subprocess.STDOUT)):  # fmt: skip
        yield f"http://127.0.0.1:{port}/"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def listening(process: "subprocess.Popen[str]") -> Iterator[None]:
    """From when a server has said its address; then it ends."""
    try:
        lines = []
        for line in process.stdout or ():  # ends where the process does
            lines.append(line)
            if "http://" in line:
                break
        else:
            pytest.fail(f"the server did not start: {''.join(lines)}")
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)


def post(address: str, content: bytes, kind: str = "application/json") -> tuple[int, str]:
    request = urllib.request.Request(address, content, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def announce(port: int, length: int) -> str:
    """What a page answers to an upload of so many bytes, before a byte of it is sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"POST /gradio_api/upload HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n"
                           b"Content-Type: multipart/form-data; boundary=x\r\n\r\n" % length)  # fmt: skip
        return connection.recv(4096).decode()


@contextmanager
def browsing(address: str, directory: Path, **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """The loaded page, and what it did that it should not: errors, requests to others. A failure leaves a picture, in
    $SCREENSHOT_DIR if set. ``options`` are those of a browser's page."""
    from playwright.sync_api import sync_playwright

    directory = Path(os.environ.get("SCREENSHOT_DIR", directory))
    flags = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
               "--disable-component-update", "--disable-sync"]  # fmt: skip
    root = ["--no-sandbox"] if os.geteuid() == 0 else []  # as root, Chromium does not start otherwise
    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags + root)
        page = browser.new_page(**{"viewport": {"width": 1360, "height": 900}, **options})
        page.set_default_timeout(60_000)  # a busy machine takes its time
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.append(request.url) if not is_local(request.url, address) else None)
        try:
            page.goto(address)
            page.wait_for_selector("body[data-keys=ready] .card >> nth=1")
            yield page, wrong
        except BaseException:
            directory.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=directory / "page.png", full_page=True)
            print(f"the page when it failed: {directory / 'page.png'}")
            raise
        finally:
            browser.close()


def is_local(url: str, address: str) -> bool:
    return url.startswith((address, "data:", "blob:"))


def cards(page: Any, shift: tuple[int, int], kind: str = "circular") -> list[str]:
    """The text of both cards, once they show ``shift``."""
    page.wait_for_selector(f'#digits-move-panels .cards[data-shift="{shift[0]},{shift[1]},{kind}"]')
    return page.locator("#digits-move-panels .card").all_inner_texts()


def labels(page: Any) -> list[str]:
    return [card.get_attribute("data-label") for card in page.locator("#digits-move-panels .card").all()]
