"""Patch merging where the anchor says: 2 x 2 tokens gathered and normalised if the model does.

- ``rolled_merge``: the patches, written once; forward and backward.
- ``merged_product``: their product with the reduction's weights, without the patches ever being written; no gradient.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.library import register_autograd

from .base import AVAILABLE, INTERPRETED, launch, operator, power, usable

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["fits_merge_kernel", "fits_merged_product", "merged_product", "rolled_merge"]

PROGRAMS = 528  # of a backward pass with a norm: four on each of 132 processors, and each leaves one sum per weight
OUTPUTS = 512  # of a merged product: patches are read again for every 192 or 256 of them, and beyond this too often


def fits_merge_kernel(x: Tensor) -> bool:
    """Whether ``rolled_merge`` takes these tokens: even sides, at most float32, at most 2048 channels."""
    single = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    even = x.shape[1] % 2 == 0 and x.shape[2] % 2 == 0 and x.shape[3] <= 2048
    return usable(x) and single and even and x.numel() > 0 and x.is_contiguous()


def fits_merged_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``merged_product`` takes x of the type given: half precision, at most 512 outputs, no gradient at all."""
    half = dtype in (torch.bfloat16, torch.float16) or INTERPRETED
    plain = half and len(weight) <= OUTPUTS and weight.is_contiguous() and not isinstance(weight, DTensor)
    return plain and not torch.is_grad_enabled() and fits_merge_kernel(x)


if AVAILABLE:

    @triton.jit
    def _patches(i, height, width):
        """Image of patches i, and the row and column where they begin in it, before it is rolled."""
        across = width // 2
        area = height // 2 * across
        image = i // area
        row = (i - image * area) // across
        return image, 2 * row, 2 * (i - image * area - row * across)

    @triton.jit
    def _places(image, top, left, height, width, CHANNELS: tl.constexpr):
        """Where in x the four tokens of patches begin, as (column, row); remainders by subtraction, since an offset is
        less than a side. Takes no pointer: what a function has read from, the compiler takes for written to by all
        that is stored where the function says."""
        top, left = tl.where(top >= height, top - height, top), tl.where(left >= width, left - width, left)
        below, right = tl.where(top + 1 == height, 0, top + 1), tl.where(left + 1 == width, 0, left + 1)
        first = image.to(tl.int64) * height
        top, below = (first + top) * width, (first + below) * width
        return (top + left) * CHANNELS, (below + left) * CHANNELS, (top + right) * CHANNELS, (below + right) * CHANNELS

    @triton.jit
    def _read(x, place, c, keep):
        return tl.load(x + place[:, None] + c[None, :], keep, 0.0).to(tl.float32)

    @triton.jit
    def _write(out, place, c, value, keep):
        tl.store(out + place[:, None] + c[None, :], value.to(out.dtype.element_ty), keep)

    @triton.jit
    def _row(weight, c, CHANNELS: tl.constexpr):
        return tl.load(weight + c, c < CHANNELS, 0.0).to(tl.float32)[None, :]

    @triton.jit
    def _mean(a0, a1, a2, a3, CHANNELS: tl.constexpr):
        return (tl.sum(a0 + a1 + a2 + a3, 1) / (4 * CHANNELS))[:, None]

    @triton.jit
    def _rolled_merge(x, offset, gain, bias, out, height, width, count, CHANNELS: tl.constexpr, NORM: tl.constexpr,
                      BIAS: tl.constexpr, EPS: tl.constexpr, C: tl.constexpr, T: tl.constexpr):  # fmt: skip
        i, c = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, C)
        keep = (i < count)[:, None] & (c < CHANNELS)[None, :]
        image, top, left = _patches(tl.minimum(i, count - 1), height, width)
        top += tl.load(offset + 2 * image).to(tl.int32)
        left += tl.load(offset + 2 * image + 1).to(tl.int32)
        p0, p1, p2, p3 = _places(image, top, left, height, width, CHANNELS)
        a0, a1, a2, a3 = _read(x, p0, c, keep), _read(x, p1, c, keep), _read(x, p2, c, keep), _read(x, p3, c, keep)
        if NORM:
            mean = _mean(a0, a1, a2, a3, CHANNELS)
            a0, a1 = tl.where(keep, a0 - mean, 0.0), tl.where(keep, a1 - mean, 0.0)
            a2, a3 = tl.where(keep, a2 - mean, 0.0), tl.where(keep, a3 - mean, 0.0)
            scale = 1.0 / tl.sqrt(_mean(a0 * a0, a1 * a1, a2 * a2, a3 * a3, CHANNELS) + EPS)
            zero = tl.zeros([T], tl.int32)  # weights are read once per patch: a row for all would wait for every thread
            a0 = a0 * scale * _read(gain, zero, c, keep)
            a1 = a1 * scale * _read(gain + CHANNELS, zero, c, keep)
            a2 = a2 * scale * _read(gain + 2 * CHANNELS, zero, c, keep)
            a3 = a3 * scale * _read(gain + 3 * CHANNELS, zero, c, keep)
            if BIAS:
                a0 += _read(bias, zero, c, keep)
                a1 += _read(bias + CHANNELS, zero, c, keep)
                a2 += _read(bias + 2 * CHANNELS, zero, c, keep)
                a3 += _read(bias + 3 * CHANNELS, zero, c, keep)
        place = i.to(tl.int64) * (4 * CHANNELS)
        _write(out, place, c, a0, keep)
        _write(out, place + CHANNELS, c, a1, keep)
        _write(out, place + 2 * CHANNELS, c, a2, keep)
        _write(out, place + 3 * CHANNELS, c, a3, keep)

    @triton.jit
    def _rolled_merge_backward(grad, offset, x, gain, grad_x, sums, height, width, count, CHANNELS: tl.constexpr,
                               NORM: tl.constexpr, EPS: tl.constexpr, C: tl.constexpr, T: tl.constexpr):  # fmt: skip
        """Each token is in one patch, so its gradient is stored and not added. With n = (x - mean) scale and
        d = gain grad, it is scale (d - mean(d) - n mean(d n)); gain and bias get the sums of grad n and of grad."""
        c = tl.arange(0, C)
        if NORM:
            w0, w1 = _row(gain, c, CHANNELS), _row(gain + CHANNELS, c, CHANNELS)
            w2, w3 = _row(gain + 2 * CHANNELS, c, CHANNELS), _row(gain + 3 * CHANNELS, c, CHANNELS)
        zero = tl.zeros([T, C], tl.float32)
        s0, s1, s2, s3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
        part, parts = tl.program_id(0), tl.num_programs(0)
        for start in range(part * T, count, parts * T):  # many patches, one sum: no atomics, the same bits always
            i = start + tl.arange(0, T)
            keep = (i < count)[:, None] & (c < CHANNELS)[None, :]
            place = i.to(tl.int64) * (4 * CHANNELS)
            g0, g1 = _read(grad, place, c, keep), _read(grad, place + CHANNELS, c, keep)
            g2, g3 = _read(grad, place + 2 * CHANNELS, c, keep), _read(grad, place + 3 * CHANNELS, c, keep)
            image, top, left = _patches(tl.minimum(i, count - 1), height, width)
            top += tl.load(offset + 2 * image).to(tl.int32)
            left += tl.load(offset + 2 * image + 1).to(tl.int32)
            p0, p1, p2, p3 = _places(image, top, left, height, width, CHANNELS)
            if NORM:
                n0, n1 = _read(x, p0, c, keep), _read(x, p1, c, keep)
                n2, n3 = _read(x, p2, c, keep), _read(x, p3, c, keep)
                d0, d1, d2, d3 = g0 * w0, g1 * w1, g2 * w2, g3 * w3
                mean, level = _mean(n0, n1, n2, n3, CHANNELS), _mean(d0, d1, d2, d3, CHANNELS)
                n0, n1 = tl.where(keep, n0 - mean, 0.0), tl.where(keep, n1 - mean, 0.0)
                n2, n3 = tl.where(keep, n2 - mean, 0.0), tl.where(keep, n3 - mean, 0.0)
                scale = 1.0 / tl.sqrt(_mean(n0 * n0, n1 * n1, n2 * n2, n3 * n3, CHANNELS) + EPS)
                along = _mean(d0 * n0, d1 * n1, d2 * n2, d3 * n3, CHANNELS) * scale
                n0, n1, n2, n3 = n0 * scale, n1 * scale, n2 * scale, n3 * scale
                s0, s1, s2, s3 = s0 + g0 * n0, s1 + g1 * n1, s2 + g2 * n2, s3 + g3 * n3
                b0, b1, b2, b3 = b0 + g0, b1 + g1, b2 + g2, b3 + g3
                g0, g1 = (d0 - level - n0 * along) * scale, (d1 - level - n1 * along) * scale
                g2, g3 = (d2 - level - n2 * along) * scale, (d3 - level - n3 * along) * scale
            _write(grad_x, p0, c, g0, keep)
            _write(grad_x, p1, c, g1, keep)
            _write(grad_x, p2, c, g2, keep)
            _write(grad_x, p3, c, g3, keep)
        if NORM:
            sums += part * (8 * CHANNELS) + c
            tl.store(sums, tl.sum(s0, 0), c < CHANNELS)
            tl.store(sums + CHANNELS, tl.sum(s1, 0), c < CHANNELS)
            tl.store(sums + 2 * CHANNELS, tl.sum(s2, 0), c < CHANNELS)
            tl.store(sums + 3 * CHANNELS, tl.sum(s3, 0), c < CHANNELS)
            tl.store(sums + 4 * CHANNELS, tl.sum(b0, 0), c < CHANNELS)
            tl.store(sums + 5 * CHANNELS, tl.sum(b1, 0), c < CHANNELS)
            tl.store(sums + 6 * CHANNELS, tl.sum(b2, 0), c < CHANNELS)
            tl.store(sums + 7 * CHANNELS, tl.sum(b3, 0), c < CHANNELS)

    @triton.jit
    def _fold(weight, gain, bias, out, folded, WIDTH: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr,
              K: tl.constexpr):  # fmt: skip
        """A row of weights times gain; the sum of what rounding leaves of it, and its product with bias. Zeros beyond
        the last row."""
        n, k = tl.program_id(0), tl.arange(0, K)
        real = k < tl.where(n < D, WIDTH, 0)
        w = tl.load(weight + n * WIDTH + k, real, 0.0).to(tl.float32)
        scaled = (w * tl.load(gain + k, k < WIDTH, 0.0).to(tl.float32)).to(out.dtype.element_ty)
        tl.store(out + n * WIDTH + k, scaled, real)
        tl.store(folded + n, tl.sum(scaled.to(tl.float32), 0))
        shift = tl.load(bias + k, (k < WIDTH) & BIAS, 0.0).to(tl.float32)
        tl.store(folded + tl.num_programs(0) + n, tl.sum(w * shift, 0))

    @triton.jit
    def _patch_moments(sums, squares, offset, out, height, width, count, sm, CHANNELS: tl.constexpr, EPS: tl.constexpr,
                       T: tl.constexpr):  # fmt: skip
        """Mean of each patch, and one over its deviation."""
        i = tl.program_id(0) * T + tl.arange(0, T)
        image, top, left = _patches(tl.minimum(i, count - 1), height, width)
        top += tl.load(offset + 2 * image).to(tl.int32)
        left += tl.load(offset + 2 * image + 1).to(tl.int32)
        p0, p1, p2, p3 = _places(0 * image, top, left, height, width, 1)
        p = image.to(tl.int64) * sm
        p0, p1, p2, p3 = p + p0, p + p1, p + p2, p + p3
        mean = tl.load(sums + p0) + tl.load(sums + p1) + tl.load(sums + p2) + tl.load(sums + p3)
        square = tl.load(squares + p0) + tl.load(squares + p1) + tl.load(squares + p2) + tl.load(squares + p3)
        mean, square = mean / (4 * CHANNELS), square / (4 * CHANNELS)
        tl.store(out + i, mean)  # also beyond the last patch: so nothing that is read there is no number
        tl.store(out + tl.num_programs(0) * T + i, 1.0 / tl.sqrt(tl.maximum(square - mean * mean, 0.0) + EPS))

    @triton.jit
    def _weights(line, k, n, real, WIDTH: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr):
        if WHOLE:
            b = tl.load(line + (k[:, None] + n[None, :] * WIDTH))
        else:
            b = tl.load(line + (k[:, None] + n[None, :] * WIDTH), real[:, None] & (n < D)[None, :], 0.0)
        return b

    @triton.jit
    def _finish(out, y, moments, folded, start, count, n, T: tl.constexpr, D: tl.constexpr, ALL: tl.constexpr,
                PARTS: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
        """Store a product of patches that should have been normalised: (w p - mean sum(w)) / std + w bias."""
        i = tl.arange(0, T)
        if NORM:
            moments += start
            y -= tl.load(moments + i)[:, None] * tl.load(folded + n)[None, :]
            y *= tl.load(moments + tl.num_programs(0) // PARTS * T + i)[:, None]
            y += tl.load(folded + ALL + n)[None, :]
        out += start.to(tl.int64) * D
        keep = (i < count - start)[:, None] & (n < D)[None, :]
        tl.store(out + (i[:, None] * D + n[None, :]), y.to(out.dtype.element_ty), keep)

    @triton.jit
    def _merged_product(x, offset, weight, folded, moments, out, height, width, count, steps, CHANNELS: tl.constexpr,
                        D: tl.constexpr, ALL: tl.constexpr, NORM: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr,
                        N: tl.constexpr, REST: tl.constexpr, T: tl.constexpr):  # fmt: skip
        """T patches by N + REST outputs, K channels of one of the four tokens at a time. Tokens go from memory to the
        product as they are, and two programs fit on a processor: so places are 32 bits, from the first image on, the
        moments are read last, and the compiler is not told how many ``steps`` there are, or it would unroll them."""
        PARTS: tl.constexpr = ALL // (N + REST)  # of the same patches, one after another: all but one find them near
        start, k = tl.program_id(0) // PARTS * T, tl.arange(0, K)
        image, top, left = _patches(tl.minimum(start + tl.arange(0, T), count - 1), height, width)
        top += tl.load(offset + 2 * image).to(tl.int32)
        left += tl.load(offset + 2 * image + 1).to(tl.int32)
        begin = start // (height // 2 * (width // 2))
        x += begin.to(tl.int64) * (height * width * CHANNELS)
        first, below, right, _ = _places(image - begin, top, left, height, width, 1)
        below, right = (below - first).to(tl.int32) * CHANNELS, (right - first).to(tl.int32) * CHANNELS
        first = first.to(tl.int32) * CHANNELS
        n = tl.program_id(0) % PARTS * (N + REST) + tl.arange(0, N)
        y = tl.zeros([T, N], tl.float32)
        if REST:  # 192 outputs are no power of two, and 256 of a kind would be a quarter for nothing
            m = tl.program_id(0) % PARTS * (N + REST) + N + tl.arange(0, REST)
            z = tl.zeros([T, REST], tl.float32)
        chunks: tl.constexpr = (CHANNELS + K - 1) // K
        for step in range(steps):
            token = step // chunks
            c = (step - token * chunks) * K
            place = first + (token % 2 * below + token // 2 * right + c)
            line = weight + token * CHANNELS + c
            real = c + k < CHANNELS
            if WHOLE:
                a = tl.load(x + (place[:, None] + k[None, :]))
            else:
                a = tl.load(x + (place[:, None] + k[None, :]), real[None, :], 0.0)
            y = tl.dot(a, _weights(line, k, n, real, 4 * CHANNELS, D, WHOLE), y)
            if REST:
                z = tl.dot(a, _weights(line, k, m, real, 4 * CHANNELS, D, WHOLE), z)
        if REST:
            _finish(out, z, moments, folded, start, count, m, T, D, ALL, PARTS, NORM)
        _finish(out, y, moments, folded, start, count, n, T, D, ALL, PARTS, NORM)


@operator("shift_vits::rolled_merge")
def rolled_merge(x: Tensor, offset: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float,
                 dtype: torch.dtype) -> Tensor:  # fmt: skip
    """2 x 2 tokens of x (B, H, W, C), rolled by ``offset`` (B, 2) in [0, side), side by side as (column, row, channel);
    with ``gain`` and ``bias`` (4C,) normalised as by a LayerNorm -> (B, H/2, W/2, 4C) of the type given."""
    offset = offset.contiguous()
    b, h, w, c = x.shape
    out = torch.empty((b, h // 2, w // 2, 4 * c), dtype=dtype, device=x.device)
    count, wide = b * (h // 2) * (w // 2), power(c)
    tokens = max(1, 1024 // wide)
    launch(_rolled_merge, (-(-count // tokens),), x, offset, offset if gain is None else gain,
           offset if bias is None else bias, out, h, w, count, CHANNELS=c, NORM=gain is not None,
           BIAS=bias is not None, EPS=eps, C=wide, T=tokens, num_warps=max(4, wide // 256))  # fmt: skip
    return out


@operator("shift_vits::rolled_merge_backward")
def rolled_merge_backward(grad: Tensor, offset: Tensor, x: Tensor | None, gain: Tensor | None, eps: float,
                          dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradient of the tokens, of the type given, and sums (programs, 2, 4C) of those of gain and bias, if x and gain
    are given."""
    offset = offset.contiguous()
    b, h, w, c = grad.shape[0], 2 * grad.shape[1], 2 * grad.shape[2], grad.shape[3] // 4
    grad_x = torch.empty((b, h, w, c), dtype=dtype, device=grad.device)
    count, wide = b * (h // 2) * (w // 2), power(c)
    tokens = max(1, 512 // wide)  # half of what the forward takes: x, gradients and sums are all in registers
    tiles = -(-count // tokens)
    parts = tiles if gain is None else min(tiles, PROGRAMS)
    sums = torch.empty((0 if gain is None else parts, 2, 4 * c), dtype=torch.float32, device=grad.device)
    launch(_rolled_merge_backward, (parts,), grad, offset, grad if x is None else x, grad if gain is None else gain,
           grad_x, sums, h, w, count, CHANNELS=c, NORM=gain is not None, EPS=eps, C=wide, T=tokens,
           num_warps=max(4, wide // 128), num_stages=1)  # fmt: skip
    return grad_x, sums


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, offset, gain, bias, ctx.eps, _ = inputs
    ctx.dtype, ctx.bias = x.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(offset, *(() if gain is None else (x, gain)))  # a plain gather needs no x


def _backward(ctx: Any, grad: Tensor) -> tuple:
    offset, x, gain = (*ctx.saved_tensors, None, None)[:3]
    grad_x, sums = rolled_merge_backward(grad.contiguous(), offset, x, gain, ctx.eps, ctx.dtype)
    if gain is None:
        return grad_x, None, None, None, None, None
    of_gain, of_bias = sums.sum(0).unbind()
    return grad_x, None, of_gain.to(gain.dtype), None if ctx.bias is None else of_bias.to(ctx.bias), None, None


register_autograd("shift_vits::rolled_merge", _backward, setup_context=_remember)


@operator("shift_vits::merged_product")
def merged_product(x: Tensor, offset: Tensor, weight: Tensor, gain: Tensor | None, bias: Tensor | None,
                   sums: Tensor | None, squares: Tensor | None, eps: float) -> Tensor:  # fmt: skip
    """Patches of 2 x 2 tokens, as of ``rolled_merge``, times ``weight`` (D, 4C) -> (B, H/2, W/2, D) of x's type.

    With ``gain`` patches are normalised, by their tokens' ``sums`` over channels and those of their ``squares``,
    (B, H, W) each, float32. The norm is folded: weights are multiplied by gain, and since they are rounded before they
    are summed, what is taken off for the mean is what it adds.
    """
    offset, (b, h, w, c), d = offset.contiguous(), x.shape, len(weight)
    count = b * (h // 2) * (w // 2)
    wide, rest = (128, 64) if d % 192 == 0 else (max(16, min(256, power(d))), 0)
    tiles, parts = -(-count // 128), -(-d // (wide + rest))
    padded = parts * (wide + rest)
    k = math.gcd(c, 32 if rest else 64)  # with 64 of everything, memory beside a processor holds one program, not two
    k = k if k >= 16 else max(16, min(64, power(c)))
    out = torch.empty((b, h // 2, w // 2, d), dtype=x.dtype, device=x.device)
    moments = folded = offset  # neither is read without a norm
    if gain is None or sums is None or squares is None:
        scaled = weight.to(x.dtype)
    else:
        scaled = torch.empty((d, 4 * c), dtype=x.dtype, device=x.device)
        folded = torch.empty((2, padded), dtype=torch.float32, device=x.device)
        launch(_fold, (padded,), weight, gain, gain if bias is None else bias, scaled, folded, WIDTH=4 * c, D=d,
               BIAS=bias is not None, K=power(4 * c), num_warps=4)  # fmt: skip
        if sums.stride() != squares.stride() or sums.stride()[1:] != (w, 1):
            sums, squares = sums.contiguous(), squares.contiguous()
        moments = torch.empty((2, tiles * 128), dtype=torch.float32, device=x.device)
        launch(_patch_moments, (tiles,), sums, squares, offset, moments, h, w, count, sums.stride(0), CHANNELS=c,
               EPS=eps, T=128, num_warps=4)  # fmt: skip
    launch(_merged_product, (tiles * parts,), x, offset, scaled, folded, moments, out, h, w, count, 4 * -(-c // k),
           CHANNELS=c, D=d, ALL=padded, NORM=gain is not None, WHOLE=c % k == 0 and d == padded, K=k, N=wide,
           REST=rest, T=128, num_warps=8, num_stages=5 if rest else 4)  # fmt: skip
    return out
