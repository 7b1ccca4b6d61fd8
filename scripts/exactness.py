"""Count how many images keep their logits to the bit, and their label, under random circular shifts.

For every model and precision: each image is classified at its place and at two random shifts, at equal batch size. For
segmenters, given as directories, logits are rolled back and all pixels must agree.

``python scripts/exactness.py --models a_swin_tiny swin_tiny --data DIR --images 1000 --precisions float32 bf16``
"""

import argparse
from functools import cache
from typing import Any

import torch

import shiftvit
from common import create_model, from_pretrained, list_models
from common.data.preprocess import PREPROCESSOR_NAME, Preprocess
from common.data.sources import load_evaluation
from common.evaluation.battery import first
from common.evaluation.exactness import PRECISIONS, count_identical
from common.evaluation.flags import add_device, count
from common.evaluation.tables import format_table, write_json
from common.models.hub import HubModel, resolve_file
from common.models.registry import MODEL_ARGUMENTS, is_fresh, parse_arguments
from segmentation import UperNet
from segmentation.data import load_evaluation as scenes_of
from segmentation.preprocess import ScenePreprocess
from segmentation.splits import EncodedScenes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list_models("*_micro", exclude_filters="upernet_*"),
                        help="directories, Hub ids, or names (of a checkpoint here; without one, random weights in "
                        "every layer)")  # fmt: skip
    parser.add_argument("--data", default="digits", help="'digits' or a folder; its evaluation split is used")
    parser.add_argument("--images", type=count, default=1000, help="images to classify")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["float32", "bf16"],
                        help="precisions of the forward passes")  # fmt: skip
    parser.add_argument("--batch_size", type=count, default=50, help="images at once")
    add_device(parser)
    parser.add_argument("--json", help="file to write the counts to")
    parser.add_argument("--model_args", **MODEL_ARGUMENTS)
    args = parser.parse_args()

    rows, arguments = [], parse_arguments(args.model_args)
    for name in args.models:
        model = load(name, **arguments).to(args.device)
        split = read(isinstance(model, UperNet), args.data)
        if isinstance(split, EncodedScenes):
            raise ValueError(f"{args.data} has scenes of several sizes, or too many for memory: give some of one size")
        if is_fresh(name):
            print(f"{name}: random weights in every layer, as no checkpoint here has this name")
            preprocess: Any = Preprocess(size=model.img_size, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))  # type: ignore
        else:
            kind = ScenePreprocess if isinstance(model, UperNet) else Preprocess
            preprocess = kind.load(resolve_file(name, PREPROCESSOR_NAME))
        images = first(split, args.images, preprocess, torch.device(args.device))
        for precision in args.precisions:
            same_bits, same_label = count_identical(model, images, preprocess, precision, args.batch_size)
            rows.append({"model": name, **arguments, "precision": precision, "device": device_name(args.device),
                         "images": len(images), "bit-identical": same_bits, "same label": same_label})  # fmt: skip
            if args.json:
                write_json(args.json, rows)  # after each count: nothing is lost if a later one fails
    print(format_table(rows))


@cache
def read(scenes: bool, data: str) -> Any:
    """The evaluation split, decoded once for all models."""
    return (scenes_of if scenes else load_evaluation)(data)


def load(name: str, **arguments: Any) -> HubModel:
    if is_fresh(name):
        torch.manual_seed(0)  # the same weights whatever models come before
        model = create_model(name, **arguments)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():  # initial weights tell images apart too little for a label to flip
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.1 * noise if parameter.ndim < 2 else noise / parameter[0].numel() ** 0.5)
    else:
        model = from_pretrained(name, **arguments)
    return model.eval()


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


if __name__ == "__main__":
    shiftvit.run(main)
