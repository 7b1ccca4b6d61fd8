"""UperNet's decoder: features of all stages, brought to one grid, pooled, added, classified."""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.classifier import PaddingMode
from common.models.upsample import unpool, upsample
from common.shifts import roll

__all__ = ["BoxMean", "ConvModule", "FCNHead", "Level", "UperHead", "Upsampling", "resample", "stretch"]

Upsampling = Literal["bilinear", "unpool"]
"""How an adaptive decoder goes from a coarse grid to a finer one: interpolated on the torus, or the paper's unpooling
(values at the places they were taken from, zeros between). Logits are interpolated in either: a hole has no label."""


class Level(NamedTuple):
    """Where features lie in the image: token h at pixel offset + stride h, per sample and modulo the side."""

    size: tuple[int, int]
    stride: int
    offset: Tensor  # B, 2


def resample(x: Tensor, source: Level, target: Level, mode: Upsampling) -> Tensor:
    """Bring (B, C, h, w) from one grid to a finer one on the torus: roll(up(x), (off_to - off_from) / stride_to)."""
    factor = source.stride // target.stride
    x = unpool(x, factor) if mode == "unpool" else upsample(x, factor)
    return roll(x, (target.offset - source.offset) // target.stride)


def stretch(x: Tensor, source: Level, target: Level, mode: Upsampling) -> Tensor:
    """The stock decoder's way: interpolate to the target's size, offsets unseen."""
    return F.interpolate(x, target.size, mode="bilinear", align_corners=False)


class BoxMean(nn.Module):
    """Pooling of a side n into k bins, on the torus: at every token the mean of the K = ceil(n / k) tokens around it.

    An odd K is centred; an even one has K + 1 taps [1/2, 1, ..., 1, 1/2] / K. One bin is the mean of all tokens.

    Shapes: (B, C, H, W) -> the same; (B, C, 1, 1) for one bin.
    """

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.bins = bins

    def forward(self, x: Tensor) -> Tensor:
        if self.bins == 1:
            return x.mean((2, 3), keepdim=True)
        rows, columns = (self.weights(n, x) for n in x.shape[2:])
        return rows @ x @ columns

    def weights(self, n: int, like: Tensor) -> Tensor:
        """(n, n), symmetric: row i holds the taps of token i."""
        taps = math.ceil(n / self.bins)
        place = torch.arange(n, device=like.device)
        ahead = (place - place[:, None]) % n
        distance = torch.minimum(ahead, n - ahead).to(like.dtype)
        return (taps / 2 + 0.5 - distance).clamp(0, 1) / taps

    def extra_repr(self) -> str:
        return f"bins={self.bins}"


class ConvModule(nn.Module):
    """Convolution without bias that keeps the size, batch norm, ReLU: (B, C, H, W) -> (B, D, H, W)."""

    def __init__(self, dim: int, out_dim: int, kernel_size: int, padding_mode: PaddingMode) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, out_dim, kernel_size, padding=kernel_size // 2, padding_mode=padding_mode,
                              bias=False)  # fmt: skip
        self.batch_norm = nn.BatchNorm2d(out_dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.batch_norm(self.conv(x)))


class UperHead(nn.Module):
    """Pyramid pooling on the coarsest stage, a feature pyramid over all: stages (B, C_i, h_i, w_i), fine to coarse ->
    logits (B, classes, h_0, w_0) on the finest stage's grid."""

    def __init__(self, *, dims: list[int], channels: int, num_classes: int, pool_scales: tuple[int, ...],
                 padding_mode: PaddingMode, drop_rate: float, adaptive: bool,
                 upsampling: Upsampling) -> None:  # fmt: skip
        super().__init__()
        self.adaptive, self.upsampling = adaptive, upsampling
        self.psp_modules = nn.ModuleList(
            nn.Sequential(
                BoxMean(bins) if adaptive else nn.AdaptiveAvgPool2d(bins),
                ConvModule(dims[-1], channels, 1, padding_mode),
            )
            for bins in pool_scales
        )
        self.bottleneck = ConvModule(dims[-1] + len(pool_scales) * channels, channels, 3, padding_mode)
        self.lateral_convs = nn.ModuleList(ConvModule(dim, channels, 1, padding_mode) for dim in dims[:-1])
        self.fpn_convs = nn.ModuleList(ConvModule(channels, channels, 3, padding_mode) for _ in dims[:-1])
        self.fpn_bottleneck = ConvModule(len(dims) * channels, channels, 3, padding_mode)
        self.dropout = nn.Dropout2d(drop_rate)
        self.classifier = nn.Conv2d(channels, num_classes, 1)

    def pool(self, x: Tensor) -> Tensor:
        """The coarsest stage with its means over ever smaller neighbourhoods: (B, C, h, w) -> (B, channels, h, w)."""
        size = (x.shape[2], x.shape[3])
        pooled = [x]
        for module in self.psp_modules:
            mean = module(x)
            if self.adaptive:
                mean = mean.expand(-1, -1, *size)  # one bin is 1 x 1, all others have the grid's size
            else:
                mean = F.interpolate(mean, size, mode="bilinear", align_corners=False)
            pooled.append(mean)
        return self.bottleneck(torch.cat(pooled, 1))

    def forward(self, features: list[Tensor], grids: list[Level]) -> Tensor:
        to_grid = resample if self.adaptive else stretch
        top = len(features) - 1
        levels = [lateral(x) for lateral, x in zip(self.lateral_convs, features[:-1], strict=True)]
        levels.append(self.pool(features[-1]))
        for i in range(top, 0, -1):
            levels[i - 1] = levels[i - 1] + to_grid(levels[i], grids[i], grids[i - 1], self.upsampling)
        for i, conv in enumerate(self.fpn_convs):
            levels[i] = conv(levels[i])
        for i in range(1, top + 1):
            levels[i] = to_grid(levels[i], grids[i], grids[0], self.upsampling)
        return self.classifier(self.dropout(self.fpn_bottleneck(torch.cat(levels, 1))))


class FCNHead(nn.Module):
    """The auxiliary head: one 3 x 3 convolution and a classifier on a single stage, for training alone."""

    def __init__(self, *, dim: int, channels: int, num_classes: int, padding_mode: PaddingMode,
                 drop_rate: float) -> None:  # fmt: skip
        super().__init__()
        self.convs = nn.Sequential(ConvModule(dim, channels, 3, padding_mode))
        self.dropout = nn.Dropout2d(drop_rate)
        self.classifier = nn.Conv2d(channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.convs(x)))
