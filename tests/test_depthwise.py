"""Depthwise convolutions and what goes with them: the kernel against its torch form, circular padding, circular maxima,
and the attention of pooled tokens.
"""

import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same_logits_by_kernels, interpreted, launches, randomize
from torch import Tensor, nn

from common.kernels import (
    depthwise_norm_kernel,
    fits_depthwise_kernel,
    fits_depthwise_norm,
    fits_pooled,
    fits_pooled_maximum,
    fits_positioned,
    pooled_maximum,
)
from common.models.registry import create_model
from common.ops.depthwise import _depthwise, depthwise
from common.ops.pooling import circular_max, pool_heads
from common.ops.roll import _CircularPad, circular_pad, convolve, roll
from common.ops.weights import normed_kernel_weights
from mvitv2.model import PoolingAttention


def plain_depthwise(x: Tensor, weight: Tensor, stride: int, circular: bool, origin: Tensor | None = None) -> Tensor:
    return _depthwise.reference(x, weight, stride, circular, origin)  # type: ignore[attr-defined]


@interpreted
@pytest.mark.parametrize("circular", [True, False], ids=["circular", "zeros"])
@pytest.mark.parametrize(("size", "channels", "stride", "sliced"), [
    ((4, 12), 64, 1, False),
    ((14, 6), 32, 2, True),  # a slice of wider tokens, read in place
    ((8, 8), 96, 4, True),
    ((7, 5), 33, 2, False),  # nothing divides
    ((1, 2), 40, 1, False),  # both neighbours are one token
    ((5, 6), 16, 3, False),
])  # fmt: skip
def test_depthwise_kernel(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], channels: int, stride: int,
                          sliced: bool, circular: bool) -> None:  # fmt: skip
    monkeypatch.setattr(sys.modules["common.kernels.depthwise"], "PROGRAMS", 4)  # several tiles for each of them
    x = torch.randn(3, *size, 3 * channels if sliced else channels, requires_grad=True)
    weight = torch.randn(3, 3, channels, requires_grad=True)
    tokens = x[..., channels : 2 * channels] if sliced else x
    assert fits_depthwise_kernel(tokens, weight.shape[:2])
    upstream = torch.randn(3, -(-size[0] // stride), -(-size[1] // stride), channels)

    def run(f) -> list[Tensor]:
        out = f(tokens, weight, stride, circular)
        return [out, *torch.autograd.grad(out, [x, weight], upstream)]

    whole = not circular or (size[0] % stride == 0 and size[1] % stride == 0)  # else gradients are the torch form's
    assert depthwise(tokens, weight, stride, circular).is_contiguous() == whole
    for fast, plain in zip(run(depthwise), run(plain_depthwise), strict=True):
        assert torch.allclose(fast, plain, atol=1e-4, rtol=1e-5)


@interpreted
@pytest.mark.parametrize(("size", "channels", "stride", "placed", "lead"), [
    ((4, 8), 64, 1, False, 0), ((6, 6), 96, 2, True, 1), ((7, 5), 33, 2, False, 3)
])  # fmt: skip
@torch.no_grad()
def test_depthwise_norm(size: tuple[int, int], channels: int, stride: int, placed: bool, lead: int) -> None:
    """What convolutions, norms and concatenations give, one after another; of tokens that lie behind those to be passed
    on, by one convolution or two at a time."""
    area = size[0] * size[1]
    first, x = torch.randn(3, lead + area, channels).split([lead, area], 1)
    norms = [randomize(nn.BatchNorm2d(channels, eps=1e-3)).eval() for _ in range(3)]
    convs = [nn.Conv2d(channels, channels, 3, groups=channels, bias=False) for _ in range(3)]
    x, weights = x.unflatten(1, size), normed_kernel_weights(convs, norms)
    origin = torch.tensor([[0, 1], [1, 0], [1, 1]]) if placed else None
    how = origin, stride, placed
    assert fits_depthwise_norm(x, convs, norms)
    for found, conv, norm in zip(
        [*depthwise_norm_kernel(x, first, weights[:1], *how), *depthwise_norm_kernel(x, first, weights[1:], *how)],
        convs, norms,
        strict=True,
    ):  # fmt: skip
        plain = plain_depthwise(x, conv.weight[:, 0].permute(1, 2, 0), stride, placed, origin)
        plain = norm(plain.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1, 2)
        assert torch.equal(found[:, :lead], first)
        assert torch.allclose(found, torch.cat([first, plain], 1), atol=1e-5, rtol=1e-5)


@interpreted
def test_pooled_is_for_inference() -> None:
    """Lost otherwise: gradients."""
    x, gain = torch.randn(1, 4, 4, 64), torch.ones(32)
    assert not fits_pooled(x, (3, 3), gain)
    assert not fits_pooled_maximum(x, 2)
    assert not fits_positioned(x)
    with torch.no_grad():
        assert fits_pooled(x, (3, 3), gain)
        assert not fits_pooled(x.double(), (3, 3), gain)
        assert not fits_pooled(x, (5, 5), gain)
        assert not fits_pooled(x, (3, 3), None)
        assert fits_pooled_maximum(x, 2)
        assert not fits_pooled_maximum(x, 4)
        assert fits_positioned(x)
        assert not fits_positioned(x.transpose(1, 2))
        assert not fits_positioned(x[..., :-1])


@interpreted
@torch.no_grad()
def test_pooled_maximum() -> None:
    """That of rolled tokens, to the bit, and nowhere lost: what is not a number."""
    x, origin = torch.randn(2, 6, 8, 40), torch.tensor([[1, 0], [5, 7]])
    rolled = roll(x, origin, (1, 2), within=True)
    assert torch.equal(pooled_maximum(x, origin), circular_max(circular_max(rolled, 2, 1), 2, 2))
    x[1, 2, 3, 4] = float("nan")
    rolled = roll(x, origin, (1, 2), within=True)
    lost = pooled_maximum(x, origin).isnan()
    assert torch.equal(lost, circular_max(circular_max(rolled, 2, 1), 2, 2).isnan())
    assert lost.any()


@interpreted
def test_depthwise_norm_is_for_inference() -> None:
    """Lost otherwise: gradients, and statistics that a norm gathers."""
    x, conv, norm = torch.randn(1, 4, 4, 16), nn.Conv2d(16, 16, 3, groups=16), nn.BatchNorm2d(16).eval()
    assert not fits_depthwise_norm(x, [conv], [norm])
    with torch.no_grad():
        assert fits_depthwise_norm(x, [conv], [norm])
        assert not fits_depthwise_norm(x, [nn.Conv2d(16, 16, 5, groups=16)], [norm])
        assert not fits_depthwise_norm(x, 2 * [conv], [norm, nn.BatchNorm2d(16, eps=1e-3).eval()])
        assert not fits_depthwise_norm(x, [conv], [norm.train()])
        for other in (nn.BatchNorm2d(16, track_running_stats=False), nn.BatchNorm2d(16, affine=False)):
            assert not fits_depthwise_norm(x, [conv], [other.eval()])


@interpreted
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("name", "calls"), [("cvt_micro", 12), ("mvitv2_micro", 20)])
def test_models_use_the_kernel(monkeypatch: pytest.MonkeyPatch, name: str, calls: int, adaptive: bool) -> None:
    """Every query, key and value of a model goes through a kernel, and its logits stay what they were."""
    launched = launches(monkeypatch, "depthwise", "folding", "pooling")
    model = create_model(name, adaptive=adaptive, anchors=()).eval()
    assert_same_logits_by_kernels(monkeypatch, model, launched, calls)


def test_plain_depthwise_is_the_convolution() -> None:
    """Weights trained in nn.Conv2d mean the same here; float64 is taken, too, and stays."""
    for mode in ("zeros", "circular"):
        conv = nn.Conv2d(6, 6, 5, stride=2, padding=2, groups=6, bias=False, padding_mode=mode).double()  # type: ignore[arg-type]
        x, weight = torch.randn(2, 8, 9, 6, dtype=torch.float64), conv.weight[:, 0].permute(1, 2, 0)
        assert not fits_depthwise_kernel(x, (3, 3))  # of its type
        assert not fits_depthwise_kernel(x.float(), (5, 5))
        expected = conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        assert torch.allclose(depthwise(x, weight, 2, mode == "circular"), expected)


def test_depthwise_under_autocast() -> None:
    """As F.conv2d: half precision inside, gradients of the weight in its own."""
    x, weight = torch.randn(2, 6, 6, 8), torch.randn(3, 3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = depthwise(x, weight, 1, True)
        assert depthwise(x.double(), weight.double(), 1, True).dtype == torch.float64
    assert out.dtype == torch.bfloat16
    (grad,) = torch.autograd.grad(out.float().sum(), weight)
    assert grad.dtype == torch.float32
    assert torch.allclose(out.float(), depthwise(x, weight, 1, True), atol=0.1)


@pytest.mark.parametrize("pad", [(1, 1, 1, 1), (2, 0, 0, 3), (4, 4, 3, 2), (0, 1, 0, 0)])
def test_circular_padding_by_index(pad: tuple[int, int, int, int]) -> None:
    """What a GPU does in one read is F.pad, with its gradient and the gradient of that."""
    x = torch.randn(2, 3, 3, 4, dtype=torch.float64, requires_grad=True)
    padded, expected = _CircularPad.apply(x, pad), F.pad(x, pad, mode="circular")
    assert torch.equal(padded, expected)
    upstream = torch.randn_like(expected)
    (grad,), (wanted,) = (torch.autograd.grad(y, x, upstream) for y in (padded, expected))
    assert torch.allclose(grad, wanted, atol=1e-14)
    assert torch.autograd.gradgradcheck(lambda t: _CircularPad.apply(t, pad).pow(3), x)


@pytest.mark.parametrize("pad", [(5, 6, 0, 1), (0, 0, 7, 2), (3, 3, 3, 3)])
def test_circular_padding_goes_around_as_often_as_it_must(pad: tuple[int, int, int, int]) -> None:
    """A wide kernel on a grid of few tokens: what F.pad refuses, and a GPU would take the gradient of by halves."""
    x = torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    left, right, top, bottom = pad
    tiled = x.repeat(1, 1, 9, 9)[..., 8 - top : 10 + bottom, 8 - left : 12 + right]
    padded = circular_pad(x, pad)
    with torch.no_grad():
        assert torch.equal(circular_pad(x, pad), tiled)
    assert torch.equal(padded, tiled)
    upstream = torch.randn_like(tiled)
    (grad,), (wanted,) = (torch.autograd.grad(y, x, upstream) for y in (padded, tiled))
    assert torch.allclose(grad, wanted, atol=1e-14)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_convolve_is_the_convolution(mode: str) -> None:
    conv = nn.Conv2d(3, 4, (3, 5), stride=2, padding=(1, 2), padding_mode=mode)  # type: ignore[arg-type]
    x = torch.randn(2, 3, 8, 10)
    assert torch.equal(convolve(conv, x), conv(x))


@pytest.mark.parametrize("stride", [2, 3, 4])
def test_circular_maximum(stride: int) -> None:
    """Max pooling of the skip on the torus, ties included: values as of a padded copy, whole gradients."""
    pad = stride // 2
    x = torch.randint(0, 5, (2, 12, 24, 3)).double().requires_grad_()
    pooled = circular_max(circular_max(x, stride, 1), stride, 2)
    padded = F.pad(x.permute(0, 3, 1, 2), (pad, pad, pad, pad), mode="circular")
    assert torch.equal(pooled, F.max_pool2d(padded, stride + 1, stride).permute(0, 2, 3, 1))
    (grad,) = torch.autograd.grad(pooled.sum(), x)
    assert torch.allclose(grad.sum(), torch.tensor(float(pooled.numel()), dtype=torch.float64))
    distinct = torch.randperm(12 * 12).double().view(1, 12, 12, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: circular_max(circular_max(t, stride, 1), stride, 2), distinct)


def test_positions_as_channels() -> None:
    """Attention with positions beside queries and keys is softmax(Q K^T / sqrt(d) + E) V + Q, E written out."""
    attn = PoolingAttention(dim=12, out_dim=12, size=(8, 12), num_heads=2, stride_q=1, stride_kv=2,
                            padding_mode="circular", circular=True).double()  # fmt: skip
    for table in (attn.rel_pos_h, attn.rel_pos_w):
        nn.init.normal_(table)
    x = torch.randn(2, 8, 12, 12, dtype=torch.float64)
    pools, norms = [attn.pool_q, attn.pool_k, attn.pool_v], [attn.norm_q, attn.norm_k, attn.norm_v]
    q, k, v = (t[..., :6] for t in pool_heads(attn.qkv(x), pools, norms, 2, None, attn.places))
    grid = q.unflatten(2, (8, 12))
    along_h = torch.einsum("bnhwd,hkd->bnhwk", grid, attn.rel_pos_h[attn.rows])
    along_w = torch.einsum("bnhwd,wkd->bnhwk", grid, attn.rel_pos_w[attn.columns])
    bias = (along_h[..., :, None] + along_w[..., None, :]).flatten(4).flatten(2, 3)  # B, heads, queries, keys
    out = (q @ k.transpose(-2, -1) / 6**0.5 + bias).softmax(-1) @ v + q
    assert torch.allclose(attn(x), attn.proj(out.transpose(1, 2).reshape(2, 8, 12, 12)), atol=1e-12)
