"""Publish a training run on the Hub, after checking that it is what its results say.

``python scripts/publish.py RUN_DIR --repo_id owner/name [--dry-run] [--private] [--sample 64] [--data DIR]``

Weights must load strictly and be finite; metrics measured again on a random sample must agree with results.json; an
adaptive model must be shift-equivariant on real images, in float64 without its canonical anchor and to the bit with
it. A failed check refuses and says why. Then the card is written and all is uploaded; ``--dry-run`` stops before that.
"""

import argparse
import json
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import validate_repo_id
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

import shiftvit
from common import create_model, from_pretrained
from common.data.preprocess import PREPROCESSOR_NAME, Preprocess
from common.data.sources import load_data
from common.data.splits import Arrays, Encoded
from common.evaluation.equivariance import assert_shift_equivariant, dense, invariant
from common.evaluation.evaluate import evaluate
from common.evaluation.flags import whole
from common.evaluation.tables import format_table, write_json
from common.models.hub import WEIGHTS_NAME, resolve_file, upload_directory
from common.publishing.cards import CARD_NAME, model_card
from common.publishing.manifest import FILES, digests, entry
from common.publishing.results import RESULTS_NAME, measured, public_results, read_results
from segmentation import UperNet
from segmentation.data import load_scenes
from segmentation.evaluation import evaluate as evaluate_scenes
from segmentation.preprocess import ScenePreprocess
from segmentation.splits import EncodedScenes

CHECKS_NAME = "publish.json"
CHANCE = 1e-4  # a sample so unlikely under the claimed value refutes it
SLACK = 0.5  # points that another device, precision or batch size may change a metric by
GROUPS = 8  # parts of a sample of scenes, whose spread says how far the sample may be off
BATCH = 8

Row = dict[str, str]


@dataclass
class Run:
    """A run directory, loaded: the model, its claims, and a sample of the images it was measured on."""

    directory: Path
    results: dict[str, Any]
    model: Any
    preprocess: Any
    sample: Any
    accelerator: Accelerator

    def batches(self, images: int) -> Iterator[Tensor]:
        """Normalised images of the sample, batch by batch, about ``images`` in all."""
        split = self.sample.prepared(self.preprocess).to(self.accelerator.device)
        size = BATCH if isinstance(split, Arrays) or not self.is_segmenter else 1  # scenes on disk differ in size
        for i, batch in enumerate(DataLoader(split, batch_size=size)):
            if i * size >= images:
                return
            pixels, has_size = split.fetch(batch)[0].to(self.accelerator.device), isinstance(split, EncodedScenes)
            yield self.preprocess.normalise(pixels) if has_size else self.preprocess.evaluate(pixels)

    @property
    def is_segmenter(self) -> bool:
        return isinstance(self.model, UperNet)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="output directory of train.py")
    parser.add_argument("--repo_id", required=True, help="owner/name")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="everything but the upload")
    parser.add_argument("--private", action="store_true", help="a new repository is private")
    parser.add_argument("--sample", type=whole, default=64, help="images to measure again; 0: all (default: 64)")
    parser.add_argument("--data", help="where the data set lies, if not where it was trained")
    parser.add_argument("--revision", help="branch to upload to; made where needed (default: main)")
    parser.add_argument("--manifest", type=Path, help="manifest.json to enter the published model into")
    args = parser.parse_args(arguments)

    try:
        validate_repo_id(args.repo_id)
    except ValueError as error:
        raise SystemExit(f"--repo_id {args.repo_id}: {error}") from None
    if args.repo_id.count("/") != 1:
        raise SystemExit(f"--repo_id {args.repo_id}: expected owner/name")
    if args.manifest and not args.manifest.is_file():
        raise SystemExit(f"--manifest {args.manifest}: no such file; nothing was checked or published")
    if not args.dry_run and get_token() is None:
        raise SystemExit("no token for the Hub: run `hf auth login` or set HF_TOKEN, or try with --dry-run")
    try:
        run = load(args.run_dir, args.sample, args.data)
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise SystemExit(f"not published: {error}") from None
    rows = check(run)
    print(format_table(rows))
    if failed := [row for row in rows if row["verdict"] != "ok"]:
        reasons = "; ".join(f"{row['check']}: {row['found']}, expected {row['expected']}" for row in failed)
        raise SystemExit(f"not published, {len(failed)} of {len(rows)} checks failed: {reasons}")
    write_json(run.directory / CHECKS_NAME, rows)
    card = model_card(run.model, run.results, source=args.repo_id, checks=rows, revision=args.revision)
    (run.directory / CARD_NAME).write_text(card, encoding="utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        folder = stage(run, Path(temporary))
        sums = digests(folder)
        print(format_table([{"file": path.name, "bytes": path.stat().st_size, "sha256": sums.get(path.name, "-")}
                            for path in sorted(folder.iterdir())]))  # fmt: skip
        if args.dry_run:
            print(f"dry run: nothing was uploaded to {args.repo_id}; the card is {run.directory / CARD_NAME}")
            return
        revision = upload(folder, args.repo_id, args.private, args.revision, sums[WEIGHTS_NAME])
    print(f'published: from_pretrained("{args.repo_id}", revision="{revision}")')
    if args.manifest:
        record(args.manifest, entry(run.results, status="published", published=True, hub_id=args.repo_id,
                                    revision=revision, sha256=sums))  # fmt: skip
        print(f"entered into {args.manifest}")


def load(directory: Path, sample: int, data: str | None) -> Run:
    """The run with ``sample`` of the images it was evaluated on; raises where something is missing or does not fit."""
    results = read_results(directory / RESULTS_NAME)
    for name in FILES:
        if not (directory / name).is_file():
            raise ValueError(f"{directory} has no {name}: give the output directory of a finished training run")
    model: Any = from_pretrained(str(directory))
    with torch.device("meta"):
        named: Any = create_model(results["model"])
    if type(named) is not type(model) or named.adaptive != model.adaptive:
        raise ValueError(f"{RESULTS_NAME} is about {results['model']}, config.json about another model "
                         f"({type(model).__name__}, adaptive={model.adaptive}): from different runs")  # fmt: skip
    dense_labels = isinstance(model, UperNet)
    path = resolve_file(directory, PREPROCESSOR_NAME)
    preprocess: Any = ScenePreprocess.load(path) if dense_labels else Preprocess.load(path)
    source = data or results["settings"]["data"]
    try:
        split: Any = (load_scenes if dense_labels else load_data)(source)[1]  # type: ignore[operator]
    except FileNotFoundError as error:
        raise ValueError(f"no data to measure on ({error}): say where they are with --data") from None
    if len(split.classes) != model.num_classes or len(split) < results["images"]:
        raise ValueError(f"{source} has {len(split):,} images of {len(split.classes)} classes, the run was measured on "
                         f"{results['images']:,} of {model.num_classes}: give its data with --data")  # fmt: skip
    split = choose(split.head(results["images"]), sample)
    accelerator = Accelerator(mixed_precision="no")
    return Run(directory, results, model.to(accelerator.device), preprocess, split, accelerator)


def choose(split: Any, count: int) -> Any:
    """``count`` images of a split at random, the same ones every time; 0: the split."""
    if not 0 < count < len(split):
        return split
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))
    return take(split, order[:count].sort().values)


def take(split: Any, index: Tensor) -> Any:
    """The images of a split, in memory or not, at ``index``."""
    if isinstance(split, Arrays):
        return replace(split, images=split.images[index], labels=split.labels[index])
    parts: dict[str, Any] = {"items": [split.items[i] for i in index.tolist()]}
    if isinstance(split, Encoded):
        parts |= {"labels": split.labels[index], "broken": torch.zeros(0, dtype=torch.bool)}
    return replace(split, **parts)


def check(run: Run) -> list[Row]:
    """A row per check: what was found, what was expected, the verdict."""
    steps: dict[str, Callable[[Run], list[Row]]] = {"weights": check_weights, "metrics": check_metrics}
    if run.model.adaptive:
        steps |= {"equivariance": check_equivariance, "bits": check_bits}
    rows: list[Row] = []
    with tqdm(steps.items(), desc="check", leave=False) as bar:
        for name, step in bar:
            bar.set_description(f"check {name}")
            rows += step(run)
    return rows


def row(check: str, found: str, expected: str, holds: bool) -> Row:
    return {"check": check, "found": found, "expected": expected, "verdict": "ok" if holds else "FAILED"}


def check_weights(run: Run) -> list[Row]:
    """They loaded strictly and are finite, or there would be no run; are they as many as claimed?"""
    count = sum(p.numel() for p in run.model.parameters())
    return [row("parameters", f"{count:,}", f"{run.results['parameters']:,}", count == run.results["parameters"])]


def check_metrics(run: Run) -> list[Row]:
    claims, settings = measured(run.results), run.results["settings"]
    if not claims:
        return [row("metrics", "none", f"some in {RESULTS_NAME}", False)]
    options: dict[str, Any] = {"accelerator": run.accelerator, "seed": settings.get("seed", 0)}
    size, total = len(run.sample), run.results["images"]
    if run.is_segmenter:
        options["batch_size"] = BATCH if isinstance(run.sample, Arrays) else 1

        def measure(split: Any, progress: bool = True) -> dict[str, Any]:
            return evaluate_scenes(run.model, split, run.preprocess, list(claims), progress=progress, **options)

        found, spread = measure(run.sample), spread_of_means(run.sample, measure, list(claims))
    else:
        found = evaluate(
            run.model, run.sample, run.preprocess, list(claims), crop=settings.get("crop", False), **options
        )
    rows = []
    for metric, claim in claims.items():
        if run.model.adaptive and metric.startswith(("c_cons", "mascc")) and claim == 100:
            low = high = 100.0  # a claim without exceptions: one refutes it
        elif run.is_segmenter:
            error = SLACK + 4 * spread[metric] * math.sqrt(1 - size / total)
            low, high = max(0.0, claim - error), min(100.0, claim + error)
        else:
            low, high = plausible(claim, size, total)
        expected = f"{low:.2f} to {high:.2f}" if low < high else f"{low:.2f}"
        rows.append(row(f"{metric}, {size:,} of {total:,}", f"{found[metric]:.2f}", f"{expected} (claimed {claim:.2f})",
                        low - 1e-9 <= found[metric] <= high + 1e-9))  # fmt: skip
    return rows


def spread_of_means(split: Any, measure: Callable[..., dict[str, Any]], metrics: list[str]) -> dict[str, float]:
    """Standard error of a sample's metrics, from how those of its parts differ."""
    count = min(GROUPS, len(split))
    if count < 2:
        return dict.fromkeys(metrics, 100.0)
    values = []
    for i in range(count):
        with suppress(ValueError):  # a part in which no pixel counts
            values.append(measure(take(split, torch.arange(i, len(split), count)), progress=False))
    if len(values) < 2:
        return dict.fromkeys(metrics, 100.0)
    return {metric: statistics.stdev(v[metric] for v in values) / math.sqrt(len(values)) for metric in metrics}


def plausible(claim: float, size: int, total: int) -> tuple[float, float]:
    """Percentages that ``size`` images drawn from ``total``, of which ``claim`` percent are right, may well show."""
    low, high = (min(max(round((claim + slack) * total / 100), 0), total) for slack in (-SLACK, SLACK))
    enough = [at_most(k, size, low, total) >= CHANCE for k in range(size + 1)]
    not_too_many = [at_most(size - k, size, total - high, total) >= CHANCE for k in range(size + 1)]
    counts = [k for k in range(size + 1) if enough[k] and not_too_many[k]]
    return 100 * counts[0] / size, 100 * counts[-1] / size


def at_most(k: int, size: int, right: int, total: int) -> float:
    """Probability of at most k right ones among ``size`` drawn from ``total``, ``right`` of them right."""
    ways = sum(math.comb(right, i) * math.comb(total - right, size - i) for i in range(min(k, right) + 1))
    return ways / math.comb(total, size)


def shifts_for(x: Tensor) -> list[tuple[int, int]]:
    """Shifts within a patch, across windows and around the torus, both axes, either sign; the last two say most."""
    height, width = x.shape[2], x.shape[3]
    return [(1, 0), (0, 1), (3, 2), (-5, width - 7), (height // 2 + 1, -(width // 3))]


def check_equivariance(run: Run) -> list[Row]:
    """In float64, without the canonical anchor, which would hide a layer that is not equivariant."""
    plain = from_pretrained(str(run.directory), canonical=False).double().to(run.accelerator.device)
    x = next(run.batches(1))[:4].double()
    action = dense if run.is_segmenter else invariant
    try:
        assert_shift_equivariant(plain, x, shifts_for(x), action)
        found, holds = "within 1e-12", True
    except AssertionError as error:
        found, holds = str(error), False
    return [row(f"float64 equivariance, {len(x)} images", found, "relative error within 1e-12", holds)]


def check_bits(run: Run) -> list[Row]:
    """In float32, on the whole sample; to the bit where the model has its canonical anchor, else up to rounding."""
    action = dense if run.is_segmenter else invariant
    tolerance = 0.0 if run.model.canonical else None
    seen, failure = 0, ""
    for x in run.batches(len(run.sample)):
        try:
            assert_shift_equivariant(run.model, x, shifts_for(x)[-2:], action, tolerance)
        except AssertionError as error:
            failure = failure or str(error)
        seen += len(x)
    promise = "bit-identical" if run.model.canonical else "equal up to rounding"
    return [row(f"float32 under shifts, {seen:,} images", failure or promise, promise, not failure)]


def stage(run: Run, folder: Path) -> Path:
    """What is uploaded, and nothing else of the run directory; results without paths of this machine."""
    for name in (*FILES, CARD_NAME, CHECKS_NAME):
        shutil.copyfile(run.directory / name, folder / name)
    write_json(folder / RESULTS_NAME, public_results(run.results))
    return folder


def upload(folder: Path, repo_id: str, private: bool, revision: str | None, sha256: str) -> str:
    """Upload, and ask the Hub for what it now has; returns the commit."""
    try:
        commit = upload_directory(folder, repo_id, private=private or None, revision=revision,
                                  commit_message="Publish a checked run")  # fmt: skip
        (info,) = HfApi().get_paths_info(repo_id, WEIGHTS_NAME, revision=commit.oid)
    except Exception as error:
        raise SystemExit(f"all checks passed, but the upload to {repo_id} failed: {error}") from None
    stored = getattr(info, "lfs", None)
    if stored is not None and stored.sha256 != sha256:
        raise SystemExit(f"{repo_id} has other weights at {commit.oid} ({stored.sha256}) than were checked ({sha256})")
    return commit.oid


def record(path: Path, model: dict[str, Any]) -> None:
    """Enter a model into a manifest, in place of what it said under that name.

    An embedded checkpoint with other weights stays, and the model goes by the name of its repository.
    """
    manifest = json.loads(path.read_text())
    models = {known["name"]: known for known in manifest["models"]}
    known = models.get(model["name"], {"path": None, "results": None})
    if known["path"] and known["sha256"] != model["sha256"]:
        model = model | {"name": model["hub_id"].split("/")[1]}
    else:
        model = model | {"path": known["path"], "results": known["results"]}
    models[model["name"]] = model
    write_json(path, manifest | {"models": list(models.values())})


if __name__ == "__main__":
    shiftvit.run(main)
