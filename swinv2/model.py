"""Swin Transformer V2, default and adaptive.

Liu et al., *Swin Transformer V2: Scaling Up Capacity and Resolution*, CVPR 2022; adaptive modules of Rojas-Gomez et
al., *Making Vision Transformers Truly Shift-Equivariant*, CVPR 2024. Parameters have timm's names.

What differs from Swin: cosine attention with a learned scale, a position bias that a small network computes from
log-spaced distances, and norms that come after attention, MLP and patch merging. The anchors are the same three. The
one before patch merging scores the projection alone: after its norm all tokens would count nearly the same.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import ClassifierHead, DropPath, Mlp, calculate_drop_path_rates
from torch import Tensor, nn

from common.anchors import NoAnchor
from common.grid import Grid
from common.models.activation import GELU
from common.models.embedding import PatchEmbed
from common.models.registry import defaults, register_model
from common.models.windowed import ANCHORS, WindowedClassifier, WindowedStage
from common.models.windows import in_whole_windows, relative_position_index
from common.ops import attend_in_windows, look_up, reduce_patches
from common.ops.merge_energy import Merging
from common.ops.weights import is_plain


def log_spaced_positions(window: tuple[int, int], pretrained_window: int) -> Tensor:
    """Every relative position d in a window, as sign(d) log2(1 + |d|) / 3 with d scaled to [-8, 8]: (positions, 2).

    ``pretrained_window`` is the side that means 8, or 0 for the window's own: a model fine-tuned with larger windows
    goes on reading small distances as it was trained to. Computed in float32 whatever the model, as in the original.
    """
    axes = []
    for side in window:
        d = torch.arange(1 - side, side, dtype=torch.float32)
        d = 8 * (d / max((pretrained_window or side) - 1, 1))
        axes.append(d.sign() * torch.log2(1 + d.abs()) / 3)
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 1).to(torch.get_default_dtype())


class WindowAttention(nn.Module):
    """Scaled cosine attention inside (shifted) windows, with a continuous position bias: (B, H, W, C) -> the same.

    softmax_j(cos(q_i, k_j) exp(min(tau, log 100)) + 16 sigmoid(MLP(log-spaced i - j))) v_j, one tau per head. Queries
    and values have a bias, keys have none.
    """

    relative_coords_table: Tensor
    relative_position_index: Tensor

    def __init__(self, *, dim: int, num_heads: int, window: tuple[int, int], pretrained_window: int, qkv_bias: bool,
                 attn_drop: float, proj_drop: float) -> None:  # fmt: skip
        super().__init__()
        self.num_heads = num_heads
        self.window = window
        self.attn_drop = attn_drop
        self.logit_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(10)))
        self.q_bias = nn.Parameter(torch.zeros(dim)) if qkv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(dim)) if qkv_bias else None
        table = log_spaced_positions(window, pretrained_window)
        self.register_buffer("relative_coords_table", table, persistent=False)
        self.register_buffer("relative_position_index", relative_position_index(window), persistent=False)
        self.cpb_mlp = nn.Sequential(nn.Linear(2, 512), nn.ReLU(inplace=True), nn.Linear(512, num_heads, bias=False))
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, shift: tuple[int, int], mask: Tensor | None, origin: Tensor | None) -> Tensor:
        bias = self.window_bias()
        qkv_bias = None
        if self.q_bias is not None and self.v_bias is not None:
            qkv_bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        if is_plain(self.qkv):
            qkv = F.linear(x, self.qkv.weight, qkv_bias)
        else:  # sharded, adapted, quantised: only its own forward knows what it computes
            qkv = self.qkv(x) if qkv_bias is None else self.qkv(x) + qkv_bias
        qkv = qkv.unflatten(-1, (3, self.num_heads, -1))
        scale = self.logit_scale.clamp(max=math.log(100)).exp().flatten()
        dropout = self.attn_drop if self.training else 0.0
        x = attend_in_windows(qkv, bias, scale, self.window, shift, mask, origin, dropout=dropout)
        return self.proj_drop(self.proj(x))

    def window_bias(self) -> Tensor:
        """(heads, n, n), of the tokens of a window."""
        bias = 16 * torch.sigmoid(self.cpb_mlp(self.relative_coords_table))  # positions, heads
        return look_up(bias, self.relative_position_index).permute(2, 0, 1).contiguous()


class SwinV2Block(nn.Module):
    """Attention in (shifted) windows, then an MLP, each normalised after and residual: (B, H, W, C) -> the same."""

    def __init__(self, *, dim: int, num_heads: int, window: tuple[int, int], pretrained_window: int, mlp_ratio: float,
                 qkv_bias: bool, proj_drop: float, attn_drop: float, drop_path: float) -> None:  # fmt: skip
        super().__init__()
        self.window = window
        self.attn = WindowAttention(dim=dim, num_heads=num_heads, window=window, pretrained_window=pretrained_window,
                                    qkv_bias=qkv_bias, attn_drop=attn_drop, proj_drop=proj_drop)  # fmt: skip
        self.norm1 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=GELU, drop=proj_drop)
        self.norm2 = nn.LayerNorm(dim)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, shift: tuple[int, int], mask: Tensor | None, origin: Tensor | None) -> Tensor:
        x = x + self.drop_path(self.norm1(in_whole_windows(self.attn, x, self.window, shift, mask, origin)))
        return x + self.drop_path(self.norm2(self.mlp(x)))


class PatchMerging(nn.Module):
    """Concatenate 2 x 2 tokens, project, normalise (eq. patch_merge01): (B, H, W, C) -> (B, H/2, W/2, D)."""

    def __init__(self, *, dim: int, out_dim: int) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * dim, out_dim, bias=False)
        self.norm = nn.LayerNorm(out_dim)

    def forward(self, grid: Grid, anchor: NoAnchor, next_anchor: NoAnchor) -> Grid:
        """The tokens' moments for the ``next_anchor`` are not known before their norm."""
        grid = anchor.on(grid, self.reduction, None)
        x, _ = reduce_patches(grid.tokens, grid.origin, None, self.reduction, grid.shared)
        return grid.then(self.norm(x), 2)

    @property
    def merging(self) -> Merging:
        return Merging(self.reduction, None)


class SwinV2(WindowedClassifier):
    """Swin Transformer V2; ``adaptive=True`` makes it truly shift-equivariant with the same parameters.

    Args:
        img_size: image side or (height, width) the model is built for. Adaptive models take any multiple of
            ``multiple``; default models take any multiple of the patch and pad windows
            (then shift them; timm shifts first).
        pretrained_window_sizes: per stage, the window that the position bias was trained with; 0 for this model's own.
        adaptive: anchor tokens, windows and patch merging.
        canonical: roll the image to its canonical place first, so that outputs are bit-identical under shifts.
        anchors: which anchors an adaptive model has (the paper's ablation removes one at a time).
        score: how tokens count in an anchor, see ``common.anchors.scores``.
        sketch: of how many random directions an anchor takes the energy; 0 is the paper's, of all channels.
        reanchor: anchor also where earlier anchors have settled where a layer begins, as in the paper.
    """

    model_type = "swinv2"

    def __init__(self, *, img_size: int | tuple[int, int] = 256, patch_size: int = 4, in_chans: int = 3,
                 num_classes: int = 1000, embed_dim: int = 96, depths: tuple[int, ...] = (2, 2, 6, 2),
                 num_heads: tuple[int, ...] = (3, 6, 12, 24), window_size: int | tuple[int, int] = 8,
                 pretrained_window_sizes: tuple[int, ...] = (0, 0, 0, 0), mlp_ratio: float = 4.0,
                 qkv_bias: bool = True, drop_rate: float = 0.0, proj_drop_rate: float = 0.0,
                 attn_drop_rate: float = 0.0, drop_path_rate: float = 0.1, adaptive: bool = False,
                 canonical: bool = True, anchors: tuple[str, ...] = ANCHORS,
                 score: str = "signed", sketch: int = 4, reanchor: bool = True) -> None:  # fmt: skip
        super().__init__(locals())
        if not any(pretrained_window_sizes):  # of any number of stages
            pretrained_window_sizes = self.config["pretrained_window_sizes"] = (0,) * len(depths)
        if len(pretrained_window_sizes) != len(depths):
            raise ValueError(f"pretrained_window_sizes {pretrained_window_sizes} must have one entry for each of "
                             f"{len(depths)} stages, as depths")  # fmt: skip
        self.patch_embed = PatchEmbed(in_chans=in_chans, dim=embed_dim, size=patch_size, stride=patch_size)
        rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        self.layers = nn.ModuleList(
            WindowedStage(
                PatchMerging(dim=self.dims[i - 1], out_dim=dim) if i else None,
                (SwinV2Block(dim=dim, num_heads=num_heads[i], window=self.windows[i],
                             pretrained_window=pretrained_window_sizes[i], mlp_ratio=mlp_ratio, qkv_bias=qkv_bias,
                             proj_drop=proj_drop_rate, attn_drop=attn_drop_rate, drop_path=rate)
                 for rate in rates[i]),
            )
            for i, dim in enumerate(self.dims)
        )  # fmt: skip
        self.norm = nn.LayerNorm(self.num_features)
        self.head = ClassifierHead(self.num_features, num_classes, pool_type="avg", drop_rate=drop_rate,
                                   input_fmt="NHWC")  # fmt: skip
        self.init_weights()

    def init_weights(self) -> None:
        """The norms of the blocks start at zero, gain and bias, as in the original: a norm at the end of a residual
        branch fixes the size of what is added, whatever the weights before it, so that only a zero gain lets a deep
        model begin as its own skip path. Inside the blocks the first step moves these norms alone.
        """
        super().init_weights()
        for name, parameter in self.named_parameters():
            if ".blocks." in name and ".norm" in name:
                nn.init.zeros_(parameter)

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if "cpb_mlp" in name or "logit_scale" in name}


@register_model
def swinv2_micro(**kwargs: Any) -> SwinV2:
    """For laptops and tests: 32 px, 8 x 8 tokens, 4 x 4 windows."""
    return SwinV2(**defaults(kwargs, img_size=32, num_classes=10, embed_dim=64, depths=(2, 2), num_heads=(2, 4),
                             window_size=4, pretrained_window_sizes=(0, 0), mlp_ratio=2.0,
                             drop_path_rate=0.0))  # fmt: skip


@register_model
def swinv2_mini(**kwargs: Any) -> SwinV2:
    """For CIFAR at its own 32 px: 16 x 16 tokens, 4 x 4 windows, 1.9 M parameters."""
    return SwinV2(**defaults(kwargs, img_size=32, patch_size=2, num_classes=10, embed_dim=64, depths=(2, 4, 1),
                             num_heads=(2, 4, 8), window_size=4, pretrained_window_sizes=(0, 0, 0),
                             drop_path_rate=0.1))  # fmt: skip


@register_model
def swinv2_tiny(**kwargs: Any) -> SwinV2:
    """SwinV2-T, 28.3 M parameters."""
    return SwinV2(**defaults(kwargs, embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24), drop_path_rate=0.2))


@register_model
def swinv2_small(**kwargs: Any) -> SwinV2:
    """SwinV2-S, 49.7 M parameters."""
    return SwinV2(**defaults(kwargs, embed_dim=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24), drop_path_rate=0.3))


@register_model
def swinv2_base(**kwargs: Any) -> SwinV2:
    """SwinV2-B, 87.9 M parameters."""
    return SwinV2(**defaults(kwargs, embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32), drop_path_rate=0.5))
