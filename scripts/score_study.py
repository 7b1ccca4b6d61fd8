"""What should an anchor look at? Small models of all four architectures on CIFAR-10 at its own 32 px, trained with
every score, several seeds each, beside the default model and beside the canonical anchor alone.

python scripts/score_study.py --data DIR                      # everything: hours of GPU time, resumable
python scripts/score_study.py --data DIR --families swin --variants default fixed --seeds 0 --epochs 2 --jobs 1

Runs go side by side in ``--jobs`` processes (one GPU shares well under ``nvidia-cuda-mps-control -d``). A run writes
its JSON when it ends, and is not repeated; ``--budget`` stops the study after so many seconds.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
import traceback
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from tqdm.auto import tqdm

import shiftvit
from common.anchors import observed_scores
from common.data.sources import load_data
from common.data.splits import Split
from common.evaluation.battery import canonical_off
from common.evaluation.flags import count, whole
from common.evaluation.tables import format_table, write_json
from common.training.engine import train
from common.training.recipe import Recipe, RunOptions
from common.training.task import Classification

FAMILIES = ("swin", "swinv2", "cvt", "mvitv2")
SCORES: dict[str, dict[str, Any]] = {
    "energy": {"score": "energy", "sketch": 0},
    "signed": {"score": "signed", "sketch": 4},
    "fixed": {"score": "fixed"},
    "peak": {"score": "peak"},
}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "canonical alone": {"anchors": (), "canonical": True},
    **{name: {**arguments, "canonical": True} for name, arguments in SCORES.items()},
    **{f"{name}, off": {**arguments, "canonical": False} for name, arguments in SCORES.items()},
}
"""Arguments of the adaptive model; None for the default one. ", off": without the canonical anchor, in training too."""

RECIPE = Recipe(model="", epochs=12, batch_size=256, lr=1e-3, lr_batch=0, warmup_epochs=2, warmup_lr=1e-5, min_lr=1e-5,
                label_smoothing=0.1, flip=True, mean=(0.491, 0.482, 0.447), std=(0.247, 0.243, 0.262))  # fmt: skip
SHAPE = {"depths": (2, 4, 2)}  # 2.4 to 2.9 M parameters, with which the study was measured
SHAPES = {"swin": {**SHAPE, "embed_dim": 64, "num_heads": (2, 4, 8)}}  # the others have such widths by default
WATCHED = 512  # test images whose anchors are looked at after every epoch


class Study(Classification):
    """Training as everywhere; after every epoch, where the grids of some images begin, and at the end how near the
    second best choice was and what is left without the canonical anchor."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.epochs = 0  # seen so far
        self.places: list[Tensor] = []  # stages, images, 2: one per epoch

    def read(self) -> tuple[Split, Split]:
        return splits(self.recipe.data)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        watched: dict[str, Any] = {}
        self.epochs += 1
        if self.model.adaptive:
            self.places.append(self.look(model, WATCHED)[1])
        if self.epochs < self.recipe.epochs:
            return {}
        if self.model.adaptive:
            moved = [(now != before).any(-1).float().mean().item() for before, now in
                     zip(self.places, self.places[1:], strict=False)]  # fmt: skip
            half = len(moved) // 2
            watched["moved_early"], watched["moved_late"] = (100 * statistics.mean(part) if part else None
                                                             for part in (moved[:half], moved[half:]))  # fmt: skip
            with torch.autocast(self.accelerator.device.type, torch.bfloat16):  # whatever it was trained in
                low, _ = self.look(model, WATCHED)
            watched |= gaps(self.look(model, WATCHED)[0], "float32") | gaps(low, "bf16")
        results = super().evaluate(model)
        if self.model.adaptive and self.model.canonical:
            with canonical_off(model):
                off = super().evaluate(model)
            watched |= {"top1_off": off["top1"], "c_cons_off": off["c_cons"]}
        return results | watched

    def look(self, model: Any, count: int) -> tuple[list[Tensor], Tensor]:
        """Tables of scores that anchors choose by, and the offsets (stages, images, 2) of all grids."""
        images = self.preprocess.evaluate(self.test_split.images[:count])  # type: ignore[attr-defined]
        with observed_scores() as scores:
            stages = model.forward_intermediates(images, intermediates_only=True, return_offsets=True)
        side = torch.tensor(images.shape[2:], device=images.device)
        return scores, torch.stack([offset % side for _, offset in stages])

    def save(self, directory: Path, state: dict[str, Tensor]) -> None:
        """Nothing: what a study needs of a model is measured at once."""

    def confirm(self, directory: Path, results: dict[str, Any]) -> None:
        """Nothing, as nothing is saved."""


@cache
def splits(data: str) -> tuple[Split, Split]:
    train, test = load_data(data)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return train.to(torch.device(device)), test.to(torch.device(device))


def gaps(tables: list[Tensor], precision: str) -> dict[str, float]:
    """How far the best score is above the second, relative to it, over all anchors: median and lowest hundredth."""
    if not tables:
        return {}
    tops = torch.cat([table.double().flatten(1).topk(2).values for table in tables])
    gap = (tops[:, 0] - tops[:, 1]) / tops[:, 0].abs().clamp_min(1e-300)
    return {f"gap_{precision}": gap.median().item(), f"gap_1%_{precision}": gap.quantile(0.01).item()}


def run(family: str, variant: str, seed: int, args: argparse.Namespace) -> None:
    arguments = VARIANTS[variant]
    model = f"{family}_mini" if arguments is None else f"a_{family}_mini"
    recipe = Recipe(**{**RECIPE.settings(), "model": model, "data": args.data, "seed": seed, "epochs": args.epochs,
                       "warmup_epochs": args.epochs / 8, "model_args": SHAPES.get(family, SHAPE) | (arguments or {}),
                       "batch_size": min(RECIPE.batch_size, args.limit or RECIPE.batch_size)})  # fmt: skip
    output = args.output_dir / name_of(family, variant, seed)
    results = train("score_study", recipe, RunOptions(output_dir=str(output), compile=args.compile, eval_every=1,
                                                      eval_batch_size=1000, limit=args.limit, report_to="none",
                                                      overwrite_output_dir=True, checkpointing_minutes=0,
                                                      mixed_precision=args.mixed_precision), Study)  # fmt: skip
    if "stopped_at" in results:  # by a signal, which is meant for all runs
        raise KeyboardInterrupt
    write_json(args.output_dir / f"{name_of(family, variant, seed)}.json",
               {"family": family, "variant": variant, "seed": seed, "limit": args.limit, "data": Path(args.data).name,
                **results})  # fmt: skip


def name_of(family: str, variant: str, seed: int) -> str:
    return f"{family}-{variant.replace(', ', '-').replace(' ', '-')}-{seed}"


def work(queue: Any, args: argparse.Namespace, until: float) -> None:
    """A worker: run after run until none is left or time is up. A run that fails says so, and the next begins."""
    torch.set_num_threads(1)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    log = (args.output_dir / f"worker-{os.getpid()}.log").open("w", buffering=1)
    with log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        while time.time() < until:
            try:
                family, variant, seeds = queue.get_nowait()
            except Exception:  # nothing left
                return
            for seed in seeds:
                try:
                    if time.time() < until:
                        run(family, variant, seed, args)
                except Exception:
                    traceback.print_exc()
            torch.compiler.reset()


def finished(path: Path, asked: dict[str, Any]) -> bool:
    """Whether this is the result of a run as it is asked for: of these data (older results do not say which), of so
    many epochs and images, in this precision."""
    result = json.loads(path.read_text()) if path.exists() else {}
    known = {"data": asked.get("data"), **result}
    return "variant" in result and all(known.get(key) == value for key, value in asked.items())


def summary(directory: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per family and variant, of runs as they are asked for: means over seeds, and the deviation of top-1."""
    groups = defaultdict(list)
    for path in sorted(directory.glob("*.json")):
        if finished(path, asked):
            result = json.loads(path.read_text())
            groups[result["family"], result["variant"]].append(result)
    rows = []
    for family in FAMILIES:
        for variant in VARIANTS:
            runs = groups.get((family, variant))
            if not runs:
                continue
            row: dict[str, Any] = {"family": family, "variant": variant, "seeds": len(runs)}
            for key in ("top1", "c_cons", "s_cons", "top1_off", "c_cons_off", "moved_early", "moved_late",
                        "gap_float32", "gap_1%_float32", "gap_bf16", "gap_1%_bf16"):  # fmt: skip
                values = [run[key] for run in runs if run.get(key) is not None]
                if values and key.startswith("gap"):  # in millionths of the best score
                    row[f"{key}_ppm"] = round(1e6 * statistics.mean(values), 2)
                elif values:
                    row[key] = round(statistics.mean(values), 2)
                if key == "top1":
                    row["deviation"] = round(statistics.stdev(values), 2) if len(values) > 1 else None
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10: a folder of parquet files, or uoft-cs/cifar10")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="architectures (all)")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="scores to train with (all)"
    )
    parser.add_argument("--seeds", nargs="+", type=whole, default=[0, 1, 2], help="one training each (0 1 2)")
    parser.add_argument(
        "--epochs", type=count, default=RECIPE.epochs, help="passes over the training images (%(default)s)"
    )
    parser.add_argument("--jobs", type=count, default=8, help="runs side by side")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds, after which no run begins")
    parser.add_argument("--limit", type=count, help="use only the first images of each split")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available(), help="compile the models"
    )
    parser.add_argument(
        "--mixed_precision", choices=("no", "bf16", "fp16"), default="bf16", help="precision of training (%(default)s)"
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/scores"), help="where the runs go (%(default)s)"
    )
    parser.add_argument("--summary", action="store_true", help="run nothing: print the table of what there is")
    parser.add_argument("--json", type=Path, help="file to write the summary to")
    args = parser.parse_args()
    if not args.summary:
        load_data(args.data)  # now: else every run fails, in a log of its own
    context = mp.get_context("spawn")
    queue, missing = context.Queue(), list[Path]()
    data = Path(args.data).name  # wherever the folder is
    asked = {"data": data, "epochs": args.epochs, "limit": args.limit, "precision": args.mixed_precision}
    for variant in args.variants:
        for family in args.families:
            paths = {seed: args.output_dir / f"{name_of(family, variant, seed)}.json" for seed in args.seeds}
            seeds = [seed for seed, path in paths.items() if not finished(path, asked)]
            if seeds and not args.summary:
                queue.put((family, variant, seeds))
                missing += [paths[seed] for seed in seeds]
    until = time.time() + args.budget
    workers = [context.Process(target=work, args=(queue, args, until)) for _ in range(min(args.jobs, len(missing)))]
    for worker in workers:
        worker.start()
    with tqdm(total=len(missing), unit="run") as bar:
        while any(worker.is_alive() for worker in workers):
            time.sleep(1)
            bar.update(sum(finished(path, asked) for path in missing) - bar.n)
    rows = summary(args.output_dir, asked)
    print(format_table(rows))
    if args.json:
        write_json(
            args.json,
            {"recipe": RECIPE.settings() | {"epochs": args.epochs, "warmup_epochs": args.epochs / 8}, "rows": rows},
        )
    failed = [path.stem for path in missing if not finished(path, asked)]
    if failed and time.time() < until:
        raise ValueError(f"{len(failed)} of {len(missing)} runs left no result, such as {failed[0]}: their errors are "
                         f"in {args.output_dir}/worker-*.log")  # fmt: skip


if __name__ == "__main__":
    shiftvit.run(main)
