"""Prepare weights: gather, combine and lay them out for kernels.

Prepared weights are never cached. Optimizers, averages of weights, collectives and ``.data`` change weights without a
trace, so a cache cannot know when it is stale; and a compiled graph prepares weights as part of its forward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .. import kernels
from .dispatch import op, usable

__all__ = ["adapted", "gathered", "is_plain", "kernel_weights", "normed_kernel_weights", "product", "weight_of"]


def gathered(parameter: Tensor | Callable[[], Tensor]) -> Tensor:
    """A parameter of another module as it is read here, in float32 at least: gathered, if it is sharded over processes
    (FSDP), for only its own module's forward finds it so; and as numbers, where a quantised layer has it as a method.
    """
    parameter = parameter if isinstance(parameter, Tensor) else parameter()
    parameter = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    parameter = parameter.dequantize() if parameter.is_quantized else parameter
    return parameter if parameter.dtype == torch.float64 else parameter.float()


def adapted(*layers: nn.Module) -> bool:
    """Whether something changes the weight of one of these layers in the forward pass: peft's adapters add to it, or
    ``torch.nn.utils``, which prunes and normalises weights, makes it anew before."""
    return any(bool(makers(layer)) or (type(layer) not in PLAIN and hasattr(layer, "get_delta_weight"))
               for layer in layers)  # fmt: skip


def makers(layer: nn.Module) -> list[Any]:
    """The hooks of ``torch.nn.utils`` that make a layer's weight."""
    return [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, MAKERS)]


def weight_of(layer: Any) -> Tensor:
    """The weight of a layer as anchors score it, ``gathered``: as its next forward will have it, and with what adapters
    of peft add to it, so that anchors choose the same before and after those are merged."""
    for make in makers(layer):
        make(layer, ())
    if not hasattr(layer, "weight"):
        raise TypeError(f"the anchor needs a layer with a weight, but got a {type(layer).__name__}: give "
                        "it the property weight, as what wraps a layer has for its base")  # fmt: skip
    weight = gathered(layer.weight)
    if type(layer) in PLAIN or not hasattr(layer, "get_delta_weight") or layer.merged or layer.disable_adapters:
        return weight
    active = (name for name in layer.active_adapters if name in layer.scaling)
    return sum((layer.get_delta_weight(name).to(weight) for name in active), weight)


def kernel_weights(*weights: Tensor, repeats: int = 1) -> Tensor:
    """Weights (C, 1, k, k) of n depthwise convolutions as kernels take them: (n, k, k, C), or a multiple of C channels.
    Without kernels, weights stay where they lie: on a CPU a convolution takes a fifth to a third less time."""
    several = torch.stack(weights) if len(weights) > 1 else weights[0][None]
    several = several[:, :, 0].permute(0, 2, 3, 1)
    return several.repeat(1, 1, 1, repeats) if repeats > 1 or usable(several) else several


def normed_kernel_weights(convs: Sequence[nn.Conv2d], norms: Sequence[nn.BatchNorm2d]) -> Tensor:
    """Of n depthwise convolutions without bias, each with a norm behind it by what that has learnt: their taps, scaled,
    and what is added, (n, k k + 1, C) in float32."""
    names = "weight", "bias", "running_mean", "running_var"
    learnt: list[list[Tensor]] = [[getattr(norm, name) for norm in norms] for name in names]
    weights, (gains, shifts, means, variances) = [conv.weight for conv in convs], learnt
    if len(weights) == 3 and weights[0].shape[2:] == (3, 3) and usable(weights[0]):
        return kernels.normed_taps(weights, gains, shifts, means, variances, norms[0].eps)
    gain, shift, mean, variance = (torch.stack(tensors).float() for tensors in learnt)  # n, C
    scale = gain * torch.rsqrt(variance + norms[0].eps)
    taps = torch.stack(weights).float().flatten(2).transpose(1, 2)  # n, k k, C
    return torch.cat([taps * scale[:, None], (shift - mean * scale)[:, None]], 1)


@op(kernel=lambda a, b: kernels.sketched(a, b, None)[0], fits=lambda a, b: kernels.fits_sketch(a, b))
def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of a few rows and weights, not in autocast's precision; a compiler makes it one pass with what is next."""
    if torch.compiler.is_compiling():
        return (a[:, :, None] * b).sum(1)
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def is_plain(module: nn.Module) -> bool:
    """Whether a module computes what its weights say: a torch layer itself, with no adapter, hook, parametrisation or
    shard about it, so that its weights may be read instead of calling it."""
    plain = type(module) in PLAIN and not isinstance(module.weight, DTensor)
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    hooks = hooks or _has_any_global_hook()  # of all modules
    return plain and not hooks and "forward" not in module.__dict__  # accelerate's offloading replaces it


MAKERS = (BasePruningMethod, SpectralNorm, WeightNorm)
PLAIN = (nn.Linear, nn.LayerNorm, nn.Conv2d, nn.BatchNorm2d, nn.SyncBatchNorm)
