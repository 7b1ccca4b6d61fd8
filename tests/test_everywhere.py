"""A convolution at every position: all of its forms must give what the strided convolution gives at each phase."""

import pytest
import torch
from torch import nn

from common.anchors import ConvAnchor
from common.ops.everywhere import at_every_position
from common.ops.roll import roll
from common.ops.strided import Strided


@pytest.mark.parametrize(("channels", "outputs", "side", "stride", "padding", "groups"), [
    (3, 12, 4, 4, 0, 1), (3, 9, 7, 4, 2, 1), (16, 16, 3, 2, 1, 16),  # as convolutions
    (3, 5, 4, 4, 0, 1), (3, 4, 7, 4, 3, 1), (1, 8, 3, 2, 1, 1),  # by windows
    (18, 4, 3, 2, 1, 1), (32, 4, 2, 2, 0, 1), (4, 4, 1, 1, 0, 1),  # by taps
])  # fmt: skip
@torch.no_grad()
def test_every_phase_is_that_of_the_convolution(channels: int, outputs: int, side: int, stride: int, padding: int,
                                                groups: int) -> None:  # fmt: skip
    conv = nn.Conv2d(channels, outputs, side, stride, padding, groups=groups, padding_mode="circular").double()
    x = torch.randn(2, channels, 8, 12, dtype=torch.float64)
    t = at_every_position(x, conv.weight, Strided.of(conv), conv.bias)
    assert t.shape == (2, outputs, 8, 12)
    for h in range(stride):
        for w in range(stride):
            moved = roll(x, torch.tensor([[h, w]] * 2))
            torch.testing.assert_close(t[:, :, h::stride, w::stride], conv(moved), rtol=1e-12, atol=1e-12)


def test_sides_without_whole_phases() -> None:
    """Every position has its output; but an anchor has nothing to choose from, and must say so."""
    conv, x = nn.Conv2d(3, 4, 4, 4), torch.randn(2, 3, 6, 12)
    with torch.no_grad():
        t = at_every_position(x, conv.weight, Strided.of(conv))
        moved = roll(x, torch.tensor([[5, 11]] * 2))  # the last position comes first
        torch.testing.assert_close(t[:, :, 5, 11], nn.functional.conv2d(moved, conv.weight)[:, :, 0, 0])
    with pytest.raises(ValueError, match="does not divide into phases"):
        ConvAnchor(sketch=4).offset(x, conv)
