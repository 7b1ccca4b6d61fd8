"""Convolutions of an image, which has few channels and may be rolled by an offset of its own: a matrix product of its
windows, read where they lie, is faster than a convolution and needs no padded or rolled copy.

- ``image_tokens``: the convolution, its norm, and what a score needs of each token, in one pass.
- ``image_phases``: energies of the convolution at all phases of its stride, without writing any output.

Both go down an image row by row of cells, with all weights at hand and the next rows on their way. They read a
window in bands as high as the stride and a band in pieces of a few pixels, and take along the sums of windows that are
not complete yet. ``in_pieces`` puts weights in the same order; windows of the second hold a kernel at ``all_phases``.
"""

from typing import Any

import torch
from torch import Tensor

from .base import AVAILABLE, INTERPRETED, launch, next_power_of_2, operator
from .cards import holds
from .image_pieces import PHASES, TOKENS, count_bytes, cut_windows, has_many_sums
from .pixels import fits_image_windows, is_packed

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import wrap
    from .pixels import beginning

__all__ = ["fits_image_phases", "fits_image_tokens", "image_phases", "image_tokens"]

MEMORY = 200_000  # bytes, of a program


def fits_image_tokens(x: Tensor, weight: Tensor, stride: int, dtype: torch.dtype) -> bool:
    """Whether ``image_tokens`` takes these: half precision, at most 256 outputs, no gradient at all. Where windows
    overlap, of x ``packed``."""
    size, half = weight.shape[-1], dtype in (torch.bfloat16, torch.float16) or INTERPRETED
    few = half and len(weight) <= 256 and not torch.is_grad_enabled() and fits_image_windows(x, size, stride)
    near = size > stride or is_packed(x)
    cut = cut_windows(x.shape[1], near, size, stride, len(weight), TOKENS)
    need = count_bytes(len(weight), TOKENS, cut, near)
    return few and need <= MEMORY and holds(x, "_image_tokens", need)


def fits_image_phases(x: Tensor, rows: int, size: int, stride: int) -> bool:
    """Whether ``image_phases`` takes a kernel of so many rows (outputs), size x size: 16-128 outputs (phases times
    rows), small windows."""
    window, outputs = size + stride - 1, rows * stride**2
    need = count_bytes(outputs, PHASES, cut_windows(x.shape[1], True, window, stride, outputs, PHASES), True)
    few = outputs in (16, 32, 64, 128) and window <= 16 and need <= MEMORY
    return few and fits_image_windows(x, window, stride) and holds(x, "_image_phases", need)


if AVAILABLE:

    @triton.jit
    def _cells(part, blocks, rows, across, M: tl.constexpr, ROWS: tl.constexpr):
        """Columns of the cells of a part, whether they are there, its first row and the one behind its last."""
        j, first = part % blocks * M + tl.arange(0, M), part // blocks * ROWS
        return tl.minimum(j, across - 1), j < across, first, tl.minimum(first + ROWS, rows)

    @triton.jit
    def _piece(x, i, j, step: tl.constexpr, down, right, height, width, sc, sh, SW: tl.constexpr, SIZE: tl.constexpr,
               STRIDE: tl.constexpr, PAD: tl.constexpr, CIRCULAR: tl.constexpr, PLACED: tl.constexpr,
               PACKED: tl.constexpr, CHANNELS: tl.constexpr, C: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr,
               TAIL: tl.constexpr, LINE: tl.constexpr, BAND: tl.constexpr):  # fmt: skip
        """A piece of the band of each cell in the row i, as ``in_pieces`` has them, of an image that begins at
        (down, right). Columns are the same in all rows: a compiler takes what depends on them out of a loop."""
        BEYOND: tl.constexpr = PAD > 0 or SIZE > STRIDE  # windows reach over the sides
        k = step * K + tl.arange(0, K if step < STEPS else TAIL)
        if PACKED:
            row, column = k // (LINE * C), k // C % LINE
            row, column = tl.where(row < BAND, row, BAND - 1), tl.where(column < SIZE, column, SIZE - 1)
            keep = (k >= 0)[None, :]  # all: beyond a window weights are zero
        else:
            row, column, channel = k // SIZE % SIZE, k % SIZE, k // (SIZE * SIZE)
            keep = (channel < CHANNELS)[None, :]
        top, left = i * STRIDE - PAD, j * STRIDE - PAD
        if BEYOND and not CIRCULAR:
            keep = keep & ((row >= -top) & (row < height - top))[None, :]
            keep = keep & (column[None, :] >= -left[:, None]) & (column[None, :] < (width - left)[:, None])
        if PLACED or BEYOND:
            top, left = wrap(wrap(top, height) + down, height), wrap(left + right, width)
        row, column = row + top, column[None, :] + left[:, None]
        if PLACED or BEYOND:
            row, column = tl.where(row < height, row, row - height), tl.where(column < width, column, column - width)
        if PACKED:
            place = (row * sh)[None, :] + tl.multiple_of(column * SW, (1, C)) + (k % C)[None, :]  # a pixel at once
        else:
            place = (row * sh + channel * sc)[None, :] + column * SW
        if PACKED and (CIRCULAR or not BEYOND):
            return tl.load(x + place)
        return tl.load(x + place, keep, 0.0)

    @triton.jit
    def _vector(weights, n, OUTPUTS: tl.constexpr):
        """One number for each of the outputs n, zero beyond the last of them, as a row in float32."""
        return tl.load(weights + n, n < OUTPUTS, 0.0).to(tl.float32)[None, :]

    @triton.jit
    def _weights(weights, n, BANDS: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr, TAIL: tl.constexpr,
                 OUTPUTS: tl.constexpr):  # fmt: skip
        """Those of each piece of each band for the outputs n, zero beyond the last of them."""
        pieces = ()
        for band in tl.static_range(BANDS):
            for step in tl.static_range(STEPS + (TAIL > 0)):
                k = band * (STEPS * K + TAIL) + step * K + tl.arange(0, K if step < STEPS else TAIL)
                piece = tl.load(weights + (k * OUTPUTS)[:, None] + n[None, :], (n < OUTPUTS)[None, :], 0.0)
                pieces = pieces + (piece,)  # type: ignore[assignment]  # noqa: RUF005
        return pieces

    @triton.jit
    def _sums(t, u, M: tl.constexpr, N: tl.constexpr, REST: tl.constexpr):
        """Over all outputs of each cell, first over those that a thread holds."""
        if REST:
            t = tl.sum(tl.reshape(t, [M, N // REST, REST]), 1) + u
        return tl.sum(t, 1)

    @triton.jit
    def _image_tokens(x, offset, weights, bias, gain, shift, direction, out, moments, height, width, parts, blocks, sb,
                      sc, sh, SW: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
                      CIRCULAR: tl.constexpr, PLACED: tl.constexpr, PACKED: tl.constexpr, CHANNELS: tl.constexpr,
                      C: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr, TAIL: tl.constexpr, LINE: tl.constexpr,
                      BAND: tl.constexpr, BANDS: tl.constexpr, SETTLED: tl.constexpr, BIAS: tl.constexpr,
                      NORM: tl.constexpr, EPS: tl.constexpr, MOMENTS: tl.constexpr, OUTPUTS: tl.constexpr,
                      N: tl.constexpr, REST: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
        """Some rows of cells of an image by N + REST outputs: 96 are no power of two, and 128 would be a quarter idle.
        A program begins one band early, with that part of its first windows, if they have two."""
        image, rows, across = tl.program_id(0) // parts, height // STRIDE, width // STRIDE
        down, right = beginning(offset, image, PLACED)
        n, m = tl.arange(0, N), N + tl.arange(0, REST if REST else 1)
        PIECES: tl.constexpr = STEPS + (TAIL > 0)
        b = _weights(weights, n, BANDS, K, STEPS, TAIL, OUTPUTS)
        if REST:
            c = _weights(weights, m, BANDS, K, STEPS, TAIL, OUTPUTS)
        j, keep, first, last = _cells(tl.program_id(0) % parts, blocks, rows, across, M, ROWS)
        x, area = x + image.to(tl.int64) * sb, rows * across
        token = out + image.to(tl.int64) * area * OUTPUTS + (j * OUTPUTS)[:, None]
        place = moments + image.to(tl.int64) * 3 * area + j
        if BANDS == 2:  # of the next row, whose first band is this row's second
            t1, u1 = tl.zeros([M, N], tl.float32), tl.zeros([M, REST if REST else 1], tl.float32)
        for band in range(first, last + BANDS - 1):
            i = band - (BANDS - 1)
            t, u = tl.zeros([M, N], tl.float32), tl.zeros([M, REST if REST else 1], tl.float32)
            if BANDS == 2:
                t, u, t1, u1 = t1, u1, t, u
            for step in tl.static_range(PIECES):
                a = _piece(x, band, j, step, down, right, height, width, sc, sh, SW, SIZE, STRIDE, PAD, CIRCULAR,
                           PLACED, PACKED, CHANNELS, C, K, STEPS, TAIL, LINE,
                           BAND).to(weights.dtype.element_ty)  # fmt: skip
                if BANDS == 2:
                    t1 = tl.dot(a, b[step], t1)
                    if REST:
                        u1 = tl.dot(a, c[step], u1)
                t = tl.dot(a, b[(BANDS - 1) * PIECES + step], t)  # waited for, so last
                if REST:
                    u = tl.dot(a, c[(BANDS - 1) * PIECES + step], u)
            if BANDS >= SETTLED:
                t1, u1 = t1 + 0.0, u1 + 0.0
            if BIAS:
                t += _vector(bias, n, OUTPUTS)
                if REST:
                    u += _vector(bias, m, OUTPUTS)
            if NORM:
                mean, square = _sums(t, u, M, N, REST) / OUTPUTS, _sums(t * t, u * u, M, N, REST)
                scale = (1.0 / tl.sqrt(tl.maximum(square / OUTPUTS - mean * mean, 0.0) + EPS))[:, None]
                mean = mean[:, None] * scale
                t = (t * scale - mean) * _vector(gain, n, OUTPUTS) + _vector(shift, n, OUTPUTS)
                if REST:
                    u = (u * scale - mean) * _vector(gain, m, OUTPUTS) + _vector(shift, m, OUTPUTS)
            there = tl.where(i >= first, keep, False)
            if MOMENTS:
                along = _sums(t * _vector(direction, n, OUTPUTS), u * _vector(direction, m, OUTPUTS), M, N, REST)
                tl.store(place + i * across, _sums(t, u, M, N, REST), there)
                tl.store(place + i * across + area, _sums(t * t, u * u, M, N, REST), there)
                tl.store(place + i * across + 2 * area, along, there)
            begin = token + i * (across * OUTPUTS)
            tl.store(begin + n[None, :], t.to(out.dtype.element_ty), there[:, None] & (n < OUTPUTS)[None, :])
            if REST:
                tl.store(begin + m[None, :], u.to(out.dtype.element_ty), there[:, None] & (m < OUTPUTS)[None, :])

    @triton.jit
    def _image_phases(x, offset, weights, bias, direction, out, height, width, parts, blocks, sb, sc, sh,
                      SW: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
                      PLACED: tl.constexpr, PACKED: tl.constexpr, CHANNELS: tl.constexpr, C: tl.constexpr,
                      K: tl.constexpr, STEPS: tl.constexpr, TAIL: tl.constexpr, LINE: tl.constexpr, BAND: tl.constexpr,
                      BANDS: tl.constexpr, SETTLED: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, M: tl.constexpr,
                      ROWS: tl.constexpr):  # fmt: skip
        """Some rows of cells of an image: energy and direction of the outputs at each phase, summed.

        The bias c is added to the sums: of (t + c)^2 over n cells, c (2 sum t + n c) is due to it."""
        S: tl.constexpr = STRIDE * STRIDE
        image, rows, across = tl.program_id(0) // parts, height // STRIDE, width // STRIDE
        down, right = beginning(offset, image, PLACED)
        n = tl.arange(0, R * S)
        PIECES: tl.constexpr = STEPS + (TAIL > 0)
        b = _weights(weights, n, BANDS, K, STEPS, TAIL, R * S)
        j, keep, first, last = _cells(tl.program_id(0) % parts, blocks, rows, across, M, ROWS)
        x = x + image.to(tl.int64) * sb
        energy, total = tl.zeros([M // 2, R * S], tl.float32), tl.zeros([M // 2, R * S], tl.float32)
        t1, t2 = tl.zeros([M, R * S], tl.float32), tl.zeros([M, R * S], tl.float32)  # of the next rows, so far
        for band in range(first, last + BANDS - 1):
            t, t1, t2 = t1, t2, tl.zeros([M, R * S], tl.float32)
            if BANDS == 2:
                t1, t2 = t2, t1
            if BANDS == 1:
                t, t2 = t2, t
            for step in tl.static_range(PIECES):
                a = _piece(x, band, j, step, down, right, height, width, sc, sh, SW, SIZE, STRIDE, PAD, True, PLACED,
                           PACKED, CHANNELS, C, K, STEPS, TAIL, LINE, BAND).to(weights.dtype.element_ty)  # fmt: skip
                if BANDS == 3:
                    t2 = tl.dot(a, b[step], t2)
                if BANDS >= 2:
                    t1 = tl.dot(a, b[(BANDS - 2) * PIECES + step], t1)
                if not PACKED or (BANDS - 1) * BAND + step * K // (LINE * C) < SIZE:  # else all are zero
                    t = tl.dot(a, b[(BANDS - 1) * PIECES + step], t)  # waited for, so last
            if BANDS >= SETTLED:
                t1, t2 = t1 + 0.0, t2 + 0.0
            t = tl.where(tl.where(band >= first + BANDS - 1, keep, False)[:, None], t, 0.0)  # not what others have
            energy += tl.reshape(tl.sum(tl.reshape(t * t, [M // 16, 2, 8, R * S]), 1), [M // 2, R * S])
            total += tl.reshape(tl.sum(tl.reshape(t, [M // 16, 2, 8, R * S]), 1), [M // 2, R * S])
        energy, total = tl.sum(energy, 0), tl.sum(total, 0)
        if BIAS:
            constant = tl.load(bias + n // S).to(tl.float32)
            added = constant * (tl.sum(keep.to(tl.int32), 0) * (last - first))
            energy += constant * (2 * total + added)
            total += added
        along = total * (tl.load(direction + n // S) * (2.0 / R) ** 0.5)
        place = out + tl.program_id(0) * 2 * S + tl.arange(0, S)
        tl.store(place, tl.sum(tl.reshape(energy, [R, S]), 0))
        tl.store(place + S, tl.sum(tl.reshape(along, [R, S]), 0))


def _reading(x: Tensor, size: int, stride: int, outputs: int,
             how: dict[str, Any]) -> tuple[int, int, dict[str, int]]:  # fmt: skip
    """Programs for an image and for a row of its cells, and how they read it and their windows; with twice the warps
    for many outputs."""
    batch, c, rows, across = x.shape[0], x.shape[1], x.shape[2] // stride, x.shape[3] // stride
    cut = cut_windows(c, is_packed(x), size, stride, outputs, how)
    many = has_many_sums(outputs, cut["BANDS"])
    m = max(16, min(how["cells"][int(2 * batch * rows < how["programs"])], next_power_of_2(across)))
    blocks = -(-across // m)
    parts = -(-rows // min(how["rows"][many], -(-rows * blocks * batch // how["programs"])))
    return parts * blocks, blocks, {
        "SW": x.stride(3), "SIZE": size, "STRIDE": stride, "PACKED": is_packed(x), "CHANNELS": c,
        "C": next_power_of_2(c), **cut,
        "SETTLED": how["settled"], "M": m, "ROWS": -(-rows // parts),
        "num_warps": how["num_warps"] * (2 if outputs > how["wide"] else 1),
        "num_stages": how["num_stages"][many] + (outputs > how["ahead"] and is_packed(x)),
    }  # fmt: skip


@operator("shift_vits::image_tokens")
def image_tokens(x: Tensor, offset: Tensor | None, weights: Tensor, bias: Tensor | None, gain: Tensor | None,
                 shift: Tensor | None, eps: float, direction: Tensor | None, size: int, stride: int, padding: int,
                 circular: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The convolution of images, rolled by ``offset`` (B, 2) in [0, side) and beyond their sides with ``circular``
    themselves, else zeros; with ``gain`` and ``shift`` (D,) normalised as by a LayerNorm.

    Products are taken in the type of the weights, sums and the norm in float32. Also what ``token_moments`` makes of
    the tokens with ``direction``, before they are rounded, or nothing without it.

    Shapes: x (B, C, H, W), any strides, fastest ``packed``, weights (..., D) from ``in_pieces``, of a kernel of
    size x size -> (B, H/s, W/s, D) of the weights' type, (B, 3, H/s, W/s).
    """
    b, _, h, w = x.shape
    outputs, rows, across = weights.shape[1], h // stride, w // stride
    out = torch.empty((b, rows, across, outputs), dtype=weights.dtype, device=x.device)
    moments = torch.empty((0 if direction is None else b, 3, rows, across), dtype=torch.float32, device=x.device)
    parts, blocks, constants = _reading(x, size, stride, outputs, TOKENS)
    n = max(16, next_power_of_2(outputs))
    rest = max(16, next_power_of_2(outputs - n // 2)) if n // 2 < outputs else 0
    n, rest = (n // 2, rest) if n // 2 + rest < n else (n, 0)
    given = [x if tensor is None else tensor for tensor in (bias, gain, shift, direction)]
    launch(_image_tokens, (b * parts,), x, x if offset is None else offset, weights, *given, out, moments, h, w, parts,
           blocks, *x.stride()[:3], PAD=padding, CIRCULAR=circular, PLACED=offset is not None, BIAS=bias is not None,
           NORM=gain is not None, EPS=eps, MOMENTS=direction is not None, OUTPUTS=outputs, N=n,
           REST=rest, **constants)  # fmt: skip
    return out, moments


@operator("shift_vits::image_phases")
def image_phases(x: Tensor, offset: Tensor | None, weights: Tensor, bias: Tensor | None, direction: Tensor, size: int,
                 stride: int, padding: int) -> Tensor:  # fmt: skip
    """Energy and direction, as of ``token_energies``, of a circular convolution's output at all phases, over images
    rolled by ``offset`` (B, 2) in [0, side). Products are taken in the type of the weights.

    Shapes: x (B, C, H, W), any strides, fastest ``packed``, weights (..., r s s) from ``in_pieces`` of ``all_phases``,
    which have windows of size x size, bias and wave (r,) -> (B, parts, 2, s, s), to be summed over the parts.
    """
    b, _, h, w = x.shape
    r = weights.shape[1] // stride**2
    parts, blocks, constants = _reading(x, size, stride, r * stride**2, PHASES)
    out = torch.empty((b, parts, 2, stride, stride), dtype=torch.float32, device=x.device)
    launch(_image_phases, (b * parts,), x, x if offset is None else offset, weights,
           direction if bias is None else bias, direction, out, h, w, parts, blocks, *x.stride()[:3], PAD=padding,
           PLACED=offset is not None, BIAS=bias is not None, R=r, **constants)  # fmt: skip
    return out
