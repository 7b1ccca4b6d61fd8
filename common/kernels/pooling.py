"""What pooled attention reads, and its skip, for inference: every head pooled by a depthwise 3 x 3 convolution and
normalised, in one pass; positions beside queries, in another; and the maximum of 3 x 3 tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .base import AVAILABLE, INTERPRETED, launch, next_power_of_2, operator, pieces
from .depthwise import fits_depthwise_kernel, split, vectors

if AVAILABLE:
    import triton
    import triton.language as tl

    from .depthwise import _column, _next, _rows, _start, _strip, _sum, _taps

__all__ = ["fits_pooled", "fits_pooled_maximum", "fits_positioned", "pooled", "pooled_maximum", "positioned"]

LONGEST = 8  # outputs of a strip
STRIPS = 8  # of a program of ``pooled``
HEADS = 64  # of a program of ``positioned``


def fits_pooled(x: Tensor, size: Sequence[int], gain: Tensor | None) -> bool:
    """Whether ``pooled`` takes these: half precision, what a depthwise kernel of this size takes, at most 256 channels
    a head, and no gradient."""
    half = x.dtype in (torch.bfloat16, torch.float16) or INTERPRETED
    if not half or gain is None or isinstance(gain, DTensor) or torch.is_grad_enabled():
        return False
    return len(gain) <= 256 and fits_depthwise_kernel(x, size)


def fits_pooled_maximum(x: Tensor, stride: int) -> bool:
    """Whether ``pooled_maximum`` takes these: tokens that a kernel reads, stride 2, and no gradient."""
    return stride == 2 and not torch.is_grad_enabled() and fits_depthwise_kernel(x, (3, 3))


def fits_positioned(q: Tensor) -> bool:
    """Whether ``positioned`` takes these: half precision, contiguous, 16-128 channels, a power of two or three times
    one, and no gradient."""
    half, d = q.dtype in (torch.bfloat16, torch.float16) or INTERPRETED, q.shape[3]
    known = 16 <= d // pieces(d) == next_power_of_2(d // pieces(d)) and d <= 128
    return half and known and not torch.is_grad_enabled() and q.is_contiguous() and q.numel() > 0


if AVAILABLE:

    @triton.jit
    def _normed(left, middle, right, taps, gains, shifts, real, CHANNELS: tl.constexpr, PIECES: tl.constexpr,
                EPS: tl.constexpr, T: tl.constexpr, C: tl.constexpr):  # fmt: skip
        """Three columns by their taps, normalised: tensors (T, C), per piece of the channels."""
        values, results, total = (), (), tl.zeros([T, C], tl.float32)
        for n in tl.static_range(PIECES):
            value = _sum(tl.zeros([T, C], tl.float32), left, middle, right, taps, 9 * n, n)
            values, total = values + (value,), total + value  # type: ignore[assignment]  # noqa: RUF005
        mean, square = (tl.sum(total, 1) / CHANNELS)[:, None], tl.zeros([T, C], tl.float32)
        for n in tl.static_range(PIECES):
            value = values[n] - mean
            if PIECES == 1 and CHANNELS != C:
                value = tl.where(real[None, :], value, 0.0)
            square += value * value
        scale = (1.0 / tl.sqrt(tl.sum(square, 1) / CHANNELS + EPS))[:, None]
        for n in tl.static_range(PIECES):
            value = (values[n] - mean) * scale * gains[n] + shifts[n]
            results = results + (value,)  # type: ignore[assignment]  # noqa: RUF005
        return results

    @triton.jit
    def _pooled(x, weight, gain, shift, tail, origin, out, height, width, rows, columns, segments, count, stride_b,
                stride_h, stride_w, heads, CHANNELS: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
                STRIDE: tl.constexpr, CIRCULAR: tl.constexpr, PLACED: tl.constexpr, UNROLLED: tl.constexpr,
                SEGMENT: tl.constexpr, EPS: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
                T: tl.constexpr):  # fmt: skip
        """T strips of outputs of one head, whose channels are one piece of C, or three: 96 are three of 32.

        Outputs are made all at once or one by one, to the same bits. All at once, reads go ahead of what they are for,
        and as outputs are stored at the end, no store holds one up. One by one, the next one's columns are read
        meanwhile, and the compiler has a fifth of the work. Beyond a stride of 2, where outputs share no columns, that
        is as fast.
        """
        RAGGED: tl.constexpr = PIECES == 1 and CHANNELS != C
        head, t, c = tl.program_id(0) % heads, tl.program_id(0) // heads * T + tl.arange(0, T), tl.arange(0, C)
        real, e = c < CHANNELS // PIECES, tl.arange(0, E)
        image, h, w = _strip(tl.minimum(t, count - 1), rows, segments, SEGMENT)
        top, first = _start(origin, image, PLACED)
        tokens, there, z = _rows(x + head * CHANNELS, top, first, image, h, w, height, stride_b, stride_h, STRIDE,
                                 CIRCULAR)  # fmt: skip
        taps, gains, shifts = (), (), ()
        for n in tl.static_range(PIECES):
            taps = taps + _taps(weight + n * C, c, real, 9, CHANNELS, RAGGED, T)
            gains = gains + _taps(gain + n * C, c, real, 1, CHANNELS, RAGGED, T)
            shifts = shifts + _taps(shift + n * C, c, real, 1, CHANNELS, RAGGED, T)
        place = ((image * heads + head) * (rows * columns) + (h * columns + w)) * (CHANNELS + WIDTH)
        left = _column(tokens, there, z, c, real, width, stride_w, CIRCULAR, RAGGED, PIECES, C)
        middle = _column(tokens, there, z + 1, c, real, width, stride_w, CIRCULAR, RAGGED, PIECES, C)
        if UNROLLED:
            results = ()
            for _ in tl.static_range(SEGMENT * PIECES):
                results = results + (tl.zeros([T, C], out.dtype.element_ty),)  # type: ignore[assignment]  # noqa: RUF005
            for _ in tl.range(SEGMENT, loop_unroll_factor=SEGMENT):
                right = _column(tokens, there, z + 2, c, real, width, stride_w, CIRCULAR, RAGGED, PIECES, C)
                values = _normed(left, middle, right, taps, gains, shifts, real, CHANNELS, PIECES, EPS, T, C)
                for n in tl.static_range(PIECES):
                    results = results[1:] + (values[n].to(out.dtype.element_ty),)  # type: ignore[assignment]  # noqa: RUF005
                z += STRIDE
                left, middle = _next(middle, right, tokens, there, z, c, real, width, stride_w, STRIDE, CIRCULAR,
                                     RAGGED, PIECES, C)  # fmt: skip
            beside = ()
            for s in tl.static_range(SEGMENT if WIDTH else 0):
                value = _tail(tail, h * columns + w + s, w + s < columns, e, WIDTH).to(out.dtype.element_ty)
                beside = beside + (value,)  # type: ignore[assignment]  # noqa: RUF005
            for s in tl.static_range(SEGMENT):
                keep, target = (t < count) & (w + s < columns), out + (place + s * (CHANNELS + WIDTH))[:, None]
                for n in tl.static_range(PIECES):
                    tl.store(target + (n * C + c)[None, :], results[s * PIECES + n], keep[:, None] & real[None, :])
                if WIDTH:
                    tl.store(target + (CHANNELS + e)[None, :], beside[s], keep[:, None] & (e < WIDTH)[None, :])
        else:
            right = _column(tokens, there, z + 2, c, real, width, stride_w, CIRCULAR, RAGGED, PIECES, C)
            for s in tl.range(SEGMENT):
                z += STRIDE
                after, second = _next(middle, right, tokens, there, z, c, real, width, stride_w, STRIDE, CIRCULAR,
                                      RAGGED, PIECES, C)  # fmt: skip
                third = _column(tokens, there, z + 2, c, real, width, stride_w, CIRCULAR, RAGGED, PIECES, C)
                keep, target = (t < count) & (w + s < columns), out + (place + s * (CHANNELS + WIDTH))[:, None]
                if WIDTH:
                    value = _tail(tail, h * columns + w + s, w + s < columns, e, WIDTH).to(out.dtype.element_ty)
                    tl.store(target + (CHANNELS + e)[None, :], value, keep[:, None] & (e < WIDTH)[None, :])
                values = _normed(left, middle, right, taps, gains, shifts, real, CHANNELS, PIECES, EPS, T, C)
                for n in tl.static_range(PIECES):
                    value = values[n].to(out.dtype.element_ty)
                    tl.store(target + (n * C + c)[None, :], value, keep[:, None] & real[None, :])
                left, middle, right = after, second, third

    @triton.jit
    def _tail(tail, token, there, e, WIDTH: tl.constexpr):
        """What stands beside tokens: (T, E)."""
        return tl.load(tail + (token * WIDTH)[:, None] + e[None, :], there[:, None] & (e < WIDTH)[None, :], 0.0)

    @triton.jit
    def _positioned(q, by_row, by_column, out, count, tokens, columns, CHANNELS: tl.constexpr, PIECES: tl.constexpr,
                    ROWS: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
                    T: tl.constexpr):  # fmt: skip
        """One place of T images' heads, whose row and column are the same."""
        token, i = tl.program_id(0) % tokens, tl.program_id(0) // tokens * T + tl.arange(0, T)
        r, s, keep = tl.arange(0, R), tl.arange(0, S), (i < count)[:, None]
        place = i.to(tl.int64) * tokens + token
        source, target = (place * CHANNELS)[:, None], (place * (CHANNELS + ROWS + COLUMNS))[:, None]
        by_row += token // columns * (ROWS * CHANNELS)
        by_column += token % columns * (COLUMNS * CHANNELS)
        along, across, values = tl.zeros([T, R], tl.float32), tl.zeros([T, S], tl.float32), ()
        for n in tl.static_range(PIECES):
            c = n * C + tl.arange(0, C)
            value = tl.load(q + source + c[None, :], keep, 0.0)
            row = tl.load(by_row + r[None, :] * CHANNELS + c[:, None], (r < ROWS)[None, :], 0.0)
            column = tl.load(by_column + s[None, :] * CHANNELS + c[:, None], (s < COLUMNS)[None, :], 0.0)
            along, across = tl.dot(value, row, along), tl.dot(value, column, across)
            values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
        for n in tl.static_range(PIECES):
            tl.store(out + target + (n * C + tl.arange(0, C))[None, :], values[n], keep)
        target += CHANNELS
        tl.store(out + target + r[None, :], along.to(out.dtype.element_ty), keep & (r < ROWS)[None, :])
        tl.store(out + target + ROWS + s[None, :], across.to(out.dtype.element_ty), keep & (s < COLUMNS)[None, :])

    @triton.jit
    def _pooled_maximum(x, origin, out, height, width, rows, columns, count, stride_b, stride_h, stride_w,
                        CHANNELS: tl.constexpr, C: tl.constexpr, T: tl.constexpr):  # fmt: skip
        BLOCKS: tl.constexpr = (CHANNELS + C - 1) // C
        t, c = tl.program_id(0) // BLOCKS * T + tl.arange(0, T), tl.program_id(0) % BLOCKS * C + tl.arange(0, C)
        image, h, w = _strip(tl.minimum(t, count - 1), rows, columns, 1)
        top, left = _start(origin, image, True)
        tokens, there, z = _rows(x, top, left, image, h, w, height, stride_b, stride_h, 2, True)
        best = tl.full([T, C], -float("inf"), tl.float32)
        for j in tl.static_range(3):
            column = _column(tokens, there, z + j, c, c < CHANNELS, width, stride_w, True, CHANNELS % C != 0, 1, C)
            for i in tl.static_range(3):
                best = tl.maximum(best, column[i], propagate_nan=tl.PropagateNan.ALL)
        place = (((image * rows + h) * columns + w) * CHANNELS)[:, None] + c[None, :]
        tl.store(out + place, best.to(out.dtype.element_ty), (t < count)[:, None] & (c < CHANNELS)[None, :])


@operator("shift_vits::pooled")
def pooled(x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, eps: float, stride: int, circular: bool,
           tail: Tensor | None, origin: Tensor | None, unrolled: bool) -> Tensor:  # fmt: skip
    """Every head of x (B, H, W, heads d) convolved with ``weight`` (3, 3, d), contiguous, as by ``depthwise``, and
    normalised as by a LayerNorm of d; beside each token its row of ``tail`` (H/s W/s, n), if there is one
    -> (B, heads, H/s W/s, d + n). ``unrolled`` is up to a third faster at strides 1 and 2, and takes five times as long
    to compile."""
    (b, h, w, channels), d, width = x.shape, weight.shape[2], 0 if tail is None else tail.shape[1]
    rows, columns, heads = -(-h // stride), -(-w // stride), channels // d
    out = torch.empty((b, heads, rows * columns, d + width), dtype=x.dtype, device=x.device)
    parts, (segment, segments) = pieces(d), split(columns, LONGEST)
    count = b * rows * segments
    launch(_pooled, (-(-count // STRIPS) * heads,), x, weight, gain, shift, weight if tail is None else tail,
           weight if origin is None else origin, out, h, w, rows, columns, segments, count, *x.stride()[:3],
           heads, CHANNELS=d, PIECES=parts, WIDTH=width, STRIDE=stride, CIRCULAR=circular, PLACED=origin is not None,
           SEGMENT=segment, UNROLLED=unrolled and stride <= 2, EPS=eps, C=max(16, next_power_of_2(d // parts)),
           E=max(2, next_power_of_2(width)), T=STRIPS, num_warps=4)  # fmt: skip
    return out


@operator("shift_vits::positioned")
def positioned(q: Tensor, by_row: Tensor, by_column: Tensor) -> Tensor:
    """Queries and, beside each, what it makes of each row and of each column of keys: q (B, heads, H W, d), by_row
    (H, rows, d), by_column (W, columns, d), all contiguous and of one type -> (B, heads, H W, d + rows + columns)."""
    (b, heads, tokens, d), rows, columns = q.shape, by_row.shape[1], by_column.shape[1]
    out = torch.empty((b, heads, tokens, d + rows + columns), dtype=q.dtype, device=q.device)
    parts = pieces(d)
    launch(_positioned, (-(-b * heads // HEADS) * tokens,), q, by_row, by_column, out, b * heads, tokens,
           len(by_column), CHANNELS=d, PIECES=parts, ROWS=rows, COLUMNS=columns, C=d // parts,
           R=max(16, next_power_of_2(rows)),
           S=max(16, next_power_of_2(columns)), T=HEADS, num_warps=4)  # fmt: skip
    return out


@operator("shift_vits::pooled_maximum")
def pooled_maximum(x: Tensor, origin: Tensor) -> Tensor:
    """On the torus, the maximum of the 3 x 3 tokens around every second one, the first at ``origin`` (B, 2) in
    [0, side): (B, H, W, C) -> (B, H/2, W/2, C), sides even."""
    b, h, w, channels = x.shape
    out = torch.empty((b, h // 2, w // 2, channels), dtype=x.dtype, device=x.device)
    (block, tile), count = vectors(channels, 16 // x.element_size()), b * (h // 2) * (w // 2)
    launch(_pooled_maximum, (-(-count // tile) * -(-channels // block),), x, origin, out, h, w, h // 2, w // 2, count,
           *x.stride()[:3], CHANNELS=channels, C=block, T=tile, num_warps=4)  # fmt: skip
    return out
