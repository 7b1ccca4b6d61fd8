"""Swin Transformer, default and adaptive.

Liu et al., *Swin Transformer: Hierarchical Vision Transformer using Shifted Windows*, ICCV 2021; adaptive modules of
Rojas-Gomez et al., *Making Vision Transformers Truly Shift-Equivariant*, CVPR 2024. Parameters have timm's names.

The adaptive model is the default model plus anchors: one before the patch embedding (A-token), one before every patch
merging (A-PMerge), one per stage before its windows (A-WSA). Tokens anchored modulo the window stay so through a stage
of equivariant blocks, so a stage anchors once. On a torus there is no edge: shifted windows use no mask.
"""

from typing import Any

import torch
from timm.layers import BlurPool2d, ClassifierHead, DropPath, Mlp, calculate_drop_path_rates, trunc_normal_
from torch import Tensor, nn

from common.anchors import NoAnchor
from common.grid import Grid
from common.models.activation import GELU
from common.models.embedding import PatchEmbed
from common.models.registry import defaults, register_model
from common.models.windowed import ANCHORS, WindowedClassifier, WindowedStage
from common.models.windows import in_whole_windows, relative_position_index
from common.ops import add_norm, attend_in_windows, look_up, reduce_patches
from common.ops.merge_energy import Merging


class WindowAttention(nn.Module):
    """Self-attention inside (shifted) windows with a table of relative positions: (B, H, W, C) -> the same."""

    relative_position_index: Tensor

    def __init__(self, *, dim: int, num_heads: int, window: tuple[int, int], qkv_bias: bool, attn_drop: float,
                 proj_drop: float) -> None:  # fmt: skip
        super().__init__()
        self.num_heads = num_heads
        self.window = window
        self.attn_drop = attn_drop
        positions = (2 * window[0] - 1) * (2 * window[1] - 1)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(positions, num_heads))
        self.register_buffer("relative_position_index", relative_position_index(window), persistent=False)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, shift: tuple[int, int], mask: Tensor | None, origin: Tensor | None) -> Tensor:
        bias = self.window_bias()
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        dropout = self.attn_drop if self.training else 0.0
        x = attend_in_windows(qkv, bias, None, self.window, shift, mask, origin, dropout=dropout)
        return self.proj_drop(self.proj(x))

    def window_bias(self) -> Tensor:
        """(heads, n, n), of the tokens of a window."""
        return look_up(self.relative_position_bias_table, self.relative_position_index).permute(2, 0, 1).contiguous()


class SwinBlock(nn.Module):
    """Attention in (shifted) windows, then an MLP, each pre-normalised and residual: (B, H, W, C) -> the same."""

    def __init__(self, *, dim: int, num_heads: int, window: tuple[int, int], mlp_ratio: float, qkv_bias: bool,
                 proj_drop: float, attn_drop: float, drop_path: float) -> None:  # fmt: skip
        super().__init__()
        self.window = window
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim=dim, num_heads=num_heads, window=window, qkv_bias=qkv_bias,
                                    attn_drop=attn_drop, proj_drop=proj_drop)  # fmt: skip
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=GELU, drop=proj_drop)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, shift: tuple[int, int], mask: Tensor | None, origin: Tensor | None) -> Tensor:
        update = self.drop_path(in_whole_windows(self.attn, self.norm1(x), self.window, shift, mask, origin))
        x, normed = add_norm(x, update, self.norm2)
        return x + self.drop_path(self.mlp(normed))


class Blur(BlurPool2d):
    """timm's blur before a strided layer, as anti-aliased networks have it (Zhang, ICML 2019): a peer of anchors."""

    def __init__(self) -> None:
        super().__init__(stride=1)

    def forward(self, grid: Grid) -> Grid:  # type: ignore[override]
        return grid._replace(tokens=super().forward(grid.tokens.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


class BlurredEmbed(PatchEmbed):
    """Patches of a blurred image."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blur = Blur()

    def forward(self, grid: Grid, next_anchor: NoAnchor) -> Grid:
        return super().forward(self.blur(grid), next_anchor)


class PatchMerging(nn.Module):
    """Concatenate 2 x 2 tokens, normalise, project (eq. patch_merge01): (B, H, W, C) -> (B, H/2, W/2, D)."""

    def __init__(self, *, dim: int, out_dim: int, antialias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, out_dim, bias=False)
        self.blur = Blur() if antialias else None

    def forward(self, grid: Grid, anchor: NoAnchor, next_anchor: NoAnchor) -> Grid:
        """``next_anchor`` is the one whose moments a kernel may leave."""
        grid = grid if self.blur is None else self.blur(grid)
        grid, modules = anchor.on(grid, self.reduction, self.norm), (self.norm, self.reduction)
        x, moments = reduce_patches(grid.tokens, grid.origin, *modules, grid.shared, next_anchor.reads)
        return grid.then(x, 2, moments)

    @property
    def merging(self) -> Merging:
        return Merging(self.reduction, self.norm)


class Swin(WindowedClassifier):
    """Swin Transformer; ``adaptive=True`` makes it truly shift-equivariant with the same parameters.

    Args:
        img_size: image side or (height, width) the model is built for. Adaptive models take any multiple of
            ``multiple``; default models take any multiple of the patch and pad windows
            (then shift them; timm shifts first).
        adaptive: anchor tokens, windows and patch merging.
        canonical: roll the image to its canonical place first, so that outputs are bit-identical under shifts.
        anchors: which anchors an adaptive model has (the paper's ablation removes one at a time).
        score: how tokens count in an anchor, see ``common.anchors.scores``.
        sketch: of how many random directions an anchor takes the energy; 0 is the paper's, of all channels.
        reanchor: anchor also where earlier anchors have settled where a layer begins, as in the paper.
        antialias: blur before every stride; for default models, to compare with.
    """

    model_type = "swin"

    def __init__(self, *, img_size: int | tuple[int, int] = 224, patch_size: int = 4, in_chans: int = 3,
                 num_classes: int = 1000, embed_dim: int = 96, depths: tuple[int, ...] = (2, 2, 6, 2),
                 num_heads: tuple[int, ...] = (3, 6, 12, 24), window_size: int | tuple[int, int] = 7,
                 mlp_ratio: float = 4.0, qkv_bias: bool = True, drop_rate: float = 0.0, proj_drop_rate: float = 0.0,
                 attn_drop_rate: float = 0.0, drop_path_rate: float = 0.1, adaptive: bool = False,
                 canonical: bool = True, anchors: tuple[str, ...] = ANCHORS, score: str = "signed", sketch: int = 4,
                 reanchor: bool = True, antialias: bool = False) -> None:  # fmt: skip
        super().__init__(locals())
        if adaptive and antialias:
            raise ValueError("antialias=True is for default models: anchors leave nothing to blur")
        embed = BlurredEmbed if antialias else PatchEmbed
        self.patch_embed = embed(in_chans=in_chans, dim=embed_dim, size=patch_size, stride=patch_size)
        rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        self.layers = nn.ModuleList(
            WindowedStage(
                PatchMerging(dim=self.dims[i - 1], out_dim=dim, antialias=antialias) if i else None,
                (SwinBlock(dim=dim, num_heads=num_heads[i], window=self.windows[i], mlp_ratio=mlp_ratio,
                           qkv_bias=qkv_bias, proj_drop=proj_drop_rate, attn_drop=attn_drop_rate, drop_path=rate)
                 for rate in rates[i]),
            )
            for i, dim in enumerate(self.dims)
        )  # fmt: skip
        self.norm = nn.LayerNorm(self.num_features)
        self.head = ClassifierHead(self.num_features, num_classes, pool_type="avg", drop_rate=drop_rate,
                                   input_fmt="NHWC")  # fmt: skip
        self.init_weights()

    def init_weights(self) -> None:
        super().init_weights()
        for name, parameter in self.named_parameters():
            if "relative_position_bias_table" in name:
                trunc_normal_(parameter, std=0.02)

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if "relative_position_bias_table" in name}


@register_model
def swin_micro(**kwargs: Any) -> Swin:
    """For laptops and tests: 32 px, 8 x 8 tokens, 4 x 4 windows."""
    return Swin(**defaults(kwargs, img_size=32, num_classes=10, embed_dim=48, depths=(2, 2), num_heads=(2, 4),
                           window_size=4, mlp_ratio=2.0, drop_path_rate=0.0, sketch=0))  # fmt: skip


@register_model
def swin_mini(**kwargs: Any) -> Swin:
    """For CIFAR at its own 32 px: 16 x 16 tokens, 4 x 4 windows, 1.9 M parameters. Three stages of 64, 128 and 256
    channels and depths 2, 4 and 1 have as many, and are 0.7 points behind after 16 epochs."""
    return Swin(**defaults(kwargs, img_size=32, patch_size=2, num_classes=10, embed_dim=96, depths=(4, 3),
                           num_heads=(3, 6), window_size=4, drop_path_rate=0.1))  # fmt: skip


@register_model
def swin_tiny(**kwargs: Any) -> Swin:
    """Swin-T, 28.3 M parameters."""
    return Swin(**defaults(kwargs, embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24), drop_path_rate=0.2))


@register_model
def swin_small(**kwargs: Any) -> Swin:
    """Swin-S, 49.6 M parameters."""
    return Swin(**defaults(kwargs, embed_dim=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24), drop_path_rate=0.3))


@register_model
def swin_base(**kwargs: Any) -> Swin:
    """Swin-B, 87.8 M parameters."""
    return Swin(**defaults(kwargs, embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32), drop_path_rate=0.5))
