"""UperNet for semantic segmentation, default and adaptive.

Xiao et al., *Unified Perceptual Parsing for Scene Understanding*, ECCV 2018, on the Swins as in Liu et al., ICCV 2021;
equivariant decoding after Rojas-Gomez et al., *Making Vision Transformers Truly Shift-Equivariant*, CVPR 2024. The
parameters of the heads have the names of transformers' ``UperNetForSemanticSegmentation``.

The adaptive model is the default model on an adaptive backbone, with every convolution circular. The backbone reports
where in the image the grid of each stage begins; whatever is added or concatenated is first rolled to one grid, and the
logits are rolled back to the image. Pooling into bins, which are fixed to the array, becomes a circular box mean.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.classifier import Classifier, PaddingMode, resolve_padding, to_pair
from common.models.hub import HubModel, check_state
from common.models.registry import create_model, defaults, from_pretrained, list_models, register_model
from common.models.upsample import unpool, upsample
from common.shifts import roll
from swin import Swin

Upsampling = Literal["bilinear", "unpool"]
"""How an adaptive decoder goes from a coarse grid to a finer one: interpolated on the torus, or the paper's unpooling
(values at the places they were taken from, zeros between). Logits are interpolated in either: a hole has no label."""


class Grid(NamedTuple):
    """Where features lie in the image: token h at pixel offset + stride h, per sample and modulo the side."""

    size: tuple[int, int]
    stride: int
    offset: Tensor  # B, 2


def resample(x: Tensor, source: Grid, target: Grid, mode: Upsampling) -> Tensor:
    """Bring (B, C, h, w) from one grid to a finer one on the torus: roll(up(x), (off_to - off_from) / stride_to)."""
    factor = source.stride // target.stride
    x = unpool(x, factor) if mode == "unpool" else upsample(x, factor)
    return roll(x, (target.offset - source.offset) // target.stride)


def stretch(x: Tensor, source: Grid, target: Grid, mode: Upsampling) -> Tensor:
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

    def forward(self, features: list[Tensor], grids: list[Grid]) -> Tensor:
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


class UperNet(HubModel):
    """UperNet on a registered backbone; ``adaptive=True`` makes its masks move with the image, same parameters.

    Images (B, in_chans, H, W), normalised -> logits (B, num_classes, H, W).

    Args:
        backbone: name of a default classifier with two stages or more, for instance ``swin_tiny``.
        backbone_args: arguments of the backbone besides those given here (``anchors``, ``sketch``, ``depths``, ...).
        img_size: image side or (height, width) that the model is built for. Adaptive models take any multiple of
            ``multiple``; default models take any multiple of the patch.
        channels, pool_scales: width of the decoder and bins of its pyramid pooling.
        auxiliary_channels: width of the auxiliary head on the last stage but one; 0 for none.
        stage_norms: normalise the features of every stage (as in MMSegmentation, and in transformers on Swin but not
            on SwinV2).
        padding_mode: of the decoder's convolutions; None for circular in an adaptive model and zeros in a default one.
        upsampling: of an adaptive decoder's features, see ``Upsampling``.
        drop_rate: of channels before the classifiers; drop_path_rate: the backbone's, None for its own.
        adaptive, canonical: as in the backbone.
    """

    model_type = "upernet"

    def __init__(self, *, backbone: str = "swin_tiny", backbone_args: Mapping[str, Any] | None = None,
                 img_size: int | tuple[int, int] = 448, in_chans: int = 3, num_classes: int = 150, channels: int = 512,
                 pool_scales: tuple[int, ...] = (1, 2, 3, 6), auxiliary_channels: int = 256, stage_norms: bool = True,
                 padding_mode: PaddingMode | None = None, upsampling: Upsampling = "bilinear", drop_rate: float = 0.1,
                 drop_path_rate: float | None = None, adaptive: bool = False,
                 canonical: bool = True) -> None:  # fmt: skip
        backbone_args = {k: tuple(v) if isinstance(v, list) else v for k, v in (backbone_args or {}).items()}
        super().__init__(locals())
        if upsampling not in get_args(Upsampling):
            raise ValueError(f"unknown upsampling {upsampling!r}: choose among {get_args(Upsampling)}")
        drop_path = {} if drop_path_rate is None else {"drop_path_rate": drop_path_rate}
        self.backbone = build_backbone(backbone, img_size=img_size, in_chans=in_chans, adaptive=adaptive,
                                       canonical=canonical, **drop_path, **backbone_args)  # fmt: skip
        if isinstance(self.backbone, Swin) and not adaptive:
            self.backbone.always_partition = True
        self.img_size, self.in_chans, self.num_classes = to_pair(img_size), in_chans, num_classes
        self.adaptive, self.canonical, self.multiple = adaptive, canonical, self.backbone.multiple
        dims = [info["num_chs"] for info in self.backbone.feature_info]
        self.strides = [info["reduction"] for info in self.backbone.feature_info]
        self.norms = nn.ModuleList(nn.LayerNorm(dim) if stage_norms else nn.Identity() for dim in dims)
        padding_mode = resolve_padding(padding_mode, adaptive)
        head: Any = dict(num_classes=num_classes, padding_mode=padding_mode, drop_rate=drop_rate)
        self.decode_head = UperHead(dims=dims, channels=channels, pool_scales=pool_scales, adaptive=adaptive,
                                    upsampling=upsampling, **head)  # fmt: skip
        self.auxiliary_head = FCNHead(dim=dims[-2], channels=auxiliary_channels, **head) if auxiliary_channels else None
        self.init_weights()

    def init_weights(self) -> None:
        """Convolutions as in MMSegmentation. The classifiers keep torch's own start: from scratch, theirs (std 0.01)
        learned the digit scenes several times slower."""
        for module in self.modules():
            if isinstance(module, ConvModule):
                nn.init.kaiming_normal_(module.conv.weight, mode="fan_out", nonlinearity="relu")

    def check_size(self, size: tuple[int, int]) -> None:
        """Raise unless this model takes images of ``size`` (adaptive: is exact for them)."""
        self.backbone.check_size(size)

    def forward_backbone(self, x: Tensor) -> tuple[list[Tensor], list[Grid]]:
        """Normalised features (B, C, h, w) of every stage, fine to coarse, and the grids they lie on."""
        stages = self.backbone.forward_intermediates(x, output_fmt="NHWC", intermediates_only=True, return_offsets=True)
        features, grids = [], []
        for norm, stride, (feature, offset) in zip(self.norms, self.strides, stages, strict=True):
            features.append(norm(feature).permute(0, 3, 1, 2))
            grids.append(Grid((feature.shape[1], feature.shape[2]), stride, offset))
        return features, grids

    def forward(self, x: Tensor, auxiliary: bool = False) -> Any:
        """Logits (B, classes, H, W); with ``auxiliary`` the pair (logits, auxiliary logits), both of that shape."""
        features, grids = self.forward_backbone(x)
        image = Grid((x.shape[2], x.shape[3]), 1, torch.zeros_like(grids[0].offset))
        to_grid = resample if self.adaptive else stretch
        logits = to_grid(self.decode_head(features, grids), grids[0], image, "bilinear")
        if not auxiliary:
            return logits
        if self.auxiliary_head is None:
            raise ValueError("this model has no auxiliary head: build it with auxiliary_channels > 0")
        return logits, to_grid(self.auxiliary_head(features[-2]), grids[-2], image, "bilinear")

    def forward_heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, auxiliary logits); under a distributed wrapper call ``model(x, auxiliary=True)`` instead."""
        return self.forward(x, auxiliary=True)

    def load_backbone(self, source: str | os.PathLike[str] | Classifier, **hub: Any) -> None:
        """Start from a classifier, default or adaptive: a model, a directory or a Hub id. Its head and the norm before
        it stay behind; all else must be there and fit."""
        classifier = source if isinstance(source, nn.Module) else from_pretrained(str(source), **hub)
        if type(classifier) is not type(self.backbone):
            raise ValueError(f"the backbone is a {type(self.backbone).__name__}, cannot start from a "
                             f"{type(classifier).__name__}")  # fmt: skip
        state = {k: v for k, v in classifier.state_dict().items() if not k.startswith(("norm.", "head."))}
        where = type(source).__name__ if isinstance(source, nn.Module) else str(source)
        check_state(self.backbone.state_dict(), state, where)
        self.backbone.load_state_dict(state, strict=True)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone.set_grad_checkpointing(enable)

    def get_classifier(self) -> nn.Module:
        return self.decode_head.classifier

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the last layer of both heads."""
        for head in (self.decode_head, self.auxiliary_head):
            if head is not None:
                old = head.classifier
                head.classifier = nn.Conv2d(old.in_channels, num_classes, 1).to(old.weight)
        self.num_classes = self.config["num_classes"] = num_classes

    def group_matcher(self, coarse: bool = False) -> Callable[[str], tuple[int, ...]]:
        """How deep a parameter lies, by its name: the backbone's depths, then everything else; as in timm."""
        inner = self.backbone.group_matcher(coarse)
        return lambda name: inner(name.removeprefix("backbone.")) if name.startswith("backbone.") else (2,)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters, besides biases and norms, that recipes leave out of weight decay."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}


def build_backbone(name: str, **kwargs: Any) -> Classifier:
    """A classifier without its head and last norm, which a segmenter has no use for."""
    if name.startswith("a_"):
        raise ValueError(f"backbone {name!r}: give the default's name, {name[2:]!r}, and adaptive=True")
    model = create_model(name, num_classes=0, **kwargs)
    if not isinstance(model, Classifier) or len(model.feature_info) < 2:
        choice = list_models("*", exclude_filters=("a_*", "upernet_*"))
        raise ValueError(f"backbone {name!r}, a {type(model).__name__}, does not report two stages or more with the "
                         f"pixel offsets of their grids: choose among {choice}")  # fmt: skip
    model.norm = model.head = nn.Identity()
    return model


MICRO = dict(img_size=64, num_classes=11, channels=48, auxiliary_channels=32, drop_rate=0.0)


@register_model
def upernet_swin_micro(**kwargs: Any) -> UperNet:
    """For laptops and tests: 64 px, two stages."""
    return UperNet(**defaults(kwargs, backbone="swin_micro", **MICRO))


@register_model
def upernet_swin_tiny(**kwargs: Any) -> UperNet:
    """UperNet on Swin-T, 60 M parameters."""
    return UperNet(**defaults(kwargs, backbone="swin_tiny"))


@register_model
def upernet_swin_small(**kwargs: Any) -> UperNet:
    """UperNet on Swin-S, 81 M parameters."""
    return UperNet(**defaults(kwargs, backbone="swin_small"))


@register_model
def upernet_swin_base(**kwargs: Any) -> UperNet:
    """UperNet on Swin-B, 121 M parameters."""
    return UperNet(**defaults(kwargs, backbone="swin_base"))


@register_model
def upernet_swinv2_micro(**kwargs: Any) -> UperNet:
    """For laptops and tests: 64 px, two stages."""
    return UperNet(**defaults(kwargs, backbone="swinv2_micro", **MICRO))


@register_model
def upernet_swinv2_tiny(**kwargs: Any) -> UperNet:
    """UperNet on SwinV2-T, 60 M parameters."""
    return UperNet(**defaults(kwargs, backbone="swinv2_tiny", img_size=512))


@register_model
def upernet_swinv2_small(**kwargs: Any) -> UperNet:
    """UperNet on SwinV2-S, 81 M parameters."""
    return UperNet(**defaults(kwargs, backbone="swinv2_small", img_size=512))


@register_model
def upernet_swinv2_base(**kwargs: Any) -> UperNet:
    """UperNet on SwinV2-B, 121 M parameters."""
    return UperNet(**defaults(kwargs, backbone="swinv2_base", img_size=512))
