"""Windows on a grid of tokens, for Swin and SwinV2: partition, its inverse, relative positions, shifts, the mask."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from ..shifts import roll

__all__ = [
    "attend",
    "attend_in_windows",
    "in_whole_windows",
    "partition",
    "relative_position_index",
    "reverse",
    "shifted_window_mask",
    "window_shift",
]


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


def relative_position_index(window: tuple[int, int]) -> Tensor:
    """(tokens, tokens) rows, for the place of token i relative to token j, in a table of all relative positions."""
    grid = torch.stack(torch.meshgrid(*(torch.arange(side) for side in window), indexing="ij"), -1).flatten(0, 1)
    relative = grid[:, None] - grid[None, :] + torch.tensor(window) - 1
    return relative[..., 0] * (2 * window[1] - 1) + relative[..., 1]


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


def window_shift(size: tuple[int, int], window: tuple[int, int]) -> tuple[int, int]:
    """By how much shifted windows move: half a window, but not at all on an axis that is a single window."""
    shift_h, shift_w = (0 if side <= w else w // 2 for side, w in zip(size, window, strict=True))
    return shift_h, shift_w


def shifted_window_mask(size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int],
                        device: torch.device) -> Tensor | None:  # fmt: skip
    """(windows, tokens, tokens), -100 where two tokens of a shifted window come from opposite edges of the array.

    None where nothing is shifted. ``size`` is rounded up to whole windows, as ``in_whole_windows`` pads.
    """
    if not any(shift):
        return None
    region = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    for dim, (side, w, s) in enumerate(zip(size, window, shift, strict=True), 1):
        side += -side % w
        i = torch.arange(side, device=device)
        band = (i >= side - w).long() + (i >= side - s).long() if s else torch.zeros_like(i)
        region = region + 3 ** (dim - 1) * band.view([-1 if d == dim else 1 for d in range(4)])
    region = partition(region, window)[0, :, :, 0]  # windows, tokens
    return (region[:, :, None] != region[:, None, :]) * -100.0


def attend_in_windows(qkv: Tensor, bias: Tensor, scale: Tensor | None, window: tuple[int, int], shift: tuple[int, int],
                      mask: Tensor | None, origin: Tensor | None = None, *,
                      dropout: float = 0.0) -> Tensor:  # fmt: skip
    """Attention inside the windows of an image rolled by ``-shift``: one kernel where there is one, else step by step.

    softmax(q k^T / sqrt(d) + bias) v or, with ``scale`` (heads,), softmax(scale cos(q, k) + bias) v. ``mask`` is that
    of ``shifted_window_mask``. ``origin`` (B, 2) is where each image's first window begins, if not at (0, 0).

    Shapes: qkv (B, H, W, 3, heads, d) with whole windows, bias (heads, n, n) -> (B, H, W, heads d).
    """
    if not dropout and kernels.fits_window_kernel(qkv, window):
        return kernels.window_attention(qkv.contiguous(), bias.float().contiguous(),
                                        None if scale is None else scale.float(), origin, list(window), list(shift),
                                        mask is not None)  # fmt: skip
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


def in_whole_windows(attention: Callable[..., Tensor], x: Tensor, window: tuple[int, int], *args: Any) -> Tensor:
    """``attention(x, ...)`` for (B, H, W, C); sides that are no multiple of the window are zero-padded and cropped."""
    height, width = x.shape[1:3]
    pad_h, pad_w = (-side % w for side, w in zip((height, width), window, strict=True))
    if not (pad_h or pad_w):
        return attention(x, *args)
    return attention(F.pad(x, (0, 0, 0, pad_w, 0, pad_h)), *args)[:, :height, :width]
