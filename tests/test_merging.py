"""Patch merging at an offset: the kernels and their gradients against the torch form."""

import sys
from copy import deepcopy
from typing import Any

import pytest
import torch
from conftest import interpreted, launches, lively, pairs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common import kernels
from common.models.registry import create_model
from common.ops import merge_patches

merging = sys.modules["common.kernels.merging"]

PHASES = [(0, 0), (0, 1), (1, 0), (1, 1)]
FAR = [(5, 9), (4, 7), (0, 9), (3, 2)]  # of 6 x 10 tokens: whole turns less one, both parities


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the merging kernels that ran, in turn."""
    return launches(monkeypatch, "merging", "merge_product")


@interpreted
@pytest.mark.parametrize("channels", [1, 3, 20, 96, 600])
def test_every_token_gets_its_own_gradient(channels: int) -> None:
    """Without a norm a patch is its tokens, so their gradients are the patches' to the bit, wherever it begins."""
    x = torch.randn(12, 4, 6, channels, requires_grad=True)
    offset = torch.tensor([(h, w) for h in range(4) for w in range(0, 6, 2)])
    out = kernels.rolled_merge(x, offset, None, None, 0.0, torch.float32)
    (grad,) = torch.autograd.grad(out, x, out.detach())
    assert torch.equal(grad, x)


@interpreted
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("dtype", "out_dtype"), [
    (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
])  # fmt: skip
def test_gradients_in_half_precision(dtype: torch.dtype, out_dtype: torch.dtype, normalised: bool) -> None:
    """Only what is read and written is rounded, as under autocast; each gradient has the type of its tensor."""
    norm = lively(nn.LayerNorm(4 * 20)) if normalised else None
    x, offset = torch.randn(2, 4, 6, 20).to(dtype).requires_grad_(), torch.tensor([(1, 3), (2, 4)])
    weights = [] if norm is None else [norm.weight, norm.bias]
    out = kernels.rolled_merge(x, offset, *(weights or (None, None)), 1e-5, out_dtype)
    upstream = torch.randn(out.shape).to(out_dtype)
    exact, double = x.detach().double().requires_grad_(), None if norm is None else deepcopy(norm).double()
    expected = merge_patches(exact, offset, double)
    grads = torch.autograd.grad(expected, [exact, *([] if double is None else double.parameters())], upstream.double())
    assert out.dtype == out_dtype
    assert torch.allclose(out.double(), expected, atol=1e-5, rtol=2**-7)
    for tensor, grad, wanted in zip(
        [x, *weights], torch.autograd.grad(out, [x, *weights], upstream), grads, strict=True
    ):
        assert grad.dtype == tensor.dtype
        assert torch.allclose(grad.double(), wanted, atol=1e-5, rtol=1e-5 if tensor.dtype == torch.float32 else 2**-7)


@interpreted
def test_gradients_where_only_some_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen backbone or a frozen norm; a gradient whose elements lie in another order."""
    norm, offset = lively(nn.LayerNorm(4 * 8)), torch.tensor([(1, 2), (0, 3)])
    x = torch.randn(2, 4, 4, 8)

    def run() -> list[Tensor]:
        out = merge_patches(x, offset, norm)
        learned = torch.autograd.grad(out.transpose(1, 2).square().sum(), list(norm.parameters()))
        tokens = x.clone().requires_grad_()
        frozen = merge_patches(tokens, offset, norm.requires_grad_(False)).permute(0, 3, 1, 2)
        norm.requires_grad_()
        return [*learned, *torch.autograd.grad(frozen, tokens, torch.arange(256.0).view(2, 32, 2, 2))]

    for fast, plain in pairs(monkeypatch, run):
        assert torch.allclose(fast, plain, atol=1e-4, rtol=1e-4)


@interpreted
@pytest.mark.parametrize("normalised", [True, False])
def test_gradients_of_a_recomputed_pass(normalised: bool) -> None:
    """Activation checkpointing calls the kernel twice and changes nothing."""
    norm = lively(nn.LayerNorm(4 * 12)) if normalised else None
    x, offset = torch.randn(2, 4, 6, 12, requires_grad=True), torch.tensor([(3, 1), (2, 5)])
    inputs = [x, *([] if norm is None else norm.parameters())]
    kept = torch.autograd.grad(merge_patches(x, offset, norm).square().sum(), inputs)
    again = checkpoint(merge_patches, x, offset, norm, use_reentrant=False)
    for one, other in zip(kept, torch.autograd.grad(again.square().sum(), inputs), strict=True):
        assert torch.equal(one, other)


@interpreted
@pytest.mark.parametrize("name", ["a_swin_micro", "a_swinv2_micro"])
def test_models_learn_through_the_kernel(monkeypatch: pytest.MonkeyPatch, launched: list[str], name: str) -> None:
    """Every merging of a model in training takes the kernel, forward and backward; all parameters learn the same."""
    model: Any = create_model(name).train()
    x, merges = torch.randn(1, 3, 32, 32), len(model.layers) - 1

    def run() -> list[Tensor]:
        logits = model(x)
        return [logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]

    fast = run()
    again = ["_rolled_merge", "_rolled_merge_backward"]  # patches are made again, not remembered
    assert launched == ["_rolled_merge"] * merges + again * merges
    monkeypatch.setattr(kernels, "fits_merge_kernel", lambda x: False)  # the other kernels stay as they are
    for one, other in zip(fast, run(), strict=True):
        assert torch.allclose(one, other, atol=1e-4, rtol=1e-3)
    assert len(launched) == 3 * merges > 0


@interpreted
def test_what_the_kernel_leaves_to_torch() -> None:
    """Odd sides, float64, other strides, no image at all, a norm that has no weights."""
    x = torch.randn(2, 4, 6, 8)
    assert kernels.fits_merge_kernel(x)
    for other in (x[:, :3], x.double(), x.transpose(1, 2), x[:0], torch.randn(1, 2, 2, 2049)):
        assert not kernels.fits_merge_kernel(other)
    merged = merge_patches(
        x, torch.ones(1, 2, dtype=torch.long).expand(2, 2), nn.LayerNorm(32, elementwise_affine=False)
    )
    assert torch.allclose(merged.mean(-1), torch.zeros(2, 2, 3), atol=1e-6)


@interpreted
def test_one_offset_for_all() -> None:
    """An expanded offset has no row per image in memory."""
    x, offset = torch.randn(3, 4, 6, 8, requires_grad=True), torch.tensor([1, 2]).expand(3, 2)
    out = kernels.rolled_merge(x, offset, None, None, 0.0, torch.float32)
    assert torch.equal(out, merge_patches(x.roll((-1, -2), (1, 2))))
    assert torch.equal(torch.autograd.grad(out, x, out.detach())[0], x)
