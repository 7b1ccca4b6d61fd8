"""One line that makes a trained model adaptive: ``adapt(model)``. Weights are untouched, the object stays the same."""

import copy
import importlib
from typing import Any, TypeVar

import torch
from torch import nn

from .hub import OURS, HubModel
from .registry import PACKAGES
from .timm_models import input_of_timm
from .weights import check_state

__all__ = ["adapt"]

M = TypeVar("M", bound=nn.Module)

TIMM = {"SwinTransformer": "swin", "SwinTransformerV2": "swinv2", "MultiScaleVit": "mvitv2"}
"""timm's classes that can be made adaptive, and the folder that knows how."""
KEPT = ("pretrained_cfg", "class_names", "stored_input")
OPTIONS = {"canonical", "anchors", "score", "sketch", "reanchor", "img_size"}
NOISE = 0.05
AS_BEFORE = ("training", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
             "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
             "_backward_pre_hooks")  # fmt: skip
"""What a module keeps: its mode, which may be another than the model's, and its hooks, as they are, so that their
handles still remove them."""


def adapt(model: M, **options: Any) -> M:
    """Make ``model`` adaptive in place and return it: our default model, or a timm Swin, SwinV2 or MViTv2.

    Its parameters stay the same tensors, so an existing optimizer keeps working. ``options`` are those of
    the adaptive model (``canonical``, ``anchors``, ``score``, ``sketch``, ``reanchor``). A timm model becomes one of
    ours, with the same names in its state_dict; what ours cannot reproduce is refused, and the model left as it was.
    """
    if unknown := sorted(set(options) - OPTIONS):
        raise ValueError(f"{unknown} cannot change with anchors: adapt takes {sorted(OPTIONS)}")
    if isinstance(model, HubModel):
        cls: type[HubModel] = type(model)
        config = dict(model.config)
        config |= {"padding_mode": None} if config.get("padding_mode") == "zeros" else {}
        config |= {"canonical": model.canonical} if "canonical" in config else {}  # may be switched on a built model
    else:
        with torch.device("cpu"):  # where it is compared, with random numbers of the CPU
            cls, config = _of_timm(model)
    with torch.device("cpu"):  # not where the default is
        twin = cls(**{**config, "adaptive": True, **options})
    like = next(model.parameters())
    twin.to(device=like.device, dtype=like.dtype)
    kept = {key: getattr(model, key) for key in KEPT if hasattr(model, key)}
    cfg, resized = getattr(model, "pretrained_cfg", None) or {}, "img_size" in options
    if isinstance(model, HubModel):
        kept |= {key: value for key, value in vars(model).items() if key not in vars(twin)}  # the user's own
    elif len(cfg.get("mean") or ()) == len(cfg.get("input_size") or ()) == 3:
        resized = tuple(cfg["input_size"][1:]) != twin.img_size  # timm keeps the size of the published weights there
        kept["stored_input"] = input_of_timm(model)
    if "pretrained_cfg" in kept:  # else what timm saves would be read as the model that this one was
        kept["pretrained_cfg"] = {**cfg, "architecture": OURS + twin.model_type}
    trains = {name: p.requires_grad for name, p in model.named_parameters()}
    recomputes = any(getattr(module, "grad_checkpointing", False) for module in model.modules())
    state = model.state_dict(keep_vars=True)
    check_state(twin.state_dict(), state, "a part of a model, or one whose layers were replaced, cannot be adapted: "
                "adapt the whole model, as it was built. Its state")  # fmt: skip
    twin.load_state_dict(state, strict=True, assign=True)
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(trains[name])
    before = dict(model.named_modules())
    names = {module: name for name, module in before.items()}
    twin.train(model.training)
    for name, module in twin.named_modules():
        module.__dict__.update({key: before[name].__dict__[key] for key in AS_BEFORE if name in before})
        if hasattr(before.get(name), "frozen"):  # of a segmenter its backbone is
            module.__dict__["frozen"] = tuple(twin.get_submodule(names[part]) for part in before[name].frozen)
    if isinstance(model, HubModel) and hasattr(model, "head"):
        twin.head = model.head  # which may pool in another way
    model.__class__ = cls  # type: ignore[assignment]
    model.__dict__ = twin.__dict__
    for key, value in kept.items():
        setattr(model, key, value)
    model.fit_input(resized)  # type: ignore[operator]
    if recomputes:
        model.set_grad_checkpointing()  # type: ignore[operator]
    return model


def _of_timm(model: nn.Module) -> tuple[type[HubModel], dict[str, Any]]:
    """Our class and the arguments that make it equal to a timm model. That is checked on an image of noise, for copies
    whose weights are noisy: fresh ones have layers that do nothing, and hide what differs. And in float64, where what
    is left of a difference is no rounding: another activation may differ by less than float32 does in a deep model."""
    name = type(model).__name__
    if name not in TIMM or not type(model).__module__.startswith("timm."):
        wrapped = hasattr(model, "module") or hasattr(model, "_orig_mod")
        if name.startswith("Feature"):  # timm's features_only
            raise TypeError(f"cannot adapt a {name}, a part of a model: adapt the whole model, timm.create_model(NAME) "
                            "without features_only, then call its forward_intermediates")  # fmt: skip
        foreign = type(model).__module__.startswith("transformers.")
        raise TypeError(f"cannot adapt a {name}: expected our default models or timm's {', '.join(TIMM)}"
                        + (", before it is compiled or wrapped" if wrapped else "")
                        + ("; weights of Swin, SwinV2 and CvT become ours by --source transformers of the folder's "
                           "convert.py" if foreign else ""))  # fmt: skip
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(f"this {name} is on the meta device, without values to compare with our model's: build it "
                         "and load its weights on a CPU or GPU, then adapt it")  # fmt: skip
    package = PACKAGES[TIMM[name]]
    config = importlib.import_module(f"{package}.convert").timm_config(model)
    cls = next(c for c in vars(importlib.import_module(package)).values()
               if isinstance(c, type) and getattr(c, "model_type", None) == TIMM[name])  # fmt: skip
    with torch.device("meta"):
        cls(**config, adaptive=True)  # else a size that is no multiple is taken for an option that ours lacks
    default = cls(**config)
    check_state(default.state_dict(), model.state_dict(), f"this {name} has options that ours lacks: its state")
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, config["in_chans"], *default.img_size, generator=generator).double()
    theirs = copy.deepcopy(model).double().cpu().eval()
    default.to(next(model.parameters()).dtype).double()  # with tables that are as coarse as theirs
    noisy = {name: tensor + NOISE * torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else
             tensor for name, tensor in theirs.state_dict().items()}  # fmt: skip
    with torch.no_grad():
        theirs.load_state_dict(noisy), default.load_state_dict(noisy)
        expected = theirs(image)
        error = (default.eval()(image) - expected).norm() / expected.norm().clamp_min(1e-30)
    if not error < 1e-6:
        raise ValueError(f"this {name} computes something different from our model of its size (relative difference "
                         f"{error:.2g}): built with an option that ours lacks, or not finite")  # fmt: skip
    return cls, config
