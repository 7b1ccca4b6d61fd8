"""How many images keep their logits to the bit, and their label, under random circular shifts."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..shifts import random_shifts, roll
from .metrics import highest, same_labels

__all__ = ["PRECISIONS", "count_identical"]

PRECISIONS = {"float32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@torch.no_grad()
def count_identical(model: nn.Module, images: Tensor, preprocess: Any, precision: str,
                    batch_size: int) -> tuple[int, int]:  # fmt: skip
    """Images whose logits are bit-identical, and whose label (of every pixel) is the same, at their place and at two
    random shifts, at equal batch size. Logits of a segmenter are rolled back first."""
    dtype = PRECISIONS[precision]
    autocast: Any = torch.autocast(images.device.type, dtype) if dtype else contextlib.nullcontext()
    same_bits = same_label = 0
    for start in tqdm(range(0, len(images), batch_size), desc=f"bits in {precision}", leave=False):
        index = torch.arange(start, min(start + batch_size, len(images)), device=images.device)
        x = preprocess.evaluate(images[index])
        with autocast, tf32(precision == "tf32"):
            first = model(x)
            bits, labels = torch.ones(len(x), dtype=torch.bool, device=x.device), [highest(first)]
            for seed in (1, 2):
                offset = random_shifts(index, (0, 0), (x.shape[2] - 1, x.shape[3] - 1), seed)
                moved = model(roll(x, offset))
                moved = roll(moved, -offset) if first.ndim == 4 else moved
                bits = bits & (moved == first).flatten(1).all(1)
                labels.append(highest(moved))
        same_bits += int(bits.sum())
        same_label += int(same_labels(*labels).view(len(x), -1).all(1).sum())
    return same_bits, same_label


@contextlib.contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Switch TensorFloat-32 on or off inside this context."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
