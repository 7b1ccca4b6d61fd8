"""What the converters share: renaming modules, and the command line of a folder's ``convert.py``."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..models.configs import read_labels
from ..models.hub import CONFIG_NAME, HubModel
from ..models.registry import MODEL_ARGUMENTS, create_model, parse_arguments
from ..models.weights import check_state

__all__ = [
    "BUFFERS",
    "State",
    "from_timm",
    "main",
    "move_merging",
    "name_classes",
    "read_weights",
    "rename",
    "to_timm",
    "windowed_config",
]

State = dict[str, Tensor]

BUFFERS = ("relative_coords_table", "relative_position_index", "attn_mask")
"""What older files of the Swins store although it follows from the geometry."""
UNSAID = ("act_layer", "window_size", "pretrained_window_sizes")
"""Arguments of which weights may fit several values: SwinV2's any window, CvT's either activation."""


def rename(name: str, names: Mapping[str, str]) -> str:
    """Replace the module in ``layers.i.blocks.j.<module>.<rest>`` or, outside the blocks, in ``<module>.<rest>``."""
    prefix, module = "", name
    if ".blocks." in name:
        parts = name.split(".")
        prefix, module = ".".join(parts[:4]) + ".", ".".join(parts[4:])
    for old, new in names.items():
        if module == old or module.startswith(f"{old}."):
            return prefix + new + module[len(old) :]
    return name


def move_merging(name: str, by: int) -> str:
    """Count patch merging as a part of the stage ``by`` stages later."""
    parts = name.split(".")
    if parts[0] == "layers" and parts[2] == "downsample":
        parts[1] = str(int(parts[1]) + by)
    return ".".join(parts)


def from_timm(state_dict: State) -> State:
    """timm's weights of a Swin or SwinV2 as ours: the same names, so a timm model's state_dict comes back as it is.

    Files published before timm moved patch merging to the start of a stage (and the original release) are accepted:
    stage i's merging belongs to stage i + 1 here, the head's layer is called fc, and stored buffers are dropped.
    """
    state = {name: tensor for name, tensor in state_dict.items() if not name.endswith(BUFFERS)}
    if any(name.startswith("layers.0.downsample.") for name in state):
        state = {move_merging(name, 1).replace("head.", "head.fc."): tensor for name, tensor in state.items()}
    return state


def to_timm(state_dict: State) -> State:
    """Our weights as timm's (timm >= 0.9): the inverse of ``from_timm``."""
    return dict(state_dict)


def windowed_config(model: Any) -> dict[str, Any]:
    """The constructor's arguments that a timm Swin and SwinV2 have in common with ours."""
    stages, first = model.layers, model.layers[0].blocks[0]
    return {"img_size": tuple(model.patch_embed.img_size), "patch_size": model.patch_embed.patch_size[0],
            "in_chans": model.patch_embed.proj.in_channels, "num_classes": model.num_classes,
            "embed_dim": model.embed_dim, "depths": tuple(len(stage.blocks) for stage in stages),
            "num_heads": tuple(stage.blocks[0].attn.num_heads for stage in stages),
            "window_size": tuple(first.window_size),
            "qkv_bias": getattr(first.attn, "q_bias", first.attn.qkv.bias) is not None,
            "mlp_ratio": first.mlp.fc1.out_features / first.mlp.fc1.in_features,
            "drop_rate": model.head.drop.p, "proj_drop_rate": first.mlp.drop1.p,
            "attn_drop_rate": first.attn.attn_drop.p,
            "drop_path_rate": getattr(stages[-1].blocks[-1].drop_path1, "drop_prob", 0.0)}  # fmt: skip


def read_weights(file: Path, allow_pickle: bool = False) -> State:
    """Tensors of a safetensors file or, with ``allow_pickle``, of what torch.load reads as weights only."""
    if file.suffix == ".safetensors":
        return load_file(file)
    if not allow_pickle:
        raise ValueError(f"{file} is not a safetensors file. A pickle can run code when it is loaded: give "
                         "--allow_pickle to read it through torch's weights-only loader, if you trust it")  # fmt: skip
    found = torch.load(file, map_location="cpu", weights_only=True)
    for key in ("model", "model_state", "state_dict"):  # how the authors' releases wrap theirs
        found = found[key] if isinstance(found, dict) and isinstance(found.get(key), dict) else found
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{file} does not hold a dictionary of tensors: expected a state_dict, also under 'model'")
    return found


def name_classes(model: HubModel, file: Path) -> None:
    """Take the names of classes from the config.json beside weights, as repositories of the Hub have it."""
    config = file.with_name(CONFIG_NAME)
    names = read_labels(config) if config.is_file() else ()
    if names and len(names) == model.config["num_classes"]:
        model.name_classes(names)


def check_windows(model: torch.nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Raise where a file of SwinV2 stores positions in other windows than the model's: its weights fit any window."""
    own = dict(model.named_buffers())
    for name, table in weights.items():
        if name.endswith("relative_coords_table") and name in own:
            side, mine = (round((each.numel() / 2) ** 0.5 + 1) // 2 for each in (table, own[name]))
            if side != mine:
                raise ValueError(f"{where} has windows of {side} in {name}, the model of {mine}: give --model_args "
                                 f"window_size={side} and the img_size of the weights")  # fmt: skip
            if not torch.allclose(table.view_as(own[name]).float(), own[name].float(), atol=1e-2):
                raise ValueError(f"{where} has positions in {name} as trained with other windows: name these with "
                                 "--model_args pretrained_window_sizes=A,B,C,D")  # fmt: skip


def main(converters: Mapping[str, Callable[[State], State]], default_model: str) -> None:
    """Turn a weights file of another library, or of the authors, into a directory for ``from_pretrained``."""
    parser = argparse.ArgumentParser(description=main.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("file", type=Path, help="safetensors file, or with --allow_pickle a .pth, to read")
    parser.add_argument("output_dir", type=Path, help="directory to write")
    parser.add_argument("--model", default=default_model, help="name of the model that the weights belong to")
    parser.add_argument("--source", choices=sorted(converters), default=next(iter(converters)), help="whose names")
    parser.add_argument("--allow_pickle", action="store_true", help="read a pickle, by torch's weights-only loader")
    parser.add_argument("--model_args", **MODEL_ARGUMENTS)
    args = parser.parse_args()
    weights = read_weights(args.file, args.allow_pickle)
    state = converters[args.source](weights)
    head = state.get("head.fc.weight")
    classes = {"num_classes": 0 if head is None else len(head)}
    model = create_model(args.model, **classes | parse_arguments(args.model_args))
    check_state(model.state_dict(), state, str(args.file))
    check_windows(model, weights, str(args.file))
    model.load_state_dict(state, strict=True)
    name_classes(model, args.file)
    print(f"{args.model}: {model.save_pretrained(args.output_dir)}")
    if unsaid := ", ".join(f"{key}={model.config[key]}" for key in UNSAID if key in model.config):
        print(f"built with {unsaid}: these weights may fit other values, too, and --model_args sets them")
