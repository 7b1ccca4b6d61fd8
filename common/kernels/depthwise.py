"""Depthwise 3 x 3 convolutions of channels-last tokens, around the torus or padded with zeros, forward and backward:
neighbours are read where they lie, so nothing is padded, permuted or copied. In inference also with the BatchNorm that
follows, and behind tokens that are only passed on."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.library import register_autograd

from .. import shifts
from .base import AVAILABLE, launch, operator, product_dtype, usable

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import around

__all__ = ["depthwise", "depthwise_norm", "fits_depthwise_kernel", "fits_depthwise_norm", "normed_taps",
           "plain_depthwise", "split", "vectors"]  # fmt: skip

LONGEST = 14  # outputs of a strip
PROGRAMS = 2048  # of a backward pass: enough to fill a GPU, and each leaves one sum per weight


def depthwise(x: Tensor, weight: Tensor, stride: int, circular: bool, origin: Tensor | None = None) -> Tensor:
    """Depthwise convolution of tokens, padded by k // 2 with zeros or (``circular``) with the opposite side. With
    ``origin`` (B, 2) in [0, side), the first output of a sample is there: nothing has to be rolled for it.

    Like ``F.conv2d``, it computes in autocast's dtype where autocast is on.

    Shapes: x (B, H, W, C), weight (k, k, C), k odd -> (B, ceil(H / stride), ceil(W / stride), C).
    """
    x = x.to(product_dtype(x))
    if fits_depthwise_kernel(x, weight.shape[:2]):
        return depthwise_kernel(x, weight.float().contiguous(), origin, stride, circular)
    return plain_depthwise(x, weight, stride, circular, origin)


def depthwise_norm(x: Tensor, lead: Tensor, weights: Tensor, stride: int, circular: bool,
                   origin: Tensor | None = None) -> Tensor:  # fmt: skip
    """Tokens ``lead`` (B, m, C), and behind them, row by row, what a convolution as in ``depthwise`` and a norm make of
    x; n times, by ``weights`` (n, 10, C) of ``common.weights.normed_taps``
    -> (n, B, m + H/stride W/stride, C). In one pass; for inference, where ``fits_depthwise_norm`` holds."""
    x = x.to(product_dtype(x))
    return depthwise_norm_kernel(x, lead.to(x.dtype), weights, origin, stride, circular)


def plain_depthwise(x: Tensor, weight: Tensor, stride: int, circular: bool, origin: Tensor | None = None) -> Tensor:
    """``depthwise`` by ``F.conv2d``: the reference of the kernel, and what runs where it does not."""
    x = x if origin is None else shifts.roll(x, origin, (1, 2), within=True)
    x, pad = x.permute(0, 3, 1, 2), weight.shape[0] // 2
    if circular:
        x, pad = shifts.circular_pad(x, (pad, pad, pad, pad)), 0
    kernel = weight.to(x.dtype).permute(2, 0, 1)[:, None]  # C, 1, k, k
    return F.conv2d(x, kernel, stride=stride, padding=pad, groups=x.shape[1]).permute(0, 2, 3, 1)


def fits_depthwise_kernel(x: Tensor, size: Sequence[int]) -> bool:
    """Whether a kernel of this size takes these: 3 x 3, at most float32, channels beside one another. Other strides are
    free, so that it reads a slice of the channels in place."""
    single = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return usable(x) and single and x.numel() > 0 and x.stride(3) == 1 and tuple(size) == (3, 3)


def fits_depthwise_norm(x: Tensor, convs: Sequence[nn.Conv2d], norms: Sequence[nn.BatchNorm2d]) -> bool:
    """Whether ``depthwise_norm`` takes these: tokens and 3 x 3 weights for the kernel, no gradient, and norms by what
    they have learnt, all of one kind."""
    learnt = all(not norm.training and norm.running_mean is not None and norm.affine for norm in norms)
    same = len({norm.eps for norm in norms}) == 1
    plain = not torch.is_grad_enabled() and not any(isinstance(norm.weight, DTensor) for norm in norms)
    fits = all(fits_depthwise_kernel(x, conv.kernel_size) for conv in convs)
    return learnt and same and plain and fits


if AVAILABLE:

    @triton.jit
    def _normed_taps(weight, gain, shift, mean, variance, out, EPS: tl.constexpr, CHANNELS: tl.constexpr,
                     C: tl.constexpr):  # fmt: skip
        c = tl.program_id(0) * C + tl.arange(0, C)
        keep = c < CHANNELS
        scale = tl.load(variance + c, keep, 0.0).to(tl.float32) + EPS
        scale = tl.load(gain + c, keep, 0.0).to(tl.float32) / tl.sqrt(scale)
        for tap in tl.static_range(9):
            value = tl.load(weight + c * 9 + tap, keep, 0.0).to(tl.float32)
            tl.store(out + tap * CHANNELS + c, value * scale, keep)
        added = tl.load(shift + c, keep, 0.0).to(tl.float32) - tl.load(mean + c, keep, 0.0).to(tl.float32) * scale
        tl.store(out + 9 * CHANNELS + c, added, keep)

    @triton.jit
    def _three_normed_taps(w0, w1, w2, g0, g1, g2, s0, s1, s2, m0, m1, m2, v0, v1, v2, out, EPS: tl.constexpr,
                           CHANNELS: tl.constexpr, C: tl.constexpr):  # fmt: skip
        if tl.program_id(1) == 0:
            _normed_taps(w0, g0, s0, m0, v0, out, EPS, CHANNELS, C)
        elif tl.program_id(1) == 1:
            _normed_taps(w1, g1, s1, m1, v1, out + 10 * CHANNELS, EPS, CHANNELS, C)
        else:
            _normed_taps(w2, g2, s2, m2, v2, out + 20 * CHANNELS, EPS, CHANNELS, C)

    @triton.jit
    def _grid(t, rows, columns, BAND: tl.constexpr):
        """Image, row and column of token t, counted along bands of rows: what a program takes shares its neighbours."""
        band = t // (BAND * columns)
        image = band // (rows // BAND)
        return image.to(tl.int64), band % (rows // BAND) * BAND + t % BAND, t // BAND % columns

    @triton.jit
    def _reader(p, i, start, side, STRIDE: tl.constexpr, CIRCULAR: tl.constexpr):
        """Along one axis, the output that reads token p by tap ``i``, and whether there is one. The first output is at
        ``start``."""
        n = p + 1 - i - start
        if CIRCULAR:
            n = around(n, side)
        return n // STRIDE, (n >= 0) & (n < side) & (n % STRIDE == 0)

    @triton.jit
    def _strip(t, rows, segments, SEGMENT: tl.constexpr):
        """Of strips t, each of SEGMENT outputs in a row: image, row, first column."""
        return (t // rows // segments).to(tl.int64), t % rows, t // rows % segments * SEGMENT

    @triton.jit
    def _rows(x, origin, image, h, w, height, stride_b, stride_h, STRIDE: tl.constexpr, CIRCULAR: tl.constexpr,
              PLACED: tl.constexpr):  # fmt: skip
        """What strips read: three rows, whether these are there, the first column."""
        top, left = 0, 0
        if PLACED:
            top, left = tl.load(origin + 2 * image).to(tl.int32), tl.load(origin + 2 * image + 1).to(tl.int32)
        tokens, there = (), ()
        for i in tl.static_range(3):
            y = h * STRIDE + top + (i - 1)
            if CIRCULAR:
                y = around(y, height)
            tokens = tokens + (x + image * stride_b + y * stride_h,)  # type: ignore[assignment]  # noqa: RUF005
            there = there + ((y >= 0) & (y < height),)  # type: ignore[assignment]  # noqa: RUF005
        return tokens, there, w * STRIDE + left - 1

    @triton.jit
    def _column(tokens, there, z, c, real, width, stride_w, CIRCULAR: tl.constexpr, RAGGED: tl.constexpr,
                PIECES: tl.constexpr, C: tl.constexpr):  # fmt: skip
        """Tokens in column z of three rows, per piece of their channels: tensors (T, C)."""
        if CIRCULAR:
            z = around(tl.minimum(z, 2 * width - 1), width)  # of places beyond the last output any token will do
        values, place = (), (z * stride_w)[:, None] + c[None, :]
        for n in tl.static_range(3 * PIECES):
            source = tokens[n % 3][:, None] + place + n // 3 * C
            if CIRCULAR and not RAGGED:
                value = tl.load(source)
            else:
                value = tl.load(source, (there[n % 3] & (z >= 0) & (z < width))[:, None] & real[None, :], 0.0)
            values = values + (value.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        return values

    @triton.jit
    def _next(middle, right, tokens, there, z, c, real, width, stride_w, STRIDE: tl.constexpr, CIRCULAR: tl.constexpr,
              RAGGED: tl.constexpr, PIECES: tl.constexpr, C: tl.constexpr):  # fmt: skip
        """The first two of the columns from z on, STRIDE after those of which these are the last two."""
        if STRIDE == 1:
            left, middle = middle, right
        else:
            if STRIDE == 2:
                left = right
            else:
                left = _column(tokens, there, z, c, real, width, stride_w, CIRCULAR, RAGGED, PIECES, C)
            middle = _column(tokens, there, z + 1, c, real, width, stride_w, CIRCULAR, RAGGED, PIECES, C)
        return left, middle

    @triton.jit
    def _taps(weight, c, real, COUNT: tl.constexpr, CHANNELS: tl.constexpr, RAGGED: tl.constexpr, T: tl.constexpr):
        """Rows of CHANNELS weights, each thread its own: (T, C) tensors of which all rows are the same."""
        taps, place = (), tl.zeros([T, 1], tl.int32) + c[None, :]
        for k in tl.static_range(COUNT):
            if RAGGED:
                tap = tl.load(weight + k * CHANNELS + place, real[None, :], 0.0)
            else:
                tap = tl.load(weight + k * CHANNELS + place)
            taps = taps + (tap.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        return taps

    @triton.jit
    def _sum(total, left, middle, right, taps, START: tl.constexpr, PIECE: tl.constexpr):
        """``total`` and three tokens of each column times their taps."""
        for i in tl.static_range(3):
            total += left[3 * PIECE + i] * taps[START + 3 * i]
        for i in tl.static_range(3):
            total += middle[3 * PIECE + i] * taps[START + 3 * i + 1]
        for i in tl.static_range(3):
            total += right[3 * PIECE + i] * taps[START + 3 * i + 2]
        return total

    @triton.jit
    def _depthwise_forward(x, lead, weight, origin, out, height, width, rows, columns, segments, count, images,
                           stride_b, stride_h, stride_w, lead_b, lead_n, out_n, LEAD: tl.constexpr, N: tl.constexpr,
                           TAPS: tl.constexpr, STRIDE: tl.constexpr, CIRCULAR: tl.constexpr, PLACED: tl.constexpr,
                           CHANNELS: tl.constexpr, SEGMENT: tl.constexpr, C: tl.constexpr,
                           T: tl.constexpr):  # fmt: skip
        """T strips of outputs, N outputs at each place, of TAPS = 9 weights, or 10 with what is added. A column of
        tokens is read once for all outputs of a strip. In further programs the LEAD tokens that go before those of
        each image."""
        BLOCKS: tl.constexpr = (CHANNELS + C - 1) // C
        RAGGED: tl.constexpr = CHANNELS % C != 0
        part, c = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * C + tl.arange(0, C)
        real = c < CHANNELS
        if LEAD:
            parts = tl.cdiv(count, T)
            if part >= parts:
                n = (part - parts) * T + tl.arange(0, T)
                image, n = (n // LEAD).to(tl.int64), n % LEAD
                keep = (image < images)[:, None] & real[None, :]
                value = tl.load(lead + (image * lead_b + n * lead_n)[:, None] + c[None, :], keep)
                place = ((image * (LEAD + rows * columns) + n) * CHANNELS)[:, None] + c[None, :]
                for m in tl.static_range(N):
                    tl.store(out + m * out_n + place, value, keep)
                return
        t = part * T + tl.arange(0, T)
        image, h, w = _strip(tl.minimum(t, count - 1), rows, segments, SEGMENT)
        tokens, there, z = _rows(x, origin, image, h, w, height, stride_b, stride_h, STRIDE, CIRCULAR, PLACED)
        taps = _taps(weight, c, real, N * TAPS, CHANNELS, RAGGED, T)
        place = ((image * (LEAD + rows * columns) + (LEAD + h * columns + w)) * CHANNELS)[:, None] + c[None, :]
        left = _column(tokens, there, z, c, real, width, stride_w, CIRCULAR, RAGGED, 1, C)
        middle = _column(tokens, there, z + 1, c, real, width, stride_w, CIRCULAR, RAGGED, 1, C)
        results = ()
        for _ in tl.static_range(SEGMENT * N):
            results = results + (tl.zeros([T, C], out.dtype.element_ty),)  # type: ignore[assignment]  # noqa: RUF005
        for _ in tl.range(SEGMENT, loop_unroll_factor=SEGMENT):  # stored at the end: no read overtakes a store
            right = _column(tokens, there, z + 2, c, real, width, stride_w, CIRCULAR, RAGGED, 1, C)
            for m in tl.static_range(N):
                total = taps[m * TAPS + 9] if TAPS == 10 else tl.zeros([T, C], tl.float32)
                total = _sum(total, left, middle, right, taps, m * TAPS, 0).to(out.dtype.element_ty)
                results = results[1:] + (total,)  # type: ignore[assignment]  # noqa: RUF005
            z += STRIDE
            left, middle = _next(middle, right, tokens, there, z, c, real, width, stride_w, STRIDE, CIRCULAR, RAGGED, 1,
                                 C)  # fmt: skip
        for n in tl.static_range(SEGMENT * N):
            keep = ((t < count) & (w + n // N < columns))[:, None] & real[None, :]
            tl.store(out + n % N * out_n + place + n // N * CHANNELS, results[n], keep)

    @triton.jit
    def _tap(grad, image, y, in_rows, z, in_columns, c, rows, columns, CHANNELS: tl.constexpr):
        """Gradients (T, C) of the outputs (y, z), zero where there is none."""
        place = ((image * rows + y) * columns + z) * CHANNELS
        keep = (in_rows & in_columns)[:, None] & (c < CHANNELS)[None, :]
        return tl.load(grad + place[:, None] + c[None, :], keep, 0.0).to(tl.float32)

    @triton.jit
    def _depthwise_backward(x, weight, origin, grad, grad_x, grad_weight, height, width, rows, columns, count, stride_b,
                            stride_h, stride_w, STRIDE: tl.constexpr, CIRCULAR: tl.constexpr, PLACED: tl.constexpr,
                            CHANNELS: tl.constexpr, BAND: tl.constexpr, C: tl.constexpr, T: tl.constexpr):  # fmt: skip
        """Both gradients from one read: token p and the outputs g_ij that read it by tap (i, j) give
        dx[p] = sum_ij w_ij g_ij and dw_ij = sum_p x[p] g_ij."""
        BLOCKS: tl.constexpr = (CHANNELS + C - 1) // C
        part, parts = tl.program_id(0) // BLOCKS, tl.num_programs(0) // BLOCKS
        c = tl.program_id(0) % BLOCKS * C + tl.arange(0, C)
        channels = c < CHANNELS
        w00, w01, w02 = (tl.load(weight + c, channels, 0.0)[None, :],
                         tl.load(weight + CHANNELS + c, channels, 0.0)[None, :],
                         tl.load(weight + 2 * CHANNELS + c, channels, 0.0)[None, :])  # fmt: skip
        w10, w11, w12 = (tl.load(weight + 3 * CHANNELS + c, channels, 0.0)[None, :],
                         tl.load(weight + 4 * CHANNELS + c, channels, 0.0)[None, :],
                         tl.load(weight + 5 * CHANNELS + c, channels, 0.0)[None, :])  # fmt: skip
        w20, w21, w22 = (tl.load(weight + 6 * CHANNELS + c, channels, 0.0)[None, :],
                         tl.load(weight + 7 * CHANNELS + c, channels, 0.0)[None, :],
                         tl.load(weight + 8 * CHANNELS + c, channels, 0.0)[None, :])  # fmt: skip
        zero = tl.zeros([T, C], tl.float32)
        s00, s01, s02, s10, s11, s12, s20, s21, s22 = zero, zero, zero, zero, zero, zero, zero, zero, zero
        for start in range(part * T, count, parts * T):  # many tokens, one sum: no atomics, the same bits always
            t = start + tl.arange(0, T)
            image, h, w = _grid(t, height, width, BAND)
            keep = (t < count)[:, None] & channels[None, :]
            place = image * stride_b + h * stride_h + w * stride_w
            value = tl.load(x + place[:, None] + c[None, :], keep, 0.0).to(tl.float32)
            top, first = 0, 0
            if PLACED:
                top = tl.load(origin + 2 * image, t < count, 0).to(tl.int32)
                first = tl.load(origin + 2 * image + 1, t < count, 0).to(tl.int32)
            y0, up = _reader(h, 0, top, height, STRIDE, CIRCULAR)
            y1, middle = _reader(h, 1, top, height, STRIDE, CIRCULAR)
            y2, down = _reader(h, 2, top, height, STRIDE, CIRCULAR)
            up, middle, down = up & (t < count), middle & (t < count), down & (t < count)
            z0, left = _reader(w, 0, first, width, STRIDE, CIRCULAR)
            z1, centre = _reader(w, 1, first, width, STRIDE, CIRCULAR)
            z2, right = _reader(w, 2, first, width, STRIDE, CIRCULAR)
            g = _tap(grad, image, y0, up, z0, left, c, rows, columns, CHANNELS)
            total, s00 = g * w00, s00 + g * value
            g = _tap(grad, image, y0, up, z1, centre, c, rows, columns, CHANNELS)
            total, s01 = total + g * w01, s01 + g * value
            g = _tap(grad, image, y0, up, z2, right, c, rows, columns, CHANNELS)
            total, s02 = total + g * w02, s02 + g * value
            g = _tap(grad, image, y1, middle, z0, left, c, rows, columns, CHANNELS)
            total, s10 = total + g * w10, s10 + g * value
            g = _tap(grad, image, y1, middle, z1, centre, c, rows, columns, CHANNELS)
            total, s11 = total + g * w11, s11 + g * value
            g = _tap(grad, image, y1, middle, z2, right, c, rows, columns, CHANNELS)
            total, s12 = total + g * w12, s12 + g * value
            g = _tap(grad, image, y2, down, z0, left, c, rows, columns, CHANNELS)
            total, s20 = total + g * w20, s20 + g * value
            g = _tap(grad, image, y2, down, z1, centre, c, rows, columns, CHANNELS)
            total, s21 = total + g * w21, s21 + g * value
            g = _tap(grad, image, y2, down, z2, right, c, rows, columns, CHANNELS)
            total, s22 = total + g * w22, s22 + g * value
            place = ((image * height + h) * width + w) * CHANNELS
            tl.store(grad_x + place[:, None] + c[None, :], total.to(grad_x.dtype.element_ty), keep)
        target = grad_weight + part * (9 * CHANNELS) + c
        tl.store(target, tl.sum(s00, 0), channels)
        tl.store(target + CHANNELS, tl.sum(s01, 0), channels)
        tl.store(target + 2 * CHANNELS, tl.sum(s02, 0), channels)
        tl.store(target + 3 * CHANNELS, tl.sum(s10, 0), channels)
        tl.store(target + 4 * CHANNELS, tl.sum(s11, 0), channels)
        tl.store(target + 5 * CHANNELS, tl.sum(s12, 0), channels)
        tl.store(target + 6 * CHANNELS, tl.sum(s20, 0), channels)
        tl.store(target + 7 * CHANNELS, tl.sum(s21, 0), channels)
        tl.store(target + 8 * CHANNELS, tl.sum(s22, 0), channels)


@operator("shift_vits::depthwise")
def depthwise_kernel(x: Tensor, weight: Tensor, origin: Tensor | None, stride: int, circular: bool) -> Tensor:
    """``depthwise`` in one pass; weight (3, 3, C) in float32, contiguous."""
    out = torch.empty((len(x), -(-x.shape[1] // stride), -(-x.shape[2] // stride), x.shape[3]), dtype=x.dtype,
                      device=x.device)  # fmt: skip
    _forward(x, None, weight.view(1, 9, -1), origin, out[None], stride, circular)
    return out


@operator("shift_vits::normed_taps")
def normed_taps(weights: list[Tensor], gains: list[Tensor], shifts: list[Tensor], means: list[Tensor],
                variances: list[Tensor], eps: float) -> Tensor:  # fmt: skip
    """Of three depthwise convolutions (C, 1, 3, 3), each with a norm behind it, and what that has learnt, (C,), all
    contiguous: taps, scaled, and what is added: (3, 10, C), float32."""
    c = len(weights[0])
    out = torch.empty((3, 10, c), dtype=torch.float32, device=weights[0].device)
    launch(_three_normed_taps, (-(-c // 64), 3), *weights, *gains, *shifts, *means, *variances, out, EPS=eps,
           CHANNELS=c, C=64, num_warps=2)  # fmt: skip
    return out


@operator("shift_vits::depthwise_norm")
def depthwise_norm_kernel(x: Tensor, lead: Tensor, weights: Tensor, origin: Tensor | None, stride: int,
                          circular: bool) -> Tensor:  # fmt: skip
    """``depthwise_norm``; weights contiguous."""
    tokens = lead.shape[1] + -(-x.shape[1] // stride) * -(-x.shape[2] // stride)
    out = torch.empty((len(weights), len(x), tokens, x.shape[3]), dtype=x.dtype, device=x.device)
    _forward(x, lead, weights, origin, out, stride, circular)
    return out


def _forward(x: Tensor, lead: Tensor | None, weights: Tensor, origin: Tensor | None, out: Tensor, stride: int,
             circular: bool) -> None:  # fmt: skip
    b, h, w, channels = x.shape
    rows, columns, n = -(-h // stride), -(-w // stride), 0 if lead is None else lead.shape[1]
    segment, segments = split(columns, LONGEST)
    block = next((n for n in (128, 64) if channels % n == 0), 32)
    tile = 128 * 4 // block  # a thread has four channels
    count, strides = b * rows * segments, (0, 0) if lead is None else lead.stride()[:2]
    programs = (-(-count // tile) + -(-b * n // tile)) * -(-channels // block)
    launch(_depthwise_forward, (programs,), x, x if lead is None else lead, weights,
           weights if origin is None else origin, out, h, w, rows, columns, segments, count, b, *x.stride()[:3],
           *strides, out.stride(0), LEAD=n, N=len(weights), TAPS=weights.shape[1], STRIDE=stride, CIRCULAR=circular,
           PLACED=origin is not None, CHANNELS=channels, SEGMENT=segment, C=block, T=tile, num_warps=4)  # fmt: skip


def vectors(x: Tensor) -> tuple[int, int]:
    """Channels and tokens of a program of 128 threads, each with a vector of 16 bytes. Channels are those of a cache
    line, or half of it where that divides them better."""
    block = 64 if x.shape[3] % 64 == 0 else 32
    return block, 128 * 16 // x.element_size() // block


def split(columns: int, longest: int) -> tuple[int, int]:
    """So many outputs in a row as strips: how long, and how many."""
    segments = -(-columns // longest)
    return -(-columns // segments), segments


@operator("shift_vits::depthwise_backward")
def depthwise_backward(grad: Tensor, x: Tensor, weight: Tensor, origin: Tensor | None, stride: int,
                       circular: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    b, h, w, channels = x.shape
    block, tile = vectors(x)
    blocks, count = -(-channels // block), b * h * w
    parts = min(-(-count // tile), max(1, PROGRAMS // blocks))
    grad_x = torch.empty((b, h, w, channels), dtype=x.dtype, device=x.device)
    grad_weight = torch.empty((parts, 3, 3, channels), dtype=torch.float32, device=x.device)
    launch(_depthwise_backward, (parts * blocks,), x, weight, weight if origin is None else origin, grad, grad_x,
           grad_weight, h, w, grad.shape[1], grad.shape[2], count, x.stride(0), x.stride(1), x.stride(2), STRIDE=stride,
           CIRCULAR=circular, PLACED=origin is not None, CHANNELS=channels, BAND=math.gcd(h, 4), C=block, T=tile,
           num_warps=4, num_stages=1)  # fmt: skip
    return grad_x, grad_weight.sum(0)


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, origin, *ctx.settings = inputs
    ctx.save_for_backward(x, weight, *([] if origin is None else [origin]))


def _backward(ctx: Any, grad: Tensor) -> tuple:
    x, weight, *origin = ctx.saved_tensors
    grads = depthwise_backward(grad.contiguous(), x, weight, origin[0] if origin else None, *ctx.settings)
    return *grads, None, None, None


register_autograd("shift_vits::depthwise", _backward, setup_context=_remember)
