"""What a run that goes on with other flags than it began with says. Else its results pass for those of one run."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_sources import write_hub_parquet

Train = Callable[..., dict[str, Any]]
EVERY_STEP = ("--checkpointing_steps", "1", "--checkpoints_total_limit", "9")
LATEST = ("--resume_from_checkpoint", "latest")


def test_another_precision_is_told(tmp_path: Path, train_digits: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """The results name the last precision alone; from fp16 that overflows, bf16 is a way out, so it is not refused."""
    run = [*EVERY_STEP, "--steps", "2"]
    train_digits(tmp_path, *run)
    (tmp_path / "checkpoints/step_00000002").rename(tmp_path / "later")
    assert train_digits(tmp_path, *run, *LATEST)["precision"] == "no"
    assert "--mixed_precision" not in capsys.readouterr().out
    (tmp_path / "checkpoints/step_00000002").rename(tmp_path / "again")
    assert train_digits(tmp_path, *run, *LATEST, "--mixed_precision", "bf16")["precision"] == "bf16"
    assert "was written with --mixed_precision no, now it is bf16: the run goes on with" in capsys.readouterr().out


def test_another_order_of_images_is_told(tmp_path: Path, train_digits: Train,
                                         capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """What is left of the epoch has images that were seen already, and lacks others."""
    write_hub_parquet(tmp_path / "data/train-0.parquet", 24)
    write_hub_parquet(tmp_path / "data/validation.parquet", 6)
    run = [*EVERY_STEP, "--data", str(tmp_path / "data"), "--batch_size", "8", "--dataloader_num_workers", "0"]
    output = tmp_path / "run"
    train_digits(output, *run, "--streaming")
    for more, said in ((["--streaming"], None), ([], "no --streaming"),
                       (["--streaming", "--dataloader_num_workers", "1"], "--streaming by 1 x 1 workers")):  # fmt: skip
        first = str(shutil.copytree(output / "checkpoints/step_00000001", tmp_path / str(said) / "step_00000001"))
        capsys.readouterr()
        train_digits(tmp_path / f"{said} run", *run, *more, "--resume_from_checkpoint", first)
        line = f"was written with --streaming by 1 x 0 workers, now it is {said}: images come in another order"
        assert (line in capsys.readouterr().out) == (said is not None)
