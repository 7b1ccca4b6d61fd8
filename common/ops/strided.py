"""What matters of a strided convolution here."""

from typing import Any, NamedTuple

from torch import nn

__all__ = ["Strided", "bare"]


def bare(layer: nn.Module) -> nn.Module:
    """A layer without the adapters that peft has put around it."""
    bare_already = isinstance(layer, nn.Conv2d) or not hasattr(layer, "get_base_layer")
    return layer if bare_already else layer.get_base_layer()  # type: ignore[operator]


class Strided(NamedTuple):
    """What matters of a strided convolution here: kernel, stride and padding, (height, width) each."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @classmethod
    def of(cls, conv: nn.Conv2d) -> "Strided":
        layer: Any = bare(conv)
        if isinstance(layer.padding, str):
            raise ValueError(f"an anchored convolution needs its padding in pixels, not {layer.padding!r}")
        return cls(layer.kernel_size, layer.stride, layer.padding)
