"""Weights of SwinV2 to and from timm and transformers; every tensor keeps its bits.

``python -m swinv2.convert model.safetensors out --model swinv2_tiny`` turns a safetensors file of timm (``--source
transformers``: of transformers) into a directory for ``SwinV2.from_pretrained``.
"""

from typing import Any

import torch

import shiftvit
from common.publishing.convert import State, from_timm, main, move_merging, rename, to_timm, windowed_config

__all__ = ["from_timm", "from_transformers", "timm_config", "to_timm", "to_transformers"]

TRANSFORMERS = {
    "patch_embed.proj": "swinv2.embeddings.patch_embeddings.projection",
    "patch_embed.norm": "swinv2.embeddings.norm",
    "attn.logit_scale": "attention.self.logit_scale",
    "attn.cpb_mlp": "attention.self.continuous_position_bias_mlp",
    "attn.proj": "attention.output.dense",
    "norm1": "layernorm_before",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "norm2": "layernorm_after",
    "norm": "swinv2.layernorm",
    "head.fc": "classifier",
}
"""Our name of a module, inside a block or at the top, and theirs. Attention is the exception: their query, key and
value are our qkv, q_bias and v_bias."""


def timm_config(model: Any) -> dict[str, Any]:
    """The arguments of ``SwinV2`` that make what a timm ``SwinTransformerV2`` is."""
    sizes = tuple(stage.blocks[0].attn.pretrained_window_size[0] for stage in model.layers)
    return windowed_config(model) | {"pretrained_window_sizes": sizes}


def from_transformers(state_dict: State) -> State:
    """Weights of transformers' ``Swinv2ForImageClassification`` as ours: query, key and value become one matrix."""
    names = {theirs: ours for ours, theirs in TRANSFORMERS.items()}
    state = {}
    for name, tensor in state_dict.items():
        block, _, part = name.rpartition(".attention.self.")
        ours = move_merging(rename(name.removeprefix("swinv2.encoder."), names), 1)
        if part == "query.weight":
            parts = [state_dict[f"{block}.attention.self.{t}.weight"] for t in ("query", "key", "value")]
            state[ours.replace("attention.self.query", "attn.qkv")] = torch.cat(parts)
        elif not part.startswith(("query", "key", "value")):
            state[ours] = tensor
        if part == "logit_scale" and f"{block}.attention.self.query.bias" in state_dict:
            for t in ("query", "value"):
                bias = state_dict[f"{block}.attention.self.{t}.bias"]
                state[ours.replace("logit_scale", f"{t[0]}_bias")] = bias
    return state


def to_transformers(state_dict: State) -> State:
    """Our weights as those of transformers' ``Swinv2ForImageClassification``: the inverse of ``from_transformers``."""
    state = {}
    for name, tensor in state_dict.items():
        theirs = rename(move_merging(name, -1), TRANSFORMERS)
        theirs = f"swinv2.encoder.{theirs}" if theirs.startswith("layers.") else theirs
        block, _, part = name.rpartition(".attn.")
        if part == "qkv.weight":
            for t, weight in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                target = theirs.replace("attn.qkv.weight", f"attention.self.{t}")
                state[f"{target}.weight"] = weight.clone()
                if (bias := state_dict.get(f"{block}.attn.{t[0]}_bias")) is not None:
                    state[f"{target}.bias"] = bias
        elif part not in ("q_bias", "v_bias"):
            state[theirs] = tensor
    return state


if __name__ == "__main__":
    shiftvit.run(
        main, {"timm": from_timm, "transformers": from_transformers, "original": from_timm}, default_model="swinv2_tiny"
    )
