"""Anchors: what makes a strided operation shift-equivariant (the paper's A-token, A-WSA, A-PMerge, APS).

An anchor looks at tokens on an H x W torus, scores each of the s x s offsets of a stride-s grid with a shift-invariant
function, rolls each sample by its own best offset and returns the rolled tokens with that offset. After it, the stock
strided operation at phase zero is equivariant. Nothing is learned in an anchor and nothing is stored; scores are taken
under ``no_grad`` and reduced over the grid in float64.

Two options make scores cheap without making them less exact. ``sketch=r`` scores r fixed random combinations of a
token's D channels instead of all (still a shift-invariant function, so still exact; 0 is the paper's full score).
``fast=True`` in a call leaves them in the precision of the model around them: safe behind the canonical anchor, where
all shifted copies are one array; otherwise scores are taken in float32 at least, outside autocast.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import kernels
from .shifts import circular_pad, roll
from .weights import kept, product, whole

__all__ = [
    "Anchor",
    "ConvAnchor",
    "Fold",
    "MergeAnchor",
    "MergeWeights",
    "Ready",
    "Score",
    "Strided",
    "TokenNorm",
    "WindowAnchor",
    "best_offset",
    "phase_scores",
    "token_energy",
]

Score = Literal["signed", "energy"]
"""How a token counts: ``energy`` is the paper's squared norm; ``signed`` adds a little of one fixed direction, because
energy cannot tell t from -t."""


def phase_scores(energy: Tensor, stride: tuple[int, int]) -> Tensor:
    """Sum a per-position score (B, H, W) over the grid of each phase -> (B, s_h, s_w), in float64."""
    batch, height, width = energy.shape
    (sh, sw) = stride
    if height % sh or width % sw:
        raise ValueError(f"a grid of {(height, width)} has no whole phases at stride {stride}")
    return _wide(energy).view(batch, height // sh, sh, width // sw, sw).sum((1, 3))


def best_offset(scores: Tensor) -> Tensor:
    """(B, s_h, s_w) scores -> (B, 2) offsets of the maximum."""
    best = scores.flatten(1).argmax(1)
    return torch.stack([best // scores.shape[2], best % scores.shape[2]], 1)


def token_energy(t: Tensor, score: Score, dim: int) -> Tensor:
    """|t|^2 over channels at ``dim`` or, for ``signed``, |t|^2 + 0.01 rms <r, t> with a fixed unit vector r."""
    energy = t.square().sum(dim)
    if score == "signed":
        shape = [1] * t.ndim
        shape[dim] = -1
        rms = _wide(energy).mean((-2, -1), keepdim=True).sqrt()
        energy = _wide(energy) + 0.01 * rms * _wide((t * _direction(t.shape[dim], t).view(shape)).sum(dim))
    return energy


def _direction(channels: int, like: Tensor) -> Tensor:
    """A fixed vector of about unit length that no model is likely to be aligned with."""
    channel = torch.arange(channels, device=like.device, dtype=like.dtype)
    return torch.sin(1.0 + 12.9898 * channel) * (2.0 / channels) ** 0.5


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.device.type == "mps" else x.double()  # MPS has no float64


class Strided(NamedTuple):
    """What matters of a strided convolution here: kernel, stride and padding, (height, width) each."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @classmethod
    def of(cls, conv: nn.Conv2d) -> "Strided":
        if isinstance(conv.padding, str):
            raise ValueError(f"an anchored convolution needs its padding in pixels, not {conv.padding!r}")
        return cls(*((int(pair[0]), int(pair[1])) for pair in (conv.kernel_size, conv.stride, conv.padding)))


Ready = Callable[[bool], tuple[Tensor, Tensor]] | None
"""How a kernel makes taps, in one pass or not, and what is added to the sum of all: see ``Anchor._taps``."""


class Fold(NamedTuple):
    """A LayerNorm of the patch, folded into the convolution: (W' p - mean ``sums``) / std + ``constant``."""

    sums: Tensor
    constant: Tensor
    eps: float


class MergeWeights(NamedTuple):
    """What a merging anchor scores, with the norm before it; and what the merging itself multiplies by, if a kernel has
    made both in one pass: see ``kernels.merging_weights``.

    Shapes: taps (r, C, 2, 2) or, from that kernel, (4, r, C) or, for one pass, (2 C, 32).
    """

    taps: Tensor
    fold: Fold | None
    scaled: Tensor | None = None
    folded: Tensor | None = None

    @property
    def kernel(self) -> Tensor:
        """(r, C, 2, 2)"""
        if self.taps.ndim == 4:
            return self.taps
        if self.taps.ndim == 3:
            return self.taps.unflatten(0, (2, 2)).permute(2, 3, 0, 1)
        return self.taps.view(2, -1, 2, 4, 4)[0, :, :, 2:].permute(3, 0, 1, 2)


class TokenNorm(NamedTuple):
    """A LayerNorm of each token before the convolution. It folds too: W LN(t) = W' t / std + W ``shift``, where W' is
    W diag(``gain``) less its mean over channels, which leaves nothing of the mean of t.

    ``moments`` (B, 3, H, W) are those of the tokens, where they are known already.
    """

    gain: Tensor
    shift: Tensor
    eps: float
    moments: Tensor | None = None

    def into(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """W' (r, C, k, k) and the constant (r,) for a convolution's weight and bias, on the torus."""
        constant = (weight * self.shift.view(-1, 1, 1)).sum((1, 2, 3))
        weight = weight * self.gain.view(-1, 1, 1)
        return weight - weight.mean(1, keepdim=True), constant if bias is None else constant + bias


class Anchor(nn.Module):
    """What anchors share: how tokens count, the sketch, the precision of scores."""

    wave: Tensor
    directions: Tensor

    def __init__(self, *, score: Score = "signed", sketch: int = 0) -> None:
        super().__init__()
        if score not in ("signed", "energy"):
            raise ValueError(f"unknown score {score!r}: choose 'signed' or 'energy'")
        self.score: Score = score
        self.sketch = sketch
        wave = _direction(4096, torch.ones(1, dtype=torch.float64)) * (4096 / 2) ** 0.5
        self.register_buffer("wave", wave.float(), persistent=False)  # kept: a sine per token and channel would be slow
        if sketch:
            generator = torch.Generator().manual_seed(2024)
            self.register_buffer("directions", torch.randn(sketch, 4096, generator=generator), persistent=False)

    def mixing(self, channels: int, like: Tensor) -> Tensor | None:
        """(r, D) weights of the r combinations of D channels that are scored; None to score them all."""
        if not self.sketch or channels <= self.sketch:
            return None
        return self.directions[:, :channels].to(like)

    def rows(self, weight: Tensor) -> Tensor:
        """Rows (D, ...) of the linear map whose output is scored, or their r fixed combinations (r, ...)."""
        mixing = self.mixing(len(weight), weight)
        return weight if mixing is None else product(mixing, weight.flatten(1)).unflatten(1, weight.shape[1:])

    def affine_rows(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """``rows`` of a weight (D, ...) and of the bias (D,) that goes with it."""
        mixing = None if bias is None else self.mixing(len(weight), weight)
        if bias is None or mixing is None or not kernels.fits_sketch(mixing, weight, bias):
            return self.rows(weight), None if bias is None else self.rows(bias[:, None])[:, 0]
        mixed, constant = kernels.sketched(mixing, weight.flatten(1), bias)
        return mixed.unflatten(1, weight.shape[1:]), constant

    def depthwise_rows(self, *weights: Tensor) -> Tensor:
        """Depthwise kernels (C, 1, k, k) of one input: side by side, or r fixed combinations of all (r, C, k, k)."""
        if not self.sketch:
            return torch.stack(weights, 1).flatten(0, 1)  # grouped: the outputs of a channel are neighbours
        channels = len(weights[0])
        parts = self.directions[:, : channels * len(weights)].to(weights[0]).split(channels, 1)  # r, C each
        return sum((part[:, :, None, None] * w[:, 0] for part, w in zip(parts[1:], weights[1:], strict=True)),
                   parts[0][:, :, None, None] * weights[0][:, 0])  # fmt: skip

    def moments(self, x: Tensor) -> tuple[Tensor, ...]:
        """Sums (B, H, W) over channels of x (B, H, W, C), of its square and of its product with ``wave``, in float32 at
        least."""
        if kernels.usable(x) and not torch.compiler.is_compiling() and x.is_contiguous():  # a compiler has it for free
            return kernels.token_moments(x, self.wave).unbind(1)
        x = x if x.dtype == torch.float64 else x.float()
        return x.sum(-1), x.square().sum(-1), (x * self.wave[: x.shape[-1]].to(x)).sum(-1)

    def precision(self, x: Tensor, fast: bool) -> AbstractContextManager[Any]:
        return nullcontext() if fast else torch.autocast(x.device.type, enabled=False)

    def cast(self, x: Tensor, fast: bool) -> Tensor:
        """Tokens in the precision they are scored in."""
        return x if fast or x.dtype == torch.float64 else x.float()

    def choose(self, x: Tensor, weight: Tensor, conv: Strided, bias: Tensor | None = None,
               fold: Fold | TokenNorm | None = None, fast: bool = False, ready: Ready = None) -> Tensor:  # fmt: skip
        """(B, 2) offsets of the best phase of a strided convolution: see ``phases``."""
        if fast and kernels.fits_token_kernel(x, weight, conv.stride):
            parts = self._parts(x, weight, conv, bias, fold, ready)
            return kernels.best_phase(parts, conv.stride[0], math.prod(x.shape[2:]), self.score == "signed")
        return best_offset(self.phases(x, weight, conv, bias, fold, fast))

    def phases(self, x: Tensor, weight: Tensor, conv: Strided, bias: Tensor | None = None,
               fold: Fold | TokenNorm | None = None, fast: bool = False, ready: Ready = None) -> Tensor:  # fmt: skip
        """(B, s_h, s_w) score of each phase of a strided convolution of x (B, C, H, W), with ``weight`` (r, C, k, k) in
        place of its own and, with ``fold``, of normalised patches or tokens. Where kernels score and ``ready`` makes
        what they take, weight and bias say only when to make it again: a compiler leaves them out."""
        if fast and kernels.fits_token_kernel(x, weight, conv.stride):
            energy, toward = self._parts(x, weight, conv, bias, fold, ready).double().sum(1).unbind(1)
            rms = (energy.sum((1, 2), keepdim=True) / math.prod(x.shape[2:])).sqrt()
            return energy if self.score == "energy" else energy + 0.01 * rms * toward
        if isinstance(fold, TokenNorm):
            gain, shift = fold.gain.to(x), fold.shift.to(x)
            x = F.layer_norm(x.permute(0, 2, 3, 1), gain.shape, gain, shift, fold.eps).permute(0, 3, 1, 2)
            x, fold = x.to(kernels.product_dtype(x)), None
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        t = at_every_position(x, weight, conv, None if bias is None else bias.to(weight.dtype))
        t = t if t.dtype == torch.float64 else t.float()
        if fold is not None:
            patch = torch.stack(self.moments(x.permute(0, 2, 3, 1))[:2], 1)  # 2 x 2, from each position on
            moments = circular_pad(patch, (0, 1, 0, 1))
            mean, square = F.avg_pool2d(moments, 2, stride=1).div(x.shape[1]).split(1, 1)
            inverse_std = (square - mean.square()).clamp_min(0).add(fold.eps).rsqrt()
            t = (t - mean * fold.sums.view(1, -1, 1, 1)) * inverse_std + fold.constant.view(1, -1, 1, 1)
        return phase_scores(token_energy(t, self.score, 1), conv.stride)

    def _parts(self, x: Tensor, weight: Tensor, conv: Strided, bias: Tensor | None, fold: Fold | TokenNorm | None,
               ready: Ready) -> Tensor:  # fmt: skip
        """Energy and direction per phase: partial sums (B, parts, 2, s, s), by one kernel or by a product and one."""
        tokens, channels = x.permute(0, 2, 3, 1), x.shape[1]
        scale, colsum, total, square, eps = None, None, None, None, 0.0
        more = [] if bias is None else [bias]
        more += [] if fold is None else fold[:2]  # its two tensors
        once = kernels.fits_token_scores(tokens, len(weight), conv.kernel[0], conv.padding[0])
        taps, constant = kept(
            lambda: ready(once) if ready is not None else self._taps(weight, bias, fold, x.dtype, once),
            (x.dtype, once, ready is not None), weight, *more)  # fmt: skip
        if fold is not None:
            known = fold.moments if isinstance(fold, TokenNorm) else None
            total, square, _ = self.moments(tokens) if known is None else known.unbind(1)
            colsum, eps = None if isinstance(fold, TokenNorm) else fold.sums.float(), fold.eps
        if once:
            return kernels.token_scores(tokens, taps, constant, self.wave, colsum, total, square, conv.kernel[0],
                                        conv.stride[0], eps)  # fmt: skip
        if total is not None and square is not None and colsum is None:
            scale = (square / channels - (total / channels).square()).clamp_min(0).add(eps).rsqrt()
        y = F.linear(tokens, taps)  # every token by every tap, B, H, W, k k r
        return kernels.token_energies(y, constant, self.wave, scale, colsum, total, square, channels, conv.kernel[0],
                                      conv.padding[0], conv.stride[0], eps)  # fmt: skip

    def _taps(self, weight: Tensor, bias: Tensor | None, fold: Fold | TokenNorm | None, dtype: torch.dtype,
              once: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Weights as (taps, C), a tap being a row, a column and an output, or as ``token_scores`` reads them, and what
        is added to the sum of all."""
        if isinstance(fold, TokenNorm):
            weight, bias = fold.into(weight, bias)
        elif fold is not None:
            bias = fold.constant
        constant = torch.zeros(len(weight), device=weight.device) if bias is None else bias.float().contiguous()
        if once:
            return kernels.in_one_pass(weight.to(dtype)), constant
        taps = weight.to(dtype).permute(2, 3, 0, 1).flatten(0, 2)
        taps = F.pad(taps, (0, 0, 0, -len(taps) % 8)) if len(taps) % 8 else taps.clone()  # GPUs multiply in eights
        return taps, constant

    def extra_repr(self) -> str:
        return f"score={self.score!r}, sketch={self.sketch}"


class ConvAnchor(Anchor):
    """A-token (eq. adaptive_token) and every other strided convolution: m* = argmax_m sum |conv at phase m|^2.

    The convolution is taken at every position (circular padding (p, k - 1 - p)) and its energy summed per phase.

    Shapes: x (B, C, H, W) -> rolled x, offsets (B, 2) in [0, stride).
    """

    def forward(self, x: Tensor, conv: nn.Conv2d, fast: bool = False) -> tuple[Tensor, Tensor]:
        offset = self.offset(x, conv, fast)
        return roll(x, offset, within=True), offset

    def prepare(self, x: Tensor, conv: nn.Conv2d, fast: bool = False) -> Tensor:
        """x as both ``offset`` and the convolution read it: an image in inference is ``packed`` once for both."""
        half = self.packing(x, conv, fast)
        return x if half is None else kernels.packed(x, half)

    def packing(self, x: Tensor, conv: nn.Conv2d, fast: bool = False) -> torch.dtype | None:
        """The type that ``prepare`` packs x in, or None if it leaves x as it is."""
        (k, _), (s, _), _ = Strided.of(conv)
        rows, half = min(self.sketch or len(conv.weight), len(conv.weight)), kernels.product_dtype(x)
        fits = fast and kernels.fits_image_tokens(x, conv.weight, s, half) and kernels.fits_image_phases(x, rows, k, s)
        return half if fits else None

    @torch.no_grad()
    def offset(self, x: Tensor, conv: nn.Conv2d, fast: bool = False, at: Tensor | None = None) -> Tensor:
        """The best phase of x or, with ``at`` (B, 2) in [0, side), where the best phase of x rolled there begins in x:
        ``at`` and that phase, on the torus."""
        with self.precision(x, fast):
            x, strided = self.cast(x, fast), Strided.of(conv)
            weights = [conv.weight] if conv.bias is None else [conv.weight, conv.bias]
            weight, bias = kept(lambda: self._of_weights(conv, x.dtype), (self.sketch, x.dtype), *weights)
            if fast and kernels.fits_image_phases(x, len(weight), strided.kernel[0], strided.stride[0]):
                return self._of_image(x, weight, strided, bias, at)
            ready = self._ready(conv, x.dtype)
            if at is None:
                return self.choose(x, weight, strided, bias, fast=fast, ready=ready)
            place = at + self.choose(roll(x, at, within=True), weight, strided, bias, fast=fast, ready=ready)
            sides = torch.stack([torch.full_like(at[:, 0], side) for side in x.shape[2:]], 1)
            return torch.where(place < sides, place, place - sides)

    def _of_weights(self, conv: nn.Conv2d, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Weight of what is scored, and its bias, in float32 at least."""
        weight, bias = whole(conv.weight), None if conv.bias is None else whole(conv.bias)
        mixed = conv.groups == 1 and self.mixing(len(weight), weight) is not None
        if mixed:
            weight, bias = self.affine_rows(weight, bias)
        return weight.to(dtype, copy=True), bias if bias is None or mixed else bias.clone()

    def _ready(self, conv: nn.Conv2d, dtype: torch.dtype) -> Ready:
        """The same by a kernel, if it fits."""
        weight, bias, mixing = conv.weight, conv.bias, self.mixing(len(conv.weight), self.wave)
        given = [weight] if bias is None else [weight, bias]
        if mixing is None or conv.groups > 1 or not kernels.fits_sketch(mixing, *given):
            return None
        return lambda once: kernels.convolution_taps(mixing, weight, bias, dtype, once)

    def _of_image(self, x: Tensor, weight: Tensor, conv: Strided, bias: Tensor | None, at: Tensor | None) -> Tensor:
        """All phases at once, as one product of windows that hold them all, read where the image lies."""
        (stride, _), (k, _) = conv.stride, conv.kernel
        half = kernels.product_dtype(x)  # float32 is more than a choice needs
        half = torch.float16 if half == torch.float32 and not kernels.INTERPRETED else half
        x = kernels.packed(x, half)
        phases = kernels.all_phases
        weights = kept(lambda: kernels.in_pieces(phases(weight.to(half), stride), x, stride, True), half, weight)
        parts = kernels.image_phases(x, at, weights, bias, self.wave, k + stride - 1, stride, conv.padding[0])
        return kernels.best_phase(parts, stride, math.prod(x.shape[2:]), self.score == "signed", at, x.shape[3])


def at_every_position(x: Tensor, weight: Tensor, conv: Strided, bias: Tensor | None = None) -> Tensor:
    """A strided convolution's output at stride 1 on the torus, with other weights of the same kernel size.

    Padding (p, k - 1 - p) puts what the convolution gives for token j of phase m at position stride j + m.
    """
    (kh, kw), (ph, pw) = conv.kernel, conv.padding
    x = circular_pad(x, (pw, kw - 1 - pw, ph, kh - 1 - ph))
    return F.conv2d(x, weight, bias, groups=x.shape[1] // weight.shape[1])


class MergeAnchor(Anchor):
    """A-PMerge (claim pmergeconv): patch merging is a 2 x 2 convolution of stride 2; m* maximises its output's energy.

    The LayerNorm of the merged patch is folded: with per-token sums, W LN(p) = (W' p - mean W'1) / std + W b, where
    W' = W diag(gain), so that no 4C-wide patch is ever written out. Without a norm (SwinV2 normalises after the
    projection, which would level all energies) the projection itself is scored.

    Shapes: x (B, H, W, C), norm over 4C, reduction 4C -> D, patches flattened as (column, row, channel)
    -> rolled x, offsets (B, 2) in {0, 1}.
    """

    zeros: Tensor

    def __init__(self, *, score: Score = "signed", sketch: int = 0) -> None:
        super().__init__(score=score, sketch=sketch)
        self.register_buffer("zeros", torch.zeros(64), persistent=False)  # what a norm would add to each output

    def forward(self, x: Tensor, reduction: nn.Linear, norm: nn.LayerNorm | None = None,
                fast: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
        offset = self.offset(x, reduction, norm, fast)
        return roll(x, offset, (1, 2), within=True), offset

    @torch.no_grad()
    def offset(self, x: Tensor, reduction: nn.Linear, norm: nn.LayerNorm | None = None, fast: bool = False,
               weights: MergeWeights | None = None) -> Tensor:  # fmt: skip
        """``weights`` are those of ``weights(x, reduction, norm, ...)``, where they are known already."""
        with self.precision(x, fast):
            x = self.cast(x, fast)
            weights = weights or self.weights(x, reduction, norm)
            kernel, fold, taps = weights.kernel, weights.fold, weights.taps
            made = taps.ndim == (2 if kernels.fits_token_scores(x, len(kernel), 2, 0) else 3)
            constant = self.zeros[: len(kernel)] if fold is None else fold.constant
            ready: Ready = (lambda once: (taps.flatten(0, -2), constant)) if made else None
            return self.choose(x.permute(0, 3, 1, 2), kernel, Strided((2, 2), (2, 2), (0, 0)), fold=fold, fast=fast,
                               ready=ready)  # fmt: skip

    @torch.no_grad()
    def weights(self, x: Tensor, reduction: nn.Linear, norm: nn.LayerNorm | None,
                scaled: torch.dtype | None = None) -> MergeWeights:  # fmt: skip
        """What is scored, of x's type; and what ``kernels.merged_product`` takes, of the type given."""
        given = [reduction.weight] if norm is None else [reduction.weight, norm.weight, norm.bias]
        once = kernels.fits_token_scores(x, self.sketch, 2, 0)
        how = self.sketch, x.dtype, scaled, once
        return kept(lambda: self._of_weights(reduction, norm, x.dtype, scaled, once), how, *given)

    def _of_weights(self, reduction: nn.Linear, norm: nn.LayerNorm | None, dtype: torch.dtype,
                    scaled: torch.dtype | None, once: bool = False) -> MergeWeights:  # fmt: skip
        weight, eps = whole(reduction.weight), 0.0 if norm is None else norm.eps
        gain, bias = (None, None) if norm is None else (whole(norm.weight), whole(norm.bias))
        mixing = self.mixing(len(weight), weight)
        others: list[Tensor] = []
        few = mixing if kernels.fits_sketch(mixing, weight) else None
        if few is not None or scaled is not None:
            made = kernels.merging_weights(weight, few, gain, bias, dtype, scaled, once)
            taps, parts, others = made[0], made[1], list(made[2:] if scaled is not None else ())
        if few is not None:
            taps = taps if once else taps[: 4 * len(few)].unflatten(0, (4, -1))
            sums, constant = parts.sum(0).unbind()
            return MergeWeights(taps, None if norm is None else Fold(sums, constant, eps), *others)
        projection = self.rows(weight)  # r, 4C
        weight = projection if gain is None else projection * gain
        kernel = weight.view(len(weight), 2, 2, -1).permute(0, 3, 2, 1).to(dtype, copy=True)  # r, C, row, column
        if bias is None:
            return MergeWeights(kernel, None, *others)
        return MergeWeights(kernel, Fold(weight.sum(1), (projection * bias).sum(1), eps), *others)


class WindowAnchor(Anchor):
    """A-WSA (eq. a_wsa): m* = argmax_m || v_m ||_2, v_m[k] the mean token norm in window k of the partition at m.

    The paper's score ties where it should not: it cannot see where in its window a bright token sits, and norms are all
    equal after a LayerNorm at its initial gain. ``signed`` breaks such ties: a token counts with its norm plus a little
    of one fixed direction, and the mean over a window has slightly uneven weights.

    An axis on which the grid is a single window has no partition to choose: there the strongest token, or on one such
    axis the strongest row or column, comes first.

    Shapes: x (B, H, W, C) -> rolled x, offsets (B, 2) in [0, window).
    """

    taps: Tensor

    def __init__(self, *, score: Score = "signed") -> None:
        super().__init__(score=score)
        place = torch.arange(4096, dtype=torch.float64)
        uneven = 0.1 * torch.sin(2 + 7.31 * place) if score == "signed" else torch.zeros_like(place)
        self.register_buffer("taps", (1 + uneven).float(), persistent=False)

    def forward(self, x: Tensor, window: tuple[int, int], fast: bool = False) -> tuple[Tensor, Tensor]:
        offset = self.offset(x, window, fast)
        return roll(x, offset, (1, 2), within=True), offset

    @torch.no_grad()
    def offset(self, x: Tensor, window: tuple[int, int], fast: bool = False, moments: Tensor | None = None) -> Tensor:
        """``moments`` (B, 3, H, W) are those of x, where they are known already."""
        with self.precision(x, fast=False):  # a sum of squares: nothing to gain from less than float32
            fast = fast and x.dtype != torch.float64
            given = self.moments(x) if moments is None or not fast else moments.unbind(1)
            _, square, toward = (t if fast else _wide(t) for t in given)  # B, H, W each
            gain = 0.1 * (2.0 / x.shape[-1]) ** 0.5 if self.score == "signed" else 0.0
            single = (x.shape[1] == window[0], x.shape[2] == window[1])
            if fast and not any(single) and kernels.fits_window_scores(square, window):
                return kernels.best_window(square, toward if gain else square, self.taps, list(window), gain)
            strength = square.sqrt() + gain * toward if gain else square.sqrt()
            if all(single):
                return best_offset(strength)
            rows, columns = (self._window_mean(n, w, strength) for n, w in zip(x.shape[1:3], window, strict=True))
            energy = (rows @ strength @ columns.T).square()  # v^2 of the window that starts at each token
            if not any(single):
                return best_offset(phase_scores(energy, window))
            # one axis alone is a single window: its strongest line, and the best partition of the other axis
            by_row = strength.sum(2) if single[0] else energy.sum(2).view(x.shape[0], -1, window[0]).sum(1)
            by_column = strength.sum(1) if single[1] else energy.sum(1).view(x.shape[0], -1, window[1]).sum(1)
            return torch.stack([by_row.argmax(1), by_column.argmax(1)], 1)

    def _window_mean(self, n: int, window: int, like: Tensor) -> Tensor:
        """(n, n) matrix that takes the mean, slightly uneven for ``signed``, of ``window`` places from each on."""
        place = torch.arange(n, device=like.device)
        ahead = (place - place[:, None]) % n
        return torch.where(ahead < window, self.taps[ahead.clamp(max=window - 1)].to(like) / window, 0)
