"""Tokens on a torus, and where they stand."""

from typing import Any, NamedTuple

from torch import Tensor

from .ops.roll import reads_from_origin, roll

__all__ = ["Grid"]


class Grid(NamedTuple):
    """Tokens (B, H, W, C); the pixel (B, 2) where token (0, 0) stands, modulo the image; and how many pixels apart
    tokens are: token h stands at offset + stride h.

    What else is known rides along: ``origin`` (B, 2) in [0, side), the token that the next operation begins with, if
    not (0, 0); whether the image lies at its ``canonical`` place, so that all shifted copies of it are one array here;
    the tokens' ``moments`` (B, 3, H, W), where a kernel has left them; the ``plan`` by which kernels prepare the
    weights of anchored layers to come; and what an anchor has ``shared`` with the layer behind it.
    """

    tokens: Tensor
    offset: Tensor
    stride: int
    origin: Tensor | None = None
    canonical: bool = False
    moments: Tensor | None = None
    plan: Any = None
    shared: Any = None

    def settle(self, inference: bool = False) -> "Grid":
        """For operations that keep the grid: move tokens to where they begin, unless kernels read them from there
        (``inference``: only where there is no gradient)."""
        return self if self.origin is None or reads_from_origin(self.tokens, inference) else self.roll()

    def roll(self) -> "Grid":
        """Move tokens to where they begin: for operations of torch alone."""
        if self.origin is None:
            return self
        tokens, offset = roll(self.tokens, self.origin, (1, 2), within=True), self.offset + self.stride * self.origin
        return self._replace(tokens=tokens, offset=offset, origin=None, moments=None, shared=None)

    def then(self, tokens: Tensor, stride: int = 1, moments: Tensor | None = None) -> "Grid":
        """What an operation of this stride has made of the grid, from its origin on."""
        offset = self.offset if self.origin is None else self.offset + self.stride * self.origin
        return self._replace(tokens=tokens, offset=offset, stride=self.stride * stride, origin=None, moments=moments,
                             shared=None)  # fmt: skip

    def kept(self, tokens: Tensor) -> "Grid":
        """What operations that keep the grid have made of its tokens, which stand where they stood."""
        return self._replace(tokens=tokens, origin=None, moments=None, shared=None)
