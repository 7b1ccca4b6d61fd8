"""Activations that are computed again in the backward pass instead of being kept."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["recompute"]


def recompute(module: nn.Module, *args: Any) -> Any:
    """``module(*args)``; where there is a gradient, its activations are computed again for it, and yet BatchNorm counts
    a batch once."""
    if not torch.is_grad_enabled():
        return module(*args)
    if torch.compiler.is_compiling():  # a compiled graph updates statistics once by itself
        return checkpoint(module, *args, use_reentrant=False)
    return checkpoint(module, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), frozen_statistics(module)))


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Let BatchNorm normalise by its batch, as in training, and yet leave its running statistics as they are."""
    norms = [norm for norm in module.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, norm.num_batches_tracked.clone()  # type: ignore[union-attr]
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
