"""The Triton kernels of attention, scores and embeddings against their torch forms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import interpreted
from torch import Tensor, nn

from common import kernels
from common.anchors import ConvAnchor, MergeAnchor, Strided, WindowAnchor, best_offset
from common.embedding import embed
from common.windowed import merge_patches
from common.windows import attend_in_windows, shifted_window_mask


def both(monkeypatch: pytest.MonkeyPatch, f: Callable[[], Any]) -> tuple[Any, Any]:
    """A result with kernels, and without."""
    fast = f()
    monkeypatch.setattr(kernels.base, "ENABLED", False)
    return fast, f()


@interpreted
@pytest.mark.parametrize("placed", [False, True], ids=["at zero", "at its own origin"])
@pytest.mark.parametrize(("window", "size", "shift", "cosine", "d"), [
    ((7, 7), (14, 21), (3, 3), False, 32),
    ((4, 4), (8, 8), (0, 0), False, 16),
    ((8, 8), (16, 8), (4, 0), True, 32),
    ((4, 4), (8, 12), (2, 2), True, 16),
])  # fmt: skip
def test_window_attention(monkeypatch: pytest.MonkeyPatch, window: tuple[int, int], size: tuple[int, int],
                          shift: tuple[int, int], cosine: bool, d: int, placed: bool) -> None:  # fmt: skip
    heads, n = 2, window[0] * window[1]
    qkv = torch.randn(2, *size, 3, heads, d, requires_grad=True)
    bias = torch.randn(heads, n, n, requires_grad=True)
    scale = (torch.rand(heads) + 0.5).requires_grad_() if cosine else None
    origin = torch.tensor([[1, 3], [2, 0]]) if placed else None
    mask = None if placed else shifted_window_mask(size, window, shift, qkv.device)
    inputs = [t for t in (qkv, bias, scale) if t is not None]
    upstream = torch.randn(2, *size, heads * d)

    def run() -> list[Tensor]:
        out = attend_in_windows(qkv, bias, scale, window, shift, mask, origin)
        return [out, *torch.autograd.grad(out, inputs, upstream)]

    for fast, plain in zip(*both(monkeypatch, run), strict=True):
        assert torch.allclose(fast, plain, atol=2e-5, rtol=1e-4)


@interpreted
@pytest.mark.parametrize(("kernel", "stride", "padding", "channels", "score", "sketch"), [
    (3, 2, 1, 40, "signed", 4),
    (3, 2, 1, 40, "energy", 8),
    (2, 2, 0, 16, "signed", 16),
    (3, 4, 1, 64, "signed", 4),
    (3, 4, 1, 64, "energy", 16),
])  # fmt: skip
def test_phases_of_convolutions(monkeypatch: pytest.MonkeyPatch, kernel: int, stride: int, padding: int, channels: int,
                                score: Any, sketch: int) -> None:  # fmt: skip
    anchor = ConvAnchor(score=score, sketch=sketch)
    conv = nn.Conv2d(channels, 32, kernel, stride, padding)
    x = torch.randn(2, channels, 8, 12)
    weight, bias = anchor.rows(conv.weight.detach()), anchor.rows(conv.bias.detach()[:, None])[:, 0]
    fast, plain = both(monkeypatch, lambda: anchor.phases(x, weight, Strided.of(conv), bias, fast=True))
    assert torch.allclose(fast, plain, rtol=1e-5)
    assert torch.equal(best_offset(fast), best_offset(plain))
    monkeypatch.setattr(kernels.base, "ENABLED", True)
    other = anchor.phases(x, weight, Strided.of(conv), bias + 1, fast=True)
    assert not torch.allclose(other, fast)  # the same weights with another bias are no old acquaintance


@interpreted
@pytest.mark.parametrize(("kernel", "padding", "score", "sketch"), [
    (4, 0, "signed", 4), (4, 0, "energy", 8), (7, 2, "energy", 4), (7, 2, "signed", 8), (7, 3, "signed", 4),
])  # fmt: skip
def test_phase_of_an_image(monkeypatch: pytest.MonkeyPatch, kernel: int, padding: int, score: Any,
                           sketch: int) -> None:  # fmt: skip
    """The image is scored where it lies, as if it were rolled."""
    anchor = ConvAnchor(score=score, sketch=sketch)
    conv = nn.Conv2d(3, 32, kernel, 4, padding)
    x, at = torch.randn(4, 3, 20, 24), torch.randint(0, 20, (4, 2))
    fast, plain = both(monkeypatch, lambda: anchor.offset(x, conv, fast=True, at=at))
    assert torch.equal(fast, plain)
    assert len({tuple(offset) for offset in plain.tolist()}) > 1


@interpreted
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
@pytest.mark.parametrize(("kernel", "padding"), [(4, 0), (7, 2), (7, 3)])
def test_embedding_of_an_image(monkeypatch: pytest.MonkeyPatch, kernel: int, padding: int, padding_mode: str,
                               placed: bool) -> None:  # fmt: skip
    """Tokens made of windows are those of the convolution, with all that is known of them and with gradients."""
    conv, norm = nn.Conv2d(3, 20, kernel, 4, padding, padding_mode=padding_mode), nn.LayerNorm(20)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x, offset = torch.randn(2, 3, 16, 24), torch.randint(0, 16, (2, 2)) if placed else None
    anchor = WindowAnchor()

    def infer() -> list[Tensor]:
        with torch.no_grad():
            tokens, moments = embed(conv, x, offset, norm, anchor.wave)
            known = anchor.moments(tokens) if moments is None else moments.unbind(1)
            return [tokens, *known, embed(conv, x, offset)[0]]

    def train() -> list[Tensor]:
        tokens = embed(conv, x, offset)[0]
        return [tokens, *torch.autograd.grad(tokens.square().sum(), [conv.weight, conv.bias])]

    for run in (infer, train):
        with monkeypatch.context() as patch:
            for fast, plain in zip(*both(patch, run), strict=True):
                assert torch.allclose(fast, plain, atol=1e-4, rtol=1e-4)


@interpreted
@pytest.mark.parametrize("normalised", [True, False])
def test_patch_merging(monkeypatch: pytest.MonkeyPatch, normalised: bool) -> None:
    norm = nn.LayerNorm(4 * 24) if normalised else None
    if norm is not None:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    x, offset = 3 + torch.randn(3, 6, 10, 24), torch.randint(0, 6, (3, 2))
    with torch.no_grad():
        fast, plain = both(monkeypatch, lambda: merge_patches(x, offset, norm))
    assert torch.allclose(fast, plain, atol=1e-5)


@interpreted
@pytest.mark.parametrize("normalised", [True, False])
def test_phases_of_patch_merging(monkeypatch: pytest.MonkeyPatch, normalised: bool) -> None:
    anchor, reduction, norm = MergeAnchor(sketch=16), nn.Linear(4 * 24, 48, bias=False), nn.LayerNorm(4 * 24)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(6, 8, 14, 24)
    fast, plain = both(monkeypatch, lambda: anchor.offset(x, reduction, norm if normalised else None, fast=True))
    assert torch.equal(fast, plain)


@interpreted
@pytest.mark.parametrize(("size", "score"), [
    ((14, 21), "signed"), ((14, 21), "energy"), ((56, 56), "signed"), ((28, 70), "energy"),
])  # fmt: skip
def test_offsets_of_windows(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], score: Any) -> None:
    anchor = WindowAnchor(score=score)
    x = torch.randn(2, *size, 16) + 1
    fast, plain = both(monkeypatch, lambda: anchor.offset(x, (7, 7), fast=True))
    assert torch.equal(fast, plain)
    assert plain.amax() > 0
