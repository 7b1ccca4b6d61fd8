"""Kernels of a model, compiled before its first images come."""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ..kernels import cards
from ..kernels.ahead import Launch, compile_all, recorded
from .dispatch import usable

__all__ = ["compile_kernels", "launches"]


def launches(model: nn.Module, shape: tuple[int, ...], training: bool) -> dict[Launch, int]:
    """What ``model`` launches outside of graphs for images of this shape, and how often. It runs on stand-ins for
    tensors: neither its weights nor its state change, and no image is needed."""
    parameter, before = next(model.parameters()), model.training
    try:
        model.train(training)
        with recorded() as found, FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(training):
            named = (*model.named_parameters(), *model.named_buffers())
            state: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in named}
            images = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            outputs = torch.func.functional_call(model, state, images)
            if training:
                sum(t.float().sum() for t in tree_leaves(outputs)).backward()
    finally:
        model.train(before)
    return found


def compile_kernels(model: nn.Module, shape: tuple[int, ...], training: bool, workers: int | None = None) -> int:
    """Compile all that ``model`` launches for images of this shape, side by side, into Triton's cache: how many there
    are."""
    parameter = next(model.parameters())
    if not usable(parameter):
        return 0
    found = launches(model, shape, training)
    compile_all(found, cards.card_of(parameter.device).capability, workers)
    return len(found)
