"""CvT weights in other layouts: transformers' ``CvtForImageClassification`` and the authors' release. Exact both ways.

Only names differ, no tensor changes. The authors trained with ``act_layer="quick_gelu"``, transformers runs their
weights with ``"gelu"``: build the model for the numbers to be reproduced (``--model_args act_layer=quick_gelu``).

``python -m cvt.convert model.safetensors out --model cvt_13 --source transformers`` writes a directory for
``CvT.from_pretrained``.
"""

import re

import shiftvit
from common.publishing.convert import State, main

__all__ = ["from_original", "from_transformers", "to_original", "to_transformers"]

# where a layer is: (ours, transformers, original); {i} is the stage, {j} the block
LAYERS = [
    ("norm", "layernorm", "norm"),
    ("head.fc", "classifier", "head"),
    *(
        (f"stages.{{i}}.{ours}", f"cvt.encoder.stages.{{i}}.{transformers}", f"stage{{i}}.{original}")
        for ours, transformers, original in (
            ("embed.proj", "embedding.convolution_embeddings.projection", "patch_embed.proj"),
            ("embed.norm", "embedding.convolution_embeddings.normalization", "patch_embed.norm"),
        )
    ),
    *(
        (f"stages.{{i}}.blocks.{{j}}.{ours}", f"cvt.encoder.stages.{{i}}.layers.{{j}}.{transformers}",
         f"stage{{i}}.blocks.{{j}}.{original}")
        for ours, transformers, original in (
            ("norm1", "layernorm_before", "norm1"),
            *(
                (f"attn.{q}.{ours}", f"attention.attention.{transformers.format(query)}", f"attn.{original.format(q)}")
                for q, query in (("q", "query"), ("k", "key"), ("v", "value"))
                for ours, transformers, original in (
                    ("conv", "convolution_projection_{}.convolution_projection.convolution", "conv_proj_{}.conv"),
                    ("norm", "convolution_projection_{}.convolution_projection.normalization", "conv_proj_{}.bn"),
                    ("proj", "projection_{}", "proj_{}"),
                )
            ),
            ("attn.proj", "attention.output.dense", "attn.proj"),
            ("norm2", "layernorm_after", "norm2"),
            ("mlp.fc1", "intermediate.dense", "mlp.fc1"),
            ("mlp.fc2", "output.dense", "mlp.fc2"),
        )
    ),
]  # fmt: skip
LEAVES = r"weight|bias|running_mean|running_var|num_batches_tracked"
CLASS_TOKEN = ("stages.{i}.cls_token", "cvt.encoder.stages.{i}.cls_token", "stage{i}.cls_token")
OURS, TRANSFORMERS, ORIGINAL = range(3)


def from_transformers(state_dict: State) -> State:
    """Names of ``CvtForImageClassification`` -> names of ``CvT``."""
    return _rename(state_dict, TRANSFORMERS, OURS)


def to_transformers(state_dict: State) -> State:
    """Names of ``CvT`` -> names of ``CvtForImageClassification``: the inverse of ``from_transformers``."""
    return _rename(state_dict, OURS, TRANSFORMERS)


def from_original(state_dict: State) -> State:
    """Names of the authors' release (``stage0.patch_embed.proj.weight``, ...) -> names of ``CvT``."""
    return _rename(state_dict, ORIGINAL, OURS)


def to_original(state_dict: State) -> State:
    """Names of ``CvT`` -> names of the authors' release: the inverse of ``from_original``."""
    return _rename(state_dict, OURS, ORIGINAL)


def _rename(state_dict: State, source: int, target: int) -> State:
    """The same tensors, in the same order, under the target's names; a name the source does not have is an error."""
    rules = [(_pattern(CLASS_TOKEN[source]), CLASS_TOKEN[target])]
    rules += [(_pattern(names[source] + ".{leaf}"), names[target] + ".{leaf}") for names in LAYERS]
    renamed = {}
    for name, tensor in state_dict.items():
        new = next((new.format(**match.groupdict()) for old, new in rules if (match := old.fullmatch(name))), None)
        if new is None:
            layout = ("this project's", "transformers'", "the original")[source]
            raise ValueError(f"{name!r} is not in {layout} CvT: check which layout the weights have")
        renamed[new] = tensor
    return renamed


def _pattern(template: str) -> re.Pattern[str]:
    pattern = re.escape(template)
    for field, values in (("i", r"\d+"), ("j", r"\d+"), ("leaf", LEAVES)):
        pattern = pattern.replace(rf"\{{{field}\}}", f"(?P<{field}>{values})")
    return re.compile(pattern)


if __name__ == "__main__":
    shiftvit.run(main, {"transformers": from_transformers, "original": from_original}, default_model="cvt_13")
