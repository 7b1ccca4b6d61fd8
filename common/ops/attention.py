"""Attention inside the windows of a grid of tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from .dispatch import op
from .roll import roll

__all__ = ["attend_in_windows"]


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
    (b, h, w, _, heads, d), (rows, columns) = qkv.shape, window
    start, moved = origin, any(shift)
    if start is not None:
        start = torch.stack([start[:, i] + shift[i] for i in (0, 1)], 1) if moved else start
        qkv = roll(qkv.flatten(3), start, (1, 2), within=not moved)
    elif moved:
        qkv = qkv.roll((-shift[0], -shift[1]), (1, 2))
    q, k, v = qkv.reshape(b, h // rows, rows, w // columns, columns, 3, heads, d).unbind(5)
    if scale is not None:  # torch's default eps is zero in float16
        q, k = (F.normalize(t, dim=-1, eps=1e-6).to(v.dtype) for t in (q, k))
    q, v = (t.permute(0, 1, 3, 5, 2, 4, 6).reshape(b, -1, heads, rows * columns, d) for t in (q, v))
    k = k.permute(0, 1, 3, 5, 6, 2, 4).reshape(b, -1, heads, d, rows * columns)  # a product with k^T: slow on some CPUs
    q = q * d**-0.5 if scale is None else (q * scale[:, None, None]).to(v.dtype)
    # written out: the fused kernels of scaled_dot_product_attention take no bias of 49 columns, and what is left
    # computes half precision in float32
    weights = (q @ k + (bias if mask is None else bias + mask[:, None])).softmax(-1)
    x = (F.dropout(weights, dropout).to(v.dtype) @ v).view(b, h // rows, w // columns, heads, rows, columns, d)
    x = x.permute(0, 1, 4, 2, 5, 3, 6).reshape(b, h, w, heads * d)
    if start is not None:
        return roll(x, -start, (1, 2))
    return x.roll(shift, (1, 2)) if moved else x
