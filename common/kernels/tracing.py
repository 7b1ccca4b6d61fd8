"""What the compiler asks about kernels.

We determine only once which of its arguments a kernel writes to. To find out, torch lowers the kernel to Triton's
intermediate code: for every launch in a graph, and up to four times for each. Kernels with unrolled loops take a second
every time, and a model launches the same ones block after block. What is found depends on the kernel, on the types of
its tensors and on its other arguments, but of numbers only on whether they are zero, which switches a part of a kernel
off. So it is kept by these: not once for every size. (torch is about to keep it by all arguments, see its pull request
193227.)

torch caches compiled graphs on disk, and its key has only the names of our operators. We add a hash of their source to
the key: else a cached graph could run with the kernels of another version.
"""

from collections.abc import Callable
from copy import copy
from functools import cache, wraps
from hashlib import sha256
from numbers import Number
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

__all__ = ["analyse_once", "mark_graphs"]

MARK = "shift_vits="
PACKAGE = __name__.rpartition(".")[0]
ANALYSES = "identify_accessed_tensors", "identify_mutated_tensors"  # as versions of torch have it
SIMPLE = Number, str, torch.dtype, NoneType  # compilers have numbers of their own


def mark_graphs(folder: Path = Path(__file__).parent) -> None:
    """Have torch find a graph on disk only if the kernels in ``folder`` are those that it was compiled with."""
    sources = sha256(b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))).hexdigest()[:16]
    others = [tag for tag in torch.compiler.config.cache_key_tag.split() if not tag.startswith(MARK)]
    torch.compiler.config.cache_key_tag = " ".join([*others, MARK + sources])


@cache
def analyse_once() -> None:
    """Have torch remember what it has found out about the kernels of this package."""
    from torch._higher_order_ops import triton_kernel_wrap

    for name in ANALYSES:
        if hasattr(triton_kernel_wrap, name):
            setattr(triton_kernel_wrap, name, remembered(getattr(triton_kernel_wrap, name)))


def remembered(analyse: Callable[..., Any]) -> Callable[..., Any]:
    """``analyse(kernel, arguments, ...)`` that is asked once for our kernels by the types of what they get."""
    found: dict[Any, Any] = {}

    @wraps(analyse)
    def call(kernel: Any, kwargs: dict[str, Any], *others: Any) -> Any:
        function = getattr(kernel, "fn", None)  # torch makes copies of kernels
        key = function, tuple((name, type_of(value)) for name, value in sorted(kwargs.items()))
        ours = getattr(function, "__module__", "").startswith(PACKAGE)
        if not ours or any(others) or any(kind is None for _, kind in key[1]):
            return analyse(kernel, kwargs, *others)
        if key not in found:
            found[key] = analyse(kernel, kwargs, *others)
        return copy(found[key])

    return call


def type_of(value: Any) -> Any:
    """What is asked of an argument: of a tensor, or what stands for one in a compiler, its type; of a number, whether
    it is zero; of others all. None of what is not known."""
    if isinstance(value, SIMPLE):
        number = isinstance(value, Number) and not isinstance(value, bool)
        return number, bool(value) if number else value
    if isinstance(value, Tensor):
        return Tensor, value.dtype
    dtype = getattr(value, "get_dtype", None)
    return None if dtype is None else (Tensor, dtype())
