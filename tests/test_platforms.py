"""Systems, terminals and Pythons other than those we work on, as far as they can be imitated here."""

import io
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch.overrides import TorchFunctionMode

import shiftvit
from common import create_model
from common.data.workers import outlive_sigterm
from common.evaluation.metrics import circular_pixel_agreement, standard_pixel_agreement, worst_pixel_agreement
from common.kernels.ahead import Launch, compile_all
from common.seeding import hashed_uniform
from common.shifts import random_shifts


def run_apart(script: str, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, check=False,
                          encoding="utf-8", env=os.environ | {"PYTHONPATH": str(ROOT)} | variables)  # fmt: skip


def test_what_a_terminal_cannot_write_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe of Windows takes the letters of one alphabet: a run ended at the name of its data."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252"))
    shiftvit.run(lambda: print("datos/año/猫", flush=True))
    assert written.getvalue().split() == [b"datos/a\xf1o/\\u732b"]


WINDOWS = """
import os, sys, torch, accelerate
sys.modules["fcntl"] = None
for name in ("register_at_fork", "fork", "pread", "pwrite", "O_CLOEXEC"):
    delattr(os, name)
from pathlib import Path
from common.training.directory import acquire, release
import swin.recipes, common.training.engine
output = Path(sys.argv[1])
release(acquire(output))
release(acquire(output))
print((output / ".lock").read_text())
"""


def test_training_begins_without_locks_of_unix(tmp_path: Path) -> None:
    """On Windows nothing that trains could be imported."""
    done = run_apart(WINDOWS, str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    said = f"{tmp_path} cannot be locked (Windows has no such locks): see to it that no other run writes there"
    assert done.stdout.count(said) == 2
    assert "\nprocess " in done.stdout


WITHOUT_TRITON = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, *others):
        return None if name.split(".")[0] == "triton" else PathFinder.find_spec(name, *others)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
import torch
import common, common.publishing.export
model = common.from_pretrained("a_swin_micro")
x = torch.randn(2, 3, 32, 32)
assert torch.equal(model(x), model(x.roll((3, 9), (2, 3))))
assert "triton" not in sys.modules
"""


def test_without_triton_nothing_is_said_of_it() -> None:
    """Torch wrote twenty lines on every import, on macOS, Windows and with its wheel for CPUs."""
    done = run_apart(WITHOUT_TRITON)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "find_triton_kernels" not in done.stderr


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_ends_when_its_parent_says_so(method: str) -> None:
    """And by no other's SIGTERM. Python 3.14 starts workers by a server: none of them ended, nor did the run."""
    context = multiprocessing.get_context(method)
    begun = context.Event()
    worker = context.Process(target=wait_like_a_worker, args=(begun,))
    worker.start()
    try:
        assert begun.wait(60)
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
        worker.join(0.3)
        assert worker.is_alive()
        worker.terminate()
        worker.join(10)
        assert worker.exitcode == 0
    finally:
        worker.kill()
        worker.join()


def wait_like_a_worker(begun: Event) -> None:
    outlive_sigterm(0)
    begun.set()
    time.sleep(60)


CARD = """
import sys, common.models.hub as hub
from common import from_pretrained
from pathlib import Path
def upload(directory, *_, **__):
    sys.stdout.buffer.write((Path(directory) / "README.md").read_bytes())
hub.upload_directory = upload
from_pretrained("a_swin_micro").push_to_hub("me/model", files={"README.md": "91.4 \\u00b1 0.2"})
"""

TABLES = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def test_cards_and_tables_are_the_same_wherever_they_are_written() -> None:
    """Git and the Hub read UTF-8; Windows and old locales write something else, or nothing."""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run_apart(CARD, **locale)
    assert done.stdout == "91.4 ± 0.2", done.stderr[-2000:]
    done = run_apart(TABLES, str(ROOT / "scripts" / "results.py"), "--check", **locale)
    assert done.returncode == 0, done.stderr[-2000:]


def test_training_runs_in_any_thread(tmp_path: Path, train_digits: Callable[..., dict[str, Any]]) -> None:
    """As tuners start it: Python lets the main thread alone say what signals do."""
    with ThreadPoolExecutor(1) as pool:
        assert "top1" in pool.submit(train_digits, tmp_path, "--steps", "1").result()


def test_kernels_are_not_compiled_ahead_without_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has Triton of its own: ``warm_up`` ended there in an AttributeError."""
    for name in ("fork", "sched_getaffinity"):
        monkeypatch.delattr(os, name)
    failed: list[Launch] = []
    compile_all([Launch("no module", "no kernel", (), ())], 90, report=lambda launch, error: failed.append(launch))
    assert not failed


class Apple(TorchFunctionMode):
    """The device of Apple's computers: it refuses float64. Tensors are on the CPU, and say that they are on that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: "cpu" if str(value) == "mps" else value for name, value in (kwargs or {}).items()}
        result = func(*(torch.device("cpu") if str(arg) == "mps" else arg for arg in args), **kwargs)
        if isinstance(result, torch.device):
            return torch.device("mps")
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError("the MPS framework doesn't support float64")
        return result


def test_random_numbers_are_drawn_on_apples_devices() -> None:
    """Accelerate takes them where they are: training ended at its first batch, evaluation at its first shift."""
    index = torch.arange(1000)
    expected, steps = hashed_uniform(index, 3, 7), random_shifts(index, (-8, 0), (8, 31), 7)
    with Apple():
        found, there = hashed_uniform(index, 3, 7), random_shifts(index, (-8, 0), (8, 31), 7)
    assert found.max() < 1
    assert (found - expected).abs().max() < 2**-23
    assert torch.equal(steps, there)


@pytest.mark.parametrize("agreement", [
    partial(circular_pixel_agreement, max_shift=None, seed=0), partial(standard_pixel_agreement, max_shift=3, seed=0),
])  # fmt: skip
def test_masks_are_compared_on_apples_devices(agreement: Callable[..., torch.Tensor]) -> None:
    images, index = torch.randn(4, 3, 16, 16), torch.arange(4)

    def model(x: torch.Tensor) -> torch.Tensor:
        return x * (torch.arange(16) - 8)  # where a pixel lies counts

    expected = agreement(model, images, index)
    with Apple():
        found = agreement(model, images, index)
    assert 0.1 < expected.mean() < 0.9
    assert (found - expected).abs().max() < 1e-6
    with Apple():
        assert (worst_pixel_agreement(model, images, 2) <= 1).all()


class DefaultDevice(TorchFunctionMode):
    """As where Apple's is the default: whoever wants float64 has to ask for the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") == torch.float64 and kwargs.get("device") is None:
            raise TypeError("the MPS framework doesn't support float64")
        return func(*args, **kwargs)


def test_models_are_built_on_apples_devices() -> None:
    with DefaultDevice():
        model = create_model("a_swin_micro")
    expected = dict(create_model("a_swin_micro").named_buffers())
    assert all(torch.equal(buffer, expected[name]) for name, buffer in model.named_buffers())
    with torch.device("meta"):
        assert all(buffer.is_meta for buffer in create_model("a_swin_micro").buffers())
