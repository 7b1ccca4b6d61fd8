"""Kernels that read images, for tokens and their phases, against their torch forms."""

import sys
from typing import Any

import pytest
import torch
from conftest import both, interpreted, launches, randomize
from torch import Tensor, nn

from common import create_model, kernels
from common.anchors import ConvAnchor, WindowAnchor
from common.ops import embed
from common.ops.choice import moments
from common.shifts import roll

pytestmark = pytest.mark.as_on_gpu("images")


@interpreted
@pytest.mark.parametrize(("kernel", "padding", "score", "sketch"), [
    (4, 0, "signed", 4), (4, 0, "energy", 8), (7, 2, "energy", 4), (7, 2, "signed", 8), (7, 3, "signed", 4),
])  # fmt: skip
def test_phase_of_an_image(monkeypatch: pytest.MonkeyPatch, kernel: int, padding: int, score: Any,
                           sketch: int) -> None:  # fmt: skip
    """The image is scored where it lies, as if it were rolled, and the place told on its own torus."""
    anchor = ConvAnchor(score=score, sketch=sketch)
    conv = nn.Conv2d(3, 32, kernel, 4, padding)
    x, at = torch.randn(4, 3, 20, 68), torch.tensor([[0, 67], [19, 0], [18, 66], [5, 9]])
    tokens = x.permute(0, 2, 3, 1)
    fast, plain = both(monkeypatch, lambda: anchor.choose(tokens, conv, low_precision=True, origin=at))
    assert torch.equal(fast, plain)
    phase = anchor.offset(roll(x, at), conv, low_precision=True)
    assert torch.equal(plain, (at + phase) % torch.tensor([20, 68]))
    assert len({tuple(offset) for offset in phase.tolist()}) > 1
    assert (plain < at).any()


@interpreted
@pytest.mark.parametrize(("kernel", "stride", "padding", "channels", "padding_mode"), [
    (4, 4, 0, 3, "circular"), (7, 4, 2, 3, "zeros"), (7, 4, 3, 3, "circular"), (7, 2, 3, 3, "zeros"),
    (3, 2, 1, 5, "circular"), (5, 4, 1, 1, "zeros"),
])  # fmt: skip
def test_parts_of_an_image(monkeypatch: pytest.MonkeyPatch, kernel: int, stride: int, padding: int, channels: int,
                           padding_mode: str) -> None:  # fmt: skip
    """An image of many cells is shared between programs, which begin with what windows have in the rows before."""
    for how in ("TOKENS", "PHASES"):
        for limit, count in (("cells", (16, 16)), ("programs", 5)):  # rows of cells: 3, 3 and 1
            monkeypatch.setitem(getattr(sys.modules["common.kernels.image_conv"], how), limit, count)
    conv = nn.Conv2d(channels, 24, kernel, stride, padding, padding_mode=padding_mode)
    anchor = ConvAnchor(score="energy", sketch=64 // stride**2)
    x, at = torch.randn(1, channels, 7 * stride, 18 * stride), torch.tensor([[5, 17]])
    x = kernels.packed(x, x.dtype)

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [
                embed(x, conv, at)[0],
                embed(x, conv)[0],
                anchor.choose(x.permute(0, 2, 3, 1), conv, low_precision=True, origin=at),
            ]

    for fast, plain in zip(*both(monkeypatch, run), strict=True):
        assert torch.allclose(fast, plain, atol=2e-5)


@interpreted
@pytest.mark.parametrize("channels", [1, 3, 4, 5])
def test_packed_image(channels: int) -> None:
    """The same image, with room for a power of two of channels in each pixel: zeros, which weights of zero leave so."""
    x = torch.randn(2, channels, 12, 20).half()[:, :, 4:]
    packed = kernels.packed(x, torch.float32)
    assert torch.equal(packed, x.float())
    assert packed.stride()[1:] == (1, 20 * packed.stride(3), {1: 1, 3: 4, 4: 4, 5: 8}[channels])
    behind = torch.as_strided(packed, (2, packed.stride(3), 8, 20), packed.stride())[:, channels:]
    assert not behind.any()
    assert kernels.packed(packed, torch.float32) is packed
    assert kernels.packed(packed, torch.float16) is not packed


@interpreted
@pytest.mark.parametrize("name", ["swin_micro", "cvt_micro", "mvitv2_micro"])
def test_an_image_is_packed_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """For the choice of a phase and for the tokens there: as the canonical anchor reads it, or apart if it has many
    channels (too many for a program to hold the weights of all phases of a large window). In a default model where
    windows overlap."""
    launched = launches(monkeypatch, "image_conv", "pixels")
    x, last = torch.randn(1, 5, 32, 32), 0 if name == "cvt_micro" else -1  # CvT's embedding is a part of its stage
    with torch.no_grad():
        model = randomize(create_model(name, adaptive=True, sketch=4)).eval()
        model.forward_stages(x[:, :3], last)
        assert launched == ["_image_phases", "_image_tokens"]
        with torch.enable_grad():
            model.forward_stages(x[:, :3], last)
        assert launched[2:] == ["_image_phases", "_image_windows"]  # which are differentiated
        launched.clear()
        randomize(create_model(name, adaptive=True, sketch=4, in_chans=5)).eval().forward_stages(x, last)
        held = ["_image_phases"] if "swin" in name else []
        assert launched == ["_image_pixels", *held, "_image_tokens"]
        launched.clear()
        create_model(name).eval().forward_stages(x[:, :3], last)
    assert launched == (["_image_tokens"] if "swin" in name else ["_image_pixels", "_image_tokens"])


@interpreted
@pytest.mark.parametrize(("placed", "padding_mode"), [(False, "zeros"), (True, "zeros"), (True, "circular")])
@pytest.mark.parametrize(("kernel", "padding", "outputs", "layout"), [
    (4, 0, 20, "planes"), (4, 0, 48, "packed"), (7, 2, 48, "packed"), (7, 3, 20, "planes"), (7, 2, 16, "channels last"),
])  # fmt: skip
def test_embedding_of_an_image(monkeypatch: pytest.MonkeyPatch, kernel: int, padding: int, padding_mode: str,
                               placed: bool, outputs: int, layout: str) -> None:  # fmt: skip
    """Tokens made of windows are those of the convolution, with all that is known of them and with gradients."""
    conv, norm = nn.Conv2d(3, outputs, kernel, 4, padding, padding_mode=padding_mode), nn.LayerNorm(outputs)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x, offset = torch.randn(2, 3, 16, 36), torch.randint(0, 16, (2, 2)) if placed else None
    x = kernels.packed(x, x.dtype) if layout == "packed" else x
    x = x.contiguous(memory_format=torch.channels_last) if layout == "channels last" else x
    anchor = WindowAnchor()

    def infer() -> list[Tensor]:
        with torch.no_grad():
            tokens, found = embed(x, conv, offset, norm, anchor.reads)
            known = moments(tokens, anchor.direction) if found is None else found.unbind(1)
            return [tokens, *known, embed(x, conv, offset)[0]]

    def train() -> list[Tensor]:
        tokens = embed(x, conv, offset)[0]
        return [tokens, *torch.autograd.grad(tokens.square().sum(), [conv.weight, conv.bias])]

    for run in (infer, train):
        with monkeypatch.context() as patch:
            for fast, plain in zip(*both(patch, run), strict=True):
                assert torch.allclose(fast, plain, atol=1e-4, rtol=1e-4)
