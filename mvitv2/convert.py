"""MViTv2 weights from and to timm, whose names are the same, and the authors' release. Every tensor keeps its bits.

``python -m mvitv2.convert model.safetensors out --model mvitv2_tiny`` writes a directory for ``from_pretrained``.
"""

import bisect
import re
from typing import Any

import shiftvit
from common.publishing.convert import State, main

__all__ = ["from_original", "from_timm", "timm_config", "to_original", "to_timm"]

FOREIGN = {
    "cls_token": "a class token, which has no place on the torus",
    "pos_embed": "absolute positions",
    "shortcut_proj_mlp": "blocks that widen in their MLP (mvitv2_large)",
}


def from_timm(state_dict: State) -> State:
    """The ``state_dict`` of timm's mvitv2_tiny, _small or _base as one of ``MViTv2``: same names, order and tensors."""
    _check(state_dict)
    return dict(state_dict)


def to_timm(state_dict: State) -> State:
    """The exact inverse of ``from_timm``. Tables of a non-square model keep their shapes; timm builds square ones."""
    _check(state_dict)
    return dict(state_dict)


def from_original(state_dict: State) -> State:
    """The authors' release (blocks counted through, ``blocks.1.proj`` where a stage begins) as one of ``MViTv2``."""
    starts = [0, *sorted(int(m[1]) for name in state_dict if (m := re.fullmatch(r"blocks\.(\d+)\.proj\.weight", name)))]

    def ours(name: str) -> str:
        if found := re.match(r"blocks\.(\d+)\.", name):
            stage = bisect.bisect_right(starts, int(found[1])) - 1
            rest = re.sub(r"^proj\.", "shortcut_proj_attn.", name[found.end() :])
            return f"stages.{stage}.blocks.{int(found[1]) - starts[stage]}.{rest}"
        return name.replace("head.projection.", "head.fc.")

    return from_timm({ours(name): tensor for name, tensor in state_dict.items()})


def to_original(state_dict: State) -> State:
    """Our weights under the authors' names: the inverse of ``from_original``."""
    _check(state_dict)
    blocks = sorted({(int(m[1]), int(m[2])) for name in state_dict
                     if (m := re.match(r"stages\.(\d+)\.blocks\.(\d+)\.", name))})  # fmt: skip

    def theirs(name: str) -> str:
        if found := re.match(r"stages\.(\d+)\.blocks\.(\d+)\.", name):
            rest = name[found.end() :].replace("shortcut_proj_attn.", "proj.")
            return f"blocks.{blocks.index((int(found[1]), int(found[2])))}.{rest}"
        return name.replace("head.fc.", "head.projection.")

    return {theirs(name): tensor for name, tensor in state_dict.items()}


def timm_config(model: Any) -> dict[str, Any]:
    """The arguments of ``MViTv2`` that make what a timm ``MultiScaleVit`` is."""
    first, stem, last = model.stages[0].blocks[0], model.patch_embed.proj, model.stages[-1].blocks[-1]
    if getattr(first.attn, "rel_pos_h", None) is None:
        raise ValueError("this MultiScaleVit has no relative positions, which ours needs")
    side = (len(first.attn.rel_pos_h) + 1) // 2 * stem.stride[0]
    kernels = [getattr(stage.blocks[0].attn.pool_q, "stride", (1, 1))[0] for stage in model.stages]
    return {"img_size": side, "patch_kernel": stem.kernel_size[0], "patch_stride": stem.stride[0],
            "in_chans": stem.in_channels, "num_classes": model.num_classes, "embed_dim": stem.out_channels,
            "depths": tuple(len(stage.blocks) for stage in model.stages), "num_heads": first.attn.num_heads,
            "stride_q": tuple(kernels), "stride_kv": first.attn.pool_k.stride[0],
            "mlp_ratio": first.mlp.fc1.out_features / first.mlp.fc1.in_features, "drop_rate": model.drop_rate,
            "drop_path_rate": getattr(last.drop_path1, "drop_prob", 0.0)}  # fmt: skip


def _check(state_dict: State) -> None:
    if "stages.0.blocks.0.attn.rel_pos_h" not in state_dict:
        raise ValueError("no stages.0.blocks.0.attn.rel_pos_h among the weights: expected timm's MViTv2 names, got "
                         f"{list(state_dict)[:3]} ... (original releases: load them with timm first)")  # fmt: skip
    for part, what in FOREIGN.items():
        if found := [name for name in state_dict if part in name]:
            raise ValueError(f"{found[0]}: the weights have {what}; MViTv2 takes those of tiny, small and base")


if __name__ == "__main__":
    shiftvit.run(main, {"timm": from_timm, "original": from_original}, default_model="mvitv2_tiny")
