"""MViTv2 weights from and to timm: the names are the same, so all there is to do is to refuse what does not fit.

``python -m mvitv2.convert model.safetensors out --model mvitv2_tiny`` writes a directory for ``from_pretrained``.
"""

from common.convert import State, main

__all__ = ["from_timm", "to_timm"]

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


def _check(state_dict: State) -> None:
    if "stages.0.blocks.0.attn.rel_pos_h" not in state_dict:
        raise ValueError("no stages.0.blocks.0.attn.rel_pos_h among the weights: expected timm's MViTv2 names, got "
                         f"{list(state_dict)[:3]} ... (original releases: load them with timm first)")  # fmt: skip
    for part, what in FOREIGN.items():
        if found := [name for name in state_dict if part in name]:
            raise ValueError(f"{found[0]}: the weights have {what}; MViTv2 takes those of tiny, small and base")


if __name__ == "__main__":
    main({"timm": from_timm}, default_model="mvitv2_tiny")
