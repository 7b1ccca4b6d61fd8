"""How anchors score: the energy of a strided operation's output at each phase of its grid, and what all anchors share.

The convolution that is scored may have other weights than the model's (a sketch of them), and a norm of its patches
before it, which is folded into its weights. Kernels do most of it where they can; the torch form is beside them.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from ..ops.dispatch import reference
from ..ops.merge import Fold
from ..ops.strided import Strided
from ..ops.weights import gathered, product
from ..shifts import circular_pad
from .scores import find_score

__all__ = ["Anchor", "Ready", "Taps", "best_offset", "observed_scores", "phase_scores",
           "token_energy", "wide"]  # fmt: skip


def phase_scores(energy: Tensor, stride: tuple[int, int]) -> Tensor:
    """Sum a per-position score (B, H, W) over the grid of each phase -> (B, s_h, s_w), in float64."""
    batch, height, width = energy.shape
    (sh, sw) = stride
    if height % sh or width % sw:
        raise ValueError(f"a grid of {(height, width)} has no whole phases at stride {stride}")
    return wide(energy).view(batch, height // sh, sh, width // sw, sw).sum((1, 3))


_OBSERVED: list[Tensor] | None = None


@contextmanager
def observed_scores() -> Iterator[list[Tensor]]:
    """Every table of scores (B, s_h, s_w) that an anchor chooses by in this context, in turn; kernels are off."""
    global _OBSERVED
    before, _OBSERVED = _OBSERVED, []
    try:
        with reference():
            yield _OBSERVED
    finally:
        _OBSERVED = before


def best_offset(scores: Tensor) -> Tensor:
    """(B, s_h, s_w) scores -> (B, 2) offsets of the maximum."""
    if _OBSERVED is not None:
        _OBSERVED.append(scores)
    best = scores.flatten(1).argmax(1)
    return torch.stack([best // scores.shape[2], best % scores.shape[2]], 1)


def token_energy(t: Tensor, score: str, dim: int) -> Tensor:
    """|t|^2 over channels at ``dim`` or, for ``signed``, |t|^2 + 0.01 rms <r, t> with a fixed unit vector r."""
    energy = t.square().sum(dim)
    if find_score(score).signed:
        shape = [1] * t.ndim
        shape[dim] = -1
        rms = wide(energy).mean((-2, -1), keepdim=True).sqrt()
        energy = wide(energy) + 0.01 * rms * wide((t * _direction(t.shape[dim], t).view(shape)).sum(dim))
    return energy


def _direction(channels: int, like: Tensor) -> Tensor:
    """A fixed vector of about unit length that no model is likely to be aligned with."""
    channel = torch.arange(channels, device=like.device, dtype=like.dtype)
    return torch.sin(1.0 + 12.9898 * channel) * (2.0 / channels) ** 0.5


def wide(x: Tensor) -> Tensor:
    return x.float() if x.device.type == "mps" else x.double()  # MPS has no float64


Taps = tuple[Tensor, Tensor]
"""Taps, and what is added to the sum of all: see ``Anchor._taps``."""
Ready = Callable[[bool], Taps | None] | None
"""How a kernel makes them, to be scored in one pass or not, if it can."""


class Anchor(nn.Module):
    """What anchors share: how tokens count, the sketch, the precision of scores."""

    wave: Tensor
    directions: Tensor
    window_weights: Tensor

    def __init__(self, *, score: str = "signed", sketch: int = 0) -> None:
        super().__init__()
        self.score = find_score(score)
        self.sketch = sketch if self.score.needs_layer else 0
        uneven = self.score.tie_break * torch.sin(2 + 7.31 * torch.arange(4096, dtype=torch.float64))
        self.register_buffer("window_weights", (1 + uneven).float(), persistent=False)
        wave = _direction(4096, torch.ones(1, dtype=torch.float64)) * (4096 / 2) ** 0.5
        self.register_buffer("wave", wave.float(), persistent=False)  # kept: a sine per token and channel would be slow
        if self.sketch:
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

    def partition(self, x: Tensor, window: tuple[int, int], fast: bool, moments: Tensor | None = None) -> Tensor:
        """Offsets (B, 2) of the best partition of tokens (B, H, W, C) into windows: see ``WindowAnchor``."""
        with self.precision(x, fast=False):  # a sum of squares: nothing to gain from less than float32
            fast = fast and x.dtype != torch.float64
            given = self.moments(x) if moments is None or not fast else moments.unbind(1)
            _, square, toward = (t if fast else wide(t) for t in given)  # B, H, W each
            gain = self.gain(x)
            single = (x.shape[1] == window[0], x.shape[2] == window[1])
            if fast and self.score.power == 2 and kernels.fits_window_scores(square, window):
                return kernels.best_window(square, toward if gain else square, self.window_weights, list(window), gain)
            strength = square.sqrt() + gain * toward if gain else square.sqrt()
            if all(single):
                return best_offset(strength)
            rows, columns = (self._window_mean(n, w, strength) for n, w in zip(x.shape[1:3], window, strict=True))
            v = rows @ strength @ columns.T  # of the window that starts at each token
            power = self.score.power
            energy = v.square() if power == 2 else (v / v.amax((1, 2), keepdim=True)).pow(power)  # v is positive
            if not any(single):
                return best_offset(phase_scores(energy, window))
            # one axis alone is a single window: its strongest line, and the best partition of the other axis
            by_row = strength.sum(2) if single[0] else energy.sum(2).view(x.shape[0], -1, window[0]).sum(1)
            by_column = strength.sum(1) if single[1] else energy.sum(1).view(x.shape[0], -1, window[1]).sum(1)
            return torch.stack([by_row.argmax(1), by_column.argmax(1)], 1)

    def gain(self, x: Tensor) -> float:
        """How much of the fixed direction counts beside a token's norm."""
        return self.score.tie_break * (2.0 / x.shape[-1]) ** 0.5

    def _window_mean(self, n: int, window: int, like: Tensor) -> Tensor:
        """(n, n) matrix that takes the mean, slightly uneven to break ties, of ``window`` places from each on."""
        place = torch.arange(n, device=like.device)
        ahead = (place - place[:, None]) % n
        return torch.where(ahead < window, self.window_weights[ahead.clamp(max=window - 1)].to(like) / window, 0)

    def precision(self, x: Tensor, fast: bool) -> AbstractContextManager[Any]:
        return nullcontext() if fast else torch.autocast(x.device.type, enabled=False)

    def cast(self, x: Tensor, fast: bool) -> Tensor:
        """Tokens in the precision they are scored in."""
        return x if fast or x.dtype == torch.float64 else x.float()

    def normed(self, x: Tensor, norm: nn.LayerNorm, known: Tensor | None, fast: bool) -> Tensor:
        """Tokens (B, H, W, C) as ``norm`` makes them and a convolution reads them, unless ``known`` already."""
        if known is None:
            x = self.cast(x, fast)
            known = F.layer_norm(
                x, norm.normalized_shape, gathered(norm.weight).to(x), gathered(norm.bias).to(x), norm.eps
            )
        return known.to(kernels.product_dtype(known)) if fast else known

    def choose(self, x: Tensor, weight: Tensor, conv: Strided, bias: Tensor | None = None, fold: Fold | None = None,
               fast: bool = False, ready: Ready = None) -> Tensor:  # fmt: skip
        """(B, 2) offsets of the best phase of a strided convolution: see ``phases``."""
        if fast and kernels.fits_token_kernel(x, weight, conv.stride):
            return self._by_kernel(x, weight, conv, bias, fold, ready, choose=True)
        return best_offset(self.phases(x, weight, conv, bias, fold, fast))

    def phases(self, x: Tensor, weight: Tensor, conv: Strided, bias: Tensor | None = None, fold: Fold | None = None,
               fast: bool = False, ready: Ready = None) -> Tensor:  # fmt: skip
        """(B, s_h, s_w) score of each phase of a strided convolution of x (B, C, H, W), with ``weight`` (r, C, k, k) in
        place of its own and, with ``fold``, of normalised patches. Where kernels score and ``ready`` makes what they
        take, weight and bias say only when to make it again: a compiler leaves them out."""
        if fast and kernels.fits_token_kernel(x, weight, conv.stride):
            energy, toward = self._by_kernel(x, weight, conv, bias, fold, ready).double().sum(1).unbind(1)
            rms = (energy.sum((1, 2), keepdim=True) / math.prod(x.shape[2:])).sqrt()
            return energy + 0.01 * rms * toward if self.score.signed else energy
        t = at_every_position(x, weight, conv, None if bias is None else bias.to(weight.dtype))
        t = t if t.dtype == torch.float64 else t.float()
        if fold is not None:
            fold = fold.whole()
            patch = torch.stack(self.moments(x.permute(0, 2, 3, 1))[:2], 1)  # 2 x 2, from each position on
            moments = circular_pad(patch, (0, 1, 0, 1))
            mean, square = F.avg_pool2d(moments, 2, stride=1).div(x.shape[1]).split(1, 1)
            inverse_std = (square - mean.square()).clamp_min(0).add(fold.eps).rsqrt()
            t = (t - mean * fold.sums.view(1, -1, 1, 1)) * inverse_std + fold.constant.view(1, -1, 1, 1)
        return phase_scores(token_energy(t, self.score.name, 1), conv.stride)

    def _by_kernel(self, x: Tensor, weight: Tensor, conv: Strided, bias: Tensor | None, fold: Fold | None, ready: Ready,
                   choose: bool = False) -> Tensor:  # fmt: skip
        """Energy and direction per phase: partial sums (B, parts, 2, s, s), by one kernel or by a product and one. Or
        the best phase (B, 2)."""
        tokens, channels, stride, signed = x.permute(0, 2, 3, 1), x.shape[1], conv.stride[0], self.score.signed
        colsum, total, square, eps = None, None, None, 0.0
        once = kernels.fits_token_scores(tokens, len(weight), conv.kernel[0], conv.padding[0])
        if fold is not None and (ready is None or not once):
            fold = fold.whole()
        made = None if ready is None else ready(once)
        taps, constant = made or self._taps(weight, bias, fold, x.dtype, once)
        if fold is not None:
            total, square, _ = self.moments(tokens)
            colsum, eps = fold.sums.float(), fold.eps
        if once:
            given = tokens, taps, constant, self.wave, colsum, total, square, conv.kernel[0], stride, eps
            return kernels.best_of_tokens(*given, signed) if choose else kernels.token_scores(*given)
        y = F.linear(tokens, taps)  # every token by every tap, B, H, W, k k r
        parts = kernels.token_energies(y, constant, self.wave, colsum, total, square, channels, conv.kernel[0],
                                       conv.padding[0], stride, eps)  # fmt: skip
        return kernels.best_phase(parts, stride, math.prod(x.shape[2:]), signed) if choose else parts

    def _taps(self, weight: Tensor, bias: Tensor | None, fold: Fold | None, dtype: torch.dtype,
              once: bool) -> Taps:  # fmt: skip
        """Weights as (taps, C), a tap being a row, a column and an output, or as ``token_scores`` reads them, and what
        is added to the sum of all."""
        bias = bias if fold is None else fold.constant
        constant = torch.zeros(len(weight), device=weight.device) if bias is None else bias.float().contiguous()
        if once:
            return kernels.in_one_pass(weight.to(dtype)), constant
        taps = weight.to(dtype).permute(2, 3, 0, 1).flatten(0, 2)
        taps = F.pad(taps, (0, 0, 0, -len(taps) % 8)) if len(taps) % 8 else taps.clone()  # GPUs multiply in eights
        return taps, constant

    def extra_repr(self) -> str:
        return f"score={self.score.name!r}, sketch={self.sketch}"


def at_every_position(x: Tensor, weight: Tensor, conv: Strided, bias: Tensor | None = None) -> Tensor:
    """A strided convolution's output at stride 1 on the torus, with other weights of the same kernel size.

    Padding (p, k - 1 - p) puts what the convolution gives for token j of phase m at position stride j + m.
    """
    (kh, kw), (ph, pw) = conv.kernel, conv.padding
    x = circular_pad(x, (pw, kw - 1 - pw, ph, kh - 1 - ph))
    return F.conv2d(x, weight, bias, groups=x.shape[1] // weight.shape[1])
