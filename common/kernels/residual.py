"""Tokens, what a layer adds to them, and the norm of the sum, in one pass; for inference. A compiler defers a sum, and
every pass that needs it reads all terms again."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .base import AVAILABLE, launch, next_power_of_2, operator, pieces

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import wrap

__all__ = ["add_norm", "fits_add_norm"]

ELEMENTS = 2048  # of a program


def fits_add_norm(x: Tensor, update: Tensor | None, gain: Tensor | None) -> bool:
    """Whether ``add_norm`` takes these: an update in half precision of tokens in the same or float32, contiguous, at
    most 2048 channels, in a graph that is compiled, and no gradient. Elsewhere torch's own two are launched sooner."""
    update = x if update is None else update
    half = update.dtype in (torch.bfloat16, torch.float16) and x.dtype in (update.dtype, torch.float32)
    plain = half and gain is not None and not isinstance(gain, DTensor)
    wanted = torch.compiler.is_compiling() and not torch.is_grad_enabled()
    return plain and wanted and x.is_contiguous() and update.is_contiguous() and 0 < x.shape[-1] <= 2048


if AVAILABLE:

    @triton.jit
    def _add_norm(x, update, gain, bias, origin, out, normed, count, height, width, CHANNELS: tl.constexpr,
                  PIECES: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PLACED: tl.constexpr, EPS: tl.constexpr,
                  K: tl.constexpr, T: tl.constexpr):  # fmt: skip
        """T tokens, in pieces of K channels: 96 are three of 32, with no thread idle."""
        i, c = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, K)
        keep = (i < count)[:, None] & (c < CHANNELS // PIECES)[None, :]
        place = i.to(tl.int64)[:, None] * CHANNELS + c[None, :]
        source = place
        if PLACED:
            image, h, w = i // (height * width), i // width % height, i % width
            h = wrap(h + tl.load(origin + 2 * image, i < count, 0).to(tl.int32), height)
            w = wrap(w + tl.load(origin + 2 * image + 1, i < count, 0).to(tl.int32), width)
            source = ((image * height + h) * width + w).to(tl.int64)[:, None] * CHANNELS + c[None, :]
        pieces, total, square = (), tl.zeros([T, K], tl.float32), tl.zeros([T, K], tl.float32)
        for n in tl.static_range(PIECES):
            t = tl.load(x + source + n * K, keep, 0.0).to(tl.float32)
            if ADD:
                t = (t + tl.load(update + place + n * K, keep, 0.0).to(tl.float32)).to(out.dtype.element_ty)
                tl.store(out + place + n * K, t, keep)
                t = t.to(tl.float32)
            total += t
            pieces = pieces + (t,)  # type: ignore[assignment]  # noqa: RUF005
        mean = (tl.sum(total, 1) / CHANNELS)[:, None]
        for n in tl.static_range(PIECES):
            t = tl.where(keep, pieces[n] - mean, 0.0)
            square += t * t
        scale = (1.0 / tl.sqrt(tl.sum(square, 1) / CHANNELS + EPS))[:, None]
        for n in tl.static_range(PIECES):
            t = (pieces[n] - mean) * scale * tl.load(gain + n * K + c, c < CHANNELS // PIECES, 0.0).to(tl.float32)
            if BIAS:
                t += tl.load(bias + n * K + c, c < CHANNELS // PIECES, 0.0).to(tl.float32)
            tl.store(normed + place + n * K, t.to(normed.dtype.element_ty), keep)


@operator("shift_vits::add_norm")
def add_norm(x: Tensor, update: Tensor | None, gain: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype,
             origin: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x + update (..., C), in x's type, and what a LayerNorm makes of it, in the type given. Without an update, nothing
    and the norm of x. With ``origin`` (B, 2) in [0, side), tokens x (B, H, W, C) begin there, on the torus."""
    out, normed = torch.empty_like(x) if update is not None else x.new_empty(0), torch.empty_like(x, dtype=dtype)
    channels = x.shape[-1]
    tokens, count, parts = max(1, ELEMENTS // next_power_of_2(channels)), x.numel() // channels, pieces(channels)
    height, width = (1, 1) if origin is None else x.shape[1:3]
    launch(_add_norm, (-(-count // tokens),), x, x if update is None else update, gain, gain if bias is None else bias,
           gain if origin is None else origin, out, normed, count, height, width, CHANNELS=channels, PIECES=parts,
           ADD=update is not None, BIAS=bias is not None, PLACED=origin is not None, EPS=eps,
           K=next_power_of_2(channels // parts), T=tokens, num_warps=4 if channels < 256 else 1)  # fmt: skip
    return out, normed
