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
from typing import Any

import torch
from torch import Tensor, nn

from common.models.classifier import Classifier, PaddingMode, resolve_padding, to_pair
from common.models.hub import HubModel
from common.models.registry import create_model, defaults, from_pretrained, list_models, register_model
from common.models.timm_models import timm_of_input
from common.models.weights import check_state, compare_arguments
from swin import Swin

from .decoder import ConvModule, FCNHead, Level, UperHead, Upsampling, resample, stretch
from .preprocess import ScenePreprocess


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
    input_fields = ScenePreprocess
    last_layer = ("decode_head.classifier.", "auxiliary_head.classifier.")

    def __init__(self, *, backbone: str = "swin_tiny", backbone_args: Mapping[str, Any] | None = None,
                 img_size: int | tuple[int, int] = 448, in_chans: int = 3, num_classes: int = 150, channels: int = 512,
                 pool_scales: tuple[int, ...] = (1, 2, 3, 6), auxiliary_channels: int = 256, stage_norms: bool = True,
                 padding_mode: PaddingMode | None = None, upsampling: Upsampling = "bilinear", drop_rate: float = 0.1,
                 drop_path_rate: float | None = None, adaptive: bool = False,
                 canonical: bool = True) -> None:  # fmt: skip
        backbone_args = {k: tuple(v) if isinstance(v, list) else v for k, v in (backbone_args or {}).items()}
        super().__init__(locals())
        if num_classes < 1:
            raise ValueError(f"num_classes is {num_classes}: a segmenter labels every pixel, with 1 class or more")
        drop_path = {} if drop_path_rate is None else {"drop_path_rate": drop_path_rate}
        self.backbone = build_backbone(backbone, img_size=img_size, in_chans=in_chans, adaptive=adaptive,
                                       canonical=canonical, **drop_path, **backbone_args)  # fmt: skip
        if isinstance(self.backbone, Swin) and not adaptive:
            self.backbone.always_partition = True
        self.img_size, self.in_chans, self.num_classes = to_pair(img_size), in_chans, num_classes
        self.adaptive, self.multiple = adaptive, self.backbone.multiple
        dims = [info["num_chs"] for info in self.backbone.feature_info]
        self.strides = [info["reduction"] for info in self.backbone.feature_info]
        self.norms = nn.ModuleList(nn.LayerNorm(dim) if stage_norms else nn.Identity() for dim in dims)
        padding_mode = resolve_padding(padding_mode, adaptive)
        head: Any = dict(num_classes=num_classes, padding_mode=padding_mode, drop_rate=drop_rate)
        self.decode_head = UperHead(dims=dims, channels=channels, pool_scales=pool_scales, adaptive=adaptive,
                                    upsampling=upsampling, **head)  # fmt: skip
        self.auxiliary_head = FCNHead(dim=dims[-2], channels=auxiliary_channels, **head) if auxiliary_channels else None
        self.init_weights()
        self.fit_input()

    @property
    def canonical(self) -> bool:
        """Whether the backbone's canonical anchor is on; may be switched, as a classifier's."""
        return self.backbone.canonical

    @canonical.setter
    def canonical(self, on: bool) -> None:
        self.backbone.canonical = on

    def init_weights(self) -> None:
        """Convolutions as in MMSegmentation. The classifiers keep torch's own start: from scratch, theirs (std 0.01)
        learned the digit scenes several times slower."""
        for module in self.modules():
            if isinstance(module, ConvModule):
                nn.init.kaiming_normal_(module.conv.weight, mode="fan_out", nonlinearity="relu")

    def check_size(self, size: tuple[int, int]) -> None:
        """Raise unless this model takes images of ``size`` (adaptive: is exact for them)."""
        self.backbone.check_size(size)

    def forward_backbone(self, x: Tensor) -> tuple[list[Tensor], list[Level]]:
        """Normalised features (B, C, h, w) of every stage, fine to coarse, and the grids they lie on."""
        stages = self.backbone.forward_intermediates(x, output_fmt="NHWC", intermediates_only=True, return_offsets=True)
        features, grids = [], []
        for norm, stride, (feature, offset) in zip(self.norms, self.strides, stages, strict=True):
            features.append(norm(feature).permute(0, 3, 1, 2))
            grids.append(Level((feature.shape[1], feature.shape[2]), stride, offset))
        return features, grids

    def forward(self, x: Tensor, auxiliary: bool = False) -> Any:
        """Logits (B, classes, H, W); with ``auxiliary`` the pair (logits, auxiliary logits), both of that shape."""
        features, grids = self.forward_backbone(x)
        image = Level((x.shape[2], x.shape[3]), 1, torch.zeros_like(grids[0].offset))
        to_grid = resample if self.adaptive else stretch
        logits = to_grid(self.decode_head(features, grids), grids[0], image, "bilinear")
        if not auxiliary:
            return logits
        if self.auxiliary_head is None:
            raise ValueError("this model has no auxiliary head: build it with auxiliary_channels > 0, or train it with "
                             "--auxiliary 0")  # fmt: skip
        return logits, to_grid(self.auxiliary_head(features[-2]), grids[-2], image, "bilinear")

    def forward_heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, auxiliary logits); under a distributed wrapper call ``model(x, auxiliary=True)`` instead."""
        return self.forward(x, auxiliary=True)

    def take_input(self, stored: dict[str, Any] | None, resized: bool = False) -> None:
        super().take_input(stored)
        self.fit_input(resized)

    def fit_input(self, resized: bool = False) -> None:
        if self.stored_input is not None:
            rows, columns = self.stored_input.get("multiple", (1, 1))
            fits = {"multiple": (math.lcm(rows, self.multiple[0]), math.lcm(columns, self.multiple[1]))}
            self.stored_input |= fits | ({"size": self.img_size, "resize": None} if resized else {})
        takes = ScenePreprocess(**(self.stored_input or {"size": self.img_size}))
        self.pretrained_cfg = timm_of_input(self.in_chans, size=takes.evaluation_size(takes.size), mean=takes.mean,
                                            std=takes.std, interpolation="bilinear")  # fmt: skip

    def load_backbone(self, source: str | os.PathLike[str] | Classifier, **hub: Any) -> str:
        """Start from a classifier, default or adaptive: a model, a directory or a Hub id. Its head and the norm before
        it stay behind; all else must be there and fit. Returns what to say of it: also which arguments differ."""
        classifier = source if isinstance(source, nn.Module) else from_pretrained(str(source), **hub)
        if type(classifier) is not type(self.backbone):
            raise ValueError(f"the backbone is a {type(self.backbone).__name__}, cannot start from a "
                             f"{type(classifier).__name__}")  # fmt: skip
        state = {k: v for k, v in classifier.state_dict().items() if not k.startswith(("norm.", "head."))}
        where = type(source).__name__ if isinstance(source, nn.Module) else str(source)
        check_state(self.backbone.state_dict(), state, where)
        self.backbone.load_state_dict(state, strict=True)
        theirs = {key: value for key, value in classifier.config.items() if key not in self.config}  # ours may differ
        return f"backbone of {where}" + compare_arguments(theirs, self.backbone.config, "backbone_args")

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
        self.class_names = ()

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
    model = None if name.startswith("upernet_") else create_model(name, num_classes=0, **kwargs)
    if not isinstance(model, Classifier) or len(model.feature_info) < 2:
        choice = list_models("*", exclude_filters=("a_*", "upernet_*"))
        raise ValueError(f"backbone {name!r} does not report two stages or more with the pixel offsets of their grids: "
                         f"choose among {choice}")  # fmt: skip
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
