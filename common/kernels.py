"""Triton kernels for CUDA: what the compiler does not fuse. Each has a plain torch form, which is its reference.

- ``window_attention``: attention inside shifted windows, read from and written to the image in one pass, so that
  nothing is rolled, partitioned or permuted, and no matrix of weights is written out; forward and backward.
- ``phase_energies``: the output of a strided convolution at every position, its energy summed per phase, without
  writing any of it out.
- ``window_offset``: the best partition into windows, from one number per token.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd, triton_op, wrap_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton: the torch forms do everything
    AVAILABLE = False
else:
    AVAILABLE = True

__all__ = ["AVAILABLE", "fits_offset_kernel", "fits_phase_kernel", "fits_window_kernel", "phase_energies",
           "window_attention", "window_offset"]  # fmt: skip

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def usable(x: Tensor) -> bool:
    """Whether kernels can run where ``x`` lies."""
    return AVAILABLE and (x.is_cuda or INTERPRETED)


def fits_window_kernel(qkv: Tensor, window: tuple[int, int]) -> bool:
    """Whether ``window_attention`` takes these: half precision, whole windows of at most 64 tokens, heads of 16-64."""
    _, height, width, _, _, d = qkv.shape
    half = qkv.dtype in (torch.bfloat16, torch.float16) or INTERPRETED
    whole = height % window[0] == 0 and width % window[1] == 0
    return usable(qkv) and half and whole and window[0] * window[1] <= 64 and d in (16, 32, 64)


def fits_phase_kernel(x: Tensor, weight: Tensor, stride: tuple[int, int]) -> bool:
    """Whether ``phase_energies`` takes these: a sketch of 16-64 directions, a square kernel, stride 2 or 4."""
    r, _, kh, kw = weight.shape
    whole = all(side % s == 0 for side, s in zip(x.shape[2:], stride, strict=True))
    fits = r in (16, 32, 64) and kh == kw and stride in ((2, 2), (4, 4)) and whole
    return usable(x) and x.dtype != torch.float64 and fits


def fits_offset_kernel(strength: Tensor) -> bool:
    """Whether ``window_offset`` takes this: at most 64 tokens a side."""
    return usable(strength) and max(strength.shape[1:]) <= 64


def _launch(kernel: Any, grid: Callable | tuple, *args: Any, **constants: Any) -> None:
    (kernel if INTERPRETED else wrap_triton(kernel))[grid](*args, **constants)


if AVAILABLE:

    @triton.jit
    def _window_rows(index, t, origin, height, width, WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr,
                     SW: tl.constexpr, PLACED: tl.constexpr):  # fmt: skip
        """Tokens t of window ``index`` of a batch: their rows in the image, and a number per region of the mask."""
        across = width // WW
        windows = (height // WH) * across
        image, window = index // windows, index % windows
        h = (window // across) * WH + t // WW  # places in the image rolled by the shift
        w = (window % across) * WW + t % WW
        top, left = h + SH, w + SW
        if PLACED:
            top += tl.load(origin + 2 * image).to(tl.int32)
            left += tl.load(origin + 2 * image + 1).to(tl.int32)
        row = image.to(tl.int64) * height * width + (top % height) * width + left % width
        band_h = (h >= height - WH).to(tl.int32) + (h >= height - SH).to(tl.int32)
        band_w = (w >= width - WW).to(tl.int32) + (w >= width - SW).to(tl.int32)
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
    def _attention_forward(qkv, bias, scale, origin, out, height, width, HEADS: tl.constexpr, D: tl.constexpr,
                           WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
                           MASKED: tl.constexpr, COSINE: tl.constexpr, PLACED: tl.constexpr,
                           T: tl.constexpr):  # fmt: skip
        N: tl.constexpr = WH * WW
        head, t, d = tl.program_id(1), tl.arange(0, T), tl.arange(0, D)
        row, region = _window_rows(tl.program_id(0), t, origin, height, width, WH, WW, SH, SW, PLACED)
        keep = (t < N)[:, None]
        place = qkv + row[:, None] * (3 * HEADS * D) + head * D + d[None, :]
        q, k, v = (tl.load(place, keep, 0.0), tl.load(place + HEADS * D, keep, 0.0),
                   tl.load(place + 2 * HEADS * D, keep, 0.0))  # fmt: skip
        if COSINE:
            q = _unit(q.to(tl.float32))[0].to(v.dtype)
            k = _unit(k.to(tl.float32))[0].to(v.dtype)
        b = tl.load(bias + head * N * N + t[:, None] * N + t[None, :], keep & (t < N)[None, :], 0.0)
        factor = tl.load(scale + head) if COSINE else D**-0.5
        p, _ = _weights(q, k, b, factor, region, t, N, MASKED)
        o = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        tl.store(out + row[:, None] * (HEADS * D) + head * D + d[None, :], o.to(v.dtype), keep)

    @triton.jit
    def _attention_backward(qkv, bias, scale, origin, grad, grad_qkv, grad_bias, grad_scale, height, width, count,
                            HEADS: tl.constexpr, D: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr,
                            SW: tl.constexpr, MASKED: tl.constexpr, COSINE: tl.constexpr, PLACED: tl.constexpr,
                            T: tl.constexpr):  # fmt: skip
        N: tl.constexpr = WH * WW
        part, head, t, d = tl.program_id(0), tl.program_id(1), tl.arange(0, T), tl.arange(0, D)
        keep = (t < N)[:, None]
        square = keep & (t < N)[None, :]
        factor = tl.load(scale + head) if COSINE else D**-0.5
        b = tl.load(bias + head * N * N + t[:, None] * N + t[None, :], square, 0.0)
        sum_bias = tl.zeros([T, T], tl.float32)
        sum_scale = tl.zeros([T], tl.float32)
        for index in range(part, count, tl.num_programs(0)):  # many windows, one sum: no atomics, the same bits always
            row, region = _window_rows(index, t, origin, height, width, WH, WW, SH, SW, PLACED)
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

    @triton.jit
    def _phase_energies(x, weight, bias, direction, colsum, out, channels, height, width, sb, sc, sh, sw,
                        SIDE: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, STRIDE: tl.constexpr,
                        NORM: tl.constexpr, EPS: tl.constexpr, R: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr,
                        BLOCK: tl.constexpr):  # fmt: skip
        """One row of positions: energy and direction of convolutions there, summed per phase of the columns.

        ``GROUPS`` convolutions of R outputs each are summed apart, and GROUPS R columns of the weight taken at a time.
        """
        image, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        n, k = part * GROUPS * R + tl.arange(0, GROUPS * R), tl.arange(0, K)
        columns = tl.num_programs(2) * GROUPS * R
        base = x + image.to(tl.int64) * sb
        add, toward = tl.load(bias + n), tl.load(direction + n)
        energies = tl.zeros([STRIDE * GROUPS], tl.float32)
        directions = tl.zeros([STRIDE * GROUPS], tl.float32)
        for start in range(0, width, BLOCK):
            w = start + tl.arange(0, BLOCK)
            real = w < width
            t = tl.zeros([BLOCK, GROUPS * R], tl.float32)
            total = tl.zeros([BLOCK, K], tl.float32)
            squares = tl.zeros([BLOCK, K], tl.float32)
            for tap in range(SIDE * SIDE):
                row = (h + tap // SIDE - PAD_H + height) % height
                column = (tl.where(real, w, 0) + (tap % SIDE - PAD_W) + width) % width
                place = base + row * sh + (column * sw)[:, None]
                for first in range(0, channels, K):
                    c = first + k
                    inside = c < channels
                    a = tl.load(place + (c * sc)[None, :], inside[None, :], 0.0)
                    m = tl.load(weight + (tap * channels + c)[:, None] * columns + n[None, :], inside[:, None], 0.0)
                    t = tl.dot(a.to(m.dtype), m, t, input_precision="ieee")
                    if NORM:
                        wide = a.to(tl.float32)
                        total += wide
                        squares += wide * wide
            if NORM:
                size = SIDE * SIDE * channels
                mean = tl.sum(total, 1) / size
                inverse = 1.0 / tl.sqrt(tl.maximum(tl.sum(squares, 1) / size - mean * mean, 0.0) + EPS)
                t = (t - mean[:, None] * tl.load(colsum + n)[None, :]) * inverse[:, None]
            t = tl.where(real[:, None], t + add[None, :], 0.0)
            e = tl.sum(tl.reshape(t * t, [BLOCK // STRIDE, STRIDE, GROUPS * R]), 0)
            f = tl.sum(tl.reshape(t * toward[None, :], [BLOCK // STRIDE, STRIDE, GROUPS * R]), 0)
            energies += tl.sum(tl.reshape(e, [STRIDE * GROUPS, R]), 1)
            directions += tl.sum(tl.reshape(f, [STRIDE * GROUPS, R]), 1)
        s = tl.arange(0, STRIDE * GROUPS)  # (phase of the column, convolution)
        place = out + (image * height + h) * 2 * STRIDE * (columns // R) + part * GROUPS
        place += (s // GROUPS) * (columns // R) + s % GROUPS
        tl.store(place, energies)
        tl.store(place + STRIDE * (columns // R), directions)

    @triton.jit
    def _mean_over_window(n, SIDE: tl.constexpr, UNEVEN: tl.constexpr, T: tl.constexpr):
        i = tl.arange(0, T)
        ahead = (i[None, :] - i[:, None] + n) % n
        weight = tl.full([T, T], 1.0, tl.float32)
        if UNEVEN:
            weight += 0.1 * tl.sin(2.0 + 7.31 * ahead.to(tl.float32))
        return tl.where((ahead < SIDE) & (i[:, None] < n) & (i[None, :] < n), weight / SIDE, 0.0)

    @triton.jit
    def _phases(n, SIDE: tl.constexpr, T: tl.constexpr):
        i = tl.arange(0, T)
        return tl.where((i[None, :] % SIDE == i[:, None]) & (i[None, :] < n), 1.0, 0.0)

    @triton.jit
    def _window_offset(strength, out, height, width, WH: tl.constexpr, WW: tl.constexpr, UNEVEN: tl.constexpr,
                       T: tl.constexpr):  # fmt: skip
        image, i = tl.program_id(0), tl.arange(0, T)
        inside = (i < height)[:, None] & (i < width)[None, :]
        s = tl.load(strength + image * height * width + i[:, None] * width + i[None, :], inside, 0.0)
        rows, columns = _mean_over_window(height, WH, UNEVEN, T), _mean_over_window(width, WW, UNEVEN, T)
        v = tl.dot(tl.dot(rows, s, input_precision="tf32x3"), tl.trans(columns), input_precision="tf32x3")
        e = tl.dot(_phases(height, WH, T), v * v, input_precision="tf32x3")
        e = tl.dot(e, tl.trans(_phases(width, WW, T)), input_precision="tf32x3")
        e = tl.where((i < WH)[:, None] & (i < WW)[None, :], e, float("-inf"))
        best = tl.argmax(tl.reshape(e, [T * T]), 0)
        tl.store(out + 2 * image, (best // T).to(tl.int64))
        tl.store(out + 2 * image + 1, (best % T).to(tl.int64))


@triton_op("shift_vits::window_attention", mutates_args={})
def window_attention(qkv: Tensor, bias: Tensor, scale: Tensor | None, origin: Tensor | None, window: list[int],
                     shift: list[int], masked: bool) -> Tensor:  # fmt: skip
    """softmax(q k^T / sqrt(d) + bias) v inside the windows of an image rolled by ``-shift``, in the image's own order.

    With ``scale``, cosine attention: softmax(scale cos(q, k) + bias) v. With ``origin``, each image has its own first
    window there. ``masked`` keeps apart what meets only across the border.

    Shapes: qkv (B, H, W, 3, heads, d), bias (heads, n, n) and scale (heads,) in float32, origin (B, 2), whole numbers
    from 0 on -> (B, H, W, heads d).
    """
    b, h, w, _, heads, d = qkv.shape
    out = torch.empty((b, h, w, heads * d), dtype=qkv.dtype, device=qkv.device)
    _launch(_attention_forward, (b * (h // window[0]) * (w // window[1]), heads), qkv, bias,
            bias if scale is None else scale, bias if origin is None else origin, out, h, w,
            **_constants(qkv, scale, origin, window, shift, masked))  # fmt: skip
    return out


@triton_op("shift_vits::window_attention_backward", mutates_args={})
def window_attention_backward(grad: Tensor, qkv: Tensor, bias: Tensor, scale: Tensor | None, origin: Tensor | None,
                              window: list[int], shift: list[int],
                              masked: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    b, h, w, _, heads, _ = qkv.shape
    count = b * (h // window[0]) * (w // window[1])
    n, parts = window[0] * window[1], min(count, max(1, 2048 // heads))
    grad_qkv = torch.empty_like(qkv)
    grad_bias = torch.empty((parts, heads, n, n), dtype=torch.float32, device=qkv.device)
    grad_scale = torch.empty((parts, heads), dtype=torch.float32, device=qkv.device)
    _launch(_attention_backward, (parts, heads), qkv, bias, bias if scale is None else scale,
            bias if origin is None else origin, grad, grad_qkv, grad_bias, grad_scale, h, w, count,
            **_constants(qkv, scale, origin, window, shift, masked))  # fmt: skip
    return grad_qkv, grad_bias.sum(0), grad_scale.sum(0)


def _constants(qkv: Tensor, scale: Tensor | None, origin: Tensor | None, window: list[int], shift: list[int],
               masked: bool) -> dict[str, Any]:  # fmt: skip
    return {"HEADS": qkv.shape[4], "D": qkv.shape[5], "WH": window[0], "WW": window[1], "SH": shift[0], "SW": shift[1],
            "MASKED": masked, "COSINE": scale is not None, "PLACED": origin is not None,
            "T": max(16, _power(window[0] * window[1])), "num_warps": 4}  # fmt: skip


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, window, shift, masked = inputs
    ctx.settings = window, shift, masked
    ctx.given = [tensor is not None for tensor in tensors]
    ctx.save_for_backward(*(tensor for tensor in tensors if tensor is not None))


def _backward(ctx: Any, grad: Tensor) -> tuple:
    saved = iter(ctx.saved_tensors)
    tensors = [next(saved) if given else None for given in ctx.given]
    grads = window_attention_backward(grad.contiguous(), *tensors, *ctx.settings)
    return grads[0], grads[1], grads[2] if ctx.given[2] else None, None, None, None, None


register_autograd("shift_vits::window_attention", _backward, setup_context=_remember)


@triton_op("shift_vits::phase_energies", mutates_args={})
def phase_energies(x: Tensor, weight: Tensor, bias: Tensor, direction: Tensor, colsum: Tensor | None,
                   padding: list[int], stride: int, rank: int, eps: float) -> Tensor:  # fmt: skip
    """Energy |t|^2 and direction <t, direction> of g convolutions of ``rank`` outputs each, at every position, summed
    per row and phase of the columns.

    With ``colsum`` the convolved patch is normalised first: t = (t - mean colsum) / std + bias.

    Shapes: x (B, C, H, W), any strides; weight (k k C, g rank) for patches as (row, column, channel); bias, direction
    and colsum (g rank,) -> (B, H, 2, stride, g).
    """
    b, c, h, w = x.shape
    side, groups = round((weight.shape[0] // c) ** 0.5), weight.shape[1] // rank
    out = torch.empty((b, h, 2, stride, groups), dtype=torch.float32, device=x.device)
    together = min(groups, max(1, 64 // rank))
    _launch(_phase_energies, (b, h, groups // together), x, weight, bias, direction, bias if colsum is None else colsum,
            out, c, h, w, *x.stride(), SIDE=side, PAD_H=padding[0], PAD_W=padding[1], STRIDE=stride,
            NORM=colsum is not None, EPS=eps, R=rank, GROUPS=together, K=64 if c in (48, 64) else 32, BLOCK=64,
            num_warps=4)  # fmt: skip
    return out


@triton_op("shift_vits::window_offset", mutates_args={})
def window_offset(strength: Tensor, window: list[int], uneven: bool) -> Tensor:
    """Offsets (B, 2) of the partition whose window means have the largest norm; strength (B, H, W), sides up to 64."""
    b, h, w = strength.shape
    out = torch.empty((b, 2), dtype=torch.int64, device=strength.device)
    _launch(_window_offset, (b,), strength, out, h, w, WH=window[0], WW=window[1], UNEVEN=uneven,
            T=max(16, _power(max(h, w))), num_warps=8)  # fmt: skip
    return out


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()
