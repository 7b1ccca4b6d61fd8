"""Rolled and padded tokens: the kernel against its torch form."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT, interpreted, launches
from torch import Tensor

from common import kernels
from common.anchors import NoAnchor
from common.grid import Grid
from common.kernels import fits_roll_kernel, rolled
from common.models.embedding import PatchEmbed
from common.ops.dispatch import usable
from common.shifts import circular_pad, roll


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return launches(monkeypatch, "rolling")


@pytest.mark.slow
def test_either_may_be_imported_first() -> None:
    """Rolls use kernels, and the torch form of a kernel uses shifts: no order of imports may break on that."""
    code = """
import sys
from importlib import import_module
for first, then in (("common.kernels", "common.shifts"), ("common.shifts", "common.kernels")):
    for name in [name for name in sys.modules if name.startswith("common")]:
        del sys.modules[name]
    import_module(first), import_module(then)
    sys.modules["common.kernels"].rolled, sys.modules["common.shifts"].roll
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def plain(x: Tensor, offset: Tensor, padding: int) -> Tensor:
    x = torch.stack([t.roll((-h, -w), (0, 1)) for t, (h, w) in zip(x, offset.tolist(), strict=True)])
    for dim, side in ((1, x.shape[1]), (2, x.shape[2])):
        x = x.index_select(dim, torch.arange(-padding, side + padding) % side)
    return x


SIZES = [
    ((8, 12), 64, 1, False),
    ((8, 12), 32, 0, True),  # a slice of wider tokens, read in place
    ((3, 70), 40, 1, True),  # several programs to a row
    ((5, 3), 33, 0, False),  # nothing divides
    ((3, 2), 160, 2, False),  # three copies of a column
    ((1, 2), 16, 1, False),  # three copies of the only row
    ((1, 1), 1, 1, False),
]


@interpreted
@pytest.mark.parametrize(("size", "channels", "padding", "sliced"), SIZES)
def test_rolled(size: tuple[int, int], channels: int, padding: int, sliced: bool) -> None:
    """Each token where it belongs, to the bit, and its gradient from everywhere it went to; offsets may be a whole
    side, as an inverse roll has them."""
    height, width = size
    x = torch.randn(5, *size, 3 * channels if sliced else channels, requires_grad=True)
    tokens = x[..., channels : 2 * channels] if sliced else x
    offset = torch.tensor([[0, 0], [height - 1, width - 1], [height, width], [0, width], [height // 2, width // 2]])
    assert fits_roll_kernel(tokens)
    out, expected = rolled(tokens, offset, padding), plain(tokens, offset, padding)
    assert out.is_contiguous()
    assert torch.equal(out, expected)
    upstream = torch.randn_like(expected)
    (grad,), (wanted,) = (torch.autograd.grad(y, x, upstream) for y in (out, expected))
    assert torch.allclose(grad, wanted, atol=1e-5)
    assert padding or torch.equal(grad, wanted)


@interpreted
@pytest.mark.parametrize("padding", [0, 1])
def test_gradient_of_the_gradient(padding: int) -> None:
    x, offset = torch.randn(2, 3, 4, 8, requires_grad=True), torch.tensor([[1, 0], [2, 3]])

    def twice(f) -> Tensor:
        (grad,) = torch.autograd.grad(f(x, offset, padding).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    assert torch.allclose(twice(rolled), twice(plain), rtol=1e-4)


@interpreted
def test_refuses_more_than_a_side() -> None:
    with pytest.raises(ValueError, match="3x4 cannot be padded by 4"):
        rolled(torch.zeros(1, 3, 4, 8), torch.zeros(1, 2, dtype=torch.long), 4)


@interpreted
def test_rolls_use_the_kernel(launched: list) -> None:
    """Tokens roll by the kernel, whatever their offsets; images, float64 and other layouts as before."""
    offset = torch.tensor([[1, 2], [-3, 50]])
    x = torch.randn(2, 6, 10, 8)
    assert torch.equal(roll(x, offset, (1, 2)), plain(x, offset, 0))
    assert torch.equal(roll(x, offset % 6, (1, 2), within=True), plain(x, offset % 6, 0))
    assert len(launched) == 2
    roll(x, offset)
    roll(x.double(), offset, (1, 2))
    roll(x.permute(0, 2, 3, 1), offset, (1, 2))
    assert len(launched) == 2


@interpreted
@pytest.mark.parametrize("placed", [False, True], ids=["at zero", "at its own origin"])
def test_embedding_of_tokens(monkeypatch: pytest.MonkeyPatch, launched: list, placed: bool) -> None:
    """CvT's later embeddings, rolled and padded at once, give the same tokens and gradients."""
    embed = PatchEmbed(in_chans=24, dim=16, size=3, stride=2, padding=1, padding_mode="circular")
    x = torch.randn(2, 6, 8, 24, requires_grad=True)
    offset = torch.tensor([[1, 0], [0, 1]]) if placed else torch.zeros(2, 2, dtype=torch.long)
    inputs = [x, *embed.parameters()]

    def run() -> list[Tensor]:
        out = embed(Grid(x, offset, 1, origin=offset if placed else None), NoAnchor()).tokens
        return [out, *torch.autograd.grad(out.pow(3).sum(), inputs)]

    fast = run()
    assert len(launched) == 2  # forward and backward
    monkeypatch.setattr(kernels.base, "ENABLED", False)
    for got, wanted in zip(fast, run(), strict=True):
        assert torch.allclose(got, wanted, atol=1e-4, rtol=1e-4)


def test_torch_form() -> None:
    """What the kernel is measured by is what runs without it."""
    x, offset = torch.randn(2, 5, 6, 3), torch.tensor([[4, 0], [1, 5]])
    padded = circular_pad(roll(x, offset, (1, 2)).permute(0, 3, 1, 2), (1, 1, 1, 1)).permute(0, 2, 3, 1)
    assert torch.equal(padded, plain(x, offset, 1))
    assert kernels.INTERPRETED or not usable(x)
    assert not fits_roll_kernel(x.double())
