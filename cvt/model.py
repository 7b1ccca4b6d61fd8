"""Convolutional vision Transformer (CvT), default and adaptive.

Wu et al., *CvT: Introducing Convolutions to Vision Transformers*, ICCV 2021; adaptive modules of Rojas-Gomez et al.,
*Making Vision Transformers Truly Shift-Equivariant*, CVPR 2024. Outputs are those of transformers' implementation.

The adaptive model is the default model plus anchors: one before every convolutional embedding (A-token), one per stage
before its blocks, for the strided keys and values. Tokens anchored modulo that stride stay so through a stage of
equivariant blocks, so a stage anchors once. All convolutions pad circularly; the class token has no place on the grid
and takes part in no roll and no convolution.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import DropPath, Mlp, calculate_drop_path_rates, get_act_layer, trunc_normal_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.anchors.modules import Anchor, ConvAnchor, Ready
from common.kernels import depthwise_taps, fits_sketch, usable
from common.models.activation import GELU
from common.models.classifier import Classifier, PaddingMode, Stages, resolve_padding
from common.models.registry import defaults, register_model
from common.ops import add_norm, depthwise, embed, kernel_weights, materialize, norm_ahead, normed, project
from common.ops.depthwise import split_class_tokens
from common.ops.strided import Strided
from common.ops.weights import gathered
from common.shifts import roll

ANCHORS = ("token", "projection")


def drop_path_rates(rate: float | tuple[float, ...], depths: tuple[int, ...]) -> Any:
    """Rates per stage and block: one number grows over all blocks, one number per stage within its stage."""
    if isinstance(rate, (int, float)):
        return calculate_drop_path_rates(rate, list(depths), stagewise=True)
    return [calculate_drop_path_rates(r, depth) for r, depth in zip(rate, depths, strict=True)]


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Let BatchNorm normalise by its batch, as in training, and yet leave its running statistics as they are."""
    norms = [norm for norm in module.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, norm.num_batches_tracked.clone()  # type: ignore[union-attr]
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


class KeyValueAnchor(Anchor):
    """Strided projections: m* = argmax_m sum |k at phase m|^2 + |v at phase m|^2; keys and values share one offset.

    k and v are the depthwise convolutions of the normalised tokens, taken at every position, before their BatchNorm.

    Shapes: x (B, H, W, C), norm over C, two depthwise convolutions of C -> offsets (B, 2) in [0, stride).
    """

    @torch.no_grad()
    def offset(self, x: Tensor, norm: nn.LayerNorm, key: nn.Conv2d, value: nn.Conv2d, fast: bool = False,
               normed: Tensor | None = None) -> Tensor:  # fmt: skip
        """``normed`` is ``norm`` of x, where it is known already."""
        if not self.score.needs_layer:
            return self.partition(x, Strided.of(key).stride, fast)
        with self.precision(x, fast):
            x = self.normed(x, norm, normed, fast).permute(0, 3, 1, 2)
            kernel = self.depthwise_rows(gathered(key.weight), gathered(value.weight)).to(x.dtype)
            ready = self._ready(key.weight, value.weight, x.dtype)
            return self.choose(x, kernel, Strided.of(key), fast=fast, ready=ready)

    def _ready(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Ready:
        """What is scored, by a kernel if it fits."""

        def make(once: bool) -> tuple[Tensor, Tensor] | None:
            mixing = self.directions[:, : 2 * len(key)] if self.sketch else None
            if mixing is None or key.shape[2:] != (3, 3) or not fits_sketch(mixing, key, value):
                return None
            return depthwise_taps(mixing, key, value, dtype, once)

        return make


class ConvEmbed(nn.Module):
    """Overlapping patches, projected by a strided convolution and normalised: (B, C, H, W) -> (B, H/s, W/s, D)."""

    def __init__(self, *, in_chans: int, dim: int, patch_size: int, stride: int, padding: int,
                 padding_mode: PaddingMode) -> None:  # fmt: skip
        super().__init__()
        if not 1 <= patch_size - 2 * padding <= stride:
            raise ValueError(f"patch size {patch_size} with stride {stride} and padding {padding} does not give one "
                             f"token per {stride} pixels: 1 <= size - 2 * padding <= stride must hold")  # fmt: skip
        self.proj = nn.Conv2d(in_chans, dim, patch_size, stride=stride, padding=padding, padding_mode=padding_mode)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, offset: Tensor | None = None) -> Tensor:
        """``offset`` (B, 2) in [0, side) is where each image, or grid of tokens, begins, if not at (0, 0)."""
        return embed(self.proj, x, offset, self.norm)[0]


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
        circular = self.conv.padding_mode == "circular"
        x = depthwise(x, kernel_weights(self.conv.weight)[0], self.conv.stride[0], circular, origin)
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
        self.embed = ConvEmbed(in_chans=in_chans, dim=dim, patch_size=patch_size, stride=stride, padding=padding,
                               padding_mode=padding_mode)  # fmt: skip
        self.register_parameter("cls_token", nn.Parameter(torch.zeros(1, 1, dim)) if cls_token else None)
        self.blocks = nn.ModuleList(
            Block(dim=dim, drop_path=drop_path[i], padding_mode=padding_mode, **block) for i in range(depth)
        )

    def offset(self, anchor: KeyValueAnchor, x: Tensor, fast: bool, normed: Tensor | None = None) -> Tensor:
        """``normed`` is the first block's norm of x, where it is known already."""
        block: Any = self.blocks[0]
        return anchor.offset(x, block.norm1, block.attn.k.conv, block.attn.v.conv, fast, normed)


class ClassTokenHead(nn.Module):
    """Linear classifier of the class token: (B, 1 + tokens, C) -> (B, num_classes)."""

    def __init__(self, *, dim: int, num_classes: int, drop_rate: float) -> None:
        super().__init__()
        self.in_features = dim
        self.drop = nn.Dropout(drop_rate)
        self.fc = nn.Linear(dim, num_classes) if num_classes else nn.Identity()

    def reset(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier; ``num_classes=0`` leaves the class token."""
        if global_pool not in (None, "token"):
            raise ValueError(f"CvT classifies from its class token: global_pool is 'token', got {global_pool!r}")
        like = next(self.fc.parameters(), None)
        self.fc = nn.Linear(self.in_features, num_classes) if num_classes else nn.Identity()
        if num_classes:
            trunc_normal_(self.fc.weight, std=0.02)
            nn.init.zeros_(self.fc.bias)  # type: ignore[arg-type]
        if like is not None:
            self.fc.to(like)

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.drop(x[:, 0])
        return x if pre_logits else self.fc(x)


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
                 score: str = "signed", sketch: int = 4) -> None:  # fmt: skip
        strides = [math.prod(patch_strides[: i + 1]) for i in range(len(depths))]
        multiple = strides[-1] * (kv_stride if adaptive else 1)
        super().__init__(locals(), multiple=(multiple, multiple), anchors=ANCHORS)
        self.padding_mode = resolve_padding(padding_mode, adaptive)
        self.num_features = embed_dims[-1]
        self.feature_info = [
            {"num_chs": dim, "reduction": stride, "module": f"stages.{i}"}
            for i, (dim, stride) in enumerate(zip(embed_dims, strides, strict=True))
        ]
        scoring: Any = {"score": score, "sketch": sketch}
        self.token_anchor = ConvAnchor(**scoring) if adaptive and "token" in anchors else None
        self.projection_anchor = KeyValueAnchor(**scoring) if adaptive and "projection" in anchors else None
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
        """Truncated normal linear weights and class token of std 0.02, zero biases, as in the original."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2 or name.endswith("cls_token"):
                trunc_normal_(parameter, std=0.02)

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith("cls_token")}

    def walk(self, x: Tensor, last: int) -> tuple[Stages, Tensor]:
        x, offset = self.enter(x, self.token_anchor, self.stages[0].embed.proj)  # type: ignore[union-attr, arg-type]
        begin = offset if self.adaptive else None
        stages: Stages = []
        stride, tokens = 1, x
        for i in range(last + 1):
            stage: CvTStage = self.stages[i]  # type: ignore[assignment]
            if i > 0 and self.token_anchor is not None:
                begin = self.token_anchor.offset(x, stage.embed.proj, fast=self.canonical)
                offset = offset + stride * begin
            x, begin, origin = stage.embed(x, begin), None, None  # B, H, W, C
            stride = self.feature_info[i]["reduction"]
            if self.projection_anchor is not None and not usable(x):
                o = stage.offset(self.projection_anchor, x, self.canonical)
                x, offset = roll(x, o, (1, 2), within=True), offset + stride * o
            b, h, w, c = x.shape
            tokens = x.flatten(1, 2)
            if stage.cls_token is not None:  # in inference of its tokens' type: autocast would make all float32
                dtype = stage.cls_token.dtype if torch.is_grad_enabled() else tokens.dtype
                tokens = torch.cat([stage.cls_token.to(dtype).expand(b, -1, -1), tokens], 1)
            tokens = materialize(tokens)
            norm: Any = stage.blocks[0].norm1
            ahead = norm_ahead(tokens, norm)
            if self.projection_anchor is not None and usable(x):
                ahead = normed(tokens, norm) if ahead is None and self.canonical else ahead
                known = ahead[:, -h * w :].unflatten(1, (h, w)) if ahead is not None and self.canonical else None
                origin = stage.offset(self.projection_anchor, x, self.canonical, known)
            for block in stage.blocks:
                tokens, ahead = self.run(block, tokens, (h, w), origin, ahead), None
            tokens = tokens if self.token_anchor is None or i == last else materialize(tokens)
            x = (tokens if stage.cls_token is None else tokens[:, -h * w :]).reshape(b, h, w, c)
            stages.append((x, offset))
            x = x.permute(0, 3, 1, 2)
        return stages, tokens

    def run(self, module: Callable[..., Tensor], *args: Any) -> Tensor:
        """As in the base class, but a block that is recomputed does not update its BatchNorm statistics once more."""
        recompute = self.grad_checkpointing and self.training and torch.is_grad_enabled()
        if not recompute or torch.compiler.is_compiling():  # a compiled graph updates them once by itself
            return super().run(module, *args)
        contexts = lambda: (nullcontext(), frozen_statistics(module))  # type: ignore[arg-type]  # noqa: E731
        return checkpoint(module, *args, use_reentrant=False, context_fn=contexts)


@register_model
def cvt_micro(**kwargs: Any) -> CvT:
    """For laptops and tests: 32 px, 8 x 8 tokens."""
    return CvT(**defaults(kwargs, img_size=32, num_classes=10, embed_dims=(32, 64, 128), depths=(1, 1, 2),
                          num_heads=(1, 2, 4), mlp_ratio=2.0, drop_path_rate=0.0))  # fmt: skip


@register_model
def cvt_mini(**kwargs: Any) -> CvT:
    """For CIFAR at its own 32 px: 16 x 16 tokens, 2.9 M parameters."""
    return CvT(**defaults(kwargs, img_size=32, num_classes=10, patch_sizes=(3, 3, 3), patch_strides=(2, 2, 2),
                          patch_paddings=(1, 1, 1), embed_dims=(64, 128, 256), depths=(2, 4, 2), num_heads=(1, 2, 4),
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
