"""Attention inside the windows of a grid of tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from .dispatch import op
from .roll import roll

__all__ = ["attend", "attend_in_windows", "partition", "reverse"]


def partition(x: Tensor, window: tuple[int, int]) -> Tensor:
    """(B, H, W, C) -> (B, windows, tokens, C), windows and tokens in row-major order."""
    b, h, w, c = x.shape
    x = x.view(b, h // window[0], window[0], w // window[1], window[1], c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(b, -1, window[0] * window[1], c)


def reverse(x: Tensor, window: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """(B, windows, tokens, C) -> (B, H, W, C): the inverse of ``partition``."""
    b, _, _, c = x.shape
    x = x.view(b, size[0] // window[0], size[1] // window[1], window[0], window[1], c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(b, *size, c)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, *, dropout: float = 0.0) -> Tensor:
    """softmax(q k^T + bias) v inside windows: (B, windows, heads, tokens, d) each -> (B, windows, tokens, heads d).

    ``bias`` (heads, tokens, tokens) is added for every window, ``mask`` (windows, tokens, tokens) for every head.
    Written out, not through ``scaled_dot_product_attention``: its fused kernels take no bias of 49 columns, and what is
    left computes half precision in float32.
    """
    b, windows, heads, n, d = q.shape
    bias = bias if mask is None else bias + mask[:, None]
    weights = (q @ k.transpose(-2, -1) + bias).softmax(-1)
    x = F.dropout(weights, dropout).to(v.dtype) @ v
    return x.transpose(2, 3).reshape(b, windows, n, heads * d)


def _fits(qkv: Tensor, bias: Tensor, scale: Tensor | None, window: tuple[int, int], shift: tuple[int, int],
          mask: Tensor | None, origin: Tensor | None = None, *, dropout: float = 0.0) -> bool:  # fmt: skip
    return not dropout and kernels.fits_window_kernel(qkv, window)


def _kernel(qkv: Tensor, bias: Tensor, scale: Tensor | None, window: tuple[int, int], shift: tuple[int, int],
            mask: Tensor | None, origin: Tensor | None = None, *, dropout: float = 0.0) -> Tensor:  # fmt: skip
    return kernels.window_attention(qkv.contiguous(), bias.float().contiguous(),
                                    None if scale is None else scale.float(), origin, list(window), list(shift),
                                    mask is not None)  # fmt: skip


@op(kernel=_kernel, fits=_fits)
def attend_in_windows(qkv: Tensor, bias: Tensor, scale: Tensor | None, window: tuple[int, int], shift: tuple[int, int],
                      mask: Tensor | None, origin: Tensor | None = None, *,
                      dropout: float = 0.0) -> Tensor:  # fmt: skip
    """Attention inside the windows of an image rolled by ``-shift``.

    softmax(q k^T / sqrt(d) + bias) v or, with ``scale`` (heads,), softmax(scale cos(q, k) + bias) v. ``mask`` is that
    of ``shifted_window_mask``. ``origin`` (B, 2) is where each image's first window begins, if not at (0, 0).

    Shapes: qkv (B, H, W, 3, heads, d) with whole windows, bias (heads, n, n) -> (B, H, W, heads d).
    """
    b, h, w, _, heads, d = qkv.shape
    x, start, moved = qkv.flatten(3), origin, any(shift)
    if start is not None:
        start = torch.stack([start[:, i] + shift[i] for i in (0, 1)], 1) if moved else start
        x = roll(x, start, (1, 2), within=not moved)
    elif moved:
        x = x.roll((-shift[0], -shift[1]), (1, 2))
    x = partition(x, window)
    q, k, v = x.view(b, -1, window[0] * window[1], 3, heads, d).permute(3, 0, 1, 4, 2, 5).unbind(0)
    if scale is None:
        q = q * d**-0.5
    else:  # torch's default eps is zero in float16
        q, k = (F.normalize(t, dim=-1, eps=1e-6) for t in (q, k))
        q = q * scale[:, None, None]
    x = reverse(attend(q.to(v.dtype), k.to(v.dtype), v, bias, mask, dropout=dropout), window, (h, w))
    if start is not None:
        return roll(x, -start, (1, 2))
    return x.roll(shift, (1, 2)) if moved else x
