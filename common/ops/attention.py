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
    qkv = qkv.reshape(b, h // rows, rows, w // columns, columns, 3, heads, d)
    added = bias if mask is None else bias + mask[:, None]
    traced = torch.is_grad_enabled() or torch.compiler.is_compiling()  # ONNX knows no fused kernel
    if qkv.device.type == "cpu" and not traced and not dropout and qkv.dtype == added.dtype:
        q, k, v = qkv.permute(5, 0, 1, 3, 6, 2, 4, 7).reshape(3, -1, heads, rows * columns, d).unbind()
        x = _attend_on_cpu(q, k, v, added, scale)
    else:
        q, k, v = qkv.unbind(5)
        x = _attend(q, k, v, added, scale, dropout)
    x = x.view(b, h // rows, w // columns, heads, rows, columns, d)
    x = x.permute(0, 1, 4, 2, 5, 3, 6).reshape(b, h, w, heads * d)
    if start is not None:
        return roll(x, -start, (1, 2))
    return x.roll(shift, (1, 2)) if moved else x


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: Tensor | None, dropout: float) -> Tensor:
    """Of q, k and v (B, windows down, rows, windows across, columns, heads, d): (B, windows, heads, n, d). Written out,
    as fused kernels of GPUs take no bias of 49 columns, and what torch has left computes half precision in float32."""
    heads, d = q.shape[5:]
    n = q.shape[2] * q.shape[4]
    q, v = (t.permute(0, 1, 3, 5, 2, 4, 6).reshape(len(t), -1, heads, n, d) for t in (q, v))
    k = k.permute(0, 1, 3, 5, 6, 2, 4).reshape(len(k), -1, heads, d, n)  # a product with k^T: slow on some CPUs
    if scale is None:
        q = q * d**-0.5
    else:  # torch's default eps is zero in float16
        q, k = (F.normalize(t, dim=dim, eps=1e-6).to(v.dtype) for t, dim in ((q, -1), (k, -2)))
        q = (q * scale[:, None, None]).to(v.dtype)
    return F.dropout((q @ k + bias).softmax(-1), dropout).to(v.dtype) @ v


def _attend_on_cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: Tensor | None) -> Tensor:
    """Of q, k and v (B windows, heads, n, d), in inference: torch's fused kernel takes half to three quarters of the
    time."""
    bias = bias[None] if bias.ndim == 3 else bias.repeat(q.shape[0] // bias.shape[0], 1, 1, 1)
    if scale is None:
        return F.scaled_dot_product_attention(q, k, v, bias)
    q, k = (F.normalize(t, dim=-1, eps=1e-6) for t in (q, k))
    return F.scaled_dot_product_attention(q * scale[:, None, None], k, v, bias, scale=1.0)
