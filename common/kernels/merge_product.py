"""The product of patches of 2 x 2 tokens with a merging's weights, without the patches ever being written; for
inference."""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .base import AVAILABLE, INTERPRETED, launch, next_power_of_2, operator
from .cards import first_tile
from .merging import fits_merge_kernel

if AVAILABLE:
    import triton
    import triton.language as tl

    from .merging import corners_of, patch_at

__all__ = ["fits_merged_product", "merged_product"]

OUTPUTS = 768  # patches are read again for every 192 or 256 of them, and beyond this too often
FEWEST, FEW = 96, 40  # programs: with fewer, blocks are smaller, down to 32 outputs


def fits_merged_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``merged_product`` takes x of the type given: half precision, at most 768 outputs, no gradient at
    all."""
    half = dtype in (torch.bfloat16, torch.float16) or INTERPRETED
    plain = half and len(weight) <= OUTPUTS and weight.is_contiguous() and not isinstance(weight, DTensor)
    if not plain or torch.is_grad_enabled() or not fits_merge_kernel(x):
        return False
    return _product_tiles(x, weight.shape[1] // 4, len(weight)) is not None


def product_memory(tiles: dict[str, int]) -> tuple[int, int, int]:
    """Of a program of ``_merged_product``: bytes held, bytes of a stage, patches and weights, and stages."""
    return 0, 2 * tiles["K"] * (tiles["T"] + tiles["MORE"] + tiles["N"] + tiles["REST"]), tiles["num_stages"]


if AVAILABLE:

    @triton.jit
    def _corners(offset, start, begin, count, height, width, T: tl.constexpr):
        """Of T patches the image, the first of four tokens, both counted from image ``begin`` on, and how far the token
        below and the one to the right are from that; in 32 bits."""
        image, top, left = patch_at(tl.minimum(start + tl.arange(0, T), count - 1), height, width)
        top += tl.load(offset + 2 * image).to(tl.int32)
        left += tl.load(offset + 2 * image + 1).to(tl.int32)
        image -= begin
        first, below, right, _ = corners_of(image, top, left, height, width, 1)
        return image, first.to(tl.int32), (below - first).to(tl.int32), (right - first).to(tl.int32)

    @triton.jit
    def _norms(sums, squares, image, first, below, right, apart, CHANNELS: tl.constexpr, EPS: tl.constexpr):
        """Mean and 1 / deviation of patches; sums of two images' tokens are ``apart`` more than their tokens are."""
        p = first + image * apart
        mean = tl.load(sums + p) + tl.load(sums + (p + below))
        mean += tl.load(sums + (p + right)) + tl.load(sums + (p + below + right))
        square = tl.load(squares + p) + tl.load(squares + (p + below))
        square += tl.load(squares + (p + right)) + tl.load(squares + (p + below + right))
        mean /= 4 * CHANNELS
        square = tl.maximum(square / (4 * CHANNELS) - mean * mean, 0.0)
        return mean, 1.0 / tl.sqrt(square + EPS)

    @triton.jit
    def _tokens(x, first, below, right, step, CHANNELS: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
        """Columns step K : (step + 1) K of patches."""
        k = tl.arange(0, K)
        if CHANNELS % K == 0:  # of one token
            token = step // (CHANNELS // K)
            place = first + (token % 2 * below + token // 2 * right + (step - token * (CHANNELS // K)) * K)
            place = place[:, None] + k[None, :]
        else:
            token = (step * K + k) // CHANNELS
            place = first[:, None] + ((token % 2)[None, :] * below[:, None] + (token // 2)[None, :] * right[:, None])
            place += (step * K + k - token * CHANNELS)[None, :]
        return tl.load(x + place) if WHOLE else tl.load(x + place, (step * K + k < 4 * CHANNELS)[None, :], 0.0)

    @triton.jit
    def _weights(weight, step, n, K: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr):
        """The same columns of weights n."""
        k = tl.arange(0, K)
        place = weight + step * K + (k[:, None] + n[None, :] * WIDTH)
        return tl.load(place) if WHOLE else tl.load(place, (step * K + k < WIDTH)[:, None] & (n < D)[None, :], 0.0)

    @triton.jit
    def _finish(out, y, norms, folded, limit, n, T: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr):
        """Store a product of patches that should have been normalised: (w p - mean sum(w)) / std + w bias."""
        i = tl.arange(0, T)
        if NORM:
            y -= tl.load(norms + i)[:, None] * tl.load(folded + n, n < D, 0.0)[None, :]
            y *= tl.load(norms + T + i)[:, None]
            y += tl.load(folded + D + n, n < D, 0.0)[None, :]
        keep = (i < limit)[:, None] & (n < D)[None, :]
        tl.store(out + (i[:, None] * D + n[None, :]), y.to(out.dtype.element_ty), keep)

    @triton.jit
    def _moments(out, direction, limit, D: tl.constexpr, T: tl.constexpr):
        """What ``token_moments`` makes of T patches' outputs, read again: while they are in registers, there is room
        for nothing else."""
        i, n = tl.arange(0, T), tl.arange(0, 32)
        total, square = tl.zeros([T, 32], tl.float32), tl.zeros([T, 32], tl.float32)
        along = tl.zeros([T, 32], tl.float32)
        for first in tl.static_range(0, D, 32):
            keep = first + n < D
            place = out + (i[:, None] * D + (first + n)[None, :])
            y = tl.load(place, (i < limit)[:, None] & keep[None, :], 0.0).to(tl.float32)
            total, square = total + y, square + y * y
            along += y * tl.load(direction + first + n, keep, 0.0)[None, :]
        return tl.sum(total, 1), tl.sum(square, 1), tl.sum(along, 1)

    @triton.jit
    def _merged_product(x, offset, weight, folded, sums, squares, direction, norms, out, moments, height, width, count,
                        steps, sm, CHANNELS: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr,
                        EPS: tl.constexpr, MOMENTS: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr,
                        N: tl.constexpr, REST: tl.constexpr, T: tl.constexpr, MORE: tl.constexpr):  # fmt: skip
        """T + MORE patches by N + REST outputs, K columns of them at a time: what is no power of two (192 outputs; 192
        patches, which share out evenly where 128 and 256 do not) is two of them.

        Tokens go from memory to the product as they are. Programs of 128 patches share a processor with another: so
        places are 32 bits, and the compiler is not told how many ``steps`` there are, or it would unroll them. PARTS
        programs have the same patches, one after another: all but one find them near.
        """
        part, start = tl.program_id(0) % PARTS * (N + REST), tl.program_id(0) // PARTS * (T + MORE)
        begin = start // (height // 2 * (width // 2))
        x += begin.to(tl.int64) * (height * width * CHANNELS)
        image, first, below, right = _corners(offset, start, begin, count, height, width, T)
        if MORE:
            image2, first2, below2, right2 = _corners(offset, start + T, begin, count, height, width, MORE)
        if NORM:  # in registers these would be in the way
            sums, squares = sums + begin.to(tl.int64) * sm, squares + begin.to(tl.int64) * sm
            apart = sm - height * width
            norms += tl.program_id(0) * (2 * (T + MORE))
            mean, scale = _norms(sums, squares, image, first, below, right, apart, CHANNELS, EPS)
            if MORE:
                mean2, scale2 = _norms(sums, squares, image2, first2, below2, right2, apart, CHANNELS, EPS)
                tl.store(norms + 2 * T + tl.arange(0, MORE), mean2)
                tl.store(norms + 2 * T + MORE + tl.arange(0, MORE), scale2)
            tl.store(norms + tl.arange(0, T), mean)
            tl.store(norms + T + tl.arange(0, T), scale)
            tl.debug_barrier()
        below, right, first = below * CHANNELS, right * CHANNELS, first * CHANNELS
        n = part + tl.arange(0, N)
        y = tl.zeros([T, N], tl.float32)
        if REST:
            m = part + N + tl.arange(0, REST)
            z = tl.zeros([T, REST], tl.float32)
        if MORE:
            below2, right2, first2 = below2 * CHANNELS, right2 * CHANNELS, first2 * CHANNELS
            y2 = tl.zeros([MORE, N], tl.float32)
            if REST:
                z2 = tl.zeros([MORE, REST], tl.float32)
        for step in range(steps):
            a = _tokens(x, first, below, right, step, CHANNELS, K, WHOLE)
            b = _weights(weight, step, n, K, 4 * CHANNELS, D, WHOLE)
            y = tl.dot(a, b, y)
            if REST:
                c = _weights(weight, step, m, K, 4 * CHANNELS, D, WHOLE)
                z = tl.dot(a, c, z)
            if MORE:
                a = _tokens(x, first2, below2, right2, step, CHANNELS, K, WHOLE)
                y2 = tl.dot(a, b, y2)
                if REST:
                    z2 = tl.dot(a, c, z2)
        out += start.to(tl.int64) * D
        if REST:
            _finish(out, z, norms, folded, count - start, m, T, D, NORM)
        _finish(out, y, norms, folded, count - start, n, T, D, NORM)
        if MOMENTS:
            tl.debug_barrier()
            total, square, along = _moments(out, direction, count - start, D, T)
            i = start + tl.arange(0, T)
            tl.store(moments + i, total, i < count)
            tl.store(moments + count + i, square, i < count)
            tl.store(moments + 2 * count + i, along, i < count)
        if MORE:
            if REST:
                _finish(out + T * D, z2, norms + 2 * T, folded, count - start - T, m, MORE, D, NORM)
            _finish(out + T * D, y2, norms + 2 * T, folded, count - start - T, n, MORE, D, NORM)


def _tiles(patches: int, channels: int, outputs: int) -> dict[str, int]:
    """How a merged product is cut: T + MORE patches by N + REST outputs, K columns at a time.

    Where outputs take several programs, blocks are as large as registers allow, since every block of patches reads
    weights again and every block of outputs patches. Swin-T's 128 images are one wave, two and four of 192 x 192.
    Of a few images these would be too few programs.
    """
    wide, rest = (128, 64) if outputs % 192 == 0 else (max(16, min(256, next_power_of_2(outputs))), 0)
    more = 64 if rest and outputs > 192 else 0
    k = math.gcd(channels, 32 if rest and not more else 64)  # with 64, memory beside a processor holds one program
    tall, warps, stages = 128, 8, 4
    if -(-patches // (tall + more)) * -(-outputs // (wide + rest)) < FEWEST:
        tall, more, rest, warps, rows = 64, 0, 0, 4, -(-patches // 64)
        wide = next((n for n in (128, 64) if rows * -(-outputs // n) >= FEW), 32)
        wide, stages = max(16, min(wide, next_power_of_2(outputs))), 4 if wide > 32 else 6
        tall = 32 if rows > 1 and rows * -(-outputs // wide) < 64 else 64
        k = math.gcd(channels, 128 if rows * -(-outputs // wide) <= 132 else 64)
    k = k if k >= 16 else max(16, min(64, next_power_of_2(channels)))
    return {"T": tall, "MORE": more, "N": wide, "REST": rest, "K": k, "num_warps": warps, "num_stages": stages}


def _product_tiles(x: Tensor, channels: int, outputs: int) -> dict[str, int] | None:
    """``_tiles`` for which the card has room: with fewer stages, then fewer columns at a time. None: there are none."""
    tiles = _tiles(x.shape[0] * (x.shape[1] // 2) * (x.shape[2] // 2), channels, outputs)
    every = [tiles, *({**tiles, "num_stages": stages} for stages in (3, 2)), {**tiles, "K": 16, "num_stages": 2}]
    tile = first_tile(x, "_merged_product", *map(product_memory, every))
    return every[tile] if tile >= 0 else None


@operator("shift_vits::merged_product")
def merged_product(x: Tensor, offset: Tensor, scaled: Tensor, folded: Tensor | None, sums: Tensor | None,
                   squares: Tensor | None, eps: float,
                   direction: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Patches of 2 x 2 tokens, as of ``rolled_merge``, times ``scaled`` (D, 4C) -> (B, H/2, W/2, D), all of x's type.

    With ``folded``, from ``merging_weights``, patches are normalised, by their tokens' ``sums`` over channels and those
    of their ``squares``, (B, H, W) each, float32. With ``direction`` also what ``token_moments`` makes of the results,
    (B, 3, H/2, W/2), if a program has all outputs of its patches; else of none.
    """
    offset, (b, h, w, c), d = offset.contiguous(), x.shape, len(scaled)
    count = b * (h // 2) * (w // 2)
    tiles = _product_tiles(x, c, d) or _tiles(count, c, d)
    tall, wide = tiles["T"] + tiles["MORE"], tiles["N"] + tiles["REST"]
    parts = -(-d // wide)  # programs with the same patches
    programs = -(-count // tall) * parts
    known = direction is not None and parts == 1 and tiles["MORE"] == 0
    out = torch.empty((b, h // 2, w // 2, d), dtype=x.dtype, device=x.device)
    moments = torch.empty((3, b if known else 0, h // 2, w // 2), dtype=torch.float32, device=x.device)
    norms = torch.empty((0 if folded is None else programs, 2, tall), dtype=torch.float32, device=x.device)
    if sums is not None and squares is not None and (sums.stride(), (w, 1)) != (squares.stride(), sums.stride()[1:]):
        sums, squares = sums.contiguous(), squares.contiguous()
    given = [offset if tensor is None else tensor for tensor in (folded, sums, squares, direction)]
    launch(_merged_product, (programs,), x, offset, scaled, *given, norms, out, moments, h, w, count,
           -(-4 * c // tiles["K"]), 0 if sums is None else sums.stride(0), CHANNELS=c, D=d, PARTS=parts,
           NORM=folded is not None, EPS=eps, MOMENTS=known, WHOLE=4 * c % tiles["K"] == 0 and d == parts * wide,
           **tiles)  # fmt: skip
    return out, moments.transpose(0, 1)
