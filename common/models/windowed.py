"""What Swin and SwinV2 share: patches, merging, and the walk through stages of windows with its three anchors."""

import math
from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from ..anchors.modules import ConvAnchor, MergeAnchor, WindowAnchor
from ..ops import begin_at, embed, materialize
from ..ops.merge import MergeWeights, Merging
from .classifier import Classifier, Stages, to_pair
from .windows import shifted_window_mask, window_shift

__all__ = ["ANCHORS", "PatchEmbed", "WindowedClassifier"]

ANCHORS = ("token", "window", "merge")


class PatchEmbed(nn.Module):
    """Non-overlapping patches, projected and normalised (eq. token): (B, C, H, W) -> (B, H/p, W/p, D)."""

    def __init__(self, *, patch_size: int, in_chans: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, patch_size, stride=patch_size)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, offset: Tensor | None = None,
                wave: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """``offset`` (B, 2) in [0, side) is where each image begins, if not at (0, 0). With ``wave`` also the tokens'
        moments, where they cost little: see ``embed``."""
        return embed(self.proj, x, offset, self.norm, wave)


class WindowedClassifier(Classifier):
    """A hierarchy of windowed stages. A subclass adds ``patch_embed``, ``layers``, ``norm`` and ``head``.

    A stage has ``downsample`` (identity, or a patch merging with ``merging`` and ``offset``, which gives tokens and
    their moments or None, as ``PatchEmbed`` does) and ``blocks`` called as ``block(x, shift, mask, origin)``.
    """

    patch_embed: PatchEmbed
    layers: nn.ModuleList
    token_anchor: ConvAnchor | None
    merge_anchor: MergeAnchor | None
    window_anchor: WindowAnchor | None

    def __init__(self, arguments: dict[str, Any]) -> None:
        patch, depths, window = arguments["patch_size"], arguments["depths"], to_pair(arguments["window_size"])
        strides = [patch * 2**i for i in range(len(depths))]
        img_size = to_pair(arguments["img_size"])
        windows = [  # a grid smaller than the window is one window
            (min(window[0], img_size[0] // stride), min(window[1], img_size[1] // stride)) for stride in strides
        ]
        adaptive, anchors = arguments["adaptive"], arguments["anchors"]
        exact = [math.lcm(*(s * w[axis] for s, w in zip(strides, windows, strict=True))) for axis in (0, 1)]
        multiple = (exact[0], exact[1]) if adaptive else (patch, patch)
        super().__init__(arguments, multiple=multiple, anchors=ANCHORS)
        self.windows = windows
        self.dims = [arguments["embed_dim"] * 2**i for i in range(len(depths))]
        self.num_features = self.dims[-1]
        self.feature_info = [
            {"num_chs": dim, "reduction": stride, "module": f"layers.{i}"}
            for i, (dim, stride) in enumerate(zip(self.dims, strides, strict=True))
        ]
        score, sketch = arguments["score"], arguments["sketch"]
        self.token_anchor = ConvAnchor(score=score, sketch=sketch) if adaptive and "token" in anchors else None
        self.merge_anchor = MergeAnchor(score=score, sketch=sketch) if adaptive and "merge" in anchors else None
        self.window_anchor = WindowAnchor(score=score) if adaptive and "window" in anchors else None

    always_partition = False  # shift windows also on a grid that is a single one, as stock segmenters do

    def init_weights(self) -> None:
        """Linear layers get truncated normal weights of std 0.02 and zero biases, as in the original."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def anchored(self, x: Tensor, moments: Tensor | None,
                 last: int) -> tuple[Tensor | None, list[Merging], list[MergeWeights]]:  # fmt: skip
        """Where the first stage's windows begin, the mergings of stages 1..last behind the canonical anchor, and what
        their anchor makes of their weights: in a compiled graph both in one launch."""
        offset, made, mergings, merge = None, None, [], self.merge_anchor if self.canonical else None
        merge = merge if merge is not None and merge.score.needs_layer else None
        if merge is not None:
            downsamples: list[Any] = [stage.downsample for stage in self.layers[1 : last + 1]]
            mergings = [downsample.merging(x) for downsample in downsamples]
        together = torch.compiler.is_compiling() and len(mergings) > 0
        if self.window_anchor is not None:
            recipe = merge.recipe(x, mergings) if merge is not None and together else None
            offset, made = self.window_anchor.beside(x, self.windows[0], self.canonical, moments, recipe)
        return offset, mergings, merge.weights(x, mergings, made) if merge is not None and mergings else []

    def walk(self, x: Tensor, last: int) -> tuple[Stages, Tensor]:
        x, offset = self.enter(x, self.token_anchor, self.patch_embed.proj)
        wave = None if self.window_anchor is None else self.window_anchor.wave
        x, moments = self.patch_embed(x, offset if self.adaptive else None, wave)
        first, mergings, weights = self.anchored(x, moments, last)
        stages: Stages = []
        stage: Any
        for i, stage in enumerate(self.layers[: last + 1]):
            stride, window = self.feature_info[i]["reduction"], self.windows[i]
            if i > 0 and self.merge_anchor is not None:
                known = weights[i - 1] if weights else None
                if mergings and mergings[i - 1].norm is None:  # what is multiplied is scored, too
                    x = x.to(mergings[i - 1].scaled or x.dtype)
                x = materialize(x)
                o = stage.downsample.offset(self.merge_anchor, x, self.canonical, known)
                (x, moments), offset = stage.downsample(x, o, known, wave), offset + stride // 2 * o
            elif i > 0:
                x, moments = stage.downsample(x)
            origin = None
            if self.window_anchor is not None:
                o = self.window_anchor.offset(x, window, self.canonical, moments) if first is None or i > 0 else first
                x, origin, moved = begin_at(x, o)
                offset = offset if moved is None else offset + stride * moved
            size = (x.shape[1], x.shape[2])
            shift = (window[0] // 2, window[1] // 2) if self.always_partition else window_shift(size, window)
            mask = None if self.adaptive else shifted_window_mask(size, window, shift, x.device)  # no edge on a torus
            for j, block in enumerate(stage.blocks):
                x = self.run(block, x, shift if j % 2 else (0, 0), mask if j % 2 else None, origin)
            stages.append((x, offset))
        return stages, x
