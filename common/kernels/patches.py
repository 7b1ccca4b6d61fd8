"""Convolutions of an image, which has few channels and may be rolled by an offset of its own: a matrix product of its
windows, read where they lie, is faster than a convolution and needs no padded or rolled copy.

- ``image_tokens``: the convolution, its norm, and what a score needs of each token, in one pass.
- ``image_phases``: energies of the convolution at all phases of its stride, without writing any output.
- ``image_windows``: the windows themselves, for a product that is differentiated or taken in float32.

The first two walk through a window in pieces of a few lines, whose weights ``in_pieces`` puts in the same order; the
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
           "image_windows", "in_pieces"]  # fmt: skip


def fits_image_windows(x: Tensor, size: int, stride: int) -> bool:
    """Whether ``image_windows`` takes these: a few channels, whole strides, no gradient for the image."""
    whole = x.shape[1] < 16 and x.shape[2] % stride == 0 and x.shape[3] % stride == 0 and size <= min(x.shape[2:])
    return usable(x) and x.dtype != torch.float64 and whole and not (x.requires_grad and torch.is_grad_enabled())


def fits_image_tokens(x: Tensor, weight: Tensor, stride: int, dtype: torch.dtype) -> bool:
    """Whether ``image_tokens`` takes these: half precision, at most 256 outputs, no gradient at all."""
    half = dtype in (torch.bfloat16, torch.float16) or INTERPRETED
    few = half and len(weight) <= 256 and weight.shape[-1] <= 16
    return few and not torch.is_grad_enabled() and fits_image_windows(x, weight.shape[-1], stride)


def fits_image_phases(x: Tensor, weight: Tensor, stride: int) -> bool:
    """Whether ``image_phases`` takes these: 16-128 outputs (phases times rows of ``weight``), small windows."""
    window, outputs = weight.shape[-1] + stride - 1, len(weight) * stride**2
    return outputs in (16, 32, 64, 128) and window <= 16 and fits_image_windows(x, window, stride)


def pieces(size: int) -> tuple[int, int, int]:
    """Lines of a window in a piece, places of a piece (16 or 32, what units multiply at once), pieces of a window."""
    places = 16 if size <= 4 else 32
    lines = places // size
    return lines, places, -(-size // lines)


def in_pieces(weight: Tensor) -> Tensor:
    """Weights (outputs, C, size, size) as (C pieces places, outputs), with zeros where a piece ends beyond the
    window."""
    size = weight.shape[-1]
    lines, places, count = pieces(size)
    weight = F.pad(weight, (0, 0, 0, count * lines - size)).unflatten(2, (count, lines)).flatten(3)
    return F.pad(weight, (0, places - lines * size)).permute(1, 2, 3, 0).flatten(0, 2).contiguous()


def all_phases(weight: Tensor, stride: int) -> Tensor:
    """A kernel (r, C, k, k) at each phase of its stride s, in windows of k + s - 1: (r s s, C, window, window)."""
    k = weight.shape[-1]
    tap = torch.arange(k + stride - 1, device=weight.device) - torch.arange(stride, device=weight.device)[:, None]
    inside, tap = (tap >= 0) & (tap < k), tap.clamp(0, k - 1)  # phase, place in the window
    moved = weight[:, :, tap[:, None, :, None], tap[None, :, None, :]]  # r, C, s, s, window, window
    moved = moved * (inside[:, None, :, None] & inside[None, :, None, :])
    return moved.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)


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
    def _piece(base, column, keep, i, step, down, height, sc, sh, SIZE: tl.constexpr, STRIDE: tl.constexpr,
               PAD: tl.constexpr, CIRCULAR: tl.constexpr, LINES: tl.constexpr, PLACES: tl.constexpr,
               PIECES: tl.constexpr):  # fmt: skip
        """A few lines of one channel of the windows of row i: (BLOCK, PLACES). What is beyond a window has no weight
        and needs no mask: on the torus there is always a pixel."""
        row = i * STRIDE - PAD + step % PIECES * LINES + tl.arange(0, PLACES) // SIZE
        place = step // PIECES * sc + around(around(row, height) + down, height) * sh
        if CIRCULAR:
            value = tl.load(base + (place[None, :] + column))
        else:
            value = tl.load(base + (place[None, :] + column), keep & ((row >= 0) & (row < height))[None, :], 0.0)
        return value

    @triton.jit
    def _convolve(x, weights, image, i, j, down, right, height, width, sb, sc, sh, sw, SIZE: tl.constexpr,
                  STRIDE: tl.constexpr, PAD: tl.constexpr, CIRCULAR: tl.constexpr, CHANNELS: tl.constexpr,
                  LINES: tl.constexpr, PLACES: tl.constexpr, PIECES: tl.constexpr, OUTPUTS: tl.constexpr,
                  N: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        """The convolution at cells j of row i: (BLOCK, N), in float32."""
        k, n = tl.arange(0, PLACES), tl.arange(0, N)
        column = tl.minimum(j, width // STRIDE - 1)[:, None] * STRIDE - PAD + (k % SIZE)[None, :]
        keep = (column >= 0) & (column < width)
        base, column = x + image.to(tl.int64) * sb, around(around(column, width) + right, width) * sw
        weight = weights + k[:, None] * OUTPUTS + n[None, :]
        t = tl.zeros([BLOCK, N], tl.float32)
        a = _piece(base, column, keep, i, 0, down, height, sc, sh, SIZE, STRIDE, PAD, CIRCULAR, LINES, PLACES, PIECES)
        for step in range(CHANNELS * PIECES):  # while a piece is multiplied the next one is on its way
            b = tl.load(weight + step * (PLACES * OUTPUTS), (n < OUTPUTS)[None, :], 0.0)
            c = _piece(base, column, keep, i, tl.minimum(step + 1, CHANNELS * PIECES - 1), down, height, sc, sh, SIZE,
                       STRIDE, PAD, CIRCULAR, LINES, PLACES, PIECES)  # fmt: skip
            t = tl.dot(a.to(b.dtype), b, t)
            a = c
        return t

    @triton.jit
    def _image_tokens(x, offset, weights, bias, gain, shift, wave, out, moments, height, width, sb, sc, sh, sw,
                      SIZE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, CIRCULAR: tl.constexpr,
                      PLACED: tl.constexpr, CHANNELS: tl.constexpr, LINES: tl.constexpr, PLACES: tl.constexpr,
                      PIECES: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
                      MOMENTS: tl.constexpr, OUTPUTS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        rows, across = height // STRIDE, width // STRIDE
        blocks = (across + BLOCK - 1) // BLOCK
        line = tl.program_id(0) // blocks  # of cells, in the batch
        image, i = line // rows, line % rows
        j, n = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N)
        down, right = _begin(offset, image, PLACED)
        t = _convolve(x, weights, image, i, j, down, right, height, width, sb, sc, sh, sw, SIZE, STRIDE, PAD, CIRCULAR,
                      CHANNELS, LINES, PLACES, PIECES, OUTPUTS, N, BLOCK)  # fmt: skip
        real = (n < OUTPUTS)[None, :]
        if BIAS:
            t += tl.load(bias + n, n < OUTPUTS, 0.0).to(tl.float32)[None, :]
        if NORM:
            t = tl.where(real, t - (tl.sum(t, 1) / OUTPUTS)[:, None], 0.0)
            t = t * (1.0 / tl.sqrt(tl.sum(t * t, 1) / OUTPUTS + EPS))[:, None]
            t = t * tl.load(gain + n, n < OUTPUTS, 0.0).to(tl.float32)[None, :]
            t += tl.load(shift + n, n < OUTPUTS, 0.0).to(tl.float32)[None, :]
        y = t.to(out.dtype.element_ty)
        token, keep = line.to(tl.int64) * across + j, j < across
        tl.store(out + token[:, None] * OUTPUTS + n[None, :], y, keep[:, None] & real)
        if MOMENTS:
            t = y.to(tl.float32)
            toward = tl.load(wave + n, n < OUTPUTS, 0.0).to(tl.float32)
            place = moments + image.to(tl.int64) * 3 * rows * across + i * across + j
            tl.store(place, tl.sum(t, 1), keep)
            tl.store(place + rows * across, tl.sum(t * t, 1), keep)
            tl.store(place + 2 * rows * across, tl.sum(t * toward[None, :], 1), keep)

    @triton.jit
    def _image_phases(x, offset, weights, bias, wave, out, height, width, sb, sc, sh, sw, SIZE: tl.constexpr,
                      STRIDE: tl.constexpr, PAD: tl.constexpr, PLACED: tl.constexpr, CHANNELS: tl.constexpr,
                      LINES: tl.constexpr, PLACES: tl.constexpr, PIECES: tl.constexpr, BIAS: tl.constexpr,
                      R: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        """A row of cells: energy and direction of the outputs at each phase, summed."""
        PHASES: tl.constexpr = STRIDE * STRIDE
        rows, blocks = height // STRIDE, (width // STRIDE + BLOCK - 1) // BLOCK
        line = tl.program_id(0) // blocks
        j, n = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK), tl.arange(0, R * PHASES)
        down, right = _begin(offset, line // rows, PLACED)
        t = _convolve(x, weights, line // rows, line % rows, j, down, right, height, width, sb, sc, sh, sw, SIZE,
                      STRIDE, PAD, True, CHANNELS, LINES, PLACES, PIECES, R * PHASES, R * PHASES, BLOCK)  # fmt: skip
        if BIAS:
            t += tl.load(bias + n // PHASES).to(tl.float32)[None, :]
        toward = t * (tl.load(wave + n // PHASES) * (2.0 / R) ** 0.5)[None, :]
        keep = (j * STRIDE < width)[:, None]
        energy = tl.where(keep, tl.sum(tl.reshape(t * t, [BLOCK, R, PHASES]), 1), 0.0)
        toward = tl.where(keep, tl.sum(tl.reshape(toward, [BLOCK, R, PHASES]), 1), 0.0)
        place = out + tl.program_id(0) * 2 * PHASES + tl.arange(0, PHASES)
        tl.store(place, tl.sum(energy, 0))
        tl.store(place + PHASES, tl.sum(toward, 0))


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


@operator("shift_vits::image_tokens")
def image_tokens(x: Tensor, offset: Tensor | None, weights: Tensor, bias: Tensor | None, gain: Tensor | None,
                 shift: Tensor | None, eps: float, wave: Tensor | None, size: int, stride: int, padding: int,
                 circular: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The convolution of images, rolled by ``offset`` (B, 2) in [0, side) and beyond their sides with ``circular``
    themselves, else zeros; with ``gain`` and ``shift`` (D,) normalised as by a LayerNorm.

    Products are taken in the type of the weights, sums and the norm in float32. Also what ``token_moments`` makes of
    the tokens with ``wave``, or nothing without it.

    Shapes: x (B, C, H, W), any strides, weights (..., D) from ``in_pieces``, of a kernel of size x size
    -> (B, H/s, W/s, D) of the weights' type, (B, 3, H/s, W/s).
    """
    b, c, h, w = x.shape
    outputs, rows, across = weights.shape[1], h // stride, w // stride
    lines, places, count = pieces(size)
    out = torch.empty((b, rows, across, outputs), dtype=weights.dtype, device=x.device)
    moments = torch.empty((0 if wave is None else b, 3, rows, across), dtype=torch.float32, device=x.device)
    block, wide = max(16, min(64, power(across))), max(16, power(outputs))
    given = [x if tensor is None else tensor for tensor in (bias, gain, shift, wave)]
    launch(_image_tokens, (b * rows * -(-across // block),), x, x if offset is None else offset, weights, *given, out,
           moments, h, w, *x.stride(), SIZE=size, STRIDE=stride, PAD=padding, CIRCULAR=circular,
           PLACED=offset is not None, CHANNELS=c, LINES=lines, PLACES=places, PIECES=count, BIAS=bias is not None,
           NORM=gain is not None, EPS=eps, MOMENTS=wave is not None, OUTPUTS=outputs, N=wide, BLOCK=block,
           num_warps=4 if wide <= 128 else 8, num_stages=2)  # fmt: skip
    return out, moments


@operator("shift_vits::image_phases")
def image_phases(x: Tensor, offset: Tensor | None, weights: Tensor, bias: Tensor | None, wave: Tensor, size: int,
                 stride: int, padding: int) -> Tensor:  # fmt: skip
    """Energy and direction, as of ``token_energies``, of a circular convolution's output at all phases, over images
    rolled by ``offset`` (B, 2) in [0, side). Products are taken in the type of the weights.

    Shapes: x (B, C, H, W), any strides, weights (..., r s s) from ``in_pieces`` of ``all_phases``, which have windows
    of size x size, bias and wave (r,) -> (B, parts, 2, s, s), to be summed over the parts.
    """
    b, c, h, w = x.shape
    r, rows, across = weights.shape[1] // stride**2, h // stride, w // stride
    lines, places, count = pieces(size)
    block = max(16, min(64, power(across)))
    parts = rows * -(-across // block)
    out = torch.empty((b, parts, 2, stride, stride), dtype=torch.float32, device=x.device)
    launch(_image_phases, (b * parts,), x, x if offset is None else offset, weights, wave if bias is None else bias,
           wave, out, h, w, *x.stride(), SIZE=size, STRIDE=stride, PAD=padding, PLACED=offset is not None, CHANNELS=c,
           LINES=lines, PLACES=places, PIECES=count, BIAS=bias is not None, R=r, BLOCK=block,
           num_warps=4 if r * stride**2 <= 64 else 8, num_stages=2)  # fmt: skip
    return out
