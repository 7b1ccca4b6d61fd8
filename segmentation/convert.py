"""Weights of UperNet to and from transformers; every tensor keeps its bits.

``python -m segmentation.convert model.safetensors out --model upernet_swin_tiny`` turns a safetensors file of
transformers' ``UperNetForSemanticSegmentation`` into a directory for ``UperNet.from_pretrained``.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import shiftvit
import swin.convert
import swinv2.convert
from common.models.registry import MODEL_ARGUMENTS, create_model, parse_arguments
from common.models.weights import check_state
from common.publishing.convert import State, name_classes

__all__ = ["from_transformers", "to_transformers"]

STAGE_NORM = "backbone.hidden_states_norms.stage"
"""Their norm of stage i is ``STAGE_NORM`` i, counted from one; ours is norms.i, counted from zero. The heads have the
same names, the backbone those of the classifier's converter."""


def from_transformers(state_dict: State) -> State:
    """Weights of transformers' ``UperNetForSemanticSegmentation`` on Swin or SwinV2 as ours.

    Takes the tensors of a file, or of a model in memory. The norm after the last stage, which no head reads, is left
    out. On SwinV2 theirs has no norms of the stages: load into a model built with ``stage_norms=False``.
    """
    version = "swinv2" if any("continuous_position_bias_mlp" in name for name in state_dict) else "swin"
    state, backbone = {}, {}
    for name, tensor in state_dict.items():
        if name.startswith(STAGE_NORM):
            stage, part = name.removeprefix(STAGE_NORM).split(".")
            state[f"norms.{int(stage) - 1}.{part}"] = tensor
        elif name.startswith("backbone."):
            module = name.removeprefix("backbone.").removeprefix("swin.")
            if not module.startswith("layernorm."):
                backbone[f"{version}.{module}"] = tensor
        else:
            state[name] = tensor
    convert = swinv2.convert if version == "swinv2" else swin.convert
    return {f"backbone.{name}": tensor for name, tensor in convert.from_transformers(backbone).items()} | state


def to_transformers(state_dict: State) -> State:
    """Our weights as a file of transformers' ``UperNetForSemanticSegmentation``: undoes ``from_transformers``."""
    version = "swinv2" if any(".cpb_mlp." in name for name in state_dict) else "swin"
    state, backbone = {}, {}
    for name, tensor in state_dict.items():
        if name.startswith("backbone."):
            backbone[name.removeprefix("backbone.")] = tensor
        elif name.startswith("norms."):
            _, stage, part = name.split(".")
            state[f"{STAGE_NORM}{int(stage) + 1}.{part}"] = tensor
        else:
            state[name] = tensor
    convert = swinv2.convert if version == "swinv2" else swin.convert
    theirs = convert.to_transformers(backbone)
    return {f"backbone.{name.removeprefix(f'{version}.')}": tensor for name, tensor in theirs.items()} | state


def main(arguments: Sequence[str] | None = None) -> None:
    """Turn a safetensors file of transformers into a directory for ``from_pretrained``."""
    parser = argparse.ArgumentParser(description=main.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("file", type=Path, help="safetensors file to read")
    parser.add_argument("output_dir", type=Path, help="directory to write")
    parser.add_argument("--model", default="upernet_swin_tiny", help="name of the model that the weights belong to")
    parser.add_argument("--model_args", **MODEL_ARGUMENTS)
    args = parser.parse_args(arguments)
    if args.file.suffix != ".safetensors":
        raise SystemExit(f"{args.file}: only safetensors files are read; a pickle can run code when it is loaded")
    state = from_transformers(load_file(args.file))
    if "decode_head.classifier.weight" not in state:
        raise SystemExit(f"{args.file} holds no decode_head.classifier: it is not a UperNet")
    classes, channels = state["decode_head.classifier.weight"].shape[:2]
    auxiliary = state.get("auxiliary_head.classifier.weight")
    found = {"num_classes": classes, "channels": channels, "stage_norms": "norms.0.weight" in state,
             "auxiliary_channels": 0 if auxiliary is None else auxiliary.shape[1]}  # fmt: skip
    model: Any = create_model(args.model, **found | parse_arguments(args.model_args))
    check_state(model.state_dict(), state, str(args.file))
    model.load_state_dict(state, strict=True)
    name_classes(model, args.file)
    print(f"{args.model}: {model.save_pretrained(args.output_dir)}")
    if any(".cpb_mlp." in name for name in state):
        print(f"built with window_size={model.backbone.config['window_size']}: these weights may fit other windows, "
              "too, and --model_args \"backbone_args={'window_size': N}\" img_size=SIDE sets them")  # fmt: skip


if __name__ == "__main__":
    shiftvit.run(main)
