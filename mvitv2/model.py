"""MViTv2, default and adaptive.

Li et al., *MViTv2: Improved Multiscale Vision Transformers for Classification and Detection*, CVPR 2022; adaptive
modules of Rojas-Gomez et al., *Making Vision Transformers Truly Shift-Equivariant*, CVPR 2024. timm's parameter names.

The adaptive model is the default model plus anchors: one before the patch embedding (A-token) and one before a block
that pools, modulo the strides of its poolings. Queries, keys, values and the max-pooled skip of a block come from the
same tokens: one roll serves all. Tokens anchored modulo s stay so through blocks that keep the grid, and come out
anchored modulo s/2 where queries have stride 2. With stride of queries x keys, the tiny model at 224 px anchors

    stage 1, 56 x 56 tokens, 1 x 4: modulo 4 (keys, values)
    stage 2, 56 x 56 tokens, 2 x 2: modulo 2 before its first block (queries, keys, values), and again modulo 2 on
                                    28 x 28 tokens before the second, for its keys and those of all that follow
    stage 3, 28 x 28 tokens, 2 x 1: modulo 2 before its first block (queries)
    stage 4, 14 x 14 tokens, 2 x 1: modulo 2 before its first block (queries)

Attention is global, so what is left is to measure relative positions around the torus (A-RPE, ``circular_rows``).
"""

import math
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import ClassifierHead, DropPath, Mlp, calculate_drop_path_rates, trunc_normal_tf_
from torch import Tensor, nn

from common.anchors import ConvAnchor, PooledProjections, ProjectionAnchor
from common.models.activation import GELU
from common.models.classifier import Classifier, PaddingMode, Stages, resolve_padding
from common.models.embedding import PatchEmbed
from common.models.positions import circular_rows, in_eights, linear_rows, one_hot_places
from common.models.registry import defaults, register_model
from common.ops import add_norm, look_up, pool_heads, pool_maximum, with_positions
from common.ops.projection_energy import Pooling

ANCHORS = ("token", "pool")
LayerNorm = partial(nn.LayerNorm, eps=1e-6)


def stage_moduli(depth: int, stride_q: int, stride_kv: int) -> list[int]:
    """What each block of a stage anchors its tokens modulo, 1 for no anchor.
    The first block pools queries and keys; the others keep the grid and pool keys alone, so that one more anchor
    before the second block serves them all, unless what the first has left is enough.
    """
    first = math.lcm(stride_q, stride_kv)
    rest = [stride_kv if first // stride_q % stride_kv else 1] + [1] * depth
    return [first, *rest][:depth]


class PoolingAttention(nn.Module):
    """Global attention of pooled queries to pooled keys and values, with the pooled queries as residual.

    softmax(Q K^T / sqrt(d) + E) V + Q, where the position of query i against key j counts as
    E[i, j] = Q_i . (R_h[rows of i and j] + R_w[columns of i and j]).

    E is never written out. It is a product: of what query i makes of each row and each column of keys, by where key j
    is, 1 in its row and 1 in its column. Both go beside queries and keys as further channels.

    Shapes: (B, H, W, C), origin (B, 2) or None, where the pooled grids begin -> (B, H/stride_q, W/stride_q, D).
    """

    rows: Tensor
    columns: Tensor
    places: Tensor

    def __init__(self, *, dim: int, out_dim: int, size: tuple[int, int], num_heads: int, stride_q: int, stride_kv: int,
                 padding_mode: PaddingMode, circular: bool) -> None:  # fmt: skip
        super().__init__()
        self.num_heads = num_heads
        head_dim = out_dim // num_heads
        positions = circular_rows if circular else linear_rows
        rows, columns = (positions(side // stride_q, side // stride_kv) for side in size)
        self.rel_pos_h = nn.Parameter(torch.empty(2 * max(rows.shape) - 1, head_dim))
        self.rel_pos_w = nn.Parameter(torch.empty(2 * max(columns.shape) - 1, head_dim))
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)
        self.register_buffer("places", one_hot_places(rows.shape[1], columns.shape[1]), persistent=False)
        self.qkv = nn.Linear(dim, 3 * out_dim)
        self.proj = nn.Linear(out_dim, out_dim)
        pool = partial(nn.Conv2d, head_dim, head_dim, 3, padding=1, groups=head_dim, bias=False,
                       padding_mode=padding_mode)  # fmt: skip
        self.pool_q = pool(stride=stride_q)
        self.norm_q = LayerNorm(head_dim)
        self.pool_k = pool(stride=stride_kv)
        self.norm_k = LayerNorm(head_dim)
        self.pool_v = pool(stride=stride_kv)
        self.norm_v = LayerNorm(head_dim)

    def forward(self, x: Tensor, origin: Tensor | None = None) -> Tensor:
        pools, norms = [self.pool_q, self.pool_k, self.pool_v], [self.norm_q, self.norm_k, self.norm_v]
        q, k, v = pool_heads(self.qkv(x), pools, norms, self.num_heads, origin, self.places)
        x = F.scaled_dot_product_attention(self.with_positions(q), k, v, scale=q.shape[-1] ** -0.5)
        x = x[..., : q.shape[-1]] + q
        x = x.transpose(1, 2).reshape(x.shape[0], len(self.rows), len(self.columns), -1)
        return self.proj(x)

    def with_positions(self, q: Tensor) -> Tensor:
        """Queries (B, heads, queries, d) and E as further channels: one for every row and every column of keys, in the
        order of ``places``, times sqrt(d), which the attention divides by."""
        scale = q.shape[-1] ** 0.5
        by_row, by_column = (in_eights(look_up(table, places) * scale, 1) for table, places in
                             ((self.rel_pos_h, self.rows), (self.rel_pos_w, self.columns)))  # fmt: skip
        return with_positions(q, by_row, by_column)

    def poolings(self) -> list[Pooling]:
        """What is pooled, stride by stride, but for stride 1, which has no choice: keys stride as values do."""
        pools, dim, made = (self.pool_q, self.pool_k, self.pool_v), self.num_heads * self.rel_pos_h.shape[1], []
        for stride in sorted({pool.stride for pool in pools} - {(1, 1)}):
            chosen = [i for i, pool in enumerate(pools) if pool.stride == stride]  # side by side
            outputs = slice(chosen[0] * dim, (chosen[-1] + 1) * dim)
            made.append(Pooling(self.qkv, outputs, [pools[i] for i in chosen], self.num_heads))
        return made


class MViTv2Block(nn.Module):
    """Pooling attention, then an MLP, each pre-normalised and residual: (B, H, W, C) -> (B, H/s, W/s, D).
    Where the width changes, the skip is projected from the normalised tokens; where queries are pooled, the skip is
    max-pooled. ``modulus`` says modulo what an adaptive model anchors the tokens first.
    """

    def __init__(self, *, dim: int, out_dim: int, size: tuple[int, int], num_heads: int, stride_q: int, stride_kv: int,
                 mlp_ratio: float, drop_path: float, padding_mode: PaddingMode, circular: bool,
                 modulus: int) -> None:  # fmt: skip
        super().__init__()
        self.stride = stride_q
        self.circular_padding = padding_mode == "circular"
        self.modulus = modulus
        self.norm1 = LayerNorm(dim)
        self.shortcut_proj_attn = nn.Linear(dim, out_dim) if dim != out_dim else None
        self.attn = PoolingAttention(dim=dim, out_dim=out_dim, size=size, num_heads=num_heads, stride_q=stride_q,
                                     stride_kv=stride_kv, padding_mode=padding_mode, circular=circular)  # fmt: skip
        self.norm2 = LayerNorm(out_dim)
        self.mlp = Mlp(out_dim, int(out_dim * mlp_ratio), act_layer=GELU)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    @property
    def pooled(self) -> PooledProjections:
        return PooledProjections(self.norm1, (self.modulus, self.modulus), self.attn.poolings())

    def forward(self, x: Tensor, origin: Tensor | None = None, normed: Tensor | None = None) -> Tensor:
        """``origin`` (B, 2) in [0, side) is where tokens begin, if not at (0, 0): those that come out do there.
        ``normed`` is ``norm1`` of x, where an anchor has taken it."""
        normed = self.norm1(x) if normed is None else normed
        skip = x if self.shortcut_proj_attn is None else self.shortcut_proj_attn(normed)
        update = self.drop_path(self.attn(normed, origin))
        if self.stride > 1:
            skip, origin = pool_maximum(skip, self.stride, self.circular_padding, origin), None
        x, normed = add_norm(skip, update, self.norm2, origin)
        return x + self.drop_path(self.mlp(normed))


class MViTv2Stage(nn.Module):
    """Blocks, the first of which pools queries and widens: (B, H, W, C) -> (B, H/s, W/s, D)."""

    def __init__(self, *, dim: int, out_dim: int, depth: int, size: tuple[int, int], stride_q: int, stride_kv: int,
                 drop_path: Any, **block: Any) -> None:  # fmt: skip
        super().__init__()
        pooled = (size[0] // stride_q, size[1] // stride_q)
        moduli = stage_moduli(depth, stride_q, stride_kv)
        self.blocks = nn.ModuleList(
            MViTv2Block(dim=out_dim if i else dim, out_dim=out_dim, size=pooled if i else size,
                        stride_q=1 if i else stride_q, stride_kv=stride_kv, drop_path=drop_path[i],
                        modulus=moduli[i], **block)
            for i in range(depth)
        )  # fmt: skip


class MViTv2(Classifier):
    """MViTv2; ``adaptive=True`` makes it truly shift-equivariant with the same parameters.

    Args:
        img_size: image side or (height, width) the model is built for, and the only one it takes: the tables of
            relative positions have its size. Both sides are multiples of ``multiple`` (32 for tiny, small, base).
        patch_kernel, patch_stride: of the convolution that makes tokens.
        embed_dim, num_heads: of the first stage; both double from stage to stage.
        stride_q: stride of the pooled queries, and so of the grid, per stage.
        stride_kv: stride of the pooled keys and values in the first stage; divided by ``stride_q`` from stage to stage.
        adaptive: anchor tokens and pooling, measure relative positions around the torus.
        canonical: roll the image to its canonical place first, so that outputs are bit-identical under shifts.
        padding_mode: of all convolutions and pooling. None: ``circular`` if adaptive, else ``zeros``. The paper also
            trains its default models with ``circular``.
        anchors: which anchors an adaptive model has (the paper's ablation removes one at a time).
        score: how tokens count in an anchor, see ``common.anchors.scores``.
        sketch: of how many random directions an anchor takes the energy; 0 is the paper's, of all channels.
        reanchor: anchor also where earlier anchors have settled where a layer begins, as in the paper.
    """

    model_type = "mvitv2"

    def __init__(self, *, img_size: int | tuple[int, int] = 224, patch_kernel: int = 7, patch_stride: int = 4,
                 in_chans: int = 3, num_classes: int = 1000, embed_dim: int = 96,
                 depths: tuple[int, ...] = (1, 2, 5, 2), num_heads: int = 1,
                 stride_q: tuple[int, ...] = (1, 2, 2, 2), stride_kv: int = 4, mlp_ratio: float = 4.0,
                 drop_rate: float = 0.0, drop_path_rate: float = 0.1, adaptive: bool = False, canonical: bool = True,
                 padding_mode: PaddingMode | None = None, anchors: tuple[str, ...] = ANCHORS,
                 score: str = "signed", sketch: int = 4, reanchor: bool = True) -> None:  # fmt: skip
        if len(depths) != len(stride_q):
            raise ValueError(f"depths {depths} and stride_q {stride_q} must have one entry per stage each")
        strides = list(accumulate(stride_q, mul, initial=patch_stride))  # of the grids before, between and after stages
        strides_kv = list(accumulate(stride_q, lambda kv, q: max(kv // q, 1), initial=stride_kv))[1:]
        exact = math.lcm(*(
            stride * (q * kv if depth > 1 else math.lcm(q, kv))  # grid before the stage, its first block, the others
            for stride, q, kv, depth in zip(strides[:-1], stride_q, strides_kv, depths, strict=True)
        ))  # fmt: skip
        super().__init__(locals(), multiple=(exact, exact), anchors=ANCHORS)
        self.padding_mode = resolve_padding(padding_mode, adaptive)
        if patch_kernel % 2 == 0:
            raise ValueError(f"patch_kernel {patch_kernel} has no centre: choose an odd one")
        dims = [embed_dim * 2**i for i in range(len(depths))]
        heads = [num_heads * 2**i for i in range(len(depths))]
        self.describe_stages(dims, strides[1:], heads, "stages")
        patches: Any = {"size": patch_kernel, "stride": patch_stride, "padding": patch_kernel // 2, "norm": False}
        self.patch_embed = PatchEmbed(in_chans=in_chans, dim=embed_dim, padding_mode=self.padding_mode, **patches)
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        self.stages = nn.ModuleList(
            MViTv2Stage(dim=dims[max(i - 1, 0)], out_dim=dims[i], depth=depths[i],
                        size=(self.img_size[0] // strides[i], self.img_size[1] // strides[i]), stride_q=stride_q[i],
                        stride_kv=strides_kv[i], num_heads=heads[i], mlp_ratio=mlp_ratio, drop_path=rates[i],
                        padding_mode=self.padding_mode, circular=adaptive)
            for i in range(len(depths))
        )  # fmt: skip
        self.norm = LayerNorm(self.num_features)
        self.head = ClassifierHead(self.num_features, num_classes, pool_type="avg", drop_rate=drop_rate,
                                   input_fmt="NHWC")  # fmt: skip
        self.token_anchor = self.anchor(ConvAnchor, "token")
        self.pool_anchor = self.anchor(ProjectionAnchor, "pool")
        self.init_weights()

    def init_weights(self) -> None:
        """As in timm: weights and tables normal, std 0.02, cut at two deviations; biases zero; convolutions torch's."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_tf_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
            elif isinstance(module, PoolingAttention):
                trunc_normal_tf_(module.rel_pos_h, std=0.02)
                trunc_normal_tf_(module.rel_pos_w, std=0.02)

    def check_size(self, size: tuple[int, int]) -> None:
        super().check_size(size)
        if size != self.img_size:
            raise ValueError(f"image size {size[0]}x{size[1]}: this model has relative positions for images of "
                             f"{self.img_size} alone. Resize or pad, or build it with img_size={size}")  # fmt: skip

    def forward_stages(self, x: Tensor, last: int) -> tuple[Stages, Tensor]:
        grid = self.anchor_images(x, self.token_anchor, self.patch_embed.proj)  # A-token
        grid = self.patch_embed(grid, self.pool_anchor)
        walked: Any = self.stages[: last + 1]
        anchored = [block.pooled for stage in walked for block in stage.blocks if block.modulus > 1]
        grid = self.pool_anchor.plan(grid, anchored)
        stages: Stages = []
        for stage in walked:
            for block in stage.blocks:
                if block.modulus > 1:
                    grid = self.pool_anchor.on(grid, block.pooled).settle(inference=True)
                normed = None if grid.shared is None else grid.shared[0]
                grid = grid.then(self.run(block, grid.tokens, grid.origin, normed), block.stride)
            stages.append((grid.tokens, grid.offset))
        return stages, grid.tokens

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if "rel_pos" in name}


@register_model
def mvitv2_micro(**kwargs: Any) -> MViTv2:
    """For laptops and tests: 32 px, 8 x 8 tokens, the stem, strides and anchors of the tiny model."""
    return MViTv2(**defaults(kwargs, img_size=32, num_classes=10, embed_dim=32, depths=(1, 2, 2), stride_q=(1, 2, 2),
                             mlp_ratio=2.0, drop_path_rate=0.0))  # fmt: skip


@register_model
def mvitv2_mini(**kwargs: Any) -> MViTv2:
    """For CIFAR at its own 32 px: 16 x 16 tokens, 2.0 M parameters."""
    return MViTv2(**defaults(kwargs, img_size=32, patch_kernel=3, patch_stride=2, num_classes=10, embed_dim=64,
                             depths=(2, 6, 1), stride_q=(1, 2, 2), drop_path_rate=0.1))  # fmt: skip


@register_model
def mvitv2_tiny(**kwargs: Any) -> MViTv2:
    """MViTv2-T, 24.2 M parameters."""
    return MViTv2(**defaults(kwargs, depths=(1, 2, 5, 2), drop_path_rate=0.1))


@register_model
def mvitv2_small(**kwargs: Any) -> MViTv2:
    """MViTv2-S, 34.9 M parameters."""
    return MViTv2(**defaults(kwargs, depths=(1, 2, 11, 2), drop_path_rate=0.1))


@register_model
def mvitv2_base(**kwargs: Any) -> MViTv2:
    """MViTv2-B, 51.5 M parameters."""
    return MViTv2(**defaults(kwargs, depths=(2, 3, 16, 3), drop_path_rate=0.3))
