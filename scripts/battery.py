"""Measure a trained classifier: every number that the tables and figures need, as one JSON file.

python scripts/battery.py --model outputs/cifar10 --data uoft-cs/cifar10 --mixed_precision bf16 --json results/NAME.json

The file also gets recipe, settings, seed and seconds, from the ``results.json`` that training wrote beside the model.
"""

import argparse
from pathlib import Path

from accelerate import PartialState

import shiftvit
from common.evaluation.battery import FULL, battery_of
from common.evaluation.evaluate import CROP
from common.evaluation.flags import add_precision, add_split, count, whole
from common.evaluation.tables import format_table
from common.models.registry import MODEL_ARGUMENTS, parse_arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory, Hub id, or name of a checkpoint here")
    parser.add_argument("--data", required=True, help="'digits', a folder, or a Hub id")
    add_split(parser)
    parser.add_argument("--parts", nargs="+", choices=FULL, default=list(FULL), help="what to measure (all)")
    add_precision(parser)
    parser.add_argument("--batch_size", type=count, default=250, help="images at once (%(default)s)")
    parser.add_argument("--limit", type=count, help="use only the first images")
    parser.add_argument("--exact_images", type=count, default=1000, help="images whose bits are compared")
    parser.add_argument("--crop", **CROP)
    parser.add_argument("--compile", action="store_true", help="compile the model first")
    parser.add_argument("--seed", type=whole, default=0, help="of the random shifts (%(default)s)")
    parser.add_argument("--model_args", **MODEL_ARGUMENTS)
    parser.add_argument("--json", type=Path, help="file to write; a figure of token errors goes beside it")
    args = parser.parse_args()
    results = battery_of(args.model, args.data, mixed_precision=args.mixed_precision, compile=args.compile,
                         limit=args.limit, split=args.split, target=args.json,
                         arguments=parse_arguments(args.model_args), parts=tuple(args.parts),
                         batch_size=args.batch_size, exact_images=args.exact_images, crop=args.crop,
                         seed=args.seed)  # fmt: skip
    if not PartialState().is_main_process:
        return
    off = results.get("canonical_off", {})
    measured = {key: value for key, value in results.items() if isinstance(value, float) and "seconds" not in key}
    beside = {key: {"canonical anchor off": off.get(key, "-")} if off else {} for key in measured}
    if measured:
        print(format_table([{"measure": key, "percent": value, **beside[key]} for key, value in measured.items()]))
    for key in ("bits", "token_errors"):
        if key in results:
            print(format_table([{name: f"{value:.2g}" if isinstance(value, float) else value
                                 for name, value in row.items()} for row in results[key]]))  # fmt: skip
    if args.json:
        print(f"written to {args.json}")


if __name__ == "__main__":
    shiftvit.run(main)
