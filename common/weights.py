"""What is made of weights: gathered, mixed, and in inference kept while they stay as they are."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import kernels

__all__ = ["forget", "kept", "normed_taps", "product", "taps", "whole"]

T = TypeVar("T")
_KEPT: dict[int, tuple[weakref.ref, dict]] = {}  # by the id of a tensor: torch's mapping of tensors is slow


def whole(parameter: Tensor) -> Tensor:
    """A parameter of another module as it is read here, in float32 at least: gathered, if it is sharded over processes
    (FSDP), for only its own module's forward finds it so."""
    parameter = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return parameter if parameter.dtype == torch.float64 else parameter.float()


def kept(make: Callable[[], T], name: Hashable, *weights: Tensor) -> T:
    """What is made of ``weights`` (new tensors: else they would hold themselves), kept with the first under a name
    until one of them changes. Not for a gradient, and not while a graph is recorded: that is for the compiler to
    decide. What is written through ``.data`` goes unnoticed until the model is asked to ``forget``."""
    if (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or not kernels.base.PLAIN.issuperset(map(type, weights))
    ):
        return make()
    try:
        state = [(w.data_ptr(), None if w.is_inference() else w._version) for w in weights]
    except RuntimeError:  # of several models at once (torch.func.vmap): no weights of their own
        return make()
    known = _kept_with(weights[0])
    if name not in known or known[name][0] != state:
        known[name] = state, make()
    return known[name][1]


def _kept_with(weight: Tensor) -> dict[Hashable, Any]:
    key = id(weight)
    found = _KEPT.get(key)
    if found is None or found[0]() is not weight:
        found = _KEPT[key] = weakref.ref(weight, lambda _: _KEPT.pop(key, None)), {}
    return found[1]


def forget(module: nn.Module) -> None:
    """Drop what is kept of a module's weights."""
    for parameter in module.parameters():
        _KEPT.pop(id(parameter), None)


def taps(*weights: Tensor, repeats: int = 1) -> Tensor:
    """Weights (C, 1, k, k) of n depthwise convolutions as kernels take them: (n, k, k, C), or so many times C."""

    def make() -> Tensor:
        several = torch.stack(weights) if len(weights) > 1 else weights[0][None]
        return several[:, :, 0].permute(0, 2, 3, 1).repeat(1, 1, 1, repeats)

    return kept(make, ("taps", len(weights), repeats), *weights)


def normed_taps(convs: Sequence[nn.Conv2d], norms: Sequence[nn.BatchNorm2d]) -> Tensor:
    """Of n depthwise convolutions without bias, each with a norm behind it by what that has learnt: their taps, scaled,
    and what is added, (n, k k + 1, C) in float32."""
    names = "weight", "bias", "running_mean", "running_var"
    learnt: list[list[Tensor]] = [[getattr(norm, name) for norm in norms] for name in names]
    weights, (gains, shifts, means, variances) = [conv.weight for conv in convs], learnt

    def make() -> Tensor:
        if len(weights) == 3 and weights[0].shape[2:] == (3, 3) and kernels.usable(weights[0]):
            return kernels.normed_taps(weights, gains, shifts, means, variances, norms[0].eps)
        gain, shift, mean, variance = (torch.stack(tensors).float() for tensors in learnt)  # n, C
        scale = gain * torch.rsqrt(variance + norms[0].eps)
        taps = torch.stack(weights).float().flatten(2).transpose(1, 2)  # n, k k, C
        return torch.cat([taps * scale[:, None], (shift - mean * scale)[:, None]], 1)

    return kept(make, "normed", *weights, *(tensor for tensors in learnt for tensor in tensors))


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of a few rows and weights, not in autocast's precision; a compiler makes it one pass with what is next."""
    if kernels.fits_sketch(a, b):
        return kernels.sketched(a, b, None)[0]
    if torch.compiler.is_compiling():
        return (a[:, :, None] * b).sum(1)
    with torch.autocast(a.device.type, enabled=False):
        return a @ b
