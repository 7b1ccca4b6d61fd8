"""What a compiler asks of a kernel, answered once: which of its arguments it writes to.

To find out, torch lowers the kernel to Triton's intermediate code: for every launch in a graph, and up to four times
for each. Kernels with unrolled loops take a second every time, and a model launches the same ones block after block.
What is found depends on the kernel, on the types of its tensors and on its other arguments alone, so it is kept by
these. (torch is about to do so itself, see its pull request 193227.)
"""

from collections.abc import Callable
from copy import copy
from functools import cache, wraps
from numbers import Number
from types import NoneType
from typing import Any

import torch
from torch import Tensor

__all__ = ["analyse_once"]

PACKAGE = __name__.rpartition(".")[0]
ANALYSES = "identify_accessed_tensors", "identify_mutated_tensors"  # as versions of torch have it
SIMPLE = Number, str, torch.dtype, NoneType  # compilers have numbers of their own


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
    """What is asked of an argument: of a tensor, or what stands for one in a compiler, its type; of others all. None of
    what is not known."""
    if isinstance(value, SIMPLE):
        return isinstance(value, bool), value
    if isinstance(value, Tensor):
        return Tensor, value.dtype
    dtype = getattr(value, "get_dtype", None)
    return None if dtype is None else (Tensor, dtype())
