"""Training from weights one has, on images one has: adapt, new classes, freeze, layer decay, large images, streams."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from PIL import Image
from safetensors.torch import load_file
from test_sources import write_hub_parquet

from common import create_model
from common.evaluation.evaluate import from_timm
from common.evaluation.evaluate import main as evaluate
from common.training.engine import _parameters, train
from common.training.recipe import BaseRecipe, parse_command_line
from common.training.task import start_from
from swin.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = ROOT / "swin" / "checkpoints" / "swin_micro"
FLAGS = ["--limit", "64", "--batch_size", "16", "--epochs", "1", "--warmup_epochs", "0", "--report_to", "none",
         "--dataloader_num_workers", "2", "--metrics", "top1"]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps one state per process; each run here wants its own."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def run(output: Path, *flags: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    results = train(*parse_command_line(RECIPES, "digits", [*FLAGS, "--output_dir", str(output), *flags]))
    return results, load_file(output / "model.safetensors")


def write_tree(folder: Path, classes: int = 3, count: int = 8, broken: bool = False) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for c in range(classes):
            for i in range(count):
                path = folder / split / f"class{c}" / f"{i}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                buffer = io.BytesIO()
                Image.fromarray(rng.integers(0, 256, (100 + 8 * i, 130, 3), dtype=np.uint8)).save(buffer, "JPEG")
                path.write_bytes(b"broken" if broken and c == i == 1 else buffer.getvalue())


def test_adapt_plugs_anchors_into_a_trained_default_model(tmp_path: Path) -> None:
    """The paper's experiment: the weights of a default checkpoint, adaptive, consistent before any fine-tuning."""
    results, state = run(tmp_path, "--model", "swin_micro", "--pretrained", str(DEFAULT), "--adapt", "--lr", "1e-12",
                         "--min_lr", "0", "--metrics", "top1", "c_cons")  # fmt: skip
    assert results["model"] == "a_swin_micro"
    assert results["c_cons"] == 100.0
    assert json.loads((tmp_path / "config.json").read_text())["adaptive"] is True
    start = {name: tensor.float() for name, tensor in load_file(DEFAULT / "model.safetensors").items()}
    assert all(torch.allclose(state[name], start[name], atol=1e-6) for name in start)


def test_other_classes_get_a_new_head_and_keep_the_rest(tmp_path: Path) -> None:
    write_tree(tmp_path / "data")
    _, state = run(tmp_path / "out", "--data", str(tmp_path / "data"), "--pretrained", str(DEFAULT), "--model",
                   "swin_micro", "--lr", "1e-12", "--min_lr", "0", "--batch_size", "8")  # fmt: skip
    start = {name: tensor.float() for name, tensor in load_file(DEFAULT / "model.safetensors").items()}
    assert state["head.fc.weight"].shape == (3, 96)
    assert all(torch.allclose(state[name], start[name], atol=1e-6) for name in start if not name.startswith("head"))
    with pytest.raises(ValueError, match="does not fit the model: .*expected"):
        run(tmp_path / "other", "--pretrained", str(ROOT / "swinv2/checkpoints/a_swinv2_micro"))


@pytest.mark.parametrize(
    ("stages", "frozen"), [(1, ("patch_embed", "layers.0")), (-1, ("patch_embed", "layers", "norm"))]
)
def test_frozen_parts_do_not_change(tmp_path: Path, stages: int, frozen: tuple[str, ...]) -> None:
    _, state = run(tmp_path, "--model", "swin_micro", "--pretrained", str(DEFAULT), "--freeze", str(stages))
    start = {name: tensor.float() for name, tensor in load_file(DEFAULT / "model.safetensors").items()}
    changed = {name for name in start if not torch.equal(state[name], start[name])}
    assert changed
    assert not [name for name in changed if name.startswith(frozen)]
    assert {name.split(".")[0] for name in changed} == ({"head"} if stages < 0 else {"layers", "norm", "head"})


def test_frozen_batch_norm_keeps_its_statistics() -> None:
    model: Any = create_model("cvt_micro")
    model.freeze(1)
    model.train()
    norms = [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert {name.startswith("stages.0.") for name, m in norms if not m.training} == {True}
    assert any(m.training for _, m in norms)
    with pytest.raises(ValueError, match="cannot freeze 9 stages: the model has 3"):
        model.freeze(9)


@pytest.mark.parametrize("name", ["a_swin_micro", "a_swinv2_micro", "a_cvt_micro", "a_mvitv2_micro"])
def test_layer_decay_slows_early_layers(name: str) -> None:
    model: Any = create_model(name)
    groups = _parameters(model, BaseRecipe(model=name, lr=1.0, lr_batch=0, layer_decay=0.5))
    rate = {id(p): group["lr"] for group in groups for p in group["params"]}
    by_name = {n: rate[id(p)] for n, p in model.named_parameters()}
    assert by_name["head.fc.weight"] == 1.0
    stem = next(n for n in by_name if "patch_embed" in n or "stages.0.embed" in n)
    assert by_name[stem] == min(by_name.values()) < 0.1
    assert sum(len(group["params"]) for group in groups) == len(by_name)


def test_large_images_train_resume_and_skip_what_is_broken(tmp_path: Path) -> None:
    """RandAugment, erasing, mixup and cutmix in workers: resumed in the middle of an epoch, to the same bits."""
    write_tree(tmp_path / "data", broken=True)
    flags = ("--data", str(tmp_path / "data"), "--batch_size", "6", "--epochs", "2", "--rand_augment",
             "rand-m9-mstd0.5-inc1", "--erase", "0.25", "--mixup", "0.8", "--cutmix", "1.0", "--skip_broken",
             "--checkpointing_steps", "3", "--checkpoints_total_limit", "9")  # fmt: skip
    results, whole = run(tmp_path / "whole", *flags)
    assert (results["images"], results["unreadable"]) == (23, 1)
    AcceleratorState._reset_state(True)
    _, resumed = run(tmp_path / "resumed", *flags, "--resume_from_checkpoint",
                     str(tmp_path / "whole/checkpoints/step_00000003"))  # fmt: skip
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.filterwarnings("ignore")
def test_what_any_process_could_not_read_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Else a run on eight processes tells of an eighth of the images that were left out in an epoch."""
    write_tree(tmp_path / "data", broken=True)
    elsewhere = torch.arange(24) == 5  # what another process met
    monkeypatch.setattr(Accelerator, "reduce", lambda _, x, *__: (x + elsewhere) / 2 if x.ndim else x)
    run(tmp_path / "run", "--data", str(tmp_path / "data"), "--batch_size", "24", "--skip_broken", "--steps", "1")
    assert "2 training images could not be read and were left out" in capsys.readouterr().out


def test_streams_train(tmp_path: Path) -> None:
    for shard in range(2):
        write_hub_parquet(tmp_path / "data" / f"train-{shard}.parquet", 12)
    write_hub_parquet(tmp_path / "data" / "validation.parquet", 6)
    results, _ = run(tmp_path / "out", "--data", str(tmp_path / "data"), "--streaming", "--batch_size", "8", "--epochs",
                     "2", "--gradient_accumulation_steps", "2", "--dataloader_num_workers", "0")  # fmt: skip
    assert results["images"] == 6
    log = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in log) == 6


def test_checkpoints_by_minutes(tmp_path: Path) -> None:
    run(tmp_path, "--checkpointing_minutes", "1e-6", "--checkpoints_total_limit", "3")
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_00000002", "step_00000003", "step_00000004"]


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """The operating system refuses to write on: the run says so, and what was saved before still resumes."""
    more = ("--epochs", "2", "--checkpointing_steps", "2")
    run(tmp_path, *more, "--checkpoints_total_limit", "9")
    for step in (4, 6, 8):  # as if it had been stopped in between
        shutil.rmtree(tmp_path / "checkpoints" / f"step_{step:08d}")
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    script = ("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); from common.training"
              ".engine import main; from swin.recipes import RECIPES; main(RECIPES, 'digits')")  # fmt: skip
    flags = [*FLAGS, *more, "--output_dir", str(tmp_path), "--resume_from_checkpoint", "latest"]
    done = subprocess.run([sys.executable, "-c", script, *flags], cwd=ROOT, text=True, capture_output=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode != 0
    assert "could not write checkpoint" in done.stderr
    assert "earlier checkpoints are untouched" in done.stderr
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before
    AcceleratorState._reset_state(True)
    results, _ = run(tmp_path, *more, "--resume_from_checkpoint", "latest")
    assert results["images"] == 64


def test_timm_models_are_evaluated_with_their_own_preprocessing(tmp_path: Path) -> None:
    """From the Hub by name, or as here from a folder that timm wrote."""
    model = timm.create_model("test_vit", num_classes=10, img_size=32)
    timm.models.save_for_hf(model, tmp_path / "model", safe_serialization=True)
    results = evaluate("", ["--model", f"timm:local-dir:{tmp_path / 'model'}", "--limit", "40", "--metrics", "top1",
                            "c_cons@4", "s_cons", "--json", str(tmp_path / "out.json")])  # fmt: skip
    assert results["images"] == 40
    assert json.loads((tmp_path / "out.json").read_text())["c_cons@4"] == results["c_cons@4"]
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["pretrained_cfg"] |= {"crop_pct": 0.9, "input_size": (3, 224, 224)}  # Swin's, of which timm makes 248 px
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    preprocess = from_timm(f"local-dir:{tmp_path / 'model'}", img_size=224)[1]
    transform = timm.data.create_transform(input_size=(3, 224, 224), crop_pct=0.9)
    assert preprocess.resize == transform.transforms[0].size == 248  # else shifts lose other borders


def test_a_start_tells_what_the_trained_model_had_otherwise(tmp_path: Path) -> None:
    """Else weights go on in a model that computes something else with them, without a word."""
    source, model = ROOT / "cvt" / "checkpoints" / "a_cvt_micro", create_model("a_cvt_micro", num_classes=3)
    said = start_from(model, str(source))
    assert "weights of" in said
    assert "head.fc.bias: new for 3 classes" in said
    assert "that model has sketch=16; this one sketch=4 (--model_args changes it)" in said
    same = create_model("a_cvt_micro", sketch=16, drop_path_rate=0.3)
    assert start_from(same, str(source)) == f"weights of {source}"
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    assert start_from(same, str(tmp_path)) == f"weights of {tmp_path}"  # weights alone serve, too
