"""The convolution that makes tokens of an image, or fewer tokens of tokens, shared by all architectures."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from .dispatch import op, product_dtype
from .roll import convolve, roll
from .strided import Strided
from .weights import is_plain

__all__ = ["embed", "embedded"]


def embedded(x: Tensor, packed: Tensor) -> Tensor:
    """Of an image and what an anchor reads of it, that which ``embed`` does: in training windows are read from the
    image itself."""
    return x if torch.is_grad_enabled() else packed


def _fits(x: Tensor, conv: nn.Conv2d, origin: Tensor | None = None, norm: nn.LayerNorm | None = None,
          direction: Tensor | None = None) -> bool:  # fmt: skip
    return is_plain(conv) and x.dtype != torch.float64


def _embed(x: Tensor, conv: nn.Conv2d, origin: Tensor | None = None, norm: nn.LayerNorm | None = None,
           direction: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Where windows do not overlap too far, all in one kernel that reads them where they lie; else tokens, then their
    norm and moments."""
    (k, _), (s, _), (p, _) = Strided.of(conv)
    dtype, plain = product_dtype(x), norm is None or is_plain(norm)
    if plain and 1 <= k - 2 * p <= s and kernels.fits_image_tokens(x, conv.weight, s, dtype):  # one window per cell
        x = kernels.packed(x, dtype) if k > s else x  # worth it where windows overlap
        weights = kernels.in_pieces(conv.weight.to(dtype), x, s)
        gain, shift, eps = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
        given = gain, shift, eps, direction, k, s, p, conv.padding_mode == "circular"
        tokens, moments = kernels.image_tokens(x, origin, weights, conv.bias, *given)
        return tokens, None if direction is None else moments
    tokens = _normed(_convolve(x, conv, origin), norm)
    compiled = torch.compiler.is_compiling()  # then moments are taken where they are needed, as tokens are normalised
    if direction is None or compiled:
        return tokens, None
    return tokens, kernels.token_moments(tokens.detach().contiguous(), direction)


def _convolve(x: Tensor, conv: nn.Conv2d, origin: Tensor | None) -> Tensor:
    """A product of an image's windows, which are read where they lie, or a convolution of tokens that are rolled and
    padded in one pass, channels-last."""
    (k, _), (s, _), (p, _) = Strided.of(conv)
    circular, weight = conv.padding_mode == "circular", conv.weight.flatten(1)
    if 1 <= k - 2 * p <= s and kernels.fits_image_windows(x, k, s):
        windows = kernels.image_windows(x, origin, k, s, p, circular, product_dtype(x))
        return F.linear(windows, F.pad(weight, (0, windows.shape[-1] - weight.shape[1])), conv.bias)
    tokens = x.permute(0, 2, 3, 1)
    if circular and x.shape[1] >= 16 and kernels.fits_roll_kernel(tokens):
        start = torch.zeros(x.shape[0], 2, dtype=torch.long, device=x.device) if origin is None else origin
        tokens = tokens.to(product_dtype(x))
        if kernels.fits_convolved(tokens, conv.weight, s, p):
            weight = conv.weight.to(tokens).permute(0, 2, 3, 1).contiguous()
            return kernels.convolved(tokens, start, weight, conv.bias)
        x = kernels.rolled(tokens, start, p).permute(0, 3, 1, 2)
        return F.conv2d(x, conv.weight, conv.bias, conv.stride).permute(0, 2, 3, 1)
    return _tokens(x, conv, origin)


@op(kernel=_embed, fits=_fits)
def embed(x: Tensor, conv: nn.Conv2d, origin: Tensor | None = None, norm: nn.LayerNorm | None = None,
          direction: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Tokens norm(conv(x)) of an image or of tokens (eq. token), read from ``origin`` (B, 2) in [0, side) on if there
    is one; and with ``direction`` their moments (``ops.choice.moments``), where a kernel has them for little.

    Shapes: (B, C, H, W) -> (B, H/s, W/s, D), (B, 3, H/s, W/s) or None.
    """
    return _normed(_tokens(x, conv, origin), norm), None


def _tokens(x: Tensor, conv: nn.Conv2d, origin: Tensor | None) -> Tensor:
    """With the few channels of an image a convolution is slow: where patches do not overlap, they are multiplied."""
    (k, _), (s, _), (p, _) = Strided.of(conv)
    x = x if origin is None else roll(x, origin, within=True)
    if k != s or p or not is_plain(conv):
        return convolve(conv, x).permute(0, 2, 3, 1)
    b, c, h, w = x.shape
    patches = x.view(b, c, h // s, s, w // s, s).permute(0, 2, 4, 1, 3, 5).reshape(b, h // s, w // s, -1)
    return F.linear(patches, conv.weight.flatten(1), conv.bias)


def _normed(tokens: Tensor, norm: nn.LayerNorm | None) -> Tensor:
    return tokens if norm is None else norm(tokens).to(tokens.dtype)  # autocast's float32 is twice as much to read
