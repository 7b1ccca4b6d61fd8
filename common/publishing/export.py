"""Models as files that run without this code: ``torch.export`` (.pt2) and ONNX (.onnx), with any batch size.

An adaptive model stays exact in the graph: the canonical anchor is integer arithmetic, whatever the runtime, so all
shifted copies of an image are one array there, too. ``check_exported`` counts that. Tracing happens on the CPU, where
models use plain torch operations and none of the kernels of ``common.kernels``.

A .onnx file is data. A .pt2 file is loaded through pickle by torch: load only files that you trust.
"""

import copy
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.exc import UserError
from torch.fx import GraphModule
from tqdm.auto import tqdm

from ..shifts import random_shifts, roll

__all__ = ["FORMATS", "Check", "Normalised", "check_exported", "export_model", "load_exported"]

FORMATS = {"torch_export": ".pt2", "onnx": ".onnx"}
TOLERANCE = 1e-4  # of the largest logit: what another runtime's rounding may change


class Normalised(nn.Module):
    """A model with its normalisation in front: uint8 images (B, C, H, W) of the model's size -> its output."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.model = model
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        dtype = next((p.dtype for p in self.model.parameters()), torch.float32)
        return self.model(((images.float() / 255 - self.mean) / self.std).to(dtype))


def export_model(model: nn.Module, images: Tensor, target: str | os.PathLike[str], *, opset: int | None = None,
                 metadata: Mapping[str, Any] | None = None) -> Path:  # fmt: skip
    """Write ``model`` (a copy of it on the CPU, in eval mode) as the format that the suffix of ``target`` names.

    ``images`` is an example: the file takes images of its sides and dtype, in batches of any size. ``opset`` is ONNX's,
    None for the one that torch recommends. ``metadata`` goes along as JSON, in a .pt2 file as extra files. The file
    appears whole or not at all, and names no path of the machine that wrote it.
    """
    target = Path(target)
    if target.suffix not in FORMATS.values():
        raise ValueError(f"cannot tell the format of {target}: its name must end in {' or '.join(FORMATS.values())}")
    if opset is not None and target.suffix != ".onnx":
        raise ValueError(f"opset {opset} is a version of ONNX, but {target} is not an ONNX file: leave it out")
    if target.suffix == ".onnx" and any(p.dtype == torch.bfloat16 for p in model.parameters()):
        raise ValueError("ONNX runtimes do not convolve in bfloat16: export the model in float32 or float16")
    example = torch.zeros(2, *images.shape[1:], dtype=images.dtype)  # a batch of one would be taken for a constant
    program = trace(copy.deepcopy(model).cpu().eval(), example)
    texts = {name: json.dumps(value, default=str) for name, value in (metadata or {}).items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as directory:
        written = Path(directory) / target.name
        if target.suffix == ".onnx":
            _save_onnx(program, written, opset, texts)
        else:
            torch.export.save(program, written, extra_files={f"{name}.json": text for name, text in texts.items()})
        os.replace(written, target)
    return target


def trace(model: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    """The graph of ``model`` for batches of any size, without the lines of code that it came from."""
    arguments: Any = {"args": (images,), "dynamic_shapes": ({0: torch.export.Dim("batch", min=1)},)}
    with torch.no_grad():
        try:
            program = torch.export.export(model, **arguments, strict=False)
        except UserError:  # code that asks for len(x) fixes the batch size, unless Python itself is traced, more slowly
            program = torch.export.export(model, **arguments, strict=True)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def _save_onnx(program: torch.export.ExportedProgram, target: Path, opset: int | None, texts: dict[str, str]) -> None:
    _import("onnxscript")
    with _quiet("onnxscript", "onnx_ir", "torch.onnx"):
        exported = torch.onnx.export(program, dynamo=True, verbose=False, input_names=["images"],
                                     output_names=["logits"], opset_version=opset,
                                     dynamic_shapes=({0: "batch"},))  # fmt: skip
    assert exported is not None
    if opset is not None and (reached := exported.model.opset_imports.get("")) != opset:
        raise ValueError(f"torch cannot write opset {opset}, it stayed at {reached}: choose another (18 to 25 are "
                         "known to work), or leave it out")  # fmt: skip
    exported.model.metadata_props.update(texts)
    exported.save(target, external_data=False)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """The exporter reports every step it skips; what matters is raised."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _import(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        raise ImportError(f"ONNX files are written and run with {name}: pip install "
                          "'shift-equivariant-vits[export]'") from None  # fmt: skip


def load_exported(path: str | os.PathLike[str]) -> Callable[[Tensor], Tensor]:
    """An exported file as a function of images: a .onnx file in onnxruntime on the CPU, a .pt2 file in torch."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no exported model {path}: write it with scripts/export.py")
    if path.suffix == ".pt2":
        return torch.export.load(path).module()
    runtime = _import("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


class Check(NamedTuple):
    """What ``check_exported`` counted."""

    images: int
    same_label: int  # images that get the model's label (a segmenter: in every pixel but near ties)
    difference: float  # largest, of logits, over the largest logit
    copies: int  # shifted images
    label_kept: int  # of them, with the label of the image in place
    bit_identical: int  # of them, with its very logits

    def problems(self, adaptive: bool) -> list[str]:
        """Why the file must not be used; a default model may change its label under shifts."""
        found = []
        if self.same_label < self.images:
            found.append(f"{self.images - self.same_label} of {self.images} images get another label than the model's")
        if not self.difference <= TOLERANCE:
            found.append(f"logits differ from the model's by {self.difference:.1e} of the largest, more than "
                         f"{TOLERANCE:.0e}")  # fmt: skip
        if adaptive and self.label_kept < self.copies:
            found.append(f"{self.copies - self.label_kept} of {self.copies} shifted images change their label")
        return found


@torch.no_grad()
def check_exported(run: Callable[[Tensor], Tensor], model: nn.Module, images: Tensor, *, shifts: int = 8,
                   seed: int = 0, progress: bool = False) -> Check:  # fmt: skip
    """Compare an exported file with the model it was made from, and with itself under ``shifts`` circular shifts of
    every image, random over the whole torus. Also runs a single image: the batch size is free.

    Logits agree to rounding, unless an image has two anchors that tie to rounding: another runtime may take the other.
    """
    expected, found = model(images), run(images)
    scale = expected.abs().max().clamp_min(1)
    alone = run(images[:1])
    difference = max((found - expected).abs().max(), (alone - expected[:1]).abs().max()) / scale
    # how much lower the model rates the other label: up to twice the tolerance it is rounding
    short = expected.amax(1, keepdim=True) - expected.gather(1, found.argmax(1, keepdim=True))
    same = (short <= 2 * TOLERANCE * scale).flatten(1).all(1)
    index, kept, bits = torch.arange(len(images)), 0, 0
    for k in tqdm(range(shifts), desc="shifts", leave=False, disable=not progress):
        offset = random_shifts(index, (0, 0), (images.shape[2] - 1, images.shape[3] - 1), seed, k)
        moved = run(roll(images, offset))
        moved = roll(moved, -offset) if moved.ndim == 4 else moved
        kept += int((moved.argmax(1) == found.argmax(1)).view(len(images), -1).all(1).sum())
        bits += int((moved == found).flatten(1).all(1).sum())
    return Check(len(images), int(same.sum()), float(difference), shifts * len(images), kept, bits)
