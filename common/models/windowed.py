"""What Swin and SwinV2 share: patches, merging, and the walk through stages of windows with its three anchors."""

import math
from collections.abc import Iterable
from typing import Any

from timm.layers import trunc_normal_
from torch import Tensor, nn

from ..anchors import ConvAnchor, MergeAnchor, WindowAnchor
from .classifier import Classifier, Stages, to_pair
from .embedding import PatchEmbed
from .windows import shifted_window_mask, window_shift

__all__ = ["ANCHORS", "WindowedClassifier", "WindowedStage"]

ANCHORS = ("token", "window", "merge")


class WindowedStage(nn.Module):
    """Patch merging (but in the first stage), called as ``downsample(grid, merge_anchor, window_anchor)``, and blocks
    that alternate between plain and shifted windows, called as ``block(x, shift, mask, origin)``."""

    def __init__(self, downsample: nn.Module | None, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.downsample = downsample or nn.Identity()
        self.blocks = nn.ModuleList(blocks)


class WindowedClassifier(Classifier):
    """A hierarchy of windowed stages. A subclass adds ``patch_embed``, ``layers`` of them, ``norm`` and ``head``."""

    patch_embed: PatchEmbed
    layers: nn.ModuleList

    def __init__(self, arguments: dict[str, Any]) -> None:
        patch, depths, window = arguments["patch_size"], arguments["depths"], to_pair(arguments["window_size"])
        if min(window) < 1:
            raise ValueError(f"window_size {window} must be 1 or more")
        strides = [patch * 2**i for i in range(len(depths))]
        img_size = to_pair(arguments["img_size"])
        windows = [  # a grid smaller than the window is one window; merging rounds odd sides up
            (min(window[0], -(-img_size[0] // stride)), min(window[1], -(-img_size[1] // stride))) for stride in strides
        ]
        exact = [math.lcm(*(s * w[axis] for s, w in zip(strides, windows, strict=True))) for axis in (0, 1)]
        multiple = (exact[0], exact[1]) if arguments["adaptive"] else (patch, patch)
        try:
            super().__init__(arguments, multiple=multiple, anchors=ANCHORS)
        except ValueError as error:
            fit = [w for w in range(4, 17) if all(side % (strides[-1] * w) == 0 for side in img_size)]
            near = min(fit, key=lambda w: abs(w - window[0]), default=None)
            if near is None or img_size[0] % multiple[0] == img_size[1] % multiple[1] == 0:  # another error
                raise
            raise ValueError(f"{error}. This size fits window_size={near}") from None
        self.windows = windows
        self.dims = [arguments["embed_dim"] * 2**i for i in range(len(depths))]
        self.describe_stages(self.dims, strides, arguments["num_heads"], "layers")
        self.token_anchor = self.anchor(ConvAnchor, "token")
        self.merge_anchor = self.anchor(MergeAnchor, "merge")
        self.window_anchor = self.anchor(WindowAnchor, "window")

    always_partition = False  # shift windows also on a grid that is a single one, as stock segmenters do

    def init_weights(self) -> None:
        """Linear layers get truncated normal weights of std 0.02 and zero biases, as in the original."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward_stages(self, x: Tensor, last: int) -> tuple[Stages, Tensor]:
        images = self.anchor_images(x, self.token_anchor, self.patch_embed.proj)  # A-token
        grid = self.patch_embed(images, self.window_anchor)
        layers: Any = self.layers[: last + 1]
        chosen = [
            stage.downsample
            for stage, window in zip(layers[1:], self.windows, strict=False)
            if self.config["reanchor"] or any(side % 2 for side in window)
        ]  # even windows settle a merging
        grid = self.merge_anchor.plan(grid, [downsample.merging for downsample in chosen])
        stages: Stages = []
        for stage, window in zip(layers, self.windows, strict=False):
            if stages:
                grid = stage.downsample(grid, self.merge_anchor, self.window_anchor)  # A-PMerge
            grid = self.window_anchor.on(grid, window).settle()  # A-WSA, once per stage
            size = (grid.tokens.shape[1], grid.tokens.shape[2])
            shift = (window[0] // 2, window[1] // 2) if self.always_partition else window_shift(size, window)
            mask = None if self.adaptive else shifted_window_mask(size, window, shift, x.device)  # no edge on a torus
            tokens = grid.tokens
            for j, block in enumerate(stage.blocks):
                tokens = self.run(block, tokens, shift if j % 2 else (0, 0), mask if j % 2 else None, grid.origin)
            grid = grid.kept(tokens)
            stages.append((grid.tokens, grid.offset))
        return stages, grid.tokens
