"""Where Triton kernels can run, and how they are launched."""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton: the torch forms do everything
    AVAILABLE = False
else:
    AVAILABLE = True

__all__ = [
    "AVAILABLE",
    "ENABLED",
    "INTERPRETED",
    "PLAIN",
    "launch",
    "next_power_of_2",
    "operator",
    "pieces",
    "product_dtype",
    "usable",
]  # fmt: skip

Launcher = TypeVar("Launcher", bound=Callable[..., Any])

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ENABLED = True  # False: the torch forms everywhere, to compare with
PLAIN = {Tensor, nn.Parameter}  # tensors with data: nothing sharded, and no stand-in while a graph is recorded
_COMPILED: dict[tuple, tuple[Any, list]] = {}


def usable(x: Tensor) -> bool:
    """Whether kernels can run where ``x`` lies."""
    return AVAILABLE and ENABLED and (x.is_cuda or INTERPRETED)


def operator(name: str) -> Callable[[Launcher], Launcher]:
    """Make a function that launches kernels an operator, which autograd and compilers know by ``name``.

    Where neither is at work the function itself is called: an operator's way through torch takes longer than many
    kernels run.
    """

    def register(function: Launcher) -> Launcher:
        triton_op(name, mutates_args={})(function)
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
    """Run a kernel of these arguments, all but ``constants``, the first of them a tensor. Triton takes long to find out
    what it has compiled for them, so that is remembered here."""
    if INTERPRETED or not _real(args[0]):
        (kernel if INTERPRETED else wrap_triton(kernel))[grid](*args, **constants)
        return
    device = args[0].device
    if device.index != torch.cuda.current_device():  # Triton would take that one
        with torch.cuda.device(device):
            return launch(kernel, grid, *args, **constants)
    like = [(a.dtype, a.data_ptr() % 16) if isinstance(a, Tensor) else a for a in args]
    key = kernel.fn, device.index, *like, *constants.items()
    if key not in _COMPILED:
        names = [parameter.name for parameter in kernel.params[len(args) :]]
        compiled = kernel[grid](*args, **constants)
        _COMPILED[key] = compiled, [constants[name] for name in names]
        return
    compiled, others = _COMPILED[key]
    compiled[(*grid, 1, 1)[:3]](*args, *others)


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
