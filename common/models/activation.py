"""GELU as a module that blocks are built with."""

from torch import Tensor, nn

from ..ops.gelu import gelu

__all__ = ["GELU"]


class GELU(nn.GELU):
    """x Phi(x): see ``common.ops.gelu``."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)
