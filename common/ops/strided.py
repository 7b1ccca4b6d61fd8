"""What matters of a strided convolution here."""

from typing import NamedTuple

from torch import nn

__all__ = ["Strided"]


class Strided(NamedTuple):
    """What matters of a strided convolution here: kernel, stride and padding, (height, width) each."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @classmethod
    def of(cls, conv: nn.Conv2d) -> "Strided":
        if isinstance(conv.padding, str):
            raise ValueError(f"an anchored convolution needs its padding in pixels, not {conv.padding!r}")
        return cls(conv.kernel_size, conv.stride, conv.padding)  # type: ignore[arg-type]
