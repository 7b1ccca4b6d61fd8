"""Depthwise 3 x 3 convolutions of channels-last tokens, around the torus or padded with zeros, forward and backward:
neighbours are read where they lie, so nothing is padded, permuted or copied. In inference also with the BatchNorm that
follows, and behind tokens that are only passed on."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.library import register_autograd

from .base import AVAILABLE, launch, operator

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import wrap

__all__ = ["depthwise_kernel", "depthwise_norm_kernel", "fits_depthwise_kernel", "fits_depthwise_norm", "split",
           "vectors"]  # fmt: skip

LONGEST = 14  # outputs of a strip; half of it if they are strided, or there are more in a row
CELLS = {1: 14, 2: 7, 4: 2}  # of a strip of a backward pass, by stride
VECTOR = 2  # channels of a thread, there
PROGRAMS = 1056  # of a backward pass: enough to fill a GPU, and each leaves one sum per weight


def fits_depthwise_kernel(x: Tensor, size: Sequence[int]) -> bool:
    """Whether a kernel of this size takes these: 3 x 3, at most float32, channels beside one another. Other strides are
    free, so that it reads a slice of the channels in place."""
    single = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return single and x.numel() > 0 and x.stride(3) == 1 and tuple(size) == (3, 3)


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
    def _strip(t, rows, segments, SEGMENT: tl.constexpr):
        """Of strips t, each of SEGMENT outputs in a row: image, row, first column."""
        return (t // rows // segments).to(tl.int64), t % rows, t // rows % segments * SEGMENT

    @triton.jit
    def _start(origin, image, PLACED: tl.constexpr):
        """Row and column of the first output's centre. Not for what is stored: see ``which``."""
        if PLACED:
            return tl.load(origin + 2 * image).to(tl.int32), tl.load(origin + 2 * image + 1).to(tl.int32)
        else:
            return tl.zeros_like(image).to(tl.int32), tl.zeros_like(image).to(tl.int32)

    @triton.jit
    def _rows(x, top, left, image, h, w, height, stride_b, stride_h, STRIDE: tl.constexpr, CIRCULAR: tl.constexpr,
              COUNT: tl.constexpr = 3, BEFORE: tl.constexpr = 1):  # fmt: skip
        """What strips read: so many rows, from that BEFORE their own on, whether these are there, the first column."""
        tokens, there = (), ()
        for i in tl.static_range(COUNT):
            y = h * STRIDE + top + (i - BEFORE)
            if CIRCULAR:
                y = wrap(y, height)
            tokens = tokens + (x + image * stride_b + y * stride_h,)  # type: ignore[assignment]  # noqa: RUF005
            there = there + ((y >= 0) & (y < height),)  # type: ignore[assignment]  # noqa: RUF005
        return tokens, there, w * STRIDE + left - BEFORE

    @triton.jit
    def _column(tokens, there, z, c, real, width, stride_w, CIRCULAR: tl.constexpr, RAGGED: tl.constexpr,
                PIECES: tl.constexpr, C: tl.constexpr, COUNT: tl.constexpr = 3):  # fmt: skip
        """Tokens in column z of COUNT rows, per piece of their channels: tensors (T, C)."""
        if CIRCULAR:
            z = wrap(tl.minimum(z, 2 * width - 1), width)  # of places beyond the last output any token will do
        values, place = (), (z * stride_w)[:, None] + c[None, :]
        for n in tl.static_range(COUNT * PIECES):
            source = tokens[n % COUNT][:, None] + place + n // COUNT * C
            if CIRCULAR and not RAGGED:
                value = tl.load(source)
            else:
                value = tl.load(source, (there[n % COUNT] & (z >= 0) & (z < width))[:, None] & real[None, :], 0.0)
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
        top, left = _start(origin, image, PLACED)
        tokens, there, z = _rows(x, top, left, image, h, w, height, stride_b, stride_h, STRIDE, CIRCULAR)
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
    def _reader(near, K: tl.constexpr, STRIDE: tl.constexpr):
        """Of the outputs around a cell, column by column, the one that reads it by tap K."""
        if STRIDE == 1:
            return near[(2 - K % 3) * 3 + 2 - K // 3]
        else:
            return near[(2 - K % 3) // 2 * 2 + (2 - K // 3) // 2]

    @triton.jit
    def _place(column, keep, inside, c, real, width, stride_w, CIRCULAR: tl.constexpr):
        """Where in its row a token of a strip lies, and whether there is one: (T, C) each."""
        if CIRCULAR:
            column = wrap(column, width)
        return (column * stride_w)[:, None] + c[None, :], (keep & inside & (column < width))[:, None] & real[None, :]

    @triton.jit
    def _depthwise_backward(x, weight, origin, grad, grad_x, grad_weight, height, width, rows, columns, segments, count,
                            stride_b, stride_h, stride_w, STRIDE: tl.constexpr, CIRCULAR: tl.constexpr,
                            PLACED: tl.constexpr, CHANNELS: tl.constexpr, SEGMENT: tl.constexpr, C: tl.constexpr,
                            T: tl.constexpr):  # fmt: skip
        """Both gradients from one read: token p and the outputs g_ij that read it by tap (i, j) give
        dx[p] = sum_ij w_ij g_ij and dw_ij = sum_p x[p] g_ij.

        A cell is an output's centre and the tokens up to the next one, STRIDE x STRIDE. Along each axis tap 1 reads its
        first token and tap 0 of the next output its last; tap 2 reads the second or, if there is but one, is of the
        output before. T strips of cells at a time, for which a column of outputs is read once."""
        BLOCKS: tl.constexpr = (CHANNELS + C - 1) // C
        RAGGED: tl.constexpr = CHANNELS % C != 0
        BEFORE: tl.constexpr = 1 if STRIDE == 1 else 0
        NEAR: tl.constexpr = BEFORE + 2  # outputs along an axis that read a cell
        part, parts = tl.program_id(0) // BLOCKS, tl.num_programs(0) // BLOCKS
        c = tl.program_id(0) % BLOCKS * C + tl.arange(0, C)
        real = c < CHANNELS
        taps, sums = _taps(weight, c, real, 9, CHANNELS, RAGGED, T), ()
        for _ in tl.static_range(9):
            sums = sums + (tl.zeros([T, C], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        for start in range(part * T, count, parts * T):  # many cells, one sum: no atomics, the same bits always
            t = start + tl.arange(0, T)
            image, h, w = _strip(tl.minimum(t, count - 1), rows, segments, SEGMENT)
            top, left = tl.zeros([T], tl.int32), tl.zeros([T], tl.int32)
            lines, there, z = _rows(grad, top, left, image, h, w, rows, rows * columns * CHANNELS, columns * CHANNELS,
                                    1, CIRCULAR, NEAR, BEFORE)  # fmt: skip
            if PLACED:  # not by _start: this says where to store
                top, left = tl.load(origin + 2 * image).to(tl.int32), tl.load(origin + 2 * image + 1).to(tl.int32)
            tokens, inside, first = _rows(x, top, left, image, h, w, height, stride_b, stride_h, STRIDE, CIRCULAR,
                                          STRIDE, 0)  # fmt: skip
            near, results = (), ()
            for n in tl.static_range(NEAR - 1):
                near = near + _column(lines, there, z + n, c, real, columns, CHANNELS, CIRCULAR, RAGGED, 1, C, NEAR)
            for s in tl.static_range(SEGMENT):
                near = near + _column(lines, there, z + (s + NEAR - 1), c, real, columns, CHANNELS, CIRCULAR, RAGGED, 1,
                                      C, NEAR)  # fmt: skip
                keep, values = (t < count) & (w + s < columns), ()
                for n in tl.static_range(STRIDE * STRIDE):
                    value, total = tl.zeros([T, C], tl.float32), tl.zeros([T, C], tl.float32)
                    if (n // STRIDE < 2 or n // STRIDE == STRIDE - 1) and (n % STRIDE < 2 or n % STRIDE == STRIDE - 1):
                        place, mask = _place(first + (s * STRIDE + n % STRIDE), keep, inside[n // STRIDE], c, real,
                                             width, stride_w, CIRCULAR)  # fmt: skip
                        value = tl.load(tokens[n // STRIDE][:, None] + place, mask, 0.0).to(tl.float32)
                    for k in tl.static_range(9):
                        if (k // 3 + STRIDE - 1) % STRIDE * STRIDE + (k % 3 + STRIDE - 1) % STRIDE == n:
                            total += taps[k] * _reader(near, k, STRIDE)
                    values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
                    results = results + (total.to(grad_x.dtype.element_ty),)  # type: ignore[assignment]  # noqa: RUF005
                before, sums = sums, ()
                for k in tl.static_range(9):
                    value = values[(k // 3 + STRIDE - 1) % STRIDE * STRIDE + (k % 3 + STRIDE - 1) % STRIDE]
                    value = before[k] + value * _reader(near, k, STRIDE)
                    sums = sums + (value,)  # type: ignore[assignment]  # noqa: RUF005
                near = near[NEAR:]
            tokens, inside, first = _rows(grad_x, top, left, image, h, w, height, height * width * CHANNELS,
                                          width * CHANNELS, STRIDE, CIRCULAR, STRIDE, 0)  # fmt: skip
            for s in tl.static_range(SEGMENT):  # stored at the end: no read overtakes a store
                keep = (t < count) & (w + s < columns)
                for n in tl.static_range(STRIDE * STRIDE):
                    place, mask = _place(first + (s * STRIDE + n % STRIDE), keep, inside[n // STRIDE], c, real, width,
                                         CHANNELS, CIRCULAR)  # fmt: skip
                    tl.store(tokens[n // STRIDE][:, None] + place, results[s * STRIDE * STRIDE + n], mask)
        for k in tl.static_range(9):
            tl.store(grad_weight + (part * 9 + k) * CHANNELS + c, tl.sum(sums[k], 0), real)


@operator("shift_vits::depthwise")
def depthwise_kernel(x: Tensor, weight: Tensor, origin: Tensor | None, stride: int, circular: bool) -> Tensor:
    """``depthwise`` in one pass; weight (3, 3, C) in float32, contiguous."""
    out = torch.empty((len(x), -(-x.shape[1] // stride), -(-x.shape[2] // stride), x.shape[3]), dtype=x.dtype,
                      device=x.device)  # fmt: skip
    _forward(x, None, weight.view(1, 9, -1), origin, out[None], stride, circular)
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
    segment, segments = split(columns, LONGEST if stride == 1 and columns <= LONGEST else LONGEST // 2)
    block = next((n for n in (128, 64) if channels % n == 0), 32)
    tile = 128 * 4 // block  # a thread has four channels
    count, strides = b * rows * segments, (0, 0) if lead is None else lead.stride()[:2]
    programs = (-(-count // tile) + -(-b * n // tile)) * -(-channels // block)
    launch(_depthwise_forward, (programs,), x, x if lead is None else lead, weights,
           weights if origin is None else origin, out, h, w, rows, columns, segments, count, b, *x.stride()[:3],
           *strides, out.stride(0), LEAD=n, N=len(weights), TAPS=weights.shape[1], STRIDE=stride, CIRCULAR=circular,
           PLACED=origin is not None, CHANNELS=channels, SEGMENT=segment, C=block, T=tile, num_warps=4)  # fmt: skip


def vectors(channels: int, each: int) -> tuple[int, int]:
    """Channels and tokens of a program of 128 threads with so many channels each: those of a cache line in bf16, or
    half of it where that divides them better."""
    block = 64 if channels % 64 == 0 else 32
    return block, 128 * each // block


def split(columns: int, longest: int) -> tuple[int, int]:
    """So many outputs in a row as strips: how long, and how many."""
    segments = -(-columns // longest)
    return -(-columns // segments), segments


@operator("shift_vits::depthwise_backward")
def depthwise_backward(grad: Tensor, x: Tensor, weight: Tensor, origin: Tensor | None, stride: int,
                       circular: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    b, h, w, channels = x.shape
    rows, columns = grad.shape[1:3]
    segment, segments = split(columns, CELLS.get(stride, 1))
    block, tile = vectors(channels, VECTOR)
    blocks, count = -(-channels // block), b * rows * segments
    parts = min(-(-count // tile), max(1, PROGRAMS // blocks))
    grad_x = torch.empty((b, h, w, channels), dtype=x.dtype, device=x.device)
    grad_weight = torch.empty((parts, 3, 3, channels), dtype=torch.float32, device=x.device)
    launch(_depthwise_backward, (parts * blocks,), x, weight, weight if origin is None else origin, grad, grad_x,
           grad_weight, h, w, rows, columns, segments, count, *x.stride()[:3], STRIDE=stride, CIRCULAR=circular,
           PLACED=origin is not None, CHANNELS=channels, SEGMENT=segment, C=block, T=tile, num_warps=4)  # fmt: skip
    return grad_x, grad_weight.sum(0)


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, origin, *ctx.settings = inputs
    ctx.save_for_backward(x, weight, *([] if origin is None else [origin]))


def _backward(ctx: Any, grad: Tensor) -> tuple:
    x, weight, *origin = ctx.saved_tensors
    grads = depthwise_backward(grad.contiguous(), x, weight, origin[0] if origin else None, *ctx.settings)
    return *grads, None, None, None


register_autograd("shift_vits::depthwise", _backward, setup_context=_remember)
