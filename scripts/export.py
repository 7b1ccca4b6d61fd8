"""Export a model to a file that runs without this repository, then check the file: same labels as the model, and still
exactly shift-invariant.

``python scripts/export.py --model swin/checkpoints/a_swin_micro --format onnx``

The file takes batches of any size of normalised float images named ``images`` and gives ``logits``; its metadata hold
the model's config, the names of its classes (``id2label``), its normalisation, its size and what images are resized to
before they are cropped to that (``resize``, null: they are not cropped). The check runs it on handwritten
digits (onnxruntime on the CPU for ONNX, torch for torch.export), in place and under random circular shifts. Needs
``pip install 'shift-equivariant-vits[export]'``.
"""

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shiftvit
from common import create_model, from_pretrained
from common.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, PREPROCESSOR_NAME, Preprocess
from common.data.splits import load_digits_data
from common.evaluation.evaluate import warn_of_fresh_weights
from common.evaluation.flags import count, whole
from common.evaluation.tables import format_table, write_json
from common.models.hub import HubModel
from common.models.registry import is_fresh
from common.publishing.export import FORMATS, Normalised, check_exported, export_model, load_exported


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory, Hub id, or name (of a checkpoint here; without one, "
                        "fresh weights)")  # fmt: skip
    parser.add_argument("--format", choices=FORMATS, required=True, help="format of the file")
    parser.add_argument("--output", type=Path, help="file to write; default: outputs/export/MODEL.pt2 or .onnx")
    parser.add_argument("--opset", type=count, help="of ONNX, 18 to 25; default: the one that torch recommends")
    parser.add_argument("--img_size", type=count, nargs="+", metavar="SIDE", help="side, or height and width, of the "
                        "images that the file takes; default: what the model was built for")  # fmt: skip
    parser.add_argument("--with_preprocessing", action="store_true",
                        help="take uint8 images of that size: the normalisation becomes part of the graph")  # fmt: skip
    parser.add_argument("--check", type=whole, default=32, metavar="N", help="digits to check on, 0 for no check (32)")
    parser.add_argument("--shifts", type=count, default=8, help="random shifts of each digit (8)")
    parser.add_argument("--json", help="file to write the counts to")
    args = parser.parse_args(arguments)
    suffix = FORMATS[args.format]
    target = args.output or Path("outputs/export") / f"{Path(args.model).resolve().name}{suffix}"
    if target.suffix != suffix:
        parser.error(f"--format {args.format} is written to a {suffix} file, not to {target}")
    if args.img_size and len(args.img_size) > 2:
        parser.error(f"--img_size takes a side, or height and width, got {args.img_size}")

    model, normalisation = load(args.model)
    size: Any = model.img_size if args.img_size is None else (args.img_size[0], args.img_size[-1])
    model.check_size(size)  # type: ignore[operator]
    digits = load_digits_data()[1].images
    if not 0 <= args.check <= len(digits):
        parser.error(f"--check {args.check}: there are {len(digits)} digits to check on")
    if model.in_chans == 3:
        images = Preprocess(size=size, **normalisation).evaluate(digits[: max(args.check, 1)])
    elif args.with_preprocessing:
        parser.error(f"--with_preprocessing needs a model of three channels, this one has {model.in_chans}")
    else:
        images = torch.randn(max(args.check, 1), model.in_chans, *size, generator=torch.Generator().manual_seed(0))
    network: nn.Module = model
    if args.with_preprocessing:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in normalisation.values())
        images = ((images * std + mean) * 255).round().clamp(0, 255).byte()
        network = Normalised(model, **normalisation).eval()
    print(f"tracing {args.model} at {size[0]}x{size[1]} and writing {target}", flush=True)
    stored = model.stored_input or {}
    crops = isinstance(stored.get("resize"), int) and tuple(stored["size"]) == tuple(size)  # a segmenter never does
    metadata = {"config": model.stored_config(),
                "preprocess": {"size": size, "resize": stored["resize"] if crops else None, **normalisation,
                               "in_graph": args.with_preprocessing}}  # fmt: skip
    export_model(network, images, target, opset=args.opset, metadata=metadata)
    results: dict[str, Any] = {"file": str(target), "format": describe(target), "MB": target.stat().st_size / 1e6}
    problems = []
    if args.check:
        check = check_exported(load_exported(target), network, images, shifts=args.shifts, progress=True)
        results |= {"images": check.images, "same label": check.same_label,
                    "difference": check.difference, "shifted copies": check.copies,
                    "label kept": check.label_kept, "bit-identical": check.bit_identical}  # fmt: skip
        problems = check.problems(adaptive=bool(model.adaptive))
    print(format_table([{key: f"{value:.1e}" if key == "difference" else value for key, value in results.items()}]))
    if args.json:
        write_json(args.json, {"model": args.model, **results, "problems": problems})
    if problems:
        raise SystemExit(f"do not use {target}: {'; '.join(problems)}")
    return results


def load(source: str) -> tuple[HubModel, dict[str, Any]]:
    """A model and the mean and std that its images are normalised with (ImageNet's where none are stored)."""
    normalisation: dict[str, Any] = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    if is_fresh(source):
        warn_of_fresh_weights(source)
        torch.manual_seed(0)
        return create_model(source).eval(), normalisation
    model = from_pretrained(source)
    if model.stored_input is None:
        warnings.warn(f"{source} has no {PREPROCESSOR_NAME}: the file will say that images are normalised as "
                      "ImageNet's", stacklevel=2)  # fmt: skip
        return model, normalisation
    return model, {key: model.stored_input.get(key, value) for key, value in normalisation.items()}


def describe(target: Path) -> str:
    if target.suffix != ".onnx":
        return "torch.export"
    import onnx

    return f"ONNX, opset {onnx.load_model(target).opset_import[0].version}"


if __name__ == "__main__":
    shiftvit.run(main)
