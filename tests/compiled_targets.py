"""Kernels compiled for cards that are not here: Triton needs no GPU for that, and says how much memory each takes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.kernels import canonical, convolving, image_conv, merging, token_scores

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64",
         torch.int32: "*i32"}  # fmt: skip
OPTIONS = "num_warps", "num_stages"


class Launch(NamedTuple):
    """What a kernel is launched with."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]


def shared_memory(launch: Launch, capability: int) -> int:
    """Bytes that a program of it takes on a card of this capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [parameter.name for parameter in launch.kernel.params]
    constants = {name: value for name, value in launch.constants.items() if name not in OPTIONS}
    signature, attributes = dict.fromkeys(names, "constexpr"), {}
    for i, (name, value) in enumerate(zip(names, launch.args, strict=False)):
        if isinstance(value, Tensor):
            signature[name] = NAMES[value.dtype]
        elif value == 1:
            constants[name] = 1
            continue
        else:
            signature[name] = "i32"
        if isinstance(value, Tensor) or value % 16 == 0:
            attributes[i,] = [["tt.divisibility", 16]]
    options = {name: launch.constants[name] for name in OPTIONS if name in launch.constants}
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared


class Case(NamedTuple):
    """A launch, and the bytes that our own count says it takes: held, of a stage, and stages."""

    launch: Launch
    memory: tuple[int, ...]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def cases(monkeypatch: Any, dtype: torch.dtype) -> dict[str, Case]:
    """Kernels that take much memory, at shapes of the full-size models, 128 images."""
    launched: list[Launch] = []
    for module in (canonical, token_scores, merging, image_conv, convolving):
        monkeypatch.setattr(module, "launch", lambda kernel, _, *args, **c: launched.append(Launch(kernel, args, c)))
    four, found = empty(4), {}

    def add(name: str, memory: tuple[int, ...]) -> None:
        found[name] = Case(launched[-1], memory)

    for side in (224, 256):
        canonical.canonical_place(empty(128, 3, side, side), empty(2, side, dtype=torch.int32), None, [])
        add(f"choose {side}", (canonical.choose_memory(256, 256),))
    for c, side in ((96, 56), (192, 28), (384, 14)):
        x, known = empty(128, side, side, c, dtype=dtype), empty(128, side, side)
        token_scores.token_scores(x, empty(2 * c, 32, dtype=dtype), four, four, four, known, known, 2, 2, 1e-5)
        add(f"scores of patches {c}", token_scores.scores_memory(c, 2))
        merging.merged_product(x, empty(128, 2, dtype=torch.int64), empty(2 * c, 4 * c, dtype=dtype), empty(2, 2 * c),
                               known, known, 1e-5)  # fmt: skip
        tiles = {name: launched[-1].constants[name] for name in ("T", "MORE", "N", "REST", "K", "num_stages")}
        add(f"merged product {c}", merging.product_memory(tiles))
    for c, side, stride in ((64, 56, 2), (96, 56, 4), (192, 28, 2), (384, 14, 2)):
        x = empty(128, side, side, c, dtype=dtype)
        token_scores.token_scores(x, empty(2 * c, 64, dtype=dtype), four, four, None, None, None, 3, stride, 0.0)
        add(f"scores of tokens {c}", (token_scores.rows_memory if c <= 128 else token_scores.scores_memory)(c, 3))
    for c, outputs, side in ((64, 192, 56), (192, 384, 28)):
        convolving.convolved(empty(128, side, side, c, dtype=dtype), empty(128, 2, dtype=torch.int64),
                             empty(outputs, 3, 3, c, dtype=dtype), empty(outputs))  # fmt: skip
        add(f"convolved {c}", convolving.convolved_memory(c, outputs))
    for size, padding, outputs in ((4, 0, 96), (7, 2, 64), (7, 3, 96)):
        x = empty(128, 224, 224, 4, dtype=dtype).permute(0, 3, 1, 2)[:, :3]
        x = empty(128, 3, 224, 224) if size == 4 else x  # windows that do not overlap are read where they lie
        given = empty(128, 2, dtype=torch.int64), empty(outputs), empty(outputs)
        cut = image_conv._pieces(3, size > 4, size, 4, outputs, image_conv.TOKENS)
        weights = empty(image_conv._length(cut) * cut["BANDS"], outputs, dtype=dtype)
        image_conv.image_tokens(x, given[0], weights, *given[1:], given[2], 1e-5, None, size, 4, padding, True)
        add(f"image tokens {size} {outputs}", (image_conv._memory(outputs, image_conv.TOKENS, cut, size > 4),))
        x, size = empty(128, 224, 224, 4, dtype=dtype).permute(0, 3, 1, 2)[:, :3], size + 3
        cut = image_conv._pieces(3, True, size, 4, 64, image_conv.PHASES)
        weights = empty(image_conv._length(cut) * cut["BANDS"], 64, dtype=dtype)
        image_conv.image_phases(x, given[0], weights, four, four, size, 4, padding)
        add(f"image phases {size}", (image_conv._memory(64, image_conv.PHASES, cut, True),))
    return found
