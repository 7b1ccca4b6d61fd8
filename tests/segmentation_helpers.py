"""What the tests of segmentation share: segmenters of random weights, and scenes in files."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from conftest import randomize
from PIL import Image
from torch import Tensor

from common import create_model
from segmentation import UperNet


def build(name: str, **kwargs: Any) -> UperNet:
    model = create_model(name, **{"drop_path_rate": 0.0, **kwargs})
    assert isinstance(model, UperNet)
    return randomize(model)


def balance(model: UperNet, x: Tensor) -> UperNet:
    """No class wins everywhere: random weights alone give masks of one colour."""
    with torch.no_grad():
        bias = model.decode_head.classifier.bias
        assert bias is not None
        bias -= model(x).mean((0, 2, 3))
    return model


def encode(pixels: np.ndarray, mode: str | None = None) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels, mode).save(buffer, "PNG")
    return buffer.getvalue()


def scene(seed: int, size: tuple[int, int] = (12, 16), classes: int = 5) -> tuple[bytes, bytes]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, size, dtype=np.uint8)
    return encode(generator.integers(0, 256, (*size, 3), dtype=np.uint8)), encode(labels)


def write_parquet(path: Path, scenes: list[tuple[bytes, bytes]], label: str = "label") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"image": [{"bytes": image, "path": None} for image, _ in scenes],
               label: [{"bytes": labels, "path": None} for _, labels in scenes]}  # fmt: skip
    pq.write_table(pa.table(columns), path)
