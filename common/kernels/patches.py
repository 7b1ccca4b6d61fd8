"""Convolutions of an image, which has few channels and may be rolled by an offset of its own: a matrix product of its
windows, read where they lie, is faster than a convolution and needs no padded or rolled copy.

- ``image_tokens``: the convolution, its norm, and what a score needs of each token, in one pass.
- ``image_phases``: energies of the convolution at all phases of its stride, without writing any output.
- ``packed``: the image in half precision, its channels side by side, for both: eight bytes are a pixel, wherever it is.
- ``image_windows``: the windows themselves, for a product that is differentiated or taken in float32.

The first two walk through a window in pieces of a few pixels, whose weights ``in_pieces`` puts in the same order; the
second through windows that hold a kernel at ``all_phases``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import AVAILABLE, INTERPRETED, launch, operator, power, usable

if AVAILABLE:
    import triton
    import triton.language as tl

    from .base import around

__all__ = ["all_phases", "fits_image_phases", "fits_image_tokens", "fits_image_windows", "image_phases", "image_tokens",
           "image_windows", "in_pieces", "packed"]  # fmt: skip

WHOLE = 128  # places of a window that weights are made up to: a multiple of those that are multiplied at once
TOKENS = {"tiles": 1, "places": 64, "num_warps": 4, "num_stages": 3}  # tiles of 8 x 8 cells in a program
PHASES = {"tiles": 2, "places": 64, "num_warps": 4, "num_stages": 3}
PACKING = {"pixels": 1024, "num_warps": 4}


def fits_image_windows(x: Tensor, size: int, stride: int) -> bool:
    """Whether ``image_windows`` takes these: a few channels, whole strides, no gradient for the image."""
    whole = x.shape[1] < 16 and x.shape[2] % stride == 0 and x.shape[3] % stride == 0 and size <= min(x.shape[2:])
    return usable(x) and x.dtype != torch.float64 and whole and not (x.requires_grad and torch.is_grad_enabled())


def fits_image_tokens(x: Tensor, weight: Tensor, stride: int, dtype: torch.dtype) -> bool:
    """Whether ``image_tokens`` takes these: half precision, at most 256 outputs, no gradient at all."""
    half = dtype in (torch.bfloat16, torch.float16) or INTERPRETED
    few = half and len(weight) <= 256 and weight.shape[-1] <= 16
    return few and not torch.is_grad_enabled() and fits_image_windows(x, weight.shape[-1], stride)


def fits_image_phases(x: Tensor, rows: int, size: int, stride: int) -> bool:
    """Whether ``image_phases`` takes a kernel of so many rows (outputs), size x size: 16-128 outputs (phases times
    rows), small windows."""
    window = size + stride - 1
    return rows * stride**2 in (16, 32, 64, 128) and window <= 16 and fits_image_windows(x, window, stride)


def in_pieces(weight: Tensor, x: Tensor) -> Tensor:
    """Weights (outputs, C, size, size) as (places, outputs) in the order in which windows of x are read: channel by
    channel or, if it is ``packed``, pixel by pixel, then zero for channels up to a power of two. Zero also beyond a
    window, up to whole pieces."""
    if is_packed(x):
        weight = F.pad(weight, (0, 0, 0, 0, 0, power(x.shape[1]) - x.shape[1])).movedim(1, -1)
    weight = weight.flatten(1).T
    return F.pad(weight, (0, 0, 0, -len(weight) % WHOLE)).contiguous()


def all_phases(weight: Tensor, stride: int) -> Tensor:
    """A kernel (r, C, k, k) at each phase of its stride s, in windows of k + s - 1: (r s s, C, window, window)."""
    k = weight.shape[-1]
    tap = torch.arange(k + stride - 1, device=weight.device) - torch.arange(stride, device=weight.device)[:, None]
    inside, tap = (tap >= 0) & (tap < k), tap.clamp(0, k - 1)  # phase, place in the window
    moved = weight[:, :, tap[:, None, :, None], tap[None, :, None, :]]  # r, C, s, s, window, window
    moved = moved * (inside[:, None, :, None] & inside[None, :, None, :])
    return moved.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)


def is_packed(x: Tensor) -> bool:
    """Whether the channels of a pixel lie side by side, with room for a power of two, and so do all pixels."""
    c = power(x.shape[1])
    return x.stride(1) == 1 and x.stride(3) == c and x.stride(0) % c == 0 and x.stride(2) % c == 0


def packed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Images (B, C, H, W) in the type given, the channels of a pixel side by side, unless they are so already. Behind
    the last channel there are zeros up to a power of two, so that a pixel is read at once."""
    if x.dtype == dtype and is_packed(x):
        return x
    return image_pixels(x, dtype).permute(0, 3, 1, 2)[:, : x.shape[1]]


if AVAILABLE:

    @triton.jit
    def _image_windows(x, offset, out, height, width, sb, sc, sh, sw, SIZE: tl.constexpr, STRIDE: tl.constexpr,
                       PAD: tl.constexpr, CIRCULAR: tl.constexpr, PLACED: tl.constexpr, COUNT: tl.constexpr,
                       WIDE: tl.constexpr, CHUNKS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        image, i = tl.program_id(0), tl.program_id(1)
        j = tl.program_id(2) // CHUNKS * BLOCK + tl.arange(0, BLOCK)
        k = tl.program_id(2) % CHUNKS * K + tl.arange(0, K)
        row = i * STRIDE - PAD + k // SIZE % SIZE
        column = j[:, None] * STRIDE - PAD + (k % SIZE)[None, :]
        keep = (j * STRIDE < width)[:, None] & (k < COUNT)[None, :]
        if not CIRCULAR:
            keep = keep & ((row >= 0) & (row < height))[None, :] & (column >= 0) & (column < width)
        down, right = _begin(offset, image, PLACED)
        row, column = around(around(row, height) + down, height), around(around(column, width) + right, width)
        place = x + image.to(tl.int64) * sb + (k // (SIZE * SIZE) * sc + row * sh)[None, :] + column * sw
        window = (image.to(tl.int64) * (height // STRIDE) + i) * (width // STRIDE) + j
        inside = (j * STRIDE < width)[:, None] & (k < WIDE)[None, :]
        tl.store(out + window[:, None] * WIDE + k[None, :], tl.load(place, keep, 0.0).to(out.dtype.element_ty), inside)

    @triton.jit
    def _begin(offset, image, PLACED: tl.constexpr):
        """Row and column where an image begins."""
        row, column = 0, 0
        if PLACED:
            row, column = tl.load(offset + 2 * image).to(tl.int32), tl.load(offset + 2 * image + 1).to(tl.int32)
        return row, column

    @triton.jit
    def _image_pixels(x, out, area, parts, sb, sc, SW: tl.constexpr, CHANNELS: tl.constexpr, C: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
        image, c = (tl.program_id(0) // parts).to(tl.int64), tl.arange(0, C)
        pixel = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
        keep = (pixel < area)[:, None]
        value = tl.load(x + image * sb + (pixel * SW)[:, None] + (c * sc)[None, :], keep & (c < CHANNELS)[None, :], 0.0)
        tl.store(out + image * area * C + (pixel * C)[:, None] + c[None, :], value.to(out.dtype.element_ty), keep)

    @triton.jit
    def _cells(part, rows, across, TILES: tl.constexpr):
        """Row and column of the cells of a part: squares of 8 x 8, of which a thread knows most before it runs."""
        m = tl.arange(0, 64 * TILES)
        tile, wide = part * TILES + m // 64, (across + 7) // 8
        below = tile // wide
        return below * 8 + m // 8 % 8, (tile - below * wide) * 8 + m % 8

    @triton.jit
    def _piece(x, i, j, step, down, right, height, width, sc, sh, SW: tl.constexpr, SIZE: tl.constexpr,
               STRIDE: tl.constexpr, PAD: tl.constexpr, CIRCULAR: tl.constexpr, PLACED: tl.constexpr,
               PACKED: tl.constexpr, CHANNELS: tl.constexpr, C: tl.constexpr, K: tl.constexpr):  # fmt: skip
        """K numbers of the window of each cell, from the step-th K on, of an image that begins at (down, right)."""
        k = step * K + tl.arange(0, K)
        if PACKED:
            row, column, channel = k // (C * SIZE), k // C % SIZE, k % C
            keep = (row < SIZE)[None, :]
        else:
            row, column, channel = k // SIZE % SIZE, k % SIZE, k // (SIZE * SIZE)
            keep = (channel < CHANNELS)[None, :]
        BEYOND: tl.constexpr = PAD > 0 or SIZE > STRIDE  # windows reach over the sides
        i, j = i * STRIDE - PAD, j * STRIDE - PAD
        if BEYOND and not CIRCULAR:
            keep = keep & (row[None, :] >= -i[:, None]) & (row[None, :] < (height - i)[:, None])
            keep = keep & (column[None, :] >= -j[:, None]) & (column[None, :] < (width - j)[:, None])
        if PLACED or (BEYOND and CIRCULAR):
            i, j = around(i + down, height), around(j + right, width)
        place = (i * sh + j * SW)[:, None] + (row * sh + column * SW)[None, :]
        if PLACED or (BEYOND and CIRCULAR):
            place -= tl.where(row[None, :] >= (height - i)[:, None], height * sh, 0)
            place -= tl.where(column[None, :] >= (width - j)[:, None], width * SW, 0)
        if PACKED:
            place = tl.multiple_of(place, (1, C)) + channel[None, :]  # a pixel is read at once
        else:
            place += (channel * sc)[None, :]
        return tl.load(x + place, keep, 0.0)

    @triton.jit
    def _vector(weights, n, OUTPUTS: tl.constexpr):
        """One number for each of the outputs n, zero beyond the last of them, as a row in float32."""
        return tl.load(weights + n, n < OUTPUTS, 0.0).to(tl.float32)[None, :]

    @triton.jit
    def _weights(weights, step, n, K: tl.constexpr, OUTPUTS: tl.constexpr):
        """Those of the step-th piece for the outputs n, zero beyond the last of them."""
        place = ((step * K + tl.arange(0, K)) * OUTPUTS)[:, None] + n[None, :]
        return tl.load(weights + place, (n < OUTPUTS)[None, :], 0.0)

    @triton.jit
    def _image_tokens(x, offset, weights, bias, gain, shift, wave, out, moments, height, width, parts, sb, sc, sh,
                      SW: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
                      CIRCULAR: tl.constexpr, PLACED: tl.constexpr, PACKED: tl.constexpr, CHANNELS: tl.constexpr,
                      C: tl.constexpr, K: tl.constexpr, PIECES: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
                      EPS: tl.constexpr, MOMENTS: tl.constexpr, OUTPUTS: tl.constexpr, N: tl.constexpr,
                      REST: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
        """Some cells of an image by N + REST outputs: 96 are no power of two, and 128 would be a quarter idle."""
        image, rows, across = tl.program_id(0) // parts, height // STRIDE, width // STRIDE
        down, right = _begin(offset, image, PLACED)
        i, j = _cells(tl.program_id(0) % parts, rows, across, TILES)
        keep, i, j = (i < rows) & (j < across), tl.minimum(i, rows - 1), tl.minimum(j, across - 1)
        x, n = x + image.to(tl.int64) * sb, tl.arange(0, N)
        t = tl.zeros([64 * TILES, N], tl.float32)
        if BIAS:
            t = tl.broadcast_to(_vector(bias, n, OUTPUTS), [64 * TILES, N])
        if REST:
            m = N + tl.arange(0, REST)
            u = tl.zeros([64 * TILES, REST], tl.float32)
            if BIAS:
                u = tl.broadcast_to(_vector(bias, m, OUTPUTS), [64 * TILES, REST])
        for step in range(PIECES):
            b = _weights(weights, step, n, K, OUTPUTS)  # before the windows, which have to wait for the offset
            if REST:
                c = _weights(weights, step, m, K, OUTPUTS)
            a = _piece(x, i, j, step, down, right, height, width, sc, sh, SW, SIZE, STRIDE, PAD, CIRCULAR, PLACED,
                       PACKED, CHANNELS, C, K).to(weights.dtype.element_ty)  # fmt: skip
            t = tl.dot(a, b, t)
            if REST:
                u = tl.dot(a, c, u)
        if NORM:
            mean, square = tl.sum(t, 1), tl.sum(t * t, 1)
            if REST:
                mean, square = mean + tl.sum(u, 1), square + tl.sum(u * u, 1)
            mean = mean / OUTPUTS
            scale = (1.0 / tl.sqrt(tl.maximum(square / OUTPUTS - mean * mean, 0.0) + EPS))[:, None]
            mean = mean[:, None] * scale
            t = (t * scale - mean) * _vector(gain, n, OUTPUTS) + _vector(shift, n, OUTPUTS)
            if REST:
                u = (u * scale - mean) * _vector(gain, m, OUTPUTS) + _vector(shift, m, OUTPUTS)
        area, cell = rows * across, i * across + j
        if MOMENTS:
            total, square, toward = tl.sum(t, 1), tl.sum(t * t, 1), tl.sum(t * _vector(wave, n, OUTPUTS), 1)
            if REST:
                total, square = total + tl.sum(u, 1), square + tl.sum(u * u, 1)
                toward += tl.sum(u * _vector(wave, m, OUTPUTS), 1)
            place = moments + image.to(tl.int64) * 3 * area + cell
            tl.store(place, total, keep)
            tl.store(place + area, square, keep)
            tl.store(place + 2 * area, toward, keep)
        token = out + image.to(tl.int64) * area * OUTPUTS + (cell * OUTPUTS)[:, None]
        tl.store(token + n[None, :], t.to(out.dtype.element_ty), keep[:, None] & (n < OUTPUTS)[None, :])
        if REST:
            tl.store(token + m[None, :], u.to(out.dtype.element_ty), keep[:, None] & (m < OUTPUTS)[None, :])

    @triton.jit
    def _image_phases(x, offset, weights, bias, wave, out, height, width, parts, sb, sc, sh, SW: tl.constexpr,
                      SIZE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, PLACED: tl.constexpr,
                      PACKED: tl.constexpr, CHANNELS: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
                      PIECES: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
        """Some cells of an image: energy and direction of the outputs at each phase, summed."""
        S: tl.constexpr = STRIDE * STRIDE
        image, rows, across = tl.program_id(0) // parts, height // STRIDE, width // STRIDE
        down, right = _begin(offset, image, PLACED)
        i, j = _cells(tl.program_id(0) % parts, rows, across, TILES)
        keep, i, j = ((i < rows) & (j < across))[:, None], tl.minimum(i, rows - 1), tl.minimum(j, across - 1)
        x, n = x + image.to(tl.int64) * sb, tl.arange(0, R * S)
        t = tl.zeros([64 * TILES, R * S], tl.float32)
        if BIAS:
            t += tl.load(bias + n // S).to(tl.float32)[None, :]
        for step in range(PIECES):
            b = _weights(weights, step, n, K, R * S)
            a = _piece(x, i, j, step, down, right, height, width, sc, sh, SW, SIZE, STRIDE, PAD, True, PLACED, PACKED,
                       CHANNELS, C, K).to(weights.dtype.element_ty)  # fmt: skip
            t = tl.dot(a, b, t)
        toward = t * (tl.load(wave + n // S) * (2.0 / R) ** 0.5)[None, :]
        energy = tl.where(keep, tl.sum(tl.reshape(t * t, [64 * TILES, R, S]), 1), 0.0)
        toward = tl.where(keep, tl.sum(tl.reshape(toward, [64 * TILES, R, S]), 1), 0.0)
        place = out + tl.program_id(0) * 2 * S + tl.arange(0, S)
        tl.store(place, tl.sum(energy, 0))
        tl.store(place + S, tl.sum(toward, 0))


@operator("shift_vits::image_windows")
def image_windows(x: Tensor, offset: Tensor | None, size: int, stride: int, padding: int, circular: bool,
                  dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Windows of ``size`` x ``size`` pixels at every ``stride``-th, the first ``padding`` before the first pixel; of
    images rolled by ``offset`` (B, 2) in [0, side), beyond their sides with ``circular`` themselves, else zeros.

    Shapes: x (B, C, H, W), any strides -> (B, H/stride, W/stride, n) of the type given, (channel, row, column) and then
    zeros up to a multiple of 8.
    """
    b, c, h, w = x.shape
    count, across = c * size**2, w // stride
    wide = -(-count // 8) * 8
    k = min(64, power(wide))
    block, chunks = max(2, min(2048 // k, power(across))), -(-wide // k)
    out = torch.empty((b, h // stride, across, wide), dtype=dtype, device=x.device)
    grid = (b, h // stride, -(-across // block) * chunks)
    launch(_image_windows, grid, x, x if offset is None else offset, out, h, w, *x.stride(), SIZE=size, STRIDE=stride,
           PAD=padding, CIRCULAR=circular, PLACED=offset is not None, COUNT=count, WIDE=wide, CHUNKS=chunks, K=k,
           BLOCK=block, num_warps=4)  # fmt: skip
    return out


@operator("shift_vits::image_pixels")
def image_pixels(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Images (B, C, H, W) as (B, H, W, c) of the type given, c the next power of two, with zeros behind channel C."""
    b, c, h, w = x.shape
    x = x if x.stride(2) == w * x.stride(3) else x.contiguous()
    out = torch.empty((b, h, w, power(c)), dtype=dtype, device=x.device)
    block = min(PACKING["pixels"], power(h * w))
    parts = -(-h * w // block)
    launch(_image_pixels, (b * parts,), x, out, h * w, parts, *x.stride()[:2], SW=x.stride(3), CHANNELS=c, C=power(c),
           BLOCK=block, num_warps=PACKING["num_warps"])  # fmt: skip
    return out


def _reading(x: Tensor, size: int, stride: int, wide: bool, how: dict[str, int]) -> tuple[int, dict[str, int]]:
    """Programs for an image, and how they read it and their windows; with twice the warps for many outputs."""
    c, near = x.shape[1], is_packed(x)
    count = -(-x.shape[2] // (8 * stride)) * -(-x.shape[3] // (8 * stride))
    tiles, places = min(how["tiles"], power(count)), how["places"]
    pieces = -(-(size**2) * (power(c) if near else c) // places)
    return -(-count // tiles), {
        "SW": x.stride(3), "SIZE": size, "STRIDE": stride, "PACKED": near, "CHANNELS": c, "C": power(c), "K": places,
        "PIECES": pieces, "TILES": tiles, "num_warps": how["num_warps"] * (2 if wide else 1),
        "num_stages": how["num_stages"],
    }  # fmt: skip


@operator("shift_vits::image_tokens")
def image_tokens(x: Tensor, offset: Tensor | None, weights: Tensor, bias: Tensor | None, gain: Tensor | None,
                 shift: Tensor | None, eps: float, wave: Tensor | None, size: int, stride: int, padding: int,
                 circular: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The convolution of images, rolled by ``offset`` (B, 2) in [0, side) and beyond their sides with ``circular``
    themselves, else zeros; with ``gain`` and ``shift`` (D,) normalised as by a LayerNorm.

    Products are taken in the type of the weights, sums and the norm in float32. Also what ``token_moments`` makes of
    the tokens with ``wave``, before they are rounded, or nothing without it.

    Shapes: x (B, C, H, W), any strides, fastest ``packed``, weights (..., D) from ``in_pieces``, of a kernel of
    size x size -> (B, H/s, W/s, D) of the weights' type, (B, 3, H/s, W/s).
    """
    b, _, h, w = x.shape
    outputs, rows, across = weights.shape[1], h // stride, w // stride
    out = torch.empty((b, rows, across, outputs), dtype=weights.dtype, device=x.device)
    moments = torch.empty((0 if wave is None else b, 3, rows, across), dtype=torch.float32, device=x.device)
    parts, constants = _reading(x, size, stride, outputs > 128, TOKENS)
    n = max(16, power(outputs))
    rest = max(16, power(outputs - n // 2)) if n // 2 < outputs else 0
    n, rest = (n // 2, rest) if n // 2 + rest < n else (n, 0)
    given = [x if tensor is None else tensor for tensor in (bias, gain, shift, wave)]
    launch(_image_tokens, (b * parts,), x, x if offset is None else offset, weights, *given, out, moments, h, w, parts,
           *x.stride()[:3], PAD=padding, CIRCULAR=circular, PLACED=offset is not None, BIAS=bias is not None,
           NORM=gain is not None, EPS=eps, MOMENTS=wave is not None, OUTPUTS=outputs, N=n,
           REST=rest, **constants)  # fmt: skip
    return out, moments


@operator("shift_vits::image_phases")
def image_phases(x: Tensor, offset: Tensor | None, weights: Tensor, bias: Tensor | None, wave: Tensor, size: int,
                 stride: int, padding: int) -> Tensor:  # fmt: skip
    """Energy and direction, as of ``token_energies``, of a circular convolution's output at all phases, over images
    rolled by ``offset`` (B, 2) in [0, side). Products are taken in the type of the weights.

    Shapes: x (B, C, H, W), any strides, fastest ``packed``, weights (..., r s s) from ``in_pieces`` of ``all_phases``,
    which have windows of size x size, bias and wave (r,) -> (B, parts, 2, s, s), to be summed over the parts.
    """
    b, _, h, w = x.shape
    r = weights.shape[1] // stride**2
    parts, constants = _reading(x, size, stride, r * stride**2 > 64, PHASES)
    out = torch.empty((b, parts, 2, stride, stride), dtype=torch.float32, device=x.device)
    launch(_image_phases, (b * parts,), x, x if offset is None else offset, weights, wave if bias is None else bias,
           wave, out, h, w, parts, *x.stride()[:3], PAD=padding, PLACED=offset is not None, BIAS=bias is not None, R=r,
           **constants)  # fmt: skip
    return out
