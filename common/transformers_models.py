"""Our models in transformers: after ``import common.transformers_models`` the ``Auto`` classes and ``pipeline`` load
what we save.

``AutoModelForImageClassification.from_pretrained(FOLDER)`` and ``pipeline("image-classification", FOLDER)`` give our
logits to the bit: files are read by ``common.from_pretrained`` and images prepared as in evaluation. Nothing is
unpickled and no remote code runs. Needs ``pip install 'shift-equivariant-vits[transformers]'``.
"""

import inspect
import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSemanticSegmentation,
    BatchFeature,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.image_processing_utils import BaseImageProcessor
from transformers.modeling_outputs import ImageClassifierOutput, SemanticSegmenterOutput

from shiftvit import check_ours

check_ours("segmentation")  # before it is imported
# ruff: noqa: E402

from segmentation.inference import labels_at
from segmentation.preprocess import ScenePreprocess

from .data.images import see
from .data.preprocess import PREPROCESSOR_NAME, Preprocess
from .evaluation.metrics import IGNORE_INDEX
from .models.hub import FOR_TIMM, OURS, HubModel, resolve_file
from .models.registry import PACKAGES, class_of

__all__ = ["Classifier", "ClassifierProcessor", "Config", "Segmenter", "SegmenterProcessor"]

HUB = ("revision", "token", "cache_dir", "local_files_only")
AUXILIARY = 0.4  # weight of the auxiliary head's loss
WITHOUT_EFFECT = ("_from_auto", "_from_pipeline", "adapter_kwargs", "ignore_mismatched_sizes", "low_cpu_mem_usage",
                  "trust_remote_code", "use_safetensors")  # fmt: skip
PROCESSING = ("_from_auto", "_from_pipeline", "_commit_hash", "use_fast", "backend", "trust_remote_code", "device",
              "code_revision", "dtype", "image_processor_type", "torch_dtype")  # fmt: skip


class Config(PreTrainedConfig):
    """config.json as transformers sees it: the arguments of the model and the names of its classes."""

    attribute_map: ClassVar[dict[str, str]] = {"num_classes": "num_labels"}  # two names of one number

    def __post_init__(self, **kwargs: Any) -> None:
        if self.id2label is None and "num_classes" in kwargs:
            kwargs.setdefault("num_labels", kwargs["num_classes"])
        super().__post_init__(**kwargs)
        self.label2id = {name: int(i) for i, name in (self.id2label or {}).items()}

    def to_diff_dict(self) -> dict[str, Any]:
        """What ``save_pretrained`` writes: config.json as ``common`` writes and reads it."""
        kind = class_of(self.model_type.removeprefix(OURS))
        known = {*inspect.signature(kind.__init__).parameters, "model_type", "id2label", *FOR_TIMM}
        known -= set() if self.names() else {"id2label"}
        held = {**super().to_diff_dict(), "num_classes": self.num_labels}
        return {key: value for key, value in held.items() if key in known}

    def names(self) -> list[str]:
        """Of the classes; none where transformers knows none, and says LABEL_0."""
        labels: Any = self.id2label or {}  # by numbers, whatever transformers declares
        names = [labels[i] for i in range(len(labels))]
        return [] if names == [f"LABEL_{i}" for i in range(len(names))] else names

    def arguments(self, kind: type[HubModel]) -> dict[str, Any]:
        """Those of ``kind`` that are given here; as many classes as there are labels."""
        names = [name for name in inspect.signature(kind.__init__).parameters if hasattr(self, name)]
        found = {name: getattr(self, name) for name in names}
        found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        return {**found, "num_classes": self.num_labels}


class _Model(PreTrainedModel):
    """One of our models, ``model``, with the signature of transformers."""

    main_input_name = "pixel_values"
    config: Any
    config_class: Any
    kind: ClassVar[type[HubModel]]

    def __init__(self, config: Config, model: HubModel | None = None) -> None:
        super().__init__(config)
        self.model: Any = self.kind(**config.arguments(self.kind)) if model is None else model

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], *, config: Any = None,
                        dtype: Any = None, **kwargs: Any) -> "_Model":  # fmt: skip
        hub = {key: kwargs.pop(key) for key in HUB if key in kwargs}
        dtype = kwargs.pop("torch_dtype", None) if dtype is None else dtype  # its name in older code
        if unknown := sorted(k for k, value in kwargs.items() if k not in WITHOUT_EFFECT and value is not None):
            raise ValueError(f"{unknown} do not apply to {cls.__name__}: load the model, then move it with .to(device)")
        if config is None:
            config = cls.config_class.from_pretrained(source, **hub)
        stored, _ = cls.kind.read_arguments(source, {}, **hub)
        changed = {k: value for k, value in config.arguments(cls.kind).items() if value != stored.get(k)}
        model = cls.kind.from_pretrained(source, **hub, **changed)
        if isinstance(dtype, str) and dtype != "auto":
            dtype = getattr(torch, dtype, dtype)
        if dtype not in (None, "auto") and not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown dtype {dtype!r}: give a torch.dtype or its name, such as 'bfloat16'")
        return cls(config, model.to(dtype) if isinstance(dtype, torch.dtype) else model).eval()

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Also of the files that we save, which hold the names of ``model``: transformers' Trainer reads these."""
        ours = not any(name.startswith("model.") for name in state_dict)
        state = {f"model.{name}": tensor for name, tensor in state_dict.items()} if ours else state_dict
        return super().load_state_dict(state, *args, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str],
                        state_dict: dict[str, Tensor] | None = None, **kwargs: Any) -> None:  # fmt: skip
        """As ``common`` saves a model: the same files. Of several processes the first, as ``is_main_process`` says; the
        others may hold a part of the weights, or none."""
        if not kwargs.get("is_main_process", True):
            return
        if names := self.config.names():
            self.model.name_classes(names)
        state = {
            name.removeprefix("model."): tensor
            for name, tensor in (self.state_dict() if state_dict is None else state_dict).items()
        }
        self.model.save_pretrained(save_directory, state)


class Classifier(_Model):
    """Images (B, 3, H, W) -> logits (B, classes)."""

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, return_dict: bool | None = None) -> Any:
        kind = self.config.problem_type
        if kind is None and labels is not None:  # as transformers infers it
            several = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
            kind = "regression" if self.config.num_labels == 1 else several
        if labels is not None and kind != "single_label_classification":
            raise ValueError(f"problem_type {kind!r} has no loss here: compute it from the logits; if each image is of "
                             "one class, give labels as whole numbers, or set config.problem_type to "
                             "'single_label_classification'")  # fmt: skip
        logits = self.model(pixel_values)
        loss: Any = None if labels is None else F.cross_entropy(logits, labels)
        output = ImageClassifierOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output


class Segmenter(_Model):
    """Images (B, 3, H, W) -> logits (B, classes, H, W)."""

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, return_dict: bool | None = None) -> Any:
        loss: Any = None
        if labels is not None and self.training and self.model.auxiliary_head is not None:  # as transformers' UperNet
            logits, auxiliary = self.model(pixel_values, auxiliary=True)
            loss = AUXILIARY * _per_pixel(auxiliary, labels)
        else:
            logits = self.model(pixel_values)
        if labels is not None:
            loss = _per_pixel(logits, labels) + (0 if loss is None else loss)
        output = SemanticSegmenterOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output


def _per_pixel(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, mean over the pixels that count; 0 where none does."""
    if logits.shape[1] > IGNORE_INDEX:
        raise ValueError(f"label {IGNORE_INDEX} is one of {logits.shape[1]} classes, and cannot mark ignored "
                         "pixels: compute the loss from the logits")  # fmt: skip
    counted = (labels != IGNORE_INDEX).sum().clamp_min(1)
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE_INDEX, reduction="sum") / counted


class _Processor(BaseImageProcessor):
    """Images of any size -> what the model takes, as in evaluation."""

    model_input_names = ["pixel_values"]  # noqa: RUF012
    kind: ClassVar[Any]
    upright: ClassVar[bool] = True  # turn images as their EXIF data say

    def __init__(self, preprocess: Any) -> None:
        super().__init__()
        self.preprocessing = preprocess

    @property
    def size(self) -> dict[str, int]:
        """What the model sees, as transformers' examples ask for it, to augment images themselves."""
        return dict(zip(("height", "width"), self.preprocessing.size, strict=True))

    @property
    def image_mean(self) -> list[float]:
        return list(self.preprocessing.mean)

    @property
    def image_std(self) -> list[float]:
        return list(self.preprocessing.std)

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], **kwargs: Any) -> "_Processor":
        hub = {key: kwargs.pop(key) for key in HUB if key in kwargs}
        _refuse(kwargs, "save the model with another preprocessor_config.json")
        return cls(cls.kind.load(resolve_file(source, PREPROCESSOR_NAME, **hub)))

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        self.preprocessing.save(Path(save_directory))

    def to_dict(self) -> dict[str, Any]:
        stored = {key: getattr(self.preprocessing, key) for key in self.kind.STORED}
        return {"image_processor_type": type(self).__name__, **stored}

    def preprocess(self, images: Any, return_tensors: str | None = None, **kwargs: Any) -> BatchFeature:
        """``images``: a Pillow image, a uint8 array (h, w, 3) or tensor (3, h, w), or several of them."""
        _refuse(kwargs, "images are prepared as in evaluation")
        if return_tensors not in (None, "pt"):
            raise ValueError(f"return_tensors={return_tensors!r} is not available: tensors are torch's, 'pt'")
        batch = images if isinstance(images, (list, tuple)) or getattr(images, "ndim", 0) == 4 else [images]
        return BatchFeature({"pixel_values": self.prepare([to_pixels(image, self.upright) for image in batch])})

    def prepare(self, images: list[np.ndarray]) -> Tensor:
        raise NotImplementedError


class ClassifierProcessor(_Processor):
    kind = Preprocess

    def prepare(self, images: list[np.ndarray]) -> Tensor:
        return torch.stack([self.preprocessing.image(pixels) for pixels in images])


class SegmenterProcessor(_Processor):
    kind = ScenePreprocess
    upright = False  # a mask lies over the pixels as they are stored

    def prepare(self, images: list[np.ndarray]) -> Tensor:
        return self.preprocessing.evaluate([torch.tensor(pixels).permute(2, 0, 1) for pixels in images])

    def post_process_semantic_segmentation(self, outputs: Any, target_sizes: Any = None) -> list[Tensor]:
        """A label per pixel for each image, (h, w) of ``target_sizes`` or as large as the logits."""
        sizes = target_sizes if target_sizes is not None else [outputs.logits.shape[-2:]] * len(outputs.logits)
        return [labels_at(logits[None], (int(size[0]), int(size[1])))[0]
                for logits, size in zip(outputs.logits, sizes, strict=True)]  # fmt: skip


def _refuse(options: dict[str, Any], why: str) -> None:
    """Raise a ValueError for options that would change nothing."""
    if unknown := sorted(key for key, value in options.items() if key not in PROCESSING and value is not None):
        raise ValueError(f"{unknown} do not apply to these images: {why}")


def to_pixels(image: Any, upright: bool = True) -> np.ndarray:
    """(h, w, 3) uint8."""
    if isinstance(image, Image.Image):
        return see(image, upright)
    pixels = image.permute(1, 2, 0).numpy() if isinstance(image, Tensor) else np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"expected Pillow images, uint8 arrays (h, w, 3) or uint8 tensors (3, h, w), got "
                         f"{type(image).__name__} of shape {np.shape(image)} and type {pixels.dtype}")  # fmt: skip
    return np.ascontiguousarray(pixels)  # OpenCV's colours turned round, image[..., ::-1], have a negative stride


def _register() -> None:
    for model_type in PACKAGES:
        dense = model_type == "upernet"
        base, auto, processor = ((Segmenter, AutoModelForSemanticSegmentation, SegmenterProcessor) if dense else
                                 (Classifier, AutoModelForImageClassification, ClassifierProcessor))  # fmt: skip
        kind = class_of(model_type)
        config = type(f"Shift{kind.__name__}Config", (Config,), {"model_type": OURS + model_type})
        model = type(f"Shift{kind.__name__}{base.__name__}", (base,), {"config_class": config, "kind": kind})
        for made in (config, model):
            made.__module__ = __name__  # where pickle looks for it
            globals()[made.__name__] = made
        AutoConfig.register(OURS + model_type, config)
        auto.register(config, model)
        AutoImageProcessor.register(config, image_processor_classes={"pil": processor, "torchvision": processor})


def _recognise_old_folders() -> None:
    """Have transformers take a model for ours that was saved when ``OURS`` did not stand before its type."""
    read = PreTrainedConfig.get_config_dict.__func__

    def get_config_dict(cls: Any, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        config, unused = read(cls, *args, **kwargs)
        if config.get("model_type") in PACKAGES and {"adaptive", "canonical"} <= set(config):
            config = {**config, "model_type": OURS + config["model_type"]}
        return config, unused

    PreTrainedConfig.get_config_dict = classmethod(get_config_dict)


_register()
_recognise_old_folders()
