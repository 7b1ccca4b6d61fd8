"""The one rule by which an operation runs as a kernel or as its reference."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from ..kernels import base
from ..kernels.base import product_dtype, usable

__all__ = ["op", "product_dtype", "reference"]

P = ParamSpec("P")
T = TypeVar("T")


def op(*, kernel: Callable[P, T], fits: Callable[P, bool]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Put a kernel beside a reference: ``kernel(...)`` where kernels run and ``fits(...)`` holds, else the function.

    All three take the same arguments, a tensor first. ``fits`` looks at everything that the kernel assumes. It reads
    shapes, types and modes alone, so a compiler decides once, while it traces. The reference stays at hand as
    ``operation.reference``.
    """

    def beside(plain: Callable[P, T]) -> Callable[P, T]:
        @wraps(plain)
        def operation(*args: Any, **kwargs: Any) -> T:
            run = kernel if usable(args[0]) and fits(*args, **kwargs) else plain
            return run(*args, **kwargs)

        operation.reference = plain  # type: ignore[attr-defined]
        return operation

    return beside


@contextmanager
def reference() -> Iterator[None]:
    """Run every operation as its reference: to compare with, or to look inside."""
    before, base.ENABLED = base.ENABLED, False
    try:
        yield
    finally:
        base.ENABLED = before
