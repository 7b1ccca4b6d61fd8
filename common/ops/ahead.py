"""Kernels of a model, compiled before its first images come."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ..kernels import base, cards
from ..kernels.ahead import Launch, compile_all, recorded
from .dispatch import product_dtype, traced, usable

__all__ = ["compile_kernels", "expect", "launches"]

_EXPECTED: set[tuple[Any, ...]] = set()  # models and shapes for which kernels were compiled side by side


def launches(model: nn.Module, shape: tuple[int, ...], training: bool,
             device: torch.device | None = None) -> dict[Launch, int]:  # fmt: skip
    """What ``model`` launches outside of graphs for images of this shape, and how often, where it is or on another
    ``device``. It runs on stand-ins for tensors: neither its weights nor its state change, and no image is needed."""
    parameter, before = next(model.parameters()), model.training
    device = device or parameter.device
    try:
        model.train(training)
        with recorded() as found, FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(training):
            named = (*model.named_parameters(), *model.named_buffers())
            state: dict[str, Tensor] = {name: _stand_in(mode.from_tensor(tensor), device) for name, tensor in named}
            images = torch.empty(shape, dtype=parameter.dtype, device=device)
            outputs = torch.func.functional_call(model, state, images)
            if training:
                sum(t.float().sum() for t in tree_leaves(outputs)).backward()
    finally:
        model.train(before)
    return found


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor``, itself a stand-in, on a device: a leaf."""
    return tensor if tensor.device == device else tensor.detach().to(device).requires_grad_(tensor.requires_grad)


def compile_kernels(model: nn.Module, shape: tuple[int, ...], training: bool, workers: int | None = None) -> int:
    """Compile all that ``model`` launches for images of this shape, side by side, into Triton's cache: how many there
    are."""
    parameter = next(model.parameters())
    if not usable(parameter):
        return 0
    found = launches(model, shape, training)
    compile_all(found, cards.card_of(parameter.device).capability, workers)
    return len(found)


def expect(model: Any, x: Tensor) -> None:
    """Outside of graphs: should a kernel of this pass have to be compiled, then compile all that a model like this one
    needs, side by side. Triton would compile them one after the other. Once for a shape and type."""
    if not traced() and usable(x) and not base.INTERPRETED:
        base.ON_COMPILING = partial(_compile_like, type(model), model.config, tuple(x.shape), x.dtype, x.device,
                                    torch.is_grad_enabled(), product_dtype(x))  # fmt: skip


def _compile_like(build: Callable[..., nn.Module], config: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype,
                  device: torch.device, training: bool, half: torch.dtype) -> None:  # fmt: skip
    """A model of its own is traced: the caller's is in the midst of a pass."""
    key = build, repr(config), shape, dtype, device, training, half
    if key in _EXPECTED:
        return
    _EXPECTED.add(key)
    with suppress(Exception):  # it saves time, no more: what is not compiled here is when it is launched
        with torch.random.fork_rng(devices=[]):
            model = build(**config).to(dtype)
        with torch.autocast(device.type, half, enabled=half != dtype):
            found = launches(model, shape, training, device)
        compile_all(found, cards.card_of(device).capability)
