"""Convolutions of tokens that begin anywhere: the kernel against a roll, circular padding and torch's convolution."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same_logits_by_kernels, both, interpreted, launches, randomize
from torch import Tensor, nn

from common.kernels import convolved, fits_convolved
from common.models.registry import create_model
from common.ops import embed
from common.shifts import circular_pad, roll


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return launches(monkeypatch, "convolving")


def plain(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = circular_pad(roll(x, offset, (1, 2)).permute(0, 3, 1, 2), (1, 1, 1, 1))
    return F.conv2d(x, weight.permute(0, 3, 1, 2), bias, 2).permute(0, 2, 3, 1)


@interpreted
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("size", "channels", "outputs"), [
    ((16, 10), 64, 192),  # outputs in two parts; programs with tokens of several images
    ((26, 22), 32, 16),  # several programs to an image
    ((2, 2), 48, 40),  # every window is all there is; a part is no power of two
    ((4, 6), 16, 256),
    ((10, 16), 192, 384),  # outputs in two blocks of two parts
    ((4, 2), 144, 258),  # a block is no power of two
])  # fmt: skip
def test_convolved(size: tuple[int, int], channels: int, outputs: int, biased: bool) -> None:
    x, weight = torch.randn(3, *size, channels), torch.randn(outputs, 3, 3, channels)
    bias = torch.randn(outputs) if biased else None
    offset = torch.tensor([[0, 0], [1, size[1] - 1], [size[0] - 1, 1]])
    with torch.no_grad():
        assert fits_convolved(x, weight.permute(0, 3, 1, 2), 2, 1)
        assert torch.allclose(convolved(x, offset, weight, bias), plain(x, offset, weight, bias), atol=1e-3)


@interpreted
def test_convolved_in_half_precision() -> None:
    """Sums are taken in float32: what is rounded is the result alone."""
    x, weight = torch.randn(2, 8, 8, 32).half(), torch.randn(24, 3, 3, 32).half()
    offset, bias = torch.tensor([[0, 1], [5, 0]]), torch.randn(24)
    with torch.no_grad():
        out = convolved(x, offset, weight, bias)
        wanted = plain(x.float(), offset, weight.float(), bias)
    assert out.dtype == torch.float16
    assert torch.allclose(out.float(), wanted, rtol=2**-10, atol=1e-3)


@interpreted
@pytest.mark.parametrize("placed", [False, True], ids=["at zero", "at its own origin"])
def test_embedding_of_tokens_for_inference(monkeypatch: pytest.MonkeyPatch, launched: list[str], placed: bool) -> None:
    conv, x = nn.Conv2d(32, 40, 3, 2, 1, padding_mode="circular"), torch.randn(2, 6, 8, 32).permute(0, 3, 1, 2)
    offset = torch.tensor([[1, 0], [5, 7]]) if placed else None
    embed(x, conv, offset)  # with gradients: by other means
    assert not launched
    with torch.no_grad():
        fast, expected = both(monkeypatch, lambda: embed(x, conv, offset)[0])
    assert launched == ["_convolved"]
    assert torch.allclose(fast, expected, atol=1e-5)


@interpreted
def test_models_use_the_kernel(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    """CvT's two embeddings of tokens, and nothing is rolled for them; logits stay what they were."""
    rolled = launches(monkeypatch, "rolling")
    model = randomize(create_model("cvt_micro", adaptive=True)).eval()
    assert_same_logits_by_kernels(monkeypatch, model, launched, 2)
    assert not rolled


@interpreted
def test_what_it_leaves_to_others() -> None:
    x, weight = torch.zeros(1, 4, 4, 32), torch.zeros(8, 32, 3, 3)
    assert not fits_convolved(x, weight, 2, 1)  # gradients are on
    with torch.no_grad():
        assert fits_convolved(x, weight, 2, 1)
        for tokens, kernel, stride, padding in (
            (x.double(), weight.double(), 2, 1),
            (x[:, :3], weight, 2, 1),
            (x.transpose(1, 2), weight, 2, 1),
            (x, weight, 1, 1),
            (x, torch.zeros(8, 32, 2, 2), 2, 0),
            (x, torch.zeros(8, 16, 3, 3), 2, 1),
            (x, torch.zeros(257, 32, 3, 3), 2, 1),
            (x, torch.zeros(386, 32, 3, 3), 2, 1),
            (torch.zeros(1, 4, 4, 208), torch.zeros(8, 208, 3, 3), 2, 1),
        ):
            assert not fits_convolved(tokens, kernel, stride, padding)
