"""Compile kernels before they are needed, side by side: where they are first launched, Triton compiles one after the
other."""

import importlib
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor
from tqdm.auto import tqdm

from . import base

__all__ = ["Launch", "compile_all", "compile_for", "recorded"]

PATIENCE = 300.0  # seconds


class Launch(NamedTuple):
    """What Triton compiles a kernel for: tensors by their types, other arguments, and constants."""

    module: str
    kernel: str
    args: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> "Launch":
        known = tuple(arg.dtype if isinstance(arg, Tensor) else _alike(arg) for arg in args)
        return cls(kernel.fn.__module__, kernel.__name__, known, tuple(constants.items()))


def _alike(arg: Any) -> Any:
    """A number for which Triton compiles the same as for this one: it looks at 1, multiples of 16 and the size."""
    whole = isinstance(arg, int) and not isinstance(arg, bool) and arg not in (0, 1) and abs(arg) < 2**31
    return (16 if arg % 16 == 0 else 3) if whole else arg


@contextmanager
def recorded() -> Iterator[dict[Launch, int]]:
    """What is launched in this context, and how often; nothing runs. For stand-ins of tensors, which have no data."""
    found: dict[Launch, int] = {}

    def record(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        launch = Launch.of(kernel, args, constants)
        found[launch] = found.get(launch, 0) + 1

    before, base.RECORD = base.RECORD, record
    try:
        yield found
    finally:
        base.RECORD = before


def compile_for(launch: Launch, capability: int) -> int:
    """Compile a kernel for a card of this capability, here or not, into Triton's cache: bytes of shared memory that a
    program takes. Triton itself sees to what is cached, for a driver that only knows the card."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    here = {"device": f"sm_{capability}", "stream": 0, "target": GPUTarget("cuda", capability, 32)}
    known = {f"get_current_{what}": lambda *_, value=value: value for what, value in here.items()}
    before, driver._active = driver._active, SimpleNamespace(**known)
    try:
        kernel = getattr(importlib.import_module(launch.module), launch.kernel)
        return kernel.warmup(*launch.args, grid=(1,), **dict(launch.constants)).metadata.shared
    finally:
        driver._active = before


def compile_all(launches: Iterable[Launch], capability: int, workers: int | None = None,
                report: Callable[[Launch, BaseException], None] = lambda launch, error: None) -> None:  # fmt: skip
    """Compile all these, as many at a time as there are processors for this process. What fails is left to the launch
    itself, which says so. A progress bar comes after five seconds."""
    if not hasattr(os, "fork"):  # on Windows, where Triton may be: kernels are compiled as they are launched
        return
    every = list(launches)
    mine = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # other processes compile, too
    workers = min(workers or max(mine, 1), len(every))
    if workers < 1 or multiprocessing.current_process().daemon:  # which may not start any
        return
    context = multiprocessing.get_context("fork")  # processes that compile use no GPU
    with warnings.catch_warnings(), ProcessPoolExecutor(workers, mp_context=context) as pool:
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        jobs = {pool.submit(compile_for, launch, capability): launch for launch in every}
        try:
            done = as_completed(jobs, timeout=PATIENCE)
            for job in tqdm(done, desc="compile kernels", total=len(jobs), delay=5.0, leave=False):
                if (error := job.exception()) is not None:
                    report(jobs[job], error)
        except TimeoutError:  # a process that was forked while another thread held a lock may wait for ever
            for process in list(pool._processes.values()):
                process.kill()
