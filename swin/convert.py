"""Weights of Swin to and from timm, transformers and the original release; every tensor keeps its bits.

``python -m swin.convert model.safetensors out --model swin_tiny --source timm`` writes a directory for
``Swin.from_pretrained``.
"""

from typing import Any

import torch

import shiftvit
from common.publishing.convert import BUFFERS, State, from_timm, main, move_merging, rename, to_timm, windowed_config

__all__ = ["from_timm", "from_transformers", "timm_config", "to_timm", "to_transformers"]

TRANSFORMERS = {
    "patch_embed.proj": "swin.embeddings.patch_embeddings.projection",
    "patch_embed.norm": "swin.embeddings.norm",
    "attn.relative_position_bias_table": "attention.self.relative_position_bias_table",
    "attn.proj": "attention.output.dense",
    "norm1": "layernorm_before",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "norm2": "layernorm_after",
    "norm": "swin.layernorm",
    "head.fc": "classifier",
}
"""Our name of a module, inside a block or at the top, and theirs; their query, key and value are our qkv."""

IN_MEMORY = {
    "attention.q_proj": "attention.self.query",
    "attention.k_proj": "attention.self.key",
    "attention.v_proj": "attention.self.value",
    "attention.o_proj": "attention.output.dense",
    "attention.relative_position_bias": "attention.self",
}
"""transformers 5 renames modules when it loads a file; its files keep the names above."""


def timm_config(model: Any) -> dict[str, Any]:
    """The arguments of ``Swin`` that make what a timm ``SwinTransformer`` is."""
    return windowed_config(model)


def from_transformers(state_dict: State) -> State:
    """Weights of transformers' ``SwinForImageClassification`` as ours: query, key and value become one matrix.

    Takes the tensors of a file, or of a model in memory.
    """
    state_dict = {rename_in_memory(name): tensor for name, tensor in state_dict.items()}
    names = {theirs: ours for ours, theirs in TRANSFORMERS.items()}
    state = {}
    for name, tensor in state_dict.items():
        block, _, part = name.rpartition(".attention.self.")
        ours = move_merging(rename(name.removeprefix("swin.encoder."), names), 1)
        if part in ("query.weight", "query.bias"):
            kind = part.removeprefix("query.")
            parts = [state_dict[f"{block}.attention.self.{t}.{kind}"] for t in ("query", "key", "value")]
            state[ours.replace("attention.self.query", "attn.qkv")] = torch.cat(parts)
        elif not part.startswith(("query", "key", "value")) and not name.endswith(BUFFERS):
            state[ours] = tensor
    return state


def to_transformers(state_dict: State) -> State:
    """Our weights as a file of transformers' ``SwinForImageClassification``: the inverse of ``from_transformers``."""
    state = {}
    for name, tensor in state_dict.items():
        theirs = rename(move_merging(name, -1), TRANSFORMERS)
        theirs = f"swin.encoder.{theirs}" if theirs.startswith("layers.") else theirs
        if ".attn.qkv." in theirs:
            for part, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                state[theirs.replace("attn.qkv", f"attention.self.{part}")] = piece.clone()
        else:
            state[theirs] = tensor
    return state


def rename_in_memory(name: str) -> str:
    for new, old in IN_MEMORY.items():
        name = name.replace(f".{new}.", f".{old}.")
    return name


if __name__ == "__main__":
    shiftvit.run(
        main, {"timm": from_timm, "transformers": from_transformers, "original": from_timm}, default_model="swin_tiny"
    )
