"""What the four architectures share: input checks, the canonical anchor, and timm's way of calling a classifier."""

import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from ..anchors import Anchor, Canonical, NoAnchor
from ..grid import Grid
from ..ops.ahead import expect
from ..ops.dispatch import rehearse
from ..ops.embed import embedded
from ..ops.recompute import recompute
from .hub import OURS, HubModel
from .timm_models import timm_of_input

__all__ = [
    "Classifier",
    "PaddingMode",
    "Stages",
    "check_images",
    "check_size",
    "resolve_padding",
    "to_pair",
]

TIMM_KEYS = ("input_size", "fixed_input_size", "pool_size", "mean", "std", "crop_pct", "crop_mode", "interpolation",
             "first_conv", "classifier")  # fmt: skip
"""What config.json tells timm of a model's images and layers."""

Stages = list[tuple[Tensor, Tensor]]
PaddingMode = Literal["zeros", "circular"]


def to_pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def check_images(x: Tensor, channels: int) -> None:
    """Raise unless x is a float batch (B, channels, H, W), and can be computed with. Never looks at values."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a tensor of images (B, {channels}, H, W), got {type(x).__name__}")
    if x.ndim != 4:
        raise ValueError(f"expected images of shape (B, {channels}, H, W), got {tuple(x.shape)}"
                         + (": add a batch dimension with x[None]" if x.ndim == 3 else ""))  # fmt: skip
    if x.shape[1] != channels:
        advice = {1: ": repeat grey images with x.expand(-1, 3, -1, -1)" if channels == 3 else "",
                  3: ": our commands read red, green and blue; give a model of other channels your own tensors, or "
                     "build it with in_chans=3"}  # fmt: skip
        raise ValueError(f"expected {channels} channels, got {x.shape[1]} in images of shape {tuple(x.shape)}"
                         + advice.get(x.shape[1], ""))  # fmt: skip
    if not x.is_floating_point():
        raise TypeError(f"expected normalised floating point images, got {x.dtype}: convert with x.float() / 255 and "
                        "normalise as the model was trained")  # fmt: skip
    if not x.shape[0]:
        raise ValueError(f"the batch is empty, of shape {tuple(x.shape)}: leave out batches without images")
    if x.is_meta:
        raise ValueError("images on the meta device have no values: give images on a CPU or GPU; without values, "
                         "torch.export.export traces the model")  # fmt: skip
    if torch.jit.is_tracing():
        raise RuntimeError("torch.jit.trace would keep the choices that anchors make for one image: use torch.export "
                           "(scripts/export.py writes .pt2 and ONNX files) or torch.compile")  # fmt: skip


def check_size(size: tuple[int, int], multiple: tuple[int, int], why: str) -> None:
    """Raise a ValueError naming the nearest valid sizes unless both sides are multiples."""
    if all(side % m == 0 and side > 0 for side, m in zip(size, multiple, strict=True)):
        return
    below = tuple(max(m, side // m * m) for side, m in zip(size, multiple, strict=True))
    above = tuple(math.ceil(side / m) * m for side, m in zip(size, multiple, strict=True))
    near = f"sizes are {below[0]}x{below[1]} and {above[0]}x{above[1]}"
    near = near if above != below else f"size is {above[0]}x{above[1]}"
    raise ValueError(f"image size {size[0]}x{size[1]}: {why} needs sides that are multiples of "
                     f"{multiple[0]}x{multiple[1]}; the nearest valid {near}. Resize or pad the image, or "
                     "build the model with another img_size")  # fmt: skip


def resolve_padding(padding_mode: PaddingMode | None, adaptive: bool) -> PaddingMode:
    """How convolutions pad: circularly in an adaptive model, with zeros in a default one unless told otherwise."""
    if adaptive and padding_mode == "zeros":
        raise ValueError("padding_mode='zeros' breaks the shift equivariance of an adaptive model, for a torus has no "
                         "edge: leave it out, or use 'circular'")  # fmt: skip
    return padding_mode or ("circular" if adaptive else "zeros")


class Classifier(HubModel):
    """Base of the four architectures: a subclass builds its layers and gives ``forward_stages``.

    Images (B, in_chans, H, W), normalised -> logits (B, num_classes). Features are channels-last, (B, H/s, W/s, C).
    """

    norm: nn.Module
    head: nn.Module
    num_features: int

    def __init__(self, arguments: dict[str, Any], *, multiple: tuple[int, int], anchors: tuple[str, ...]) -> None:
        super().__init__(arguments)
        if unknown := sorted(set(arguments["anchors"]) - set(anchors)):
            raise ValueError(f"unknown anchors {unknown}: choose among {anchors}")
        self.img_size = to_pair(arguments["img_size"])
        self.in_chans: int = arguments["in_chans"]
        self.num_classes: int = arguments["num_classes"]
        self.adaptive: bool = arguments["adaptive"]
        self.canonical: bool = arguments["canonical"]
        self.multiple = multiple
        self.grad_checkpointing = False
        self.frozen: tuple[nn.Module, ...] = ()
        self.timm_settings: dict[str, Any] | None = None
        self.feature_info: list[dict[str, Any]] = []
        self.canonicalize = Canonical()
        self.check_size(self.img_size)

    def describe_stages(self, dims: Sequence[int], strides: Sequence[int], num_heads: Sequence[int],
                        modules: str) -> None:  # fmt: skip
        """Note the width and the stride (in pixels) of every stage, ``modules.0`` and so on. Raise unless each has
        heads, and as many as divide its width: a head is a slice of the channels."""
        if len(dims) != len(num_heads):
            raise ValueError(f"num_heads {tuple(num_heads)} must have one entry for each of {len(dims)} stages")
        for i, (dim, heads) in enumerate(zip(dims, num_heads, strict=True)):
            if heads < 1 or dim % heads:
                raise ValueError(f"num_heads {tuple(num_heads)}: {heads} heads do not divide the {dim} channels of "
                                 f"stage {i}; choose a divisor of {dim}")  # fmt: skip
        self.num_features = dims[-1]
        self.feature_info = [
            {"num_chs": dim, "reduction": stride, "module": f"{modules}.{i}"}
            for i, (dim, stride) in enumerate(zip(dims, strides, strict=True))
        ]

    def check_size(self, size: tuple[int, int]) -> None:
        """Raise unless this model takes images of ``size`` (adaptive: is exact for them)."""
        check_size(size, self.multiple, "an exactly shift-equivariant model" if self.adaptive else "this model")

    def anchor(self, kind: type[Anchor], name: str) -> NoAnchor:
        """The anchor ``name`` of an adaptive model, or none."""
        wanted = self.adaptive and name in self.config["anchors"]
        settings = {key: self.config[key] for key in ("score", "sketch", "reanchor") if key in self.config}
        return kind(**settings) if wanted else NoAnchor()

    def anchor_images(self, x: Tensor, anchor: NoAnchor, embedding: nn.Conv2d) -> Grid:
        """Check a batch; let each image of an adaptive model begin at its canonical place and there at the best phase
        of the convolution that makes tokens. Nothing is moved yet: one read does both."""
        check_images(x, self.in_chans)
        self.check_size((x.shape[2], x.shape[3]))
        rehearse(self, x)
        expect(self, x)
        offset = torch.zeros(x.shape[0], 2, dtype=torch.long, device=x.device)
        grid = Grid(x.permute(0, 2, 3, 1), offset, 1)
        if self.adaptive and self.canonical:
            grid = self.canonicalize.on(grid, anchor, embedding)
        grid = anchor.on(grid, embedding)
        return grid._replace(tokens=embedded(x.permute(0, 2, 3, 1), grid.tokens), shared=None)

    def forward_stages(self, x: Tensor, last: int) -> tuple[Stages, Tensor]:
        """Tokens (B, H/s, W/s, C) of stages 0..last, each with the pixel offsets (B, 2) of its grid's origin, and what
        leaves the last of them (with its class token, where there is one)."""
        raise NotImplementedError

    def forward_features(self, x: Tensor) -> Tensor:
        return self.norm(self.forward_stages(x, len(self.feature_info) - 1)[1])

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(self, x: Tensor, indices: int | list[int] | None = None, norm: bool = False,
                              stop_early: bool = False, output_fmt: Literal["NCHW", "NHWC"] = "NCHW",
                              intermediates_only: bool = False, return_offsets: bool = False) -> Any:  # fmt: skip
        """Features of chosen stages, as in timm.

        ``indices``: stages by number, the last n, or None for all. With ``return_offsets`` every feature comes as
        ``(feature, offset)``: token h of a stride-s stage lies at image position offset + s h, modulo the side.
        Returns ``(final, intermediates)``, or ``intermediates`` alone.
        """
        count = len(self.feature_info)
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt {output_fmt!r} is not available: choose NCHW or NHWC")
        asked = range(count) if indices is None else range(-indices, 0) if isinstance(indices, int) else indices
        if not asked or not all(-count <= i < count for i in asked):
            raise ValueError(f"indices {indices} do not fit a model of {count} stages: give some of 0 to {count - 1}, "
                             "or how many of the last")  # fmt: skip
        take = [range(count)[i] for i in asked]
        stages, final = self.forward_stages(x, max(take) if stop_early else count - 1)
        intermediates = []
        for i in take:
            feature, offset = stages[i]
            feature = self.norm(feature) if norm and i == count - 1 else feature
            feature = feature.permute(0, 3, 1, 2) if output_fmt == "NCHW" else feature
            intermediates.append((feature, offset) if return_offsets else feature)
        if intermediates_only:
            return intermediates
        return (self.norm(final) if len(stages) == count else final), intermediates

    def run(self, block: nn.Module, *args: Any) -> Tensor:
        """Call a block, recomputing its activations in the backward pass if ``set_grad_checkpointing`` says so."""
        return recompute(block, *args) if self.grad_checkpointing and self.training else block(*args)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """The last layer, as in timm."""
        return self.head.fc  # type: ignore[return-value]

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the last layer; ``num_classes=0`` leaves pooled features."""
        like = next(self.parameters())
        self.head.reset(num_classes, global_pool)  # type: ignore[operator]
        self.head.to(device=like.device, dtype=like.dtype)
        self.num_classes = self.config["num_classes"] = num_classes
        self.class_names = ()

    def freeze(self, stages: int) -> None:
        """Keep the stem and the first ``stages`` stages as they are in training; -1: everything but the head. What an
        earlier call froze trains again."""
        count = len(self.feature_info)
        if not -1 <= stages <= count:
            raise ValueError(f"cannot freeze {stages} stages: the model has {count}; -1 freezes all but the head")
        modules = [self.get_submodule(info["module"]) for info in self.feature_info[: stages if stages >= 0 else count]]
        if stages:
            lists = {info["module"].split(".")[0] for info in self.feature_info}
            apart = {"head"} if stages < 0 else {"head", "norm"}
            modules += [child for name, child in self.named_children() if name not in lists | apart]
        for modules_of, trains in ((self.frozen, True), (modules, False)):
            for module in modules_of:
                module.requires_grad_(trains)
        self.frozen = tuple(modules)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for module in self.frozen:  # no batch statistics, no dropout in what is frozen
            module.eval()
        return self

    def group_matcher(self, coarse: bool = False) -> Callable[[str], tuple[int, ...]]:
        """How deep a parameter lies, by its name: stem, stages (and blocks, unless ``coarse``), head; as in timm."""

        def depth(name: str) -> tuple[int, ...]:
            found = re.match(r"(?:layers|stages)\.(\d+)(?:\.blocks\.(\d+))?", name)
            if found is None:
                return (2,) if name.startswith(("head.", "norm.")) else (0,)
            return (1, int(found[1])) if coarse else (1, int(found[1]), -1 if found[2] is None else int(found[2]))

        return depth

    def take_input(self, stored: dict[str, Any] | None, resized: bool = False) -> None:
        """As ``HubModel.take_input``; timm is told mean, std and size, too."""
        if stored:
            self.set_input(**stored | ({"size": self.img_size, "resize": None} if resized else {}))

    def fit_input(self, resized: bool = False) -> None:
        if resized:
            self.pretrained_cfg = {**self.default_cfg, "input_size": (self.in_chans, *self.img_size)}
            self.take_input(self.stored_input, resized)

    def save_pretrained(self, save_directory: str | os.PathLike[str], state_dict: dict[str, Tensor] | None = None,
                        **accelerates: Any) -> Path:  # fmt: skip
        pool = getattr(getattr(self.head, "global_pool", None), "pool_type", "avg")
        if pool != "avg":
            raise ValueError(f"the head pools by {pool!r}, which a config does not hold: a loaded model would pool by "
                             "'avg'. Call reset_classifier(..., global_pool='avg') first")  # fmt: skip
        return super().save_pretrained(save_directory, state_dict, **accelerates)

    def set_input(self, *, size: tuple[int, int], resize: int | None = None, **normalisation: Any) -> None:
        """Tell timm, and files to come, how the model's images are prepared: as a preprocessor file says."""
        self.stored_input = {"size": size, "resize": resize, **normalisation}
        self.pretrained_cfg = {**self.default_cfg, **timm_of_input(self.in_chans, **self.stored_input)}

    def timm_config(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.default_cfg.items() if key in TIMM_KEYS}
        return {"architecture": OURS + self.model_type, "pretrained_cfg": kept}

    @property
    def default_cfg(self) -> dict[str, Any]:
        """What timm wants to know of a model: its input, normalisation, first layer and classifier."""
        if self.timm_settings is None:
            first = next(name for name, module in self.named_modules() if isinstance(module, nn.Conv2d))
            self.timm_settings = {
                "architecture": OURS + self.model_type,
                "input_size": (self.in_chans, *self.img_size), "pool_size": None,
                "fixed_input_size": True, "num_classes": self.num_classes, "mean": IMAGENET_DEFAULT_MEAN,
                "std": IMAGENET_DEFAULT_STD,
                "crop_pct": 0.875, "interpolation": "bicubic", "first_conv": first, "classifier": "head.fc",
            }  # fmt: skip
        return self.timm_settings

    @default_cfg.setter
    def default_cfg(self, settings: dict[str, Any]) -> None:
        self.timm_settings = settings

    pretrained_cfg = default_cfg

    @property
    def head_hidden_size(self) -> int:
        return self.num_features

    def no_weight_decay(self) -> set[str]:
        """Names of parameters, besides biases and norms, that recipes leave out of weight decay."""
        return set()
