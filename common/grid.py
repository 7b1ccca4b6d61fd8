"""Tokens on a torus, and where they stand."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ops.roll import reads_from_origin, roll

__all__ = ["Grid"]


class Grid(NamedTuple):
    """Tokens (B, H, W, C); the pixel (B, 2) where token (0, 0) stands, modulo the image; and how many pixels apart
    tokens are: token h stands at offset + stride h.

    ``anchored``: modulo how many pixels, along each axis, that place follows the content wherever the image is shifted.

    What else is known rides along: ``origin`` (B, 2) in [0, side), the token that the next operation begins with, if
    not (0, 0), or ``start``, the one that earlier operations began with, where they left tokens in their places;
    whether the image lies at its ``canonical`` place, so that all shifted copies of it are one array here; the tokens'
    ``moments`` (B, 3, H, W), where a kernel has left them; the ``plan`` by which kernels prepare the weights of
    anchored layers to come; and what an anchor has ``shared`` with the layer behind it.
    """

    tokens: Tensor
    offset: Tensor
    stride: int
    anchored: tuple[int, int] = (1, 1)
    origin: Tensor | None = None
    start: Tensor | None = None
    canonical: bool = False
    moments: Tensor | None = None
    plan: Any = None
    shared: Any = None

    def is_anchored(self, window: tuple[int, int]) -> bool:
        """Whether a layer that takes so many tokens at a time begins at the same content already."""
        return all(pixels % (self.stride * side) == 0 for pixels, side in zip(self.anchored, window, strict=True))

    def begin_at(self, origin: Tensor, window: tuple[int, int], keep: bool) -> "Grid":
        """Begin at the token that an anchor has chosen in a window. It only matters modulo the window: ``keep`` takes
        the token, as good, that also follows the content modulo what was anchored before, if there is one."""
        found, factors = [], []
        for pixels, side in zip(self.anchored, window, strict=True):
            tokens, rest = divmod(pixels, self.stride)
            both = keep and not rest and math.gcd(tokens, side) == 1
            factors.append(tokens * pow(tokens, -1, side) if both else 1)  # 1 modulo the window, 0 modulo the tokens
            found.append(pixels if rest else self.stride * side * (tokens if both else 1))
        if any(factor > 1 for factor in factors):
            start = torch.zeros_like(origin) if self.start is None else self.start
            axes = zip(start.unbind(1), origin.unbind(1), factors, self.tokens.shape[1:3], strict=True)
            origin = torch.stack([(start + (token - start) * factor) % side for start, token, factor, side in axes], 1)
        return self._replace(origin=origin, start=None, anchored=(found[0], found[1]))

    def begin_again(self) -> "Grid":
        """Begin where earlier operations began."""
        return self if self.start is None else self._replace(origin=self.start, start=None)

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
        return self._replace(tokens=tokens, offset=offset, stride=self.stride * stride, origin=None, start=None,
                             moments=moments, shared=None)  # fmt: skip

    def kept(self, tokens: Tensor) -> "Grid":
        """What operations that keep the grid have made of its tokens, which stand where they stood."""
        return self._replace(tokens=tokens, origin=None, start=self.origin, moments=None, shared=None)
