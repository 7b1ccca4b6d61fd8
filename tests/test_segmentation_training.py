"""Training segmenters: runs resume to the same bits, start from a classifier, and measure what the metrics define."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from PIL import Image
from safetensors.torch import load_file
from segmentation_helpers import encode, scene, write_parquet
from torch import Tensor

from common import create_model
from common.evaluation.metrics import confusion_matrix, mascc, massc, mean_iou, miou
from common.training.engine import _parameters, train
from common.training.recipe import BaseRecipe, parse_command_line
from common.training.reproduce import main as reproduce
from segmentation import UperNet
from segmentation.data import load_scenes
from segmentation.evaluation import evaluate, load_for_evaluation
from segmentation.evaluation import main as evaluate_cli
from segmentation.preprocess import ScenePreprocess
from segmentation.recipes import RECIPES
from segmentation.reproduce import KNOWN, SCALES, rescale
from segmentation.splits import EncodedScenes, decode_labels
from segmentation.task import Segmentation, SegmentationRecipe

ROOT = Path(__file__).resolve().parents[1]
CLASSIFIER = ROOT / "swin" / "checkpoints" / "a_swin_micro"
FLAGS = ["--limit", "16", "--batch_size", "4", "--epochs", "1", "--warmup_steps", "1", "--report_to", "none",
         "--dataloader_num_workers", "1"]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps one state per process; each run here wants its own."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def run(output: Path, *flags: str, recipe: str = "digits") -> tuple[dict[str, Any], dict[str, Tensor]]:
    command = ["--recipe", recipe, *FLAGS, "--output_dir", str(output), *flags]
    results = train(*parse_command_line(RECIPES, "digits", command), Segmentation)
    return results, load_file(output / "model.safetensors")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of the adaptive micro model on digit scenes."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(True)
    output = tmp_path_factory.mktemp("reference")
    run(output, "--checkpointing_steps", "2")
    return output


def test_a_run_leaves_a_model_and_the_measures_of_the_paper(reference: Path) -> None:
    """The tables would hold other quantities than ``common.metrics`` defines, or a model that nobody can load."""
    results = json.loads((reference / "results.json").read_text())
    model, preprocess = load_for_evaluation(str(reference), 11)
    _, test = load_scenes("digits")
    assert model.class_names == test.classes
    images, labels, _ = test.head(16).fetch(torch.arange(16))
    batches = [(preprocess.evaluate(x), y) for x, y in zip(images.split(4), labels.split(4), strict=True)]
    assert preprocess.mean == (0.0, 0.0, 0.0)
    assert results["miou"] == miou(model, batches)
    assert results["massc"] == pytest.approx(massc(model, batches), rel=1e-9)
    assert results["mascc"] == mascc(model, batches) == 100.0
    assert results["settings"]["auxiliary"] == 0.4
    assert (reference / "best" / "preprocessor_config.json").exists()


def test_resumed_gives_the_same_bits(reference: Path, tmp_path: Path) -> None:
    """A run of days would have to start anew after an interruption."""
    _, state = run(tmp_path, "--checkpointing_steps", "2", "--resume_from_checkpoint",
                   str(reference / "checkpoints/step_00000002"))  # fmt: skip
    expected = load_file(reference / "model.safetensors")
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_starts_from_a_classifier_and_from_a_segmenter(reference: Path, tmp_path: Path) -> None:
    """``--backbone`` and ``--pretrained`` would be taken without effect."""
    still = ("--lr", "1e-12", "--min_lr", "0", "--warmup_lr", "0", "--metrics", "miou", "--limit", "4")
    _, state = run(tmp_path / "one", "--backbone", str(CLASSIFIER), *still)
    start = {name: tensor.float() for name, tensor in load_file(CLASSIFIER / "model.safetensors").items()}
    shared = {name for name in start if not name.startswith(("norm.", "head."))}
    assert shared
    assert all(torch.allclose(state[f"backbone.{name}"], start[name], atol=1e-6) for name in shared)

    for part in ("train", "val"):
        write_parquet(tmp_path / "five" / f"{part}.parquet", [scene(i, (64, 64)) for i in range(4)])
    AcceleratorState._reset_state(True)
    _, state = run(tmp_path / "two", "--pretrained", str(reference), "--data", str(tmp_path / "five"), "--freeze", "-1",
                   "--lr", "1e-3")  # fmt: skip
    start = load_file(reference / "model.safetensors")
    changed = {name for name, tensor in state.items() if not torch.equal(tensor, start[name])}
    assert state["decode_head.classifier.weight"].shape[0] == 5
    assert changed
    assert not [name for name in changed if name.startswith("backbone.")]


def test_scenes_of_many_sizes_train_and_are_measured_at_their_own(tmp_path: Path) -> None:
    """ADE20K would not train, or its mIoU would be that of resized labels."""
    for part in ("train", "val"):
        write_parquet(tmp_path / f"camvid/{part}.parquet", [scene(i, (40 + 7 * i, 60), classes=12) for i in range(5)])
    results, _ = run(tmp_path / "out", "--data", str(tmp_path / "camvid"), "--size", "32", "32", "--resize", "128",
                     "32", "--ratio_range", "0.5", "2", "--photometric", "--flip", "--max_class_share",
                     "0.75")  # fmt: skip
    assert results["mascc"] == 100.0
    assert results["images"] == 5
    model, preprocess = load_for_evaluation(str(tmp_path / "out"), 11)
    split = load_scenes(str(tmp_path / "camvid"))[1]
    assert isinstance(split, EncodedScenes)
    matrix = torch.zeros(11, 11, dtype=torch.long)
    for i in range(5):
        image, labels = split.decode(i)
        x = preprocess.evaluate(image[None])
        assert [side % 32 for side in x.shape[2:]] == [0, 0]
        logits = F.interpolate(model(x), (labels.shape[0], labels.shape[1]), mode="bilinear", align_corners=False)
        matrix += confusion_matrix(logits.argmax(1), labels[None], 11)
    assert results["miou"] == pytest.approx(mean_iou(matrix), abs=1e-9)


@pytest.mark.slow
def test_evaluation_from_the_command_line_draws(reference: Path, tmp_path: Path) -> None:
    """The paper's figure could not be made; the worst case and windows could not be measured."""
    results = evaluate_cli("", ["--model", str(reference), "--compare", "upernet_swin_micro", "--limit", "6",
                                "--metrics", "miou", "mascc@5", "mascc_worst@2", "--pictures", str(tmp_path),
                                "--scenes", "2", "--json", str(tmp_path / "out.json")])  # fmt: skip
    stored = json.loads((tmp_path / "out.json").read_text())
    assert stored["miou"] == results["miou"]
    assert stored["mascc@5"] == stored["mascc_worst@2"] == 100.0
    rows = {row["picture"]: row for row in stored["pictures"]}
    assert rows.keys() == {"circular_64x64.png", "standard_64x64.png"}
    assert rows["circular_64x64.png"][reference.name] == 0.0
    for name in rows:
        with Image.open(tmp_path / name) as figure:
            assert figure.format == "PNG"
    AcceleratorState._reset_state(True)
    windows = ["--model", str(reference), "--limit", "2", "--slide", "32", "32", "--mixed_precision", "bf16"]
    slid = evaluate_cli("", windows)
    assert (slid["images"], slid["slide"]) == (2, [32, 32])
    other = tmp_path / "other"
    shutil.copytree(reference, other)
    stored = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(stored | {"std": [1.0, 1.0, 1.0]}))
    with pytest.raises(ValueError, match="they take different ones"):
        evaluate_cli("", ["--model", str(reference), "--compare", str(other), "--pictures", str(tmp_path / "two")])
    (other / "preprocessor_config.json").unlink()
    with pytest.warns(UserWarning, match="has no preprocessor_config.json: ImageNet's mean and std are used"):
        evaluate_cli("", ["--model", str(other), "--limit", "1", "--metrics", "miou"])
    with pytest.warns(UserWarning, match="upernet_swin_micro is the name of a model without a checkpoint"):
        evaluate_cli("", ["--model", "upernet_swin_micro", "--limit", "1", "--metrics", "miou"])
    with pytest.raises(ValueError, match="unknown metric 'top1': choose among miou"):
        evaluate_cli("", ["--model", str(reference), "--metrics", "top1"])
    with pytest.raises(TypeError, match="is a Swin, not a segmenter"):
        evaluate_cli("", ["--model", str(CLASSIFIER)])


@pytest.mark.slow
def test_two_processes_count_every_scene_once(reference: Path, tmp_path: Path) -> None:
    """Nine scenes do not divide into two processes: padding must not count twice in the confusion matrix."""
    _, test = load_scenes("digits")
    model, preprocess = load_for_evaluation(str(reference), 11)
    single = evaluate(model, test.head(9), preprocess, ["miou", "mascc"], batch_size=2)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
               "segmentation/evaluate.py", "--model", str(reference), "--limit", "9", "--batch_size", "2", "--metrics",
               "miou", "mascc", "--json", str(tmp_path / "out.json")]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    both = json.loads((tmp_path / "out.json").read_text())
    assert both["images"] == single["images"] == 9
    assert both["miou"] == pytest.approx(single["miou"], abs=1e-3)
    assert both["mascc"] == single["mascc"]


def test_the_trained_model_in_the_repository() -> None:
    """The README's first command would show noise."""
    model, preprocess = load_for_evaluation("upernet_a_swin_micro", 11)
    results = evaluate(model, load_scenes("digits")[1].head(40), preprocess, ["miou", "mascc"])
    assert results["miou"] > 75
    assert results["mascc"] == 100.0


def test_layer_decay_slows_early_layers() -> None:
    """``--layer_decay`` would slow the decoder, or nothing."""
    model = create_model("upernet_a_swin_micro")
    groups = _parameters(model, BaseRecipe(model="", lr=1.0, lr_batch=0, layer_decay=0.5))
    rate = {id(p): group["lr"] for group in groups for p in group["params"]}
    by_name = {name: rate[id(p)] for name, p in model.named_parameters()}
    assert {lr for name, lr in by_name.items() if not name.startswith("backbone.")} == {1.0}
    assert by_name["backbone.patch_embed.proj.weight"] == min(by_name.values()) < 0.1


def test_bad_runs_are_explained(tmp_path: Path) -> None:
    """A user would be left with an error of CUDA's, or with a model that is not exact."""
    for part in ("train", "val"):
        write_parquet(tmp_path / f"camvid/{part}.parquet", [scene(i, (32, 32), classes=40) for i in range(4)])
    for flags, error, message in (
        (("--data", str(tmp_path / "camvid")), ValueError, "has label 39, but there are 11 classes"),
        (("--size", "40", "64"), ValueError, "image size 40x64.*nearest valid sizes are 32x64 and 64x64"),
        (("--multiple", "20"), ValueError, "image size 20x20"),
        (("--backbone", "outputs/nowhere/at_all"), FileNotFoundError, "no directory .*--backbone takes"),
        (("--model", "a_swin_micro"), TypeError, "a_swin_micro is not a segmenter"),
        (("--streaming",), ValueError, "can be neither streamed nor skipped"),
        (("--expected_rows", "9", "9", "11"), ValueError, "1,000 training images instead of 9"),
        (("--model", "a_swin_micro"), TypeError, "train it with swin/train.py"),
        (("--batch_size", "1"), ValueError, "batch norm needs two in each part"),
        (("--gradient_accumulation_steps", "8"), ValueError, "--batch_size 4 in 8 parts"),
        (("--max_class_share", "75"), ValueError, "is not a share: give 0.75"),
        (("--ratio_range", "2", "0.5"), ValueError, "runs downwards"),
        (("--mixed_precision", "fp16"), ValueError, "fp16 is not available on cpu"),
    ):
        AcceleratorState._reset_state(True)
        with pytest.raises(error, match=message):
            run(tmp_path / "out", *flags)
    for flags in (("--resize", "0", "0"), ("--ratio_range", "-1", "0.5"), ("--auxiliary", "-0.4")):
        with pytest.raises(SystemExit):
            run(tmp_path / "out", *flags)


def test_masks_that_tell_nothing_apart_are_refused(tmp_path: Path) -> None:
    """Masks of 0 and 255, as many tools write them, would train a model that never sees its object."""
    object_as_255 = [(image, encode(np.where(decode_labels(labels) > 2, 255, 0).astype(np.uint8)))
                     for image, labels in (scene(i, (32, 32)) for i in range(4))]  # fmt: skip
    ignored = [(image, encode(np.full((32, 32), 255, np.uint8))) for image, _ in object_as_255]
    for name, learnt, measured, message in (
        ("one", object_as_255, [scene(0, (32, 32))], "training split .* no pixel but of class 'bg'. Label 255"),
        ("none", [scene(i, (32, 32), 2) for i in range(4)], ignored, "evaluation split .* no pixel that counts"),
    ):
        write_parquet(tmp_path / name / "train.parquet", learnt)
        write_parquet(tmp_path / name / "val.parquet", measured)
        (tmp_path / name / "classes.txt").write_text("\n".join(["bg", *"abcd"]))
        AcceleratorState._reset_state(True)
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "out", "--data", str(tmp_path / name))
    AcceleratorState._reset_state(True)
    write_parquet(tmp_path / "none/val.parquet", [scene(5, (32, 32), classes=2)])
    with pytest.warns(UserWarning, match="training split of .* has no pixel of b, c, d"):
        run(tmp_path / "out", "--data", str(tmp_path / "none"), "--size", "32", "32")


def test_scenes_are_resized_once_for_evaluation(tmp_path: Path) -> None:
    """A second time, their size would be another: 64 x 96 became 64 x 64."""
    for part in ("train", "val"):
        write_parquet(tmp_path / f"camvid/{part}.parquet", [scene(i, (33 + i, 20), classes=11) for i in range(3)])
    split = load_scenes(str(tmp_path / "camvid"))[1]
    preprocess = ScenePreprocess(size=(64, 64), resize=(40, 200), multiple=(32, 32))
    seen: list[tuple[int, ...]] = []

    def model(x: Tensor) -> Tensor:
        seen.append(tuple(x.shape[2:]))
        return torch.zeros(len(x), 11, *x.shape[2:])

    AcceleratorState._reset_state(True)
    evaluate(model, split, preprocess, ["miou"])
    assert seen == [preprocess.evaluation_size((33 + i, 20)) for i in range(3)]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_valid(name: str) -> None:
    """Days of training would end at the first evaluation, at a size that the model refuses."""
    recipe = RECIPES[name]
    slim: dict[str, Any] = {"backbone_args": {"embed_dim": 24, "num_heads": (1, 2, 2, 4)}, "channels": 8}
    size = {} if recipe.size is None else {"img_size": recipe.size}
    model = create_model(recipe.model, **recipe.model_args, **size, **({} if "micro" in recipe.model else slim))
    assert isinstance(model, UperNet)
    multiple = (recipe.multiple, recipe.multiple) if recipe.multiple else model.multiple
    preprocess = ScenePreprocess(size=model.img_size, resize=recipe.resize, multiple=multiple)
    for scene_size in ((512, 683), (360, 480), (1600, 1200)):
        model.check_size(preprocess.evaluation_size(scene_size))
    own = "standard" in name or name in ("digits", "photographs")  # zeros in a default model, around a torus otherwise
    assert model.config["padding_mode"] == (None if own else "circular")


def test_a_backbone_that_takes_one_size_trains(tmp_path: Path) -> None:
    """MViTv2 refuses images of the smallest valid side, which no scene has."""
    flags = ("--model_args", "backbone=mvitv2_micro", "--limit", "4", "--metrics", "miou")
    assert run(tmp_path / "out", *flags)[0]["images"] == 4
    AcceleratorState._reset_state(True)
    with pytest.raises(ValueError, match=r"relative positions for images of \(64, 64\) alone"):
        run(tmp_path / "other", *flags, "--resize", "96", "64")


@pytest.mark.slow
def test_rows_of_the_paper_run_small(tmp_path: Path) -> None:
    """``reproduce.py`` would fail after days, not after seconds."""

    def shorter(recipe: SegmentationRecipe, scale: str) -> SegmentationRecipe:
        return replace(rescale(recipe, scale), epochs=1, batch_size=16)

    table = reproduce(RECIPES, "", ["--scale", "smoke", "--rows", "ade20k", "--output_dir", str(tmp_path)],
                      task=Segmentation, rescale=shorter, scales=SCALES, known=KNOWN)  # fmt: skip
    assert table[0]["model"] == "upernet_a_swin_micro"
    assert (table[0]["miou paper"], table[0]["mascc ours"]) == (43.44, 100.0)
