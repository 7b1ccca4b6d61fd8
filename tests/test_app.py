"""The page: what it shows is what the models do, and a person with a browser and no network can move the image."""

import io
import json
import os
import re
import runpy
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from common import from_pretrained
from common.data.preprocess import Preprocess
from common.publishing.quotas import Quotas
from common.shifts import roll
from swin import Swin

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "app.py"
APP = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
DEFAULT, ADAPTIVE = (str(ROOT / "swin" / "checkpoints" / name) for name in ("swin_micro", "a_swin_micro"))
SHIFTS = [(1, 0), (0, 1), (2, 3), (-3, 2), (4, 4), (-12, 2), (8, -8), (15, 15), (-16, -16), (31, -33)]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def sides() -> Any:
    return APP.load_sides(DEFAULT, ADAPTIVE)


@pytest.fixture(scope="module")
def examples(sides: Any) -> list[Tensor]:
    return APP.load_examples(sides[0].preprocess)


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


def test_the_adaptive_card_shows_no_change_and_the_default_card_does(sides: Any, examples: list[Tensor]) -> None:
    """Else the page would not show what the project is about."""
    changed = 0
    for i, (dx, dy) in enumerate(SHIFTS):
        default, adaptive = (APP.examine(side, examples[i], dx, dy) for side in sides)
        assert adaptive.identical
        assert torch.equal(adaptive.still, adaptive.moved)
        assert all(not error.any() for error in adaptive.errors)
        assert not default.identical
        assert all(error.max() > 0.05 for error in default.errors)
        assert [error.shape for error in default.errors] == [(32, 32)] * 2
        changed += int(default.still.argmax() != default.moved.argmax())
    assert changed >= 3
    for side in sides:  # nothing moved: nothing may seem to change
        outcome = APP.examine(side, examples[0], 0, 0)
        assert outcome.identical
        assert not any(error.any() for error in outcome.errors)


def test_errors_compare_a_token_with_itself(sides: Any, examples: list[Tensor]) -> None:
    """Without the canonical roll, grids really move: a map aligned by other than the reported offsets is bright."""
    model = from_pretrained(ADAPTIVE, canonical=False)
    side = APP.Side("adaptive", model, sides[1].preprocess)
    for i, (dx, dy) in enumerate(SHIFTS):
        outcome = APP.examine(side, examples[i], dx, dy)
        assert max(float(error.max()) for error in outcome.errors) < 1e-4, (dx, dy)


@pytest.mark.parametrize("origin", [(0, 0), (1, 2)])
def test_errors_are_drawn_where_the_token_is_on_the_moved_image(origin: tuple[int, int]) -> None:
    """Else people would look for the cause in the wrong place: the grid of this model doubles its token (2, 3)."""

    class Doubling:
        feature_info = ({"reduction": 4},)

        def forward_intermediates(self, x: Tensor, return_offsets: bool) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
            offset = torch.tensor([origin])
            tokens = F.avg_pool2d(roll(x, offset), 4)
            tokens[:, :, 2, 3] *= 2
            return tokens, [(tokens, offset)]

        def forward_head(self, x: Tensor) -> Tensor:
            return x.mean((2, 3))

    side = APP.Side("stub", Doubling(), Preprocess(size=(32, 32), mean=(0, 0, 0), std=(1, 1, 1)))
    (error,) = APP.examine(side, torch.full((1, 3, 32, 32), 255, dtype=torch.uint8), 4, 0).errors
    expected = torch.zeros(32, 32, dtype=torch.bool)
    top, left = 8 + origin[0], 12 + origin[1]  # the token that is doubled now, and beside it the one that was
    expected[top : top + 4, left : left + 8] = True
    assert torch.equal(error > 0, expected)


def test_cards_say_what_was_found(sides: Any, examples: list[Tensor]) -> None:
    """Else a reader is told the wrong label, or the wrong verdict on the bits."""
    picture, cards = APP.draw(sides, examples[0], -12, 2)
    assert picture != APP.draw(sides, examples[0], 0, 0)[0]
    found = re.findall(r'data-model="(\w+)" data-label="(\d+)".*?label (kept|changed).*?bit-identical: (yes|no)', cards)
    outcomes = [APP.examine(side, examples[0], -12, 2) for side in sides]
    default, adaptive = (str(int(outcome.moved.argmax())) for outcome in outcomes)
    assert found == [("default", default, "changed", "no"), ("adaptive", adaptive, "kept", "yes")]
    assert re.findall(r"largest ([\d.]+)", cards)[2:] == ["0", "0"]
    assert f"<span>{100 * float(outcomes[0].moved.max()):.1f}</span>" in cards


def test_many_classes_give_few_bars() -> None:
    """Else a model of ImageNet's classes gets a page of a thousand bars."""
    probabilities = torch.rand(1000).softmax(0)
    card = APP.draw_card("default", APP.Outcome(probabilities, probabilities.roll(1), [torch.zeros(8, 8)], False))
    assert 5 <= card.count("<i style") <= APP.BARS
    assert card.count('class="bar top"') == 1


def test_uploads_are_fitted_or_refused(sides: Any, examples: list[Tensor]) -> None:
    """Else a person's own image is changed on its way, or a hostile file fills the server's memory."""
    preprocess = sides[0].preprocess
    pixels = examples[3][0].permute(1, 2, 0).numpy()
    assert torch.equal(APP.read_upload(png(pixels), preprocess), examples[3])
    assert APP.read_upload(png(np.zeros((50, 90, 3), np.uint8)), preprocess).shape == (1, 3, 32, 32)
    for content, reason in (
        (bomb(6_000), "6000 x 6000 pixels, more than 25,000,000"),
        (bomb(60_000), "exceeds"),
        (b"<b>", "unknown format"),
        (png(pixels)[:60], "This file cannot be shown"),
        (b"", "unknown format"),
    ):
        with pytest.raises(ValueError, match=reason):
            APP.read_upload(content, preprocess)


def test_models_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    """Else the page fails later, in a place that does not say why."""
    model = Swin.from_pretrained(DEFAULT)
    model.reset_classifier(7)
    model.save_pretrained(tmp_path)
    shutil.copy(Path(DEFAULT) / "preprocessor_config.json", tmp_path)
    with pytest.raises(ValueError, match=r"\(\(32, 32\), 7\), the adaptive one \(\(32, 32\), 10\): give two models"):
        APP.load_sides(str(tmp_path), ADAPTIVE)
    default, adaptive = APP.load_sides(DEFAULT, DEFAULT)  # one set of weights serves both
    assert (default.model.adaptive, adaptive.model.adaptive) == (False, True)


def test_without_gradio_the_script_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else people see a traceback instead of the command that helps."""
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(sys, "argv", ["app.py"])
    monkeypatch.setattr("os.environ", dict(os.environ))  # the script sets some
    with pytest.raises(SystemExit, match=r"pip install 'shift-equivariant-vits\[app\]'"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_no_image_is_dropped_while_another_is_drawn(sides: Any) -> None:
    """Else, where drawing takes long, the page goes on showing an image that is not the last one chosen."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'shift-equivariant-vits[app]'")
    events = [event for event in APP.build_page(sides).config["dependencies"] if event["backend_fn"]]
    assert len(events) == 5  # a slider moves; an example is chosen, then drawn; a file is uploaded, then drawn
    assert {event["trigger_mode"] for event in events} == {"always_last", "multiple"}  # "once" is the one that drops


# what strangers may ask


@pytest.fixture
def busy(sides: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, threading.Event, int]]:
    """The page on a free port, what its drawing waits for, and the number of the function that draws."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'shift-equivariant-vits[app]'")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    page, go_on, draw = APP.build_page(sides), threading.Event(), APP.draw
    monkeypatch.setitem(APP.build_page.__globals__, "draw", lambda *given: (go_on.wait(60), draw(*given))[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    APP.serve(page, "127.0.0.1", port)
    try:
        events = [event for event in page.config["dependencies"] if event["backend_fn"]]
        redraw = next(event["id"] for event in events if event["trigger_mode"] == "always_last")
        yield f"http://127.0.0.1:{port}/gradio_api", go_on, redraw
    finally:
        go_on.set()
        page.close(verbose=False)


def post(address: str, content: bytes, kind: str = "application/json") -> tuple[int, str]:
    request = urllib.request.Request(address, content, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_queue_has_an_end(busy: tuple[str, threading.Event, int]) -> None:
    """Else one visitor with a loop keeps all others from the page: 300 jobs waited, and nobody was refused."""
    address, go_on, redraw = busy
    job = json.dumps({"data": [None, 1, 2], "fn_index": redraw, "session_hash": "someone"}).encode()
    with ThreadPoolExecutor(20) as pool:  # at once: none may slip in before others are counted
        answers = list(pool.map(lambda _: post(f"{address}/queue/join", job), range(40)))
    codes = Counter(code for code, _ in answers)
    assert set(codes) == {200, 429}, answers
    assert codes[200] <= APP.JOBS_PER_CLIENT
    assert "of your requests are still waiting" in next(text for code, text in answers if code == 429)
    go_on.set()
    deadline = time.monotonic() + 60
    while (answer := post(f"{address}/queue/join", job))[0] == 429 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert answer[0] == 200  # and it is open again


def test_large_uploads_are_refused_unread(busy: tuple[str, threading.Event, int]) -> None:
    """Else a stranger fills the disk."""
    kind, head = "multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"'
    form = head + b"\r\n\r\n%b\r\n--x--\r\n"
    assert post(f"{busy[0]}/upload", form % bytes(100), kind)[0] == 200
    host, port = busy[0].split("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"POST /gradio_api/upload HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\n"
                           f"Content-Length: {2**30}\r\n\r\n".encode())  # fmt: skip
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")  # before a byte of it is sent


def test_all_clients_together_have_an_end() -> None:
    """Else many machines do what one may not. Requests without a length are refused, too."""
    waiting = Counter({"a": 3, "b": 4})
    quotas = Quotas(None, jobs=lambda: waiting, max_bytes=100, per_client=4, in_all=8)  # type: ignore[arg-type]
    assert quotas.refusal("a", b"100") is None
    assert quotas.refusal("c", b"0") is None
    assert [(quotas.refusal("b", b"1") or (0,))[0], (quotas.refusal("a", b"101") or (0,))[0]] == [429, 413]
    assert (quotas.refusal("a", None) or (0,))[0] == 411
    waiting["c"] = 1
    assert (quotas.refusal("d", b"1") or (0, ""))[1].startswith("8 requests are waiting")


def taken(work: Callable[[], Any]) -> int:
    """MiB by which ``work`` raises the most memory that this process has had."""

    def most(key: str) -> int:
        return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1024  # type: ignore[index]

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = most("VmRSS")
    work()
    return most("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured through /proc, as on Linux")
def test_a_small_file_takes_little_memory(sides: Any) -> None:
    """Else 11 KB from a stranger take the server to 2 GB."""

    def flat(side: int, mode: str) -> bytes:
        buffer = io.BytesIO()
        Image.new(mode, (side, side)).save(buffer, "PNG")
        return buffer.getvalue()

    def refused() -> None:
        with pytest.raises(ValueError, match="9400 x 9400 pixels, more than 25,000,000"):
            APP.read_upload(small, sides[0].preprocess)

    small, fine = flat(9_400, "1"), flat(4_900, "LA")
    assert len(small) < 20_000
    assert taken(refused) < 16  # nothing is decoded
    assert taken(lambda: APP.read_upload(fine, sides[0].preprocess)) < 600


# in a browser


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page as people start it, on a free port."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'shift-equivariant-vits[app]'")
    pytest.importorskip("playwright", reason="the page is tested with playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("the page is tested in Chromium, and none is on the path: apt-get install chromium")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                   "GRADIO_TEMP_DIR": str(tmp_path_factory.mktemp("gradio"))}  # fmt: skip
    process = subprocess.Popen([sys.executable, str(SCRIPT), "--port", port], env=environment, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    try:
        lines = []
        for line in process.stdout or ():  # ends where the process does
            lines.append(line)
            if "http://" in line:
                break
        else:
            pytest.fail(f"the server did not start: {''.join(lines)}")
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait(timeout=30)


@contextmanager
def browsing(address: str, directory: Path) -> Iterator[tuple[Any, list[str]]]:
    """The loaded page, and what it did that it should not: errors, requests to others. A failure leaves a picture, in
    $SCREENSHOT_DIR if set."""
    from playwright.sync_api import sync_playwright

    directory = Path(os.environ.get("SCREENSHOT_DIR", directory))
    options = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
               "--disable-component-update", "--disable-sync"]  # fmt: skip
    root = ["--no-sandbox"] if os.geteuid() == 0 else []  # as root, Chromium does not start otherwise
    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options + root)
        page = browser.new_page(viewport={"width": 1360, "height": 900})
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


def cards(page: Any, shift: tuple[int, int]) -> list[str]:
    """The text of both cards, once they show ``shift``."""
    page.wait_for_selector(f'.cards[data-shift="{shift[0]},{shift[1]}"]')
    return page.locator(".card").all_inner_texts()


def labels(page: Any) -> list[str]:
    return [card.get_attribute("data-label") for card in page.locator(".card").all()]


@pytest.mark.slow
def test_a_person_can_use_the_page(address: str, tmp_path: Path, sides: Any, examples: list[Tensor]) -> None:
    """Else there is no page. One test, for a server takes long to start."""
    with browsing(address, tmp_path) as (page, wrong):
        move_by_slider_and_keys(page, sides, examples)
        choose_and_upload(page, examples)
        assert wrong == []


def move_by_slider_and_keys(page: Any, sides: Any, examples: list[Tensor]) -> None:
    """Both models' cards follow: the default one's changes, the adaptive one's does not."""
    assert labels(page) == ["0", "0"]
    start = cards(page, (0, 0))
    assert all("bit-identical: yes" in text for text in start)
    still = page.locator("#view img").get_attribute("src")

    slider = page.locator("#dx input[type=range]")
    box = slider.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 8, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    dx = int(slider.input_value())
    assert -16 < dx < -8
    default, adaptive = cards(page, (dx, 0))
    assert "bit-identical: no" in default
    assert default != start[0]
    assert adaptive == start[1]
    assert page.locator("#view img").get_attribute("src") != still

    page.keyboard.press("ArrowDown")  # the dx slider has the focus and must not take it for its own
    page.keyboard.press("ArrowDown")
    assert cards(page, (dx, 2))[1] == start[1]
    for _ in range(dx + 12, 0):
        page.keyboard.press("ArrowRight")
    for _ in range(dx + 12):
        page.keyboard.press("ArrowLeft")
    default, adaptive = cards(page, (-12, 2))
    expected = [str(int(APP.examine(side, examples[0], -12, 2).moved.argmax())) for side in sides]
    assert labels(page) == expected
    assert expected[0] != expected[1] == "0"
    assert "label changed" in default
    assert adaptive == start[1]

    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    assert cards(page, (15, 2))[1] == start[1]  # out on the left, in on the right
    page.locator("#dx input[type=number]").fill("")  # a box being typed in is no error
    cards(page, (0, 2))
    page.locator("#reset").click()
    assert cards(page, (0, 0)) == start


def choose_and_upload(page: Any, examples: list[Tensor]) -> None:
    """Other images can be seen, and a bad file neither kills the page nor goes unanswered."""

    def shows(image: Tensor) -> None:
        source = re.search(r'src="(.*)"', APP.draw_pixels(image, "")).group(1)  # type: ignore[union-attr]
        page.wait_for_selector(f'#view img[src="{source}"]')

    page.locator("#examples button").nth(7).click()
    shows(examples[7])
    page.keyboard.press("ArrowUp")
    cards(page, (0, -1))
    shows(examples[7].roll(-1, 2))
    assert labels(page)[1] == "7"

    for i, content in enumerate((bomb(12_000), b"<script>alert(1)</script>")):
        page.locator("input[type=file]").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": content})
        page.get_by_text("This file cannot be shown").nth(i).wait_for()
    shows(examples[7].roll(-1, 2))
    own = png(examples[3][0].permute(1, 2, 0).numpy())
    page.locator("input[type=file]").set_input_files({"name": "own.png", "mimeType": "image/png", "buffer": own})
    shows(examples[3].roll(-1, 2))
