"""Where Triton kernels can run, how they are launched, and what is known of those that fail."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.library import custom_op, infer_schema, triton_op, wrap_triton

from . import cards
from .tracing import analyse_once, mark_graphs

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton: the torch forms do everything
    AVAILABLE = False
else:
    AVAILABLE = torch.version.hip is None  # on AMD's cards nobody has shown that kernels are right

__all__ = [
    "AVAILABLE",
    "ENABLED",
    "INTERPRETED",
    "PLAIN",
    "KernelError",
    "compiled_kernels",
    "launch",
    "next_power_of_2",
    "operator",
    "pieces",
    "product_dtype",
    "report",
]  # fmt: skip

Launcher = TypeVar("Launcher", bound=Callable[..., Any])

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # products and sums fuse, as where kernels were tuned
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ENABLED = os.environ.get("SHIFT_VITS_KERNELS") != "0"  # False: the torch forms everywhere, to compare with
PLAIN = {Tensor, nn.Parameter}  # tensors with data: nothing sharded, and no stand-in while a graph is recorded
RECORD: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None  # takes the launches of stand-ins
ON_COMPILING: Callable[[], None] | None = None  # called before a kernel is compiled: others will be, too
_COMPILED: dict[tuple, tuple[Any, list]] = {}
_REPORTED: set[str] = set()
mark_graphs()


class KernelError(RuntimeError):
    """A kernel that could not be compiled or launched, by name, where that was, and why."""

    def __init__(self, kernel: str, where: str, why: BaseException) -> None:
        reason = (str(why).strip() or type(why).__name__).splitlines()[0]
        super().__init__(
            f"kernel {kernel} failed on {where}: {type(why).__name__}: {reason}. With SHIFT_VITS_KERNELS=0 in the "
            f"environment no kernel is used; scripts/doctor.py says what runs here."
        )
        self.kernel = kernel


def report(error: KernelError, operation: str) -> None:
    """Warn of a kernel that failed, once in a process; raise with SHIFT_VITS_STRICT=1 in the environment."""
    if os.environ.get("SHIFT_VITS_STRICT") == "1":
        raise error
    if error.kernel not in _REPORTED:
        _REPORTED.add(error.kernel)
        warnings.warn(f"{error} From now on {operation} runs in its torch form.", stacklevel=4)


def operator(name: str) -> Callable[[Launcher], Launcher]:
    """Make a function that launches kernels an operator, which autograd and compilers know by ``name``.

    Where neither is at work the function itself is called: an operator's way through torch takes longer than many
    kernels run.
    """

    def register(function: Launcher) -> Launcher:
        schema = infer_schema(function, mutates_args={})
        unread: Any = partial(function)  # torch would search a function's source for kernels, in vain
        unread.__globals__ = function.__globals__  # torch 2.11 reads the signature again  # type: ignore[attr-defined]
        define = triton_op if AVAILABLE else custom_op  # without Triton, torch would warn of each
        define(name, mutates_args={}, schema=schema)(unread)
        library, _, short = name.partition("::")
        known = getattr(getattr(torch.ops, library), short).default  # itself: less for a compiled graph to check

        @wraps(function)
        def call(*args: Any) -> Any:
            direct = not torch.compiler.is_compiling() and not torch.is_grad_enabled() and _real(args[0])
            return function(*args) if direct else known(*args)

        return call  # type: ignore[return-value]

    return register


def _real(x: Any) -> bool:
    """Whether this, if a tensor, is a plain one."""
    return type(x) in PLAIN or not isinstance(x, Tensor)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a kernel of these arguments, all but ``constants``, the first of them a tensor. What compilers and drivers
    raise is a ``KernelError`` then, which operations know how to meet."""
    if RECORD is not None and not _real(args[0]):
        RECORD(kernel, args, constants)
        return
    if not INTERPRETED and not _real(args[0]):
        analyse_once()
        wrap_triton(kernel)[grid](*args, **constants)
        return
    try:
        _launch(kernel, grid, *args, **constants)
    except Exception as error:
        device = args[0].device
        raise KernelError(kernel.__name__, f"{cards.card_of(device).name} ({device})", error) from error


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Triton takes long to find out what it has compiled for these arguments, so that is remembered here."""
    if INTERPRETED:
        kernel[grid](*args, **constants)
        return
    device = args[0].device
    if device.index != torch.cuda.current_device():  # Triton would take that one
        with torch.cuda.device(device):
            return _launch(kernel, grid, *args, **constants)
    like = [(a.dtype, a.data_ptr() % 16) if isinstance(a, Tensor) else a for a in args]
    key = kernel.fn, device.index, *like, *constants.items()
    if key not in _COMPILED:
        names = [parameter.name for parameter in kernel.params[len(args) :]]
        with _told_of_compiling() if ON_COMPILING is not None else nullcontext():
            compiled = kernel[grid](*args, **constants)
        _COMPILED[key] = compiled, [constants[name] for name in names]
        return
    compiled, others = _COMPILED[key]
    compiled[(*grid, 1, 1)[:3]](*args, *others)


@contextmanager
def _told_of_compiling() -> Iterator[None]:
    """Have Triton call ``ON_COMPILING`` where its cache lacks a kernel, and look again before it compiles that."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    class Telling(knobs.cache.manager_class or FileCacheManager):  # type: ignore[misc]
        def get_group(self, filename: str) -> dict[str, str] | None:
            global ON_COMPILING
            found = super().get_group(filename)
            if found is not None or ON_COMPILING is None:
                return found
            compile_others, ON_COMPILING = ON_COMPILING, None
            compile_others()
            return super().get_group(filename)

    with knobs.cache.scope():
        knobs.cache.manager_class = Telling
        yield


def compiled_kernels() -> list[tuple[str, Any]]:
    """Names of the kernels that this process has compiled outside of graphs, and what Triton says of each."""
    return [(str(getattr(key[0], "__name__", key[0])), compiled) for key, (compiled, _) in _COMPILED.items()]


def next_power_of_2(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def pieces(channels: int) -> int:
    """In how many equal parts a program takes so many channels: three where that makes powers of two, of 16 at least,
    and leaves no thread idle."""
    third = channels // 3
    return 3 if channels % 3 == 0 and next_power_of_2(third) == third >= 16 else 1


def product_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product of x would be taken in: that of autocast, which leaves float64 alone, or its own."""
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if cast else x.dtype


if AVAILABLE:

    @triton.jit
    def wrap(n, side):
        """Where n in [-side, 2 side) is on the torus: cheaper than a remainder."""
        n = tl.where(n < 0, n + side, n)
        return tl.where(n >= side, n - side, n)
