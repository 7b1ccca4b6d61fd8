"""Convolutional vision Transformer (CvT), default and adaptive.

Wu et al., *CvT: Introducing Convolutions to Vision Transformers*, ICCV 2021; adaptive modules of Rojas-Gomez et al.,
*Making Vision Transformers Truly Shift-Equivariant*, CVPR 2024. Outputs are those of transformers' implementation.

The adaptive model is the default model plus anchors: one before every convolutional embedding (A-token), one per stage
before its blocks, for the strided keys and values. Tokens anchored modulo that stride stay so through a stage of
equivariant blocks, so a stage anchors once. All convolutions pad circularly; the class token has no place on the grid
and takes part in no roll and no convolution.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import DropPath, Mlp, calculate_drop_path_rates, get_act_layer, trunc_normal_
from torch import Tensor, nn

from common.anchors import ConvAnchor, KeysAndValues, ProjectionAnchor
from common.grid import Grid
from common.models.activation import GELU
from common.models.classifier import Classifier, PaddingMode, Stages, resolve_padding
from common.models.embedding import PatchEmbed
from common.models.head import ClassTokenHead
from common.models.registry import defaults, register_model
from common.ops import add_norm, materialize, norm_ahead, project
from common.ops.depthwise import as_tokens, depthwise_by, split_class_tokens

ANCHORS = ("token", "projection")
PER_STAGE = ("patch_sizes", "patch_strides", "patch_paddings", "embed_dims", "num_heads", "drop_path_rate")


def drop_path_rates(rate: float | tuple[float, ...], depths: tuple[int, ...]) -> Any:
    """Rates per stage and block: one number grows over all blocks, one number per stage within its stage."""
    if isinstance(rate, (int, float)):
        return calculate_drop_path_rates(rate, list(depths), stagewise=True)
    return [calculate_drop_path_rates(r, depth) for r, depth in zip(rate, depths, strict=True)]


class ConvProjection(nn.Module):
    """Convolutional projection: depthwise 3 x 3 convolution and BatchNorm on the grid, then a linear layer.

    Shapes: x (B, H, W, C), class tokens (B, n, C) that skip the convolution, origin (B, 2) or None, where the strided
    grid begins -> (B, n + H/s W/s, C).
    """

    def __init__(self, *, dim: int, stride: int, bias: bool, padding_mode: PaddingMode) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, stride=stride, padding=1, groups=dim, bias=False, padding_mode=padding_mode)
        self.norm = nn.BatchNorm2d(dim)
        self.proj = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, cls_token: Tensor, origin: Tensor | None) -> Tensor:
        x = depthwise_by(self.conv, x, origin)
        x = self.norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1, 2)  # B, tokens, C
        return self.proj(torch.cat([cls_token, x], 1) if cls_token.shape[1] else x)


class Attention(nn.Module):
    """Self-attention with convolutional projections, keys and values strided: (B, n + H W, C) -> the same.

    Scores are scaled by C^-1/2, not by the width of a head: this is how CvT was trained.
    """

    def __init__(self, *, dim: int, num_heads: int, kv_stride: int, qkv_bias: bool, attn_drop: float, proj_drop: float,
                 padding_mode: PaddingMode) -> None:  # fmt: skip
        super().__init__()
        self.num_heads = num_heads
        self.scale = dim**-0.5
        self.attn_drop = attn_drop
        self.q = ConvProjection(dim=dim, stride=1, bias=qkv_bias, padding_mode=padding_mode)
        self.k = ConvProjection(dim=dim, stride=kv_stride, bias=qkv_bias, padding_mode=padding_mode)
        self.v = ConvProjection(dim=dim, stride=kv_stride, bias=qkv_bias, padding_mode=padding_mode)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, size: tuple[int, int], origin: Tensor | None) -> Tensor:
        b, n, c = x.shape
        cls_token, x = split_class_tokens(x, size)
        q, k, v = (
            t.view(b, -1, self.num_heads, c // self.num_heads).transpose(1, 2)
            for t in project(x, cls_token, self.q, self.k, self.v, origin)
        )
        dropout = self.attn_drop if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=self.scale)
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(b, n, c)))


class Block(nn.Module):
    """Attention, then an MLP, each pre-normalised and residual: (B, n + H W, C) -> the same, n class tokens first."""

    def __init__(self, *, dim: int, mlp_ratio: float, act_layer: str, proj_drop: float, drop_path: float,
                 **attention: Any) -> None:  # fmt: skip
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim=dim, proj_drop=proj_drop, **attention)
        self.norm2 = nn.LayerNorm(dim)
        act = GELU if act_layer == "gelu" else get_act_layer(act_layer)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act, drop=proj_drop)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, size: tuple[int, int], origin: Tensor | None, normed: Tensor | None = None) -> Tensor:
        """``normed`` is ``norm1`` of x, where it is known already."""
        normed = self.norm1(x) if normed is None else normed
        x, normed = add_norm(x, self.drop_path(self.attn(normed, size, origin)), self.norm2)
        return x + self.drop_path(self.mlp(normed))


class CvTStage(nn.Module):
    """Convolutional embedding and blocks; the last stage has a class token."""

    cls_token: nn.Parameter | None

    def __init__(self, *, in_chans: int, dim: int, depth: int, patch_size: int, stride: int, padding: int,
                 cls_token: bool, drop_path: Any, padding_mode: PaddingMode, **block: Any) -> None:  # fmt: skip
        super().__init__()
        self.embed = PatchEmbed(in_chans=in_chans, dim=dim, size=patch_size, stride=stride, padding=padding,
                               padding_mode=padding_mode)  # fmt: skip
        self.register_parameter("cls_token", nn.Parameter(torch.zeros(1, 1, dim)) if cls_token else None)
        self.blocks = nn.ModuleList(
            Block(dim=dim, drop_path=drop_path[i], padding_mode=padding_mode, **block) for i in range(depth)
        )

    @property
    def projected(self) -> KeysAndValues:
        """The first block's: what is anchored for it is so for all."""
        block: Any = self.blocks[0]
        return KeysAndValues(block.norm1, block.attn.k.conv, block.attn.v.conv)

    def shared_norm(self, grid: Grid, x: Tensor) -> Tensor | None:
        """The first block's norm of x, where the anchor, or a kernel, has taken it."""
        if grid.shared is not None and self.cls_token is None:
            return grid.shared[0].flatten(1, 2)
        return norm_ahead(x, self.blocks[0].norm1)  # type: ignore[arg-type]

    def with_class_token(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, n + H W, C). In inference of the tokens' type: autocast would make all float32."""
        tokens = x.flatten(1, 2)
        if self.cls_token is not None:
            tokens = torch.cat([as_tokens(self.cls_token, tokens).expand(x.shape[0], -1, -1), tokens], 1)
        return materialize(tokens)


class CvT(Classifier):
    """CvT; ``adaptive=True`` makes it truly shift-equivariant with the same parameters.

    Args:
        img_size: image side or (height, width) the model is built for. Adaptive models take any multiple of
            ``multiple`` (the last stage's stride times its key stride, 32 for CvT-13), default models any multiple of
            the last stage's stride (16), so that every token stands for the same number of pixels.
        act_layer: "gelu" as in transformers, or "quick_gelu" as the original weights were trained.
        drop_path_rate: largest rate of stochastic depth. One number grows linearly from 0 over all blocks; one number
            per stage grows from 0 within each stage, as in the original.
        padding_mode: how all convolutions pad; None is "circular" for adaptive models, "zeros" for default ones. The
            paper trains default models with "circular", too, where it measures circular shifts.
        adaptive: anchor the convolutional embeddings and the strided keys and values.
        canonical: roll the image to its canonical place first, so that outputs are bit-identical under shifts.
        anchors: which anchors an adaptive model has.
        score: how tokens count in an anchor, see ``common.anchors.scores``.
        sketch: of how many random directions an anchor takes the energy; 0 is the paper's, of all channels.
        reanchor: anchor also where earlier anchors have settled where a layer begins, as in the paper.
    """

    model_type = "cvt"

    def __init__(self, *, img_size: int | tuple[int, int] = 224, in_chans: int = 3, num_classes: int = 1000,
                 patch_sizes: tuple[int, ...] = (7, 3, 3), patch_strides: tuple[int, ...] = (4, 2, 2),
                 patch_paddings: tuple[int, ...] = (2, 1, 1), embed_dims: tuple[int, ...] = (64, 192, 384),
                 depths: tuple[int, ...] = (1, 2, 10), num_heads: tuple[int, ...] = (1, 3, 6), kv_stride: int = 2,
                 mlp_ratio: float = 4.0, qkv_bias: bool = True, act_layer: Literal["gelu", "quick_gelu"] = "gelu",
                 drop_rate: float = 0.0, proj_drop_rate: float = 0.0, attn_drop_rate: float = 0.0,
                 drop_path_rate: float | tuple[float, ...] = 0.1, padding_mode: PaddingMode | None = None,
                 adaptive: bool = False, canonical: bool = True, anchors: tuple[str, ...] = ANCHORS,
                 score: str = "signed", sketch: int = 4, reanchor: bool = True) -> None:  # fmt: skip
        strides = [math.prod(patch_strides[: i + 1]) for i in range(len(depths))]
        multiple = strides[-1] * (kv_stride if adaptive else 1)
        super().__init__(locals(), multiple=(multiple, multiple), anchors=ANCHORS)
        self.padding_mode = resolve_padding(padding_mode, adaptive)
        for name in PER_STAGE:
            if isinstance(entries := self.config[name], tuple) and len(entries) != len(depths):
                raise ValueError(f"{name} {entries} must have one entry for each of {len(depths)} stages, as depths")
        self.describe_stages(embed_dims, strides, num_heads, "stages")
        self.token_anchor = self.anchor(ConvAnchor, "token")
        self.projection_anchor = self.anchor(ProjectionAnchor, "projection")
        rates = drop_path_rates(drop_path_rate, depths)
        self.stages = nn.ModuleList(
            CvTStage(in_chans=embed_dims[i - 1] if i else in_chans, dim=embed_dims[i], depth=depths[i],
                     patch_size=patch_sizes[i], stride=patch_strides[i], padding=patch_paddings[i],
                     padding_mode=self.padding_mode, cls_token=i == len(depths) - 1, num_heads=num_heads[i],
                     kv_stride=kv_stride, mlp_ratio=mlp_ratio, qkv_bias=qkv_bias, act_layer=act_layer,
                     proj_drop=proj_drop_rate, attn_drop=attn_drop_rate, drop_path=rates[i])
            for i in range(len(depths))
        )  # fmt: skip
        self.norm = nn.LayerNorm(self.num_features)
        self.head = ClassTokenHead(dim=self.num_features, num_classes=num_classes, drop_rate=drop_rate)
        self.init_weights()

    def init_weights(self) -> None:
        """Truncated normal linear weights and class token of std 0.02, convolutions as torch's, as in the original. All
        biases are zero; it leaves those of the embeddings and of the head as torch draws them."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2 or name.endswith("cls_token"):
                trunc_normal_(parameter, std=0.02)

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith("cls_token")}

    def forward_stages(self, x: Tensor, last: int) -> tuple[Stages, Tensor]:
        stage: Any = self.stages[0]
        grid = self.anchor_images(x, self.token_anchor, stage.embed.proj)  # A-token, of pixels
        stages: Stages = []
        for stage in self.stages[: last + 1]:
            if stages:
                grid = self.token_anchor.on(grid, stage.embed.proj)  # A-token, of tokens
            grid = stage.embed(grid, self.projection_anchor)
            grid = self.projection_anchor.on(grid, stage.projected).settle()  # keys and values, once per stage
            _, h, w, _ = grid.tokens.shape
            x = stage.with_class_token(grid.tokens)
            normed = stage.shared_norm(grid, x)
            for block in stage.blocks:
                x, normed = self.run(block, x, (h, w), grid.origin, normed), None
            grid = grid.kept(x[:, -h * w :].unflatten(1, (h, w)))
            stages.append((grid.tokens, grid.offset))
        return stages, x


@register_model
def cvt_micro(**kwargs: Any) -> CvT:
    """For laptops and tests: 32 px, 8 x 8 tokens."""
    return CvT(**defaults(kwargs, img_size=32, num_classes=10, embed_dims=(32, 64, 128), depths=(1, 1, 2),
                          num_heads=(1, 2, 4), mlp_ratio=2.0, drop_path_rate=0.0))  # fmt: skip


@register_model
def cvt_mini(**kwargs: Any) -> CvT:
    """For CIFAR at its own 32 px: 16 x 16 tokens, 2.1 M parameters."""
    return CvT(**defaults(kwargs, img_size=32, num_classes=10, patch_sizes=(3, 3, 3), patch_strides=(2, 2, 2),
                          patch_paddings=(1, 1, 1), embed_dims=(64, 128, 256), depths=(2, 4, 1), num_heads=(1, 2, 4),
                          drop_path_rate=0.1))  # fmt: skip


@register_model
def cvt_13(**kwargs: Any) -> CvT:
    """CvT-13, 20.0 M parameters."""
    return CvT(**defaults(kwargs, embed_dims=(64, 192, 384), depths=(1, 2, 10), num_heads=(1, 3, 6),
                          drop_path_rate=(0.0, 0.0, 0.1)))  # fmt: skip


@register_model
def cvt_21(**kwargs: Any) -> CvT:
    """CvT-21, 31.6 M parameters."""
    return CvT(**defaults(kwargs, embed_dims=(64, 192, 384), depths=(1, 4, 16), num_heads=(1, 3, 6),
                          drop_path_rate=(0.0, 0.0, 0.1)))  # fmt: skip


@register_model
def cvt_w24(**kwargs: Any) -> CvT:
    """CvT-W24, 277 M parameters, 384 px."""
    return CvT(**defaults(kwargs, img_size=384, embed_dims=(192, 768, 1024), depths=(2, 2, 20), num_heads=(3, 12, 16),
                          drop_path_rate=(0.0, 0.0, 0.1)))  # fmt: skip
