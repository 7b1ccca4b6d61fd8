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

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import kernels
from .shifts import circular_pad, roll

__all__ = [
    "Anchor",
    "ConvAnchor",
    "Fold",
    "MergeAnchor",
    "Score",
    "Strided",
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


class Fold(NamedTuple):
    """A LayerNorm of the patch, folded into the convolution: (W' p - mean ``sums``) / std + ``constant``."""

    sums: Tensor
    constant: Tensor
    eps: float


class Anchor(nn.Module):
    """What anchors share: how tokens count, the sketch, the precision of scores."""

    directions: Tensor

    def __init__(self, *, score: Score = "signed", sketch: int = 0) -> None:
        super().__init__()
        if score not in ("signed", "energy"):
            raise ValueError(f"unknown score {score!r}: choose 'signed' or 'energy'")
        self.score: Score = score
        self.sketch = sketch
        if sketch:
            generator = torch.Generator().manual_seed(2024)
            self.register_buffer("directions", torch.randn(sketch, 4096, generator=generator), persistent=False)

    def rows(self, weight: Tensor) -> Tensor:
        """Rows (D, ...) of the linear map whose output is scored, or their r fixed combinations (r, ...)."""
        if not self.sketch or len(weight) <= self.sketch:
            return weight
        return torch.tensordot(self.directions[:, : len(weight)].to(weight), weight, 1)

    def depthwise_rows(self, *weights: Tensor) -> Tensor:
        """Depthwise kernels (C, 1, k, k) of one input: side by side, or r fixed combinations of all (r, C, k, k)."""
        if not self.sketch:
            return torch.stack(weights, 1).flatten(0, 1)  # grouped: the outputs of a channel are neighbours
        kernels = torch.stack(weights)[:, :, 0]  # n, C, k, k
        directions = self.directions[:, : kernels.shape[0] * kernels.shape[1]].to(kernels)
        return torch.einsum("rnc,ncij->rcij", directions.unflatten(1, kernels.shape[:2]), kernels)

    def precision(self, x: Tensor, fast: bool) -> AbstractContextManager[Any]:
        return nullcontext() if fast else torch.autocast(x.device.type, enabled=False)

    def cast(self, x: Tensor, fast: bool) -> Tensor:
        """Tokens in the precision they are scored in."""
        return x if fast or x.dtype == torch.float64 else x.float()

    def phases(self, x: Tensor, weight: Tensor, conv: Strided, bias: Tensor | None = None, fold: Fold | None = None,
               fast: bool = False) -> Tensor:  # fmt: skip
        """(B, s_h, s_w) score of each phase of a strided convolution of x (B, C, H, W), with ``weight`` (r, C, k, k) in
        place of its own and, with ``fold``, of normalised patches."""
        if fast and weight.shape[1] == x.shape[1] and kernels.fits_phase_kernel(x, weight, conv.stride):
            return self._phases_in_one_kernel(x, weight, conv, bias, fold)
        t = at_every_position(x, weight, conv, bias)
        t = t if t.dtype == torch.float64 else t.float()
        if fold is not None:
            x = x if x.dtype == torch.float64 else x.float()
            sums = torch.stack([x.sum(1), x.square().sum(1)], 1)
            mean, square = F.avg_pool2d(circular_pad(sums, (0, 1, 0, 1)), 2, stride=1).div(x.shape[1]).split(1, 1)
            inverse_std = (square - mean.square()).clamp_min(0).add(fold.eps).rsqrt()
            t = (t - mean * fold.sums.view(1, -1, 1, 1)) * inverse_std + fold.constant.view(1, -1, 1, 1)
        return phase_scores(token_energy(t, self.score, 1), conv.stride)

    def _phases_in_one_kernel(self, x: Tensor, weight: Tensor, conv: Strided, bias: Tensor | None,
                              fold: Fold | None) -> Tensor:  # fmt: skip
        (r, channels, _, _), (_, _, height, width), stride = weight.shape, x.shape, conv.stride[0]
        constant = bias if fold is None else fold.constant
        constant = torch.zeros(r, device=x.device) if constant is None else constant.float()
        direction, sums = _direction(r, constant), None if fold is None else fold.sums.float()
        if channels < 16:  # cells of stride x stride pixels instead: channels enough for a matrix product
            weight, padding = _cell_weights(weight, conv)
            x = F.pixel_unshuffle(x.to(weight.dtype), stride).contiguous(memory_format=torch.channels_last)
            constant, direction, phases = constant.repeat(stride**2), direction.repeat(stride**2), 1
        else:
            weight, padding, phases = weight.permute(2, 3, 1, 0).reshape(-1, r).contiguous(), conv.padding, stride
        parts = kernels.phase_energies(x, weight, constant, direction, sums, list(padding), phases, r,
                                       0.0 if fold is None else fold.eps)  # fmt: skip
        if channels < 16:
            energy, toward = parts.double().sum(1).view(-1, 2, stride, stride).unbind(1)
        else:
            energy, toward = parts.unflatten(1, (-1, stride)).double().sum(1)[..., 0].unbind(2)  # B, s, s
        if self.score == "energy":
            return energy
        rms = (energy.sum((1, 2), keepdim=True) / (height * width)).sqrt()
        return energy + 0.01 * rms * toward

    def extra_repr(self) -> str:
        return f"score={self.score!r}, sketch={self.sketch}"


def _cell_weights(weight: Tensor, conv: Strided) -> tuple[Tensor, tuple[int, int]]:
    """The convolution at every phase of a stride-s grid, as a convolution of its s x s cells.

    Phase (a, b) sees the kernel (r, C, k, k) moved by (a - p, b - p) pixels: placed on a canvas of whole cells.
    Returns weights (cells cells C s s, s s r), patches as (cell row, cell column, channel, row, column), and padding.
    """
    (k, _), (s, _), (p, _) = conv
    before = -(-p // s)  # whole cells above and to the left of the first
    cells = before + (s - 1 - p + k - 1) // s + 1
    place = torch.arange(k, device=weight.device) + torch.arange(s, device=weight.device)[:, None] - p + before * s
    at = (place[..., None] == torch.arange(cells * s, device=weight.device)).to(weight.dtype)  # phase, tap, canvas
    canvas = torch.einsum("rcij,aiu,bjv->ucvabr", weight, at, at)  # cells s, C, cells s, s, s, r
    canvas = canvas.unflatten(0, (cells, s)).unflatten(3, (cells, s))  # cell, row, C, cell, column, a, b, r
    return canvas.permute(0, 3, 2, 1, 4, 5, 6, 7).reshape(cells**2 * weight.shape[1] * s * s, -1), (before, before)


class ConvAnchor(Anchor):
    """A-token (eq. adaptive_token) and every other strided convolution: m* = argmax_m sum |conv at phase m|^2.

    The convolution is taken at every position (circular padding (p, k - 1 - p)) and its energy summed per phase.

    Shapes: x (B, C, H, W) -> rolled x, offsets (B, 2) in [0, stride).
    """

    def forward(self, x: Tensor, conv: nn.Conv2d, fast: bool = False) -> tuple[Tensor, Tensor]:
        offset = self.offset(x, conv, fast)
        return roll(x, offset, within=True), offset

    @torch.no_grad()
    def offset(self, x: Tensor, conv: nn.Conv2d, fast: bool = False) -> Tensor:
        with self.precision(x, fast):
            x = self.cast(x, fast)
            weight, bias = conv.weight.to(x), None if conv.bias is None else conv.bias.to(x)
            if conv.groups == 1:
                weight, bias = self.rows(weight), None if bias is None else self.rows(bias)
            return best_offset(self.phases(x, weight, Strided.of(conv), bias, fast=fast))


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

    def forward(self, x: Tensor, reduction: nn.Linear, norm: nn.LayerNorm | None = None,
                fast: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
        offset = self.offset(x, reduction, norm, fast)
        return roll(x, offset, (1, 2), within=True), offset

    @torch.no_grad()
    def offset(self, x: Tensor, reduction: nn.Linear, norm: nn.LayerNorm | None = None, fast: bool = False) -> Tensor:
        with self.precision(x, fast):
            x = self.cast(x, fast).permute(0, 3, 1, 2)  # B, C, H, W
            channels = x.shape[1]
            projection = self.rows(reduction.weight.to(x))  # r, 4C
            weight = projection if norm is None else projection * norm.weight.to(x)
            kernel = weight.view(-1, 2, 2, channels).permute(0, 3, 2, 1)  # r, C, row, column
            fold = None if norm is None else Fold(weight.sum(1), projection @ norm.bias.to(projection), norm.eps)
            return best_offset(self.phases(x, kernel, Strided((2, 2), (2, 2), (0, 0)), fold=fold, fast=fast))


class WindowAnchor(Anchor):
    """A-WSA (eq. a_wsa): m* = argmax_m || v_m ||_2, v_m[k] the mean token norm in window k of the partition at m.

    The paper's score ties where it should not: it cannot see where in its window a bright token sits, and norms are all
    equal after a LayerNorm at its initial gain. ``signed`` breaks such ties: a token counts with its norm plus a little
    of one fixed direction, and the mean over a window has slightly uneven weights.

    An axis on which the grid is a single window has no partition to choose: there the strongest token, or on one such
    axis the strongest row or column, comes first.

    Shapes: x (B, H, W, C) -> rolled x, offsets (B, 2) in [0, window).
    """

    wave: Tensor

    def __init__(self, *, score: Score = "signed") -> None:
        super().__init__(score=score)
        wave = _direction(4096, torch.ones(1, dtype=torch.float64)).float() * (4096 / 2) ** 0.5
        self.register_buffer("wave", wave, persistent=False)  # kept: a sine per token and channel would be slow

    def forward(self, x: Tensor, window: tuple[int, int], fast: bool = False) -> tuple[Tensor, Tensor]:
        offset = self.offset(x, window, fast)
        return roll(x, offset, (1, 2), within=True), offset

    @torch.no_grad()
    def offset(self, x: Tensor, window: tuple[int, int], fast: bool = False) -> Tensor:
        with self.precision(x, fast=False):  # a sum of squares: nothing to gain from less than float32
            x = self.cast(x, fast=False)
            fast = fast and x.dtype == torch.float32
            wide = (lambda t: t) if fast else _wide
            strength = wide(x.square().sum(-1)).sqrt()  # B, H, W
            if self.score == "signed":
                direction = self.wave[: x.shape[-1]].to(x) * (2.0 / x.shape[-1]) ** 0.5
                strength = strength + 0.1 * wide((x * direction).sum(-1))
            single = (x.shape[1] == window[0], x.shape[2] == window[1])
            if all(single):
                return best_offset(strength)
            if fast and not any(single) and kernels.fits_offset_kernel(strength):
                return kernels.window_offset(strength.contiguous(), list(window), self.score == "signed")
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
        ahead = ((place - place[:, None]) % n).to(like.dtype)
        weight = 1 + 0.1 * torch.sin(2 + 7.31 * ahead) if self.score == "signed" else torch.ones_like(ahead)
        return torch.where(ahead < window, weight / window, 0)
