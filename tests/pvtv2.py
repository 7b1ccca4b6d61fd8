"""PVTv2, default and adaptive: a fifth architecture over the public pieces, as ``docs/add-a-model.md`` explains it.

Wang et al., *PVT v2: Improved Baselines with Pyramid Vision Transformer*, CVMJ 2022. Parameters have timm's names.
"""

import math
from functools import partial
from typing import Any

import torch.nn.functional as F
from timm.layers import ClassifierHead
from torch import Tensor, nn

from common.anchors import ConvAnchor
from common.models.classifier import Classifier, PaddingMode, Stages, resolve_padding
from common.models.embedding import PatchEmbed
from common.ops import convolve

ANCHORS = ("token", "reduction")
LayerNorm = partial(nn.LayerNorm, eps=1e-6)


class Attention(nn.Module):
    """Attention of all tokens to keys and values that a strided convolution has reduced: (B, H, W, C) -> the same."""

    def __init__(self, *, dim: int, num_heads: int, reduction: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.kv, self.proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.sr = nn.Conv2d(dim, dim, reduction, reduction) if reduction > 1 else None
        self.norm = nn.LayerNorm(dim) if reduction > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        reduced = x
        if self.sr is not None and self.norm is not None:
            reduced = self.norm(self.sr(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        q = self.q(x).flatten(1, 2).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.kv(reduced).flatten(1, 2).unflatten(2, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Mlp(nn.Module):
    """Two linear layers with a depthwise convolution between: (B, H, W, C) -> the same."""

    def __init__(self, *, dim: int, hidden: int, padding_mode: PaddingMode) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, padding_mode=padding_mode)

    def forward(self, x: Tensor) -> Tensor:
        x = convolve(self.dwconv, self.fc1(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.fc2(F.gelu(x))


class Block(nn.Module):
    """Attention, then an MLP, each pre-normalised and residual."""

    def __init__(
        self, *, dim: int, num_heads: int, reduction: int, mlp_ratio: float, padding_mode: PaddingMode
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(dim), LayerNorm(dim)
        self.attn = Attention(dim=dim, num_heads=num_heads, reduction=reduction)
        self.mlp = Mlp(dim=dim, hidden=int(dim * mlp_ratio), padding_mode=padding_mode)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stage(nn.Module):
    """An embedding (but in the first stage, where it is the model's) and blocks."""

    def __init__(self, *, in_chans: int, dim: int, depth: int, first: bool, **block: Any) -> None:
        super().__init__()
        self.downsample = None if first else PatchEmbed(in_chans=in_chans, dim=dim, size=3, stride=2, padding=1,
                                                        padding_mode=block["padding_mode"])  # fmt: skip
        self.blocks = nn.ModuleList(Block(dim=dim, **block) for _ in range(depth))
        self.norm = LayerNorm(dim)


class PVTv2(Classifier):
    """PVTv2; ``adaptive=True`` makes it truly shift-equivariant with the same parameters."""

    model_type = "pvtv2"

    def __init__(self, *, img_size: int = 224, in_chans: int = 3, num_classes: int = 1000,
                 embed_dims: tuple[int, ...] = (32, 64, 160, 256), depths: tuple[int, ...] = (2, 2, 2, 2),
                 num_heads: tuple[int, ...] = (1, 2, 5, 8), reductions: tuple[int, ...] = (8, 4, 2, 1),
                 mlp_ratios: tuple[float, ...] = (8, 8, 4, 4), adaptive: bool = False, canonical: bool = True,
                 anchors: tuple[str, ...] = ANCHORS, score: str = "signed", sketch: int = 4) -> None:  # fmt: skip
        strides = [4 * 2**i for i in range(len(depths))]
        multiple = math.lcm(*(s * r for s, r in zip(strides, reductions, strict=True)))
        super().__init__(locals(), multiple=(multiple, multiple), anchors=ANCHORS)
        mode = resolve_padding(None, adaptive)
        self.num_features = embed_dims[-1]
        self.feature_info = [{"num_chs": dim, "reduction": stride, "module": f"stages.{i}"}
                             for i, (dim, stride) in enumerate(zip(embed_dims, strides, strict=True))]  # fmt: skip
        self.patch_embed = PatchEmbed(
            in_chans=in_chans, dim=embed_dims[0], size=7, stride=4, padding=3, padding_mode=mode
        )
        self.stages = nn.ModuleList(
            Stage(in_chans=embed_dims[max(i - 1, 0)], dim=embed_dims[i], depth=depths[i], first=i == 0,
                  num_heads=num_heads[i], reduction=reductions[i], mlp_ratio=mlp_ratios[i], padding_mode=mode)
            for i in range(len(depths))
        )  # fmt: skip
        self.norm = nn.Identity()  # the last stage has its own
        self.head = ClassifierHead(embed_dims[-1], num_classes, pool_type="avg", input_fmt="NHWC")
        self.token_anchor = self.anchor(ConvAnchor, "token")
        self.reduction_anchor = self.anchor(ConvAnchor, "reduction")

    def forward_stages(self, x: Tensor, last: int) -> tuple[Stages, Tensor]:
        grid = self.anchor_images(x, self.token_anchor, self.patch_embed.proj)
        grid = self.patch_embed(grid, self.reduction_anchor)
        stages: Stages = []
        stage: Any
        for stage in self.stages[: last + 1]:
            if stage.downsample is not None:
                grid = self.token_anchor.on(grid, stage.downsample.proj)  # A-token, of tokens
                grid = stage.downsample(grid, self.reduction_anchor)
            if (reduction := stage.blocks[0].attn.sr) is not None:  # once: the blocks keep the grid
                grid = self.reduction_anchor.on(grid, reduction).roll()
            tokens = grid.tokens
            for block in stage.blocks:
                tokens = self.run(block, tokens)
            grid = grid.kept(stage.norm(tokens))
            stages.append((grid.tokens, grid.offset))
        return stages, grid.tokens
