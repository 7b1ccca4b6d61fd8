"""The one rule by which an operation runs as a kernel or as its reference, and what happens when a kernel fails.

A kernel may fail to compile or to launch on a card that nobody has tried. Outside of graphs, its operation is then
computed by the reference, for good in this process, and a warning says so once. Graphs that are traced later have the
reference, too; graphs that are compiled already are left as they are. So on such a card a model is rehearsed before it
is traced (``rehearse``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..kernels import base, cards
from ..kernels.base import KernelError, product_dtype, report

__all__ = ["failed", "forwards", "gradients", "op", "product_dtype", "reference", "rehearse", "traced", "usable",
           "watched"]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")
Watcher = Callable[[str, Callable[..., Any] | None, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_FAILED: set[str] = set()  # operations that run as their references
_REHEARSED: set[tuple[Any, ...]] = set()  # operations by their shapes, models by their configuration: tried once each
_WATCHER: Watcher | None = None
_REHEARSING = False
FEW, MANY = 1, 16  # images of a rehearsal: kernels have tiles of their own for a few


def op(*, kernel: Callable[P, T], fits: Callable[P, bool]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Put a kernel beside a reference: ``kernel(...)`` where kernels run and ``fits(...)`` holds, else the function.

    All three take the same arguments, a tensor first. ``fits`` looks at everything that the kernel assumes. It reads
    shapes, types and modes alone, so a compiler decides once, while it traces. All three stay at hand, as
    ``operation.kernel``, ``operation.fits`` and ``operation.reference``.
    """

    def decorate(plain: Callable[P, T]) -> Callable[P, T]:
        name, first = plain.__name__.strip("_"), next(iter(signature(plain).parameters))

        @wraps(plain)
        def operation(*args: Any, **kwargs: Any) -> T:
            here = usable(args[0] if args else kwargs[first])
            if not here and _WATCHER is None:
                return plain(*args, **kwargs)
            if not (here and fits(*args, **kwargs) and _works(name)):
                watch = None if traced() or not base.ENABLED else _WATCHER
                return plain(*args, **kwargs) if watch is None else watch(name, None, plain, args, kwargs)
            if traced():
                return kernel(*args, **kwargs)
            return _attempt(name, kernel, plain, args, kwargs)

        operation.kernel, operation.fits, operation.reference = kernel, fits, plain  # type: ignore[attr-defined]
        return operation

    return decorate


def usable(x: Tensor) -> bool:
    """Whether kernels can run where ``x`` lies: only then is ``fits`` asked."""
    return base.AVAILABLE and base.ENABLED and ((x.is_cuda and _modern(x)) or base.INTERPRETED)


def _modern(x: Tensor) -> bool:
    """Whether a card runs kernels: one without bfloat16 does where nothing is multiplied in it."""
    return cards.runs(x) or (product_dtype(x) != torch.bfloat16 and cards.runs(x, bf16=False))


@torch.compiler.assume_constant_result  # what has failed stays so: graphs need not check it
def _works(name: str) -> bool:
    return name not in _FAILED


def traced() -> bool:
    """Whether a graph is recorded here, and not a rehearsal of it."""
    return torch.compiler.is_compiling() and not _rehearsing()


@torch.compiler.assume_constant_result
def _rehearsing() -> bool:
    return _REHEARSING


def forwards() -> bool:
    """Whether derivatives are taken forwards, as by ``torch.func.jvp``, which functions with a backward of their own
    cannot. A compiler traces only what takes none, and has nothing to check then."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def failed() -> set[str]:
    """Operations of which a kernel has failed in this process: they run as their references."""
    return set(_FAILED)


def _attempt(name: str, kernel: Callable[..., T], plain: Callable[..., T], args: tuple[Any, ...],
             kwargs: dict[str, Any]) -> T:  # fmt: skip
    """What the kernel gives or, if it fails, the reference, and that from now on."""
    try:
        if _WATCHER is not None:
            return _WATCHER(name, kernel, plain, args, kwargs)
        if torch.is_grad_enabled():
            _rehearse(name, kernel, args, kwargs)
        return kernel(*args, **kwargs)
    except KernelError as error:
        report(error, name)
        _FAILED.add(name)
    return plain(*args, **kwargs)


def _rehearse(name: str, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run an operation forward and backward, once for its shapes, on a card where nobody has tried it: if its backward
    fails, the reference can still take over, as in the midst of a backward pass it could not."""
    given = [arg for arg in args if isinstance(arg, Tensor)]
    if not given or cards.tuned(given[0]) or not any(arg.requires_grad for arg in given):
        return
    key = name, *((arg.shape, arg.dtype, arg.requires_grad) for arg in given)
    if key not in _REHEARSED:
        _REHEARSED.add(key)
        gradients(kernel, args, kwargs)


def rehearse(model: Any, x: Tensor) -> None:
    """Where a graph is traced for a card that nobody has tuned on: run a model like it outside of the graph first, so
    that kernels which fail there do not get into the graph, where nothing could replace them."""
    if traced() and usable(x) and not cards.tuned(x):
        _run_like(type(model), model.config, x.dtype, x.device, torch.is_grad_enabled())


@torch.compiler.assume_constant_result
def _run_like(build: Callable[..., Any], config: dict[str, Any], dtype: torch.dtype, device: torch.device,
              training: bool) -> bool:  # fmt: skip
    global _REHEARSING
    key = build, repr(config), dtype, device, training, torch.is_autocast_enabled(device.type)
    if key in _REHEARSED or base.RECORD is not None:
        return False
    _REHEARSED.add(key)
    before, _REHEARSING = _REHEARSING, True
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
            model = build(**config).to(dtype).train(training)
            for count in (MANY,) if training else (FEW, MANY):
                model(torch.zeros(count, config["in_chans"], *model.img_size, dtype=dtype))
    except torch.OutOfMemoryError:
        pass  # whether kernels run is then not known, as without a rehearsal
    finally:
        _REHEARSING = before
    return True


def gradients(function: Callable[..., Any], args: tuple[Any, ...],
              kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor | None]]:  # fmt: skip
    """Tensors that a function returns, and the gradients of a fixed combination of them by those arguments that
    need one, in a graph of their own: nothing is left behind, neither in ``.grad`` nor in a checkpoint that is being
    recorded."""
    apart = [arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, Tensor) else arg for arg in args]
    inputs = [arg for arg in apart if isinstance(arg, Tensor) and arg.requires_grad]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        result = function(*apart, **kwargs)
        every = [t for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, Tensor)]
        outputs = [t for t in every if t.requires_grad]
        if not inputs or not outputs:
            return every, []
        generator = torch.Generator(outputs[0].device).manual_seed(0)
        along = [torch.randn(t.shape, generator=generator, device=t.device).to(t.dtype) for t in outputs]
        return every, list(torch.autograd.grad(outputs, inputs, along, allow_unused=True))


@contextmanager
def watched(watcher: Watcher | None) -> Iterator[None]:
    """Outside of graphs, have every operation called by ``watcher(name, kernel, reference, args, kwargs)``, the kernel
    None where it does not fit: to compare the two."""
    global _WATCHER
    before, _WATCHER = _WATCHER, watcher
    try:
        yield
    finally:
        _WATCHER = before


@contextmanager
def reference() -> Iterator[None]:
    """Run every operation as its reference: to compare with, or to look inside."""
    before, base.ENABLED = base.ENABLED, False
    try:
        yield
    finally:
        base.ENABLED = before
