"""MViTv2 weights from and to timm: the names are the same, so all there is to do is to refuse what does not fit.

``python -m mvitv2.convert model.safetensors out --model mvitv2_tiny`` writes a directory for ``from_pretrained``.
"""

from typing import Any

from common.convert import State, main

__all__ = ["from_timm", "timm_config", "to_timm"]

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


def timm_config(model: Any) -> dict[str, Any]:
    """The arguments of ``MViTv2`` that make what a timm ``MultiScaleVit`` is."""
    first, stem, last = model.stages[0].blocks[0], model.patch_embed.proj, model.stages[-1].blocks[-1]
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
    main({"timm": from_timm}, default_model="mvitv2_tiny")
