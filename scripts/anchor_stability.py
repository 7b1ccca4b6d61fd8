"""How often does an anchor stay with the content of an image under a standard shift, where new pixels come in?

python scripts/anchor_stability.py --data DIR --images 500 --sizes 32 224

No model is trained: the patch embeddings have fresh weights, the same for all scores. Each image is shifted with zeros
by up to an eighth of its side; an anchor that follows the content picks the phase that moved along. Circular shifts
always do. By chance a phase is right in 1 / stride^2 of the cases.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

import shiftvit
from common.anchors import SCORES, ConvAnchor
from common.data import Preprocess
from common.data.sources import load_evaluation
from common.evaluation.battery import first
from common.evaluation.flags import add_device, count
from common.evaluation.tables import format_table, write_json
from common.shifts import random_shifts, standard_shift


@torch.no_grad()
def stability(anchor: ConvAnchor, conv: nn.Conv2d, images: Tensor, pairs: int) -> float:
    """Percent of (image, shift) pairs whose phase moves with the content."""
    stride, reach, index = conv.stride[0], images.shape[2] // 8, torch.arange(len(images), device=images.device)
    before, kept = anchor(images, conv)[1], 0
    for pair in range(pairs):
        shift = random_shifts(index, (-reach, -reach), (reach, reach), pair)
        after = anchor(standard_shift(images, shift), conv)[1]
        kept += int((after == (before + shift) % stride).all(1).sum())
    return 100 * kept / (pairs * len(images))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="'digits', a folder, or a Hub id")
    parser.add_argument("--images", type=count, default=500, help="images of the evaluation split (%(default)s)")
    parser.add_argument("--sizes", type=count, nargs="+", default=[32], help="sides that images are resized to (32)")
    parser.add_argument("--strides", type=count, nargs="+", default=[2, 4], help="strides of the grids (2 4)")
    parser.add_argument("--pairs", type=count, default=4, help="shifts of each image")
    add_device(parser)
    parser.add_argument("--json", type=Path, help="file to write the table to")
    args = parser.parse_args()
    split = load_evaluation(args.data).head(args.images)
    rows = []
    for size in args.sizes:
        preprocess = Preprocess(size=(size, size))
        images = preprocess.evaluate(first(split, args.images, preprocess, torch.device(args.device)))
        for stride in args.strides:
            torch.manual_seed(0)
            conv = nn.Conv2d(3, 64, stride, stride).to(args.device)
            row: dict[str, object] = {"side": size, "stride": stride, "chance": round(100 / stride**2, 1)}
            for name in tqdm(SCORES, desc=f"{size} px, stride {stride}", leave=False):
                row[name] = round(stability(ConvAnchor(score=name).to(args.device), conv, images, args.pairs), 1)
            rows.append(row)
    print(format_table(rows))
    if args.json:
        write_json(args.json, {"data": args.data, "images": len(split), "pairs": args.pairs, "rows": rows})


if __name__ == "__main__":
    shiftvit.run(main)
