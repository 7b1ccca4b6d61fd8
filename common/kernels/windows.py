"""Attention inside shifted windows, read from and written to the image in one pass: nothing is rolled, partitioned or
permuted, and no matrix of weights is written out; forward and backward."""

from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd

from .base import AVAILABLE, INTERPRETED, launch, next_power_of_2, operator

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import wrap

__all__ = ["fits_window_kernel", "window_attention"]

GROUP, PROGRAMS = 3, 1024  # heads that a program takes one after another, where so many programs are left


def fits_window_kernel(qkv: Tensor, window: tuple[int, int]) -> bool:
    """Whether ``window_attention`` takes these: half precision, whole windows of at most 64 tokens, heads of 16-64."""
    _, height, width, _, _, d = qkv.shape
    half = qkv.dtype in (torch.bfloat16, torch.float16) or INTERPRETED
    whole = height % window[0] == 0 and width % window[1] == 0
    return half and whole and window[0] * window[1] <= 64 and d in (16, 32, 64)


if AVAILABLE:

    @triton.jit
    def _window_rows(index, t, top, left, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WH: tl.constexpr,
                     WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr):  # fmt: skip
        """Tokens t of window ``index`` of a batch, whose images begin at ``top`` and ``left``: their rows in the image,
        and a number per region of the mask."""
        across = WIDTH // WW
        windows = (HEIGHT // WH) * across
        image, window = index // windows, index % windows
        h = (window // across) * WH + t // WW  # places in the image rolled by the shift
        w = (window % across) * WW + t % WW
        y, z = wrap(wrap(h + SH, HEIGHT) + top, HEIGHT), wrap(wrap(w + SW, WIDTH) + left, WIDTH)
        row = image.to(tl.int64) * (HEIGHT * WIDTH) + (y * WIDTH + z)
        band_h = (h >= HEIGHT - WH).to(tl.int32) + (h >= HEIGHT - SH).to(tl.int32)
        band_w = (w >= WIDTH - WW).to(tl.int32) + (w >= WIDTH - SW).to(tl.int32)
        return row, 3 * band_h + band_w

    @triton.jit
    def _unit(x):
        """Rows of unit length, and one over their length."""
        inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-6)
        return x * inverse[:, None], inverse

    @triton.jit
    def _weights(q, k, bias, scale, region, t, N: tl.constexpr, MASKED: tl.constexpr):
        """softmax(scale q k^T + bias), and q k^T."""
        cosine = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = cosine * scale + bias
        if MASKED:
            s += tl.where(region[:, None] == region[None, :], 0.0, -100.0)
        s = tl.where((t < N)[None, :], s, float("-inf"))
        p = tl.exp(s - tl.max(s, 1)[:, None])
        return p / tl.sum(p, 1)[:, None], cosine

    @triton.jit
    def _attention_forward(qkv, bias, scale, origin, out, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
                           HEADS: tl.constexpr, D: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr,
                           SW: tl.constexpr, MASKED: tl.constexpr, COSINE: tl.constexpr, PLACED: tl.constexpr,
                           T: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
        """A window, and some of its heads: where its tokens are is found once for all."""
        N: tl.constexpr = WH * WW
        t, d = tl.arange(0, T), tl.arange(0, D)
        top, left = 0, 0
        if PLACED:  # read here: of what a function reads, a compiler would think that the kernel may write to it
            image = tl.program_id(0) // ((HEIGHT // WH) * (WIDTH // WW))
            top, left = tl.load(origin + 2 * image).to(tl.int32), tl.load(origin + 2 * image + 1).to(tl.int32)
        row, region = _window_rows(tl.program_id(0), t, top, left, HEIGHT, WIDTH, WH, WW, SH, SW)
        keep = (t < N)[:, None]
        first = qkv + row[:, None] * (3 * HEADS * D) + d[None, :]
        target = out + row[:, None] * (HEADS * D) + d[None, :]
        for head in range(tl.program_id(1) * GROUP, tl.program_id(1) * GROUP + GROUP):
            place = first + head * D
            q, k, v = (tl.load(place, keep, 0.0), tl.load(place + HEADS * D, keep, 0.0),
                       tl.load(place + 2 * HEADS * D, keep, 0.0))  # fmt: skip
            if COSINE:
                q = _unit(q.to(tl.float32))[0].to(v.dtype)
                k = _unit(k.to(tl.float32))[0].to(v.dtype)
            b = tl.load(bias + head * N * N + t[:, None] * N + t[None, :], keep & (t < N)[None, :], 0.0)
            factor = tl.load(scale + head) if COSINE else D**-0.5
            p, _ = _weights(q, k, b, factor, region, t, N, MASKED)
            o = tl.dot(p.to(v.dtype), v, input_precision="ieee")
            tl.store(target + head * D, o.to(v.dtype), keep)

    @triton.jit
    def _attention_backward(qkv, bias, scale, origin, grad, grad_qkv, grad_bias, grad_scale, count,
                            HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
                            WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
                            MASKED: tl.constexpr, COSINE: tl.constexpr, PLACED: tl.constexpr,
                            T: tl.constexpr):  # fmt: skip
        N: tl.constexpr = WH * WW
        part, parts, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
        t, d = tl.arange(0, T), tl.arange(0, D)
        keep = (t < N)[:, None]
        square = keep & (t < N)[None, :]
        factor = tl.load(scale + head) if COSINE else D**-0.5
        b = tl.load(bias + head * N * N + t[:, None] * N + t[None, :], square, 0.0)
        sum_bias = tl.zeros([T, T], tl.float32)
        sum_scale = tl.zeros([T], tl.float32)
        top, left = 0, 0
        if PLACED:
            image = part // ((HEIGHT // WH) * (WIDTH // WW))
            top, left = tl.load(origin + 2 * image).to(tl.int32), tl.load(origin + 2 * image + 1).to(tl.int32)
        for index in range(part, count, parts):  # many windows, one sum: no atomics, the same bits always
            row, region = _window_rows(index, t, top, left, HEIGHT, WIDTH, WH, WW, SH, SW)
            if PLACED:  # of the next window: else its tokens could not be on their way while this one is computed
                image = tl.minimum(index + parts, count - 1) // ((HEIGHT // WH) * (WIDTH // WW))
                top, left = tl.load(origin + 2 * image).to(tl.int32), tl.load(origin + 2 * image + 1).to(tl.int32)
            place = row[:, None] * (3 * HEADS * D) + head * D + d[None, :]
            q, k, v = (tl.load(qkv + place, keep, 0.0), tl.load(qkv + place + HEADS * D, keep, 0.0),
                       tl.load(qkv + place + 2 * HEADS * D, keep, 0.0))  # fmt: skip
            g = tl.load(grad + row[:, None] * (HEADS * D) + head * D + d[None, :], keep, 0.0)
            if COSINE:
                unit_q, inverse_q = _unit(q.to(tl.float32))
                unit_k, inverse_k = _unit(k.to(tl.float32))
                q, k = unit_q.to(v.dtype), unit_k.to(v.dtype)
            p, cosine = _weights(q, k, b, factor, region, t, N, MASKED)
            p = tl.where(square, p, 0.0)
            dp = tl.dot(g, tl.trans(v), input_precision="ieee")
            ds = p * (dp - tl.sum(p * dp, 1)[:, None])
            sum_bias += ds
            half_p, half_ds = p.to(v.dtype), ds.to(v.dtype)
            dv = tl.dot(tl.trans(half_p), g, input_precision="ieee")
            dq = tl.dot(half_ds, k, input_precision="ieee") * factor
            dk = tl.dot(tl.trans(half_ds), q, input_precision="ieee") * factor
            if COSINE:
                sum_scale += tl.sum(ds * cosine, 1)
                dq = (dq - unit_q * tl.sum(unit_q * dq, 1)[:, None]) * inverse_q[:, None]
                dk = (dk - unit_k * tl.sum(unit_k * dk, 1)[:, None]) * inverse_k[:, None]
            tl.store(grad_qkv + place, dq.to(v.dtype), keep)
            tl.store(grad_qkv + place + HEADS * D, dk.to(v.dtype), keep)
            tl.store(grad_qkv + place + 2 * HEADS * D, dv.to(v.dtype), keep)
        target = part * HEADS + head
        tl.store(grad_bias + target * N * N + t[:, None] * N + t[None, :], sum_bias, square)
        tl.store(grad_scale + target, tl.sum(sum_scale, 0))


@operator("shift_vits::window_attention")
def window_attention(qkv: Tensor, bias: Tensor, scale: Tensor | None, origin: Tensor | None, window: list[int],
                     shift: list[int], masked: bool) -> Tensor:  # fmt: skip
    """softmax(q k^T / sqrt(d) + bias) v inside the windows of an image rolled by ``-shift``, in the image's own order.

    With ``scale``, cosine attention: softmax(scale cos(q, k) + bias) v. With ``origin``, each image has its own first
    window there. ``masked`` keeps apart what meets only across the border.

    Shapes: qkv (B, H, W, 3, heads, d), bias (heads, n, n) and scale (heads,) in float32, origin (B, 2), whole numbers
    in [0, side) -> (B, H, W, heads d).
    """
    b, h, w, _, heads, d = qkv.shape
    out = torch.empty((b, h, w, heads * d), dtype=qkv.dtype, device=qkv.device)
    windows = b * (h // window[0]) * (w // window[1])
    group = GROUP if heads % GROUP == 0 and windows * heads >= PROGRAMS * GROUP else 1
    launch(_attention_forward, (windows, heads // group), qkv, bias, bias if scale is None else scale,
           bias if origin is None else origin, out, GROUP=group, num_stages=1,
           **_constants(qkv, scale, origin, window, shift, masked))  # fmt: skip
    return out


@operator("shift_vits::window_attention_backward")
def window_attention_backward(grad: Tensor, qkv: Tensor, bias: Tensor, scale: Tensor | None, origin: Tensor | None,
                              window: list[int], shift: list[int],
                              masked: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    b, h, w, _, heads, _ = qkv.shape
    count = b * (h // window[0]) * (w // window[1])
    n, parts = window[0] * window[1], min(count, max(1, 2048 // heads))
    grad_qkv = torch.empty_like(qkv)
    grad_bias = torch.empty((parts, heads, n, n), dtype=torch.float32, device=qkv.device)
    grad_scale = torch.empty((parts, heads), dtype=torch.float32, device=qkv.device)
    launch(_attention_backward, (parts, heads), qkv, bias, bias if scale is None else scale,
            bias if origin is None else origin, grad, grad_qkv, grad_bias, grad_scale, count,
            **_constants(qkv, scale, origin, window, shift, masked))  # fmt: skip
    return grad_qkv, grad_bias.sum(0), grad_scale.sum(0)


def _constants(qkv: Tensor, scale: Tensor | None, origin: Tensor | None, window: list[int], shift: list[int],
               masked: bool) -> dict[str, Any]:  # fmt: skip
    return {"HEIGHT": qkv.shape[1], "WIDTH": qkv.shape[2], "HEADS": qkv.shape[4], "D": qkv.shape[5], "WH": window[0],
            "WW": window[1], "SH": shift[0], "SW": shift[1],
            "MASKED": masked, "COSINE": scale is not None, "PLACED": origin is not None,
            "T": max(16, next_power_of_2(window[0] * window[1])), "num_warps": 4}  # fmt: skip


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, window, shift, masked = inputs
    ctx.settings = window, shift, masked
    ctx.given = [tensor is not None for tensor in tensors]
    ctx.save_for_backward(*(tensor for tensor in tensors if tensor is not None))


def _backward(ctx: Any, grad: Tensor) -> tuple:
    saved = iter(ctx.saved_tensors)
    tensors: Any = [next(saved) if given else None for given in ctx.given]
    grads = window_attention_backward(grad.contiguous(), *tensors, *ctx.settings)
    return grads[0], grads[1], grads[2] if ctx.given[2] else None, None, None, None, None


register_autograd("shift_vits::window_attention", _backward, setup_context=_remember)
