"""The convolution that makes tokens of an image, or fewer tokens of tokens, shared by all architectures."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from .dispatch import guarded
from .roll import convolve, roll
from .strided import Strided
from .weights import is_plain

__all__ = ["embed", "embedded"]


def embedded(x: Tensor, packed: Tensor) -> Tensor:
    """Of an image and what an anchor reads of it, that which ``embed`` does: in training windows are read from the
    image itself."""
    return x if torch.is_grad_enabled() else packed


@guarded
def embed(conv: nn.Conv2d, x: Tensor, origin: Tensor | None = None, norm: nn.LayerNorm | None = None,
          direction: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``conv`` of an image or of tokens, read from ``origin`` (B, 2) in [0, side) on if there is one, channels-last,
    normalised by ``norm``; and with ``direction`` the tokens' moments (``ops.choice.moments``), where a kernel has them
    for little.

    With the few channels of an image a convolution is slow: where it can be, it is one matrix product of windows, which
    a GPU reads where they lie. Tokens with few channels too; others are rolled and padded in one pass, channels-last.

    Shapes: (B, C, H, W) -> (B, H/s, W/s, D), (B, 3, H/s, W/s) or None.
    """
    (k, _), (s, _), (p, _) = Strided.of(conv)
    circular, dtype = conv.padding_mode == "circular", kernels.product_dtype(x)
    plain = is_plain(conv) and (norm is None or is_plain(norm))
    if plain and 1 <= k - 2 * p <= s and kernels.fits_image_tokens(x, conv.weight, s, dtype):  # one window per cell
        x = kernels.packed(x, dtype) if k > s else x  # worth it where windows overlap
        weights = kernels.in_pieces(conv.weight.to(dtype), x, s)
        gain, shift, eps = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
        given = gain, shift, eps, direction, k, s, p, circular
        tokens, moments = kernels.image_tokens(x, origin, weights, conv.bias, *given)
        return tokens, None if direction is None else moments
    tokens = _convolve(conv, x, origin, circular) if is_plain(conv) else _called(conv, x, origin)
    if norm is not None:
        tokens = norm(tokens).to(tokens.dtype)  # autocast leaves float32: twice what a stage has to read and write
    compiled = torch.compiler.is_compiling()  # then moments are taken where they are needed, as tokens are normalised
    if direction is None or compiled or not kernels.usable(x) or tokens.dtype == torch.float64:
        return tokens, None
    return tokens, kernels.token_moments(tokens.detach().contiguous(), direction)


def _called(conv: nn.Conv2d, x: Tensor, origin: Tensor | None) -> Tensor:
    return convolve(conv, x if origin is None else roll(x, origin, within=True)).permute(0, 2, 3, 1)


def _convolve(conv: nn.Conv2d, x: Tensor, origin: Tensor | None, circular: bool) -> Tensor:
    (k, _), (s, _), (p, _) = Strided.of(conv)
    weight = conv.weight.flatten(1)
    if 1 <= k - 2 * p <= s and kernels.fits_image_windows(x, k, s):
        windows = kernels.image_windows(x, origin, k, s, p, circular, kernels.product_dtype(x))
        return F.linear(windows, F.pad(weight, (0, windows.shape[-1] - weight.shape[1])), conv.bias)
    tokens = x.permute(0, 2, 3, 1)
    if circular and x.shape[1] >= 16 and kernels.fits_roll_kernel(tokens):
        start = torch.zeros(len(x), 2, dtype=torch.long, device=x.device) if origin is None else origin
        tokens = tokens.to(kernels.product_dtype(x))
        if kernels.fits_convolved(tokens, conv.weight, s, p):
            weight = conv.weight.to(tokens).permute(0, 2, 3, 1).contiguous()
            return kernels.convolved(tokens, start, weight, conv.bias)
        x = kernels.rolled(tokens, start, p).permute(0, 3, 1, 2)
        return F.conv2d(x, conv.weight, conv.bias, conv.stride).permute(0, 2, 3, 1)
    if k != s or p:
        return _called(conv, x, origin)
    x = x if origin is None else roll(x, origin, within=True)
    b, c, h, w = x.shape
    x = x.view(b, c, h // s, s, w // s, s).permute(0, 2, 4, 1, 3, 5).reshape(b, h // s, w // s, -1)
    return F.linear(x, weight, conv.bias)
