"""The main job on embedded data: train the default and the adaptive micro model on handwritten digits, measure how
often each keeps its label when the image moves, and draw it. Four to five minutes on two cores."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import shiftvit
from common import from_pretrained
from common.data.preprocess import Preprocess
from common.data.sources import load_data
from common.evaluation.evaluate import evaluate
from common.evaluation.flags import count
from common.evaluation.metrics import c_cons, predict
from common.evaluation.tables import format_table, write_json
from swin.recipes import RECIPES

NAMES = ("swin_micro", "a_swin_micro")
METRICS = ("top1", "c_cons", "c_cons_worst@4", "s_cons")
SHIFTS = ((0, 0), (0, 1), (1, 0), (2, 3), (5, 1), (9, 13), (16, 16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"), help="where models and picture go")
    parser.add_argument("--epochs", type=count, default=45, help=f"the recipe has {RECIPES['digits'].epochs}")
    args = parser.parse_args()

    train_side_by_side(args.output_dir, args.epochs)
    models = {name: from_pretrained(str(args.output_dir / name)) for name in NAMES}
    rows = []
    _, test = load_data("digits")
    preprocess = Preprocess(size=models["swin_micro"].img_size, mean=RECIPES["digits"].mean, std=RECIPES["digits"].std)  # type: ignore[arg-type]
    images = preprocess.evaluate(test.images)
    for name, model in models.items():
        measured = evaluate(model, test, preprocess, METRICS, batch_size=180)
        rows.append({"model": name, **{key: measured[key] for key in METRICS},
                     "parameters": sum(p.numel() for p in model.parameters())})  # fmt: skip
    draw(models, images, test.labels, args.output_dir / "demo.png")
    write_json(args.output_dir / "demo.json", rows)
    print(format_table(rows))
    print(f"percent, {len(test)} held-out digits; c_cons_worst@4: one label for all 16 shifts of 0 to 3 px")
    print(f"picture: {args.output_dir / 'demo.png'}")


def train_side_by_side(output: Path, epochs: int) -> None:
    """Both models at once, one process and one thread each, so that two cores are busy and the bits are the same."""
    root = Path(__file__).resolve().parents[1]
    processes = []
    for position, name in enumerate(NAMES):
        command = [sys.executable, "swin/train.py", "--model", name, "--epochs", str(epochs),
                   "--eval_every", str(epochs),  # once, at the end
                   "--output_dir", str((output / name).resolve()), "--resume_from_checkpoint", "latest"]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "TQDM_POSITION": str(position)}
        processes.append(subprocess.Popen(command, cwd=root, env=environment))
    if any(process.wait() for process in processes):
        raise SystemExit("training failed: see the messages above")


@torch.no_grad()
def draw(models: dict, images: Tensor, labels: Tensor, target: Path) -> None:
    """Top: one digit at several shifts with both models' labels. Bottom: consistency against the size of the shift."""
    wrong = torch.stack([predict(models["swin_micro"], images.roll(shift, (2, 3))) != labels for shift in SHIFTS])
    sure = [model(images).softmax(-1)[torch.arange(len(labels)), labels] for model in models.values()]
    often = wrong.sum(0) >= min(4, int(wrong.sum(0).max()))
    chosen = int((torch.stack(sure).amin(0) * often).argmax())  # both are sure in place, the default only there
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    top.suptitle(f"the digit {int(labels[chosen])}, moved down and right by so many pixels; what leaves comes back")
    for axis, shift in zip(top.subplots(1, len(SHIFTS)), SHIFTS, strict=True):
        image = images[chosen : chosen + 1].roll(shift, (2, 3))
        axis.imshow(image[0, 0], cmap="gray")
        axis.set(xticks=[], yticks=[], title=f"{shift[0]}, {shift[1]}", xlabel=" \n ")
        for line, (name, model) in enumerate(models.items()):
            said, kind = int(predict(model, image)), "adaptive" if name.startswith("a_") else "default"
            axis.text(0.5, -0.1 - 0.13 * line, f"{kind}: {said}", transform=axis.transAxes, ha="center", va="center",
                      color="forestgreen" if said == labels[chosen] else "firebrick")  # fmt: skip
    axis = bottom.subplots()
    reaches = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 31]
    for name, model in models.items():
        values = [c_cons(model, images, max_shift=reach) for reach in reaches]
        axis.plot(reaches, values, marker="o", label=f"{'adaptive' if name.startswith('a_') else 'default'} ({name})")
    axis.set(xlabel="largest circular shift (px)", ylabel="C-Cons (%)", ylim=(0, 104))
    axis.legend(frameon=False, loc="lower left")
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    shiftvit.run(main)
