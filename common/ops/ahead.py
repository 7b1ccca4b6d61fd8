"""Kernels of a model, compiled before its first images come."""

import copy
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
    ``device``. A copy of it runs on stand-ins for tensors, so it does not change, and no image is needed."""
    parameter, copied = next(model.parameters()), _without_data(model)
    device = device or parameter.device
    with recorded() as found, FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(training):
        images = torch.empty(shape, dtype=parameter.dtype, device=device)
        nn.Module.to_empty(copied, device=device)  # with tables of no values
        outputs = copied.train(training)(images)
        if training:
            sum(t.float().sum() for t in tree_leaves(outputs)).backward()
    return found


def _without_data(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers are on the meta device."""
    known: dict[int, Any] = {id(t): t.detach().to("meta") for t in model.buffers()}
    for t in model.parameters():
        known[id(t)] = nn.Parameter(t.detach().to("meta"), t.requires_grad)
    return copy.deepcopy(model, known)


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
    needs, side by side, and this one with them. Triton would compile one after the other. Once for a shape and type."""
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
        with torch.device("meta"):  # no weights are drawn
            model = build(**config).to(dtype)
        with torch.autocast(device.type, half, enabled=half != dtype):
            found = launches(model, shape, training, device)
        compile_all(found, cards.card_of(device).capability)
