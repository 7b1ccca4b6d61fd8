"""What strangers may ask of the page."""

import io
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from app_helpers import EXAMPLES, SEGMENTERS, SIDES, announce, free_port, post
from PIL import Image

from common.publishing.quotas import Quotas
from shiftvit.page import build
from shiftvit.page.controls import build_strip
from shiftvit.page.sides import fit, read_upload


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, threading.Event, int]]:
    """The page on a free port, what its drawing waits for, and the number of the function that draws."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'shift-equivariant-vits[app]'")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    page, go_on, draw = build.build_page({"digits": SIDES}, SEGMENTERS), threading.Event(), build.draw
    monkeypatch.setattr(build, "draw", lambda *given: (go_on.wait(60), draw(*given))[1])
    port = free_port()
    build.serve(page, "127.0.0.1", port)
    try:
        events = [event for event in page.config["dependencies"] if event["backend_fn"]]
        redraw = next(event["id"] for event in events if event["trigger_mode"] == "always_last")
        yield f"http://127.0.0.1:{port}/gradio_api", go_on, redraw
    finally:
        go_on.set()
        page.close(verbose=False)


def test_the_queue_has_an_end(busy: tuple[str, threading.Event, int]) -> None:
    """Else one visitor with a loop keeps all others from the page: 300 jobs waited, and nobody was refused."""
    address, go_on, redraw = busy
    job = json.dumps({"data": [None, 1, 2, "circular"], "fn_index": redraw, "session_hash": "someone"}).encode()
    with ThreadPoolExecutor(20) as pool:  # at once: none may slip in before others are counted
        answers = list(pool.map(lambda _: post(f"{address}/queue/join", job), range(40)))
    codes = Counter(code for code, _ in answers)
    assert set(codes) == {200, 429}, answers
    assert codes[200] <= build.JOBS_PER_CLIENT
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
    assert announce(int(busy[0].split("/")[2].split(":")[1]), 2**30).startswith("HTTP/1.1 413")


@pytest.mark.parametrize("index", [10, -1, 10**9, 1.5, "0", None, [0], {"a": 1}])
def test_only_what_is_offered_can_be_chosen(index: Any) -> None:
    """Else a request that no browser sends ends in a traceback, or in another image than the one named."""
    gr = pytest.importorskip("gradio", reason="the page needs gradio: pip install 'shift-equivariant-vits[app]'")
    with gr.Blocks():
        _, chosen = build_strip("any", EXAMPLES)
    assert chosen(SimpleNamespace(index=9)) == 9
    with pytest.raises(gr.Error, match="There are 10 images here: choose one of them"):
        chosen(SimpleNamespace(index=index))


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
def test_a_small_file_takes_little_memory() -> None:
    """Else 11 KB from a stranger take the server to 2 GB."""

    def flat(side: int, mode: str) -> bytes:
        buffer = io.BytesIO()
        Image.new(mode, (side, side)).save(buffer, "PNG")
        return buffer.getvalue()

    def refused() -> None:
        with pytest.raises(ValueError, match="9400 x 9400 pixels, more than 25,000,000"):
            read_upload(small)

    small, fine = flat(9_400, "1"), flat(4_900, "LA")
    assert len(small) < 20_000
    assert taken(refused) < 16  # nothing is decoded
    assert taken(lambda: fit(read_upload(fine), SIDES[0].preprocess)) < 600
