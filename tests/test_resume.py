"""Going on with a run: from the newest checkpoint that is whole, at the right place, in a directory of its own."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from common.data.splits import Arrays, EpochSampler
from common.training.checkpoints import latest_checkpoint, read_checkpoint, write_manifest
from common.training.directory import acquire, release
from common.training.engine import _batches
from common.training.task import Classification

Train = Callable[..., dict[str, Any]]
EVERY_STEP = ("--checkpointing_steps", "1", "--checkpoints_total_limit", "9")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, train_digits: Train) -> Path:
    """The directory of a run of four steps with a checkpoint at each."""
    output = tmp_path_factory.mktemp("finished")
    train_digits(output, *EVERY_STEP)
    return output


@pytest.fixture
def used(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return shutil.copytree(finished, tmp_path / "run")


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))


def same(one: Path, other: Path) -> bool:
    first, second = (load_file(path / "model.safetensors") for path in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_with_a_fused_optimizer_resumes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_digits: Train
) -> None:
    """As on a GPU. Fused steps raise no version counters: what anchors had cached of the weights would differ from what
    a resumed run makes of them."""
    adamw = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, **options: adamw(groups, **{**options, "fused": True}))
    flags = *EVERY_STEP, "--model", "a_swin_micro", "--lr", "0.02"  # so that four steps change what anchors choose
    train_digits(tmp_path / "whole", *flags)
    resumed = shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    train_digits(resumed, *flags, "--resume_from_checkpoint", str(resumed / "checkpoints" / "step_00000002"))
    assert same(resumed, tmp_path / "whole")


# broken checkpoints


@pytest.mark.parametrize("fault", ["truncated", "flipped", "missing", "unfinished"])
def test_a_broken_checkpoint_is_named_and_latest_passes_it_over(
    finished: Path, used: Path, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], train_digits: Train
) -> None:
    """A torn file would end in a library's traceback, with whole checkpoints beside it."""
    broken = used / "checkpoints" / "step_00000004"
    names = {"truncated": "optimizer.bin", "flipped": "model.safetensors", "missing": "random_states_0.pkl"}
    name = names.get(fault, "manifest.json")
    content = (broken / name).read_bytes()
    if fault == "truncated":
        (broken / name).write_bytes(content[:1000])
    elif fault == "flipped":
        (broken / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        (broken / name).unlink()
    with pytest.raises(ValueError, match=f"step_00000004 is .*{name}") as error:
        train_digits(tmp_path / "other", "--resume_from_checkpoint", str(broken))
    assert len(str(error.value)) < 500
    train_digits(used, *EVERY_STEP, "--resume_from_checkpoint", "latest")
    said = capsys.readouterr().out
    assert f"passed over: {broken}" in said
    assert "resumed from" in said
    assert "step_00000003: epoch 0, step 3" in said
    assert same(used, finished)


def test_none_whole_is_an_error_and_none_at_all_a_start(tmp_path: Path) -> None:
    """A run of days would silently begin again."""
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / "step_00000007").mkdir()
    with pytest.raises(ValueError, match="no checkpoint under .* is whole .*step_00000007"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"progress": {"step": -3}}, "progress is {'step': -3"),
        ({"progress": {"step": 1.5}}, "not a whole number from 0 on"),
        ({"progress": {"step": True}}, "not a whole number from 0 on"),
        ({"progress": {"step": "2"}}, "not a whole number from 0 on"),
        ({"progress": {"steps": 2}}, "not a whole number from 0 on"),
        ({"progress": None}, "progress is None"),
        ({"identity": 3}, "must name its run"),
        ({"processes": 0}, "how many processes"),
        ({"processes": 2}, r"no random states of processes \[1\]"),
        ({"processes": 10**12}, r"no random states of processes \[1, 2, 3, 4, 5\]"),  # of which no list has room
    ],
)
def test_nonsense_in_progress_is_refused(used: Path, change: dict[str, Any], message: str) -> None:
    """A run would start at step -3, or with other random numbers than it would have drawn."""
    path = used / "checkpoints" / "step_00000002"
    state = read_checkpoint(path)
    for key, value in change.items():
        state[key] = {**state[key], **value} if isinstance(value, dict) else value
    (path / "progress.json").write_text(json.dumps(state))
    write_manifest(path)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(path)
    for text in ("[]", "{", "7", "[" * 100_000):
        (path / "progress.json").write_text(text)
        write_manifest(path)
        with pytest.raises(ValueError, match="is broken \\(progress.json"):
            read_checkpoint(path)


def test_a_torn_log_line_is_left_out(used: Path, capsys: pytest.CaptureFixture[str], train_digits: Train) -> None:
    """A run that was killed while it logged could not be resumed."""
    log = used / "log.jsonl"
    before = log.read_text().splitlines()
    log.write_bytes(log.read_bytes()[:-7] + b"\xff")
    train_digits(used, *EVERY_STEP, "--resume_from_checkpoint", "latest")
    assert f"left out line {len(before)} of {len(before)}, which is torn" in capsys.readouterr().out
    after = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in after if "loss" in row] == [1, 2, 3, 4]


def test_random_numbers_go_on_where_they_were(tmp_path: Path, train_digits: Train) -> None:
    """Drop path would leave out other blocks after a resumption, in the middle of an epoch or at its end."""
    flags = (*EVERY_STEP, "--drop_path", "0.5", "--steps", "7")
    train_digits(tmp_path / "whole", *flags)
    for step in (2, 4):
        source = tmp_path / f"whole/checkpoints/step_{step:08d}"
        train_digits(tmp_path / str(step), *flags, "--resume_from_checkpoint", str(source))
        assert same(tmp_path / "whole", tmp_path / str(step)), step


def test_processes_draw_numbers_of_their_own(tmp_path: Path, train_digits: Train,
                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Else drop path leaves out the same blocks for image i of every process, as if there were fewer images."""
    drawn = []

    def inputs(*_: Any) -> None:
        drawn.append(torch.get_rng_state())
        raise InterruptedError

    monkeypatch.setattr(Classification, "inputs", inputs)
    for process in (0, 1):
        monkeypatch.setattr(Accelerator, "process_index", process)
        with pytest.raises(InterruptedError):
            train_digits(tmp_path / str(process))
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("processes", [1, 2])
def test_several_processes_go_on_in_the_order_of_the_epoch(processes: int) -> None:
    """What was left of the epoch would be that of the first one: images seen twice, others never."""
    accelerator: Any = SimpleNamespace(skip_first_batches=skip_first_batches)
    data = Arrays(torch.zeros(24, 3, 4, 4, dtype=torch.uint8), torch.zeros(24, dtype=torch.long), ("a",))
    orders = []
    for process in range(processes):

        def batches(epoch: int, done: int, process: int = process) -> list[list[int]]:
            loader = DataLoader(data, batch_size=4 // processes, sampler=EpochSampler(24, seed=1, batch_size=4))
            prepared = prepare_data_loader(loader, num_processes=processes, process_index=process)
            return [batch.tolist() for batch in _batches(prepared, epoch, done, 6, accelerator)]

        assert batches(3, 2) == batches(3, 0)[2:]
        assert batches(3, 2) != batches(0, 2)
        orders += batches(3, 0)
    assert sorted(index for batch in orders for index in batch) == list(range(24))


# another accumulation


@pytest.mark.parametrize(("before", "after"), [("1", "2"), ("4", "1")])
def test_resumed_with_another_accumulation(tmp_path: Path, train_digits: Train, before: str, after: str,
                                           capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """A run moved to a smaller or larger GPU would see some images of the epoch twice and others never, or draw other
    random numbers without a word."""
    flags = ("--steps", "6", "--checkpointing_steps", "3")
    train_digits(tmp_path / "whole", *flags, "--gradient_accumulation_steps", before)
    assert "parts" not in capsys.readouterr().out
    train_digits(tmp_path / "resumed", *flags, "--gradient_accumulation_steps", after, "--resume_from_checkpoint",
                 str(tmp_path / "whole/checkpoints/step_00000003"))  # fmt: skip
    assert f"written with batches in {before} parts, now they are in {after}: the same images, but other" in (
        capsys.readouterr().out)  # fmt: skip
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed"))
    whole, resumed = (torch.cat([state[name].double().flatten() for name in one]) for state in (one, other))
    assert (whole - resumed).norm() <= 1e-6 * whole.norm()
    rows = [json.loads(line) for line in (tmp_path / "resumed/log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [4, 5, 6]


def test_a_place_that_no_run_comes_by_is_refused(used: Path, train_digits: Train) -> None:
    path = used / "checkpoints" / "step_00000002"
    state = read_checkpoint(path)
    state["progress"]["images"] += 16
    (path / "progress.json").write_text(json.dumps(state))
    write_manifest(path)
    with pytest.raises(ValueError, match="images=48.* is not a position in epochs of 4 steps of 16 images"):
        train_digits(used, "--resume_from_checkpoint", str(path))
    assert steps(used) == [1, 2, 3, 4]  # refused before anything is moved


# another run's directory


def test_a_new_run_does_not_begin_over_another(
    finished: Path, used: Path, tmp_path: Path, train_digits: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own checkpoints would be pruned as the older ones, and "latest" would find the other run."""
    files = sorted(path.relative_to(used) for path in used.rglob("*") if path.is_file() and path.name != ".lock")
    contents = [(used / file).read_bytes() for file in files]
    new = ("--checkpointing_steps", "1", "--checkpoints_total_limit", "2", "--seed", "1", "--steps", "3")
    for more in ((), ("--resume_from_checkpoint", str(finished / "checkpoints/step_00000001"))):
        with pytest.raises(ValueError, match="holds the checkpoints of a run .*--overwrite_output_dir"):
            train_digits(used, *new, *more)
    with pytest.raises(ValueError, match="leave out one of them"):
        train_digits(used, *new, "--overwrite_output_dir", "--resume_from_checkpoint", "latest")
    assert [(used / file).read_bytes() for file in files] == contents
    train_digits(used, *new, "--overwrite_output_dir")
    assert steps(used) == [2, 3]
    assert len((used / "log.jsonl.old-1").read_text().splitlines()) == 6
    for file, content in zip(files, contents, strict=True):  # all of the old run is still there
        aside = used / f"{file.parts[0]}.old-1" / Path(*file.parts[1:]) if len(file.parts) > 1 else f"{file}.old-1"
        assert (used / aside).read_bytes() == content, file
    train_digits(used, *new, "--resume_from_checkpoint", "latest")
    assert "step_00000003: epoch 0, step 3" in capsys.readouterr().out
    train_digits(used, *new, "--overwrite_output_dir")
    assert (used / "checkpoints.old-2").is_dir()


def test_a_run_that_goes_on_elsewhere_leaves_what_is_there(finished: Path, used: Path, train_digits: Train) -> None:
    """Else it deletes checkpoints and models of the run that was there, and its log begins with that one's rows."""
    log = (used / "log.jsonl").read_text().replace('"seed": 0', '"seed": 5')
    (used / "log.jsonl").write_text(log)
    train_digits(used, "--checkpointing_steps", "1", "--checkpoints_total_limit", "1", "--overwrite_output_dir",
                 "--resume_from_checkpoint", str(finished / "checkpoints/step_00000002"))  # fmt: skip
    assert steps(used) == [4]
    assert len([*(used / "checkpoints.old-1").glob("step_*")]) == 4
    assert (used / "log.jsonl.old-1").read_text() == log
    assert [json.loads(line)["step"] for line in (used / "log.jsonl").read_text().splitlines()] == [3, 4, 4, 4]
    assert {path.name for path in used.glob("*.old-1")} >= {"best.old-1", "model.safetensors.old-1"}


def test_going_back_sets_later_checkpoints_aside(finished: Path, used: Path, train_digits: Train) -> None:
    """With one to keep, the new checkpoint would go and the abandoned one stay."""
    train_digits(used, "--checkpointing_steps", "1", "--checkpoints_total_limit", "1", "--resume_from_checkpoint",
                 str(used / "checkpoints/step_00000002"), "--gradient_accumulation_steps", "1")  # fmt: skip
    assert steps(used) == [4]
    assert sorted(path.name for path in (used / "checkpoints.old-1").iterdir()) == ["step_00000003", "step_00000004"]
    rows = [json.loads(line) for line in (used / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]  # what is done again is logged once
    assert same(used, finished)


def test_a_run_that_is_resumed_at_its_end_logs_its_last_epoch(used: Path, train_digits: Train) -> None:
    """Else its last measures stand at the epoch before, and in no figure or table of its whole length."""
    before = [json.loads(line) for line in (used / "log.jsonl").read_text().splitlines()]
    train_digits(used, *EVERY_STEP, "--resume_from_checkpoint", "latest")
    after = [json.loads(line) for line in (used / "log.jsonl").read_text().splitlines()]
    epochs = [[row["epoch"] for row in rows if "top1" in row] for rows in (before, after)]
    assert epochs == [[1], [1]]


def test_copies_by_other_names_are_left_alone(used: Path, train_digits: Train) -> None:
    """A copy that someone keeps would be deleted or, kept as the newest one, have the run delete its own."""
    root = used / "checkpoints"
    (root / "step_00000004").rename(root / "step_best")
    shutil.copytree(root / "step_best", root / "step_00000001_mine")
    train_digits(used, "--checkpointing_steps", "1", "--checkpoints_total_limit", "1", "--resume_from_checkpoint",
                 "latest")  # fmt: skip
    assert sorted(path.name for path in root.iterdir()) == ["step_00000001_mine", "step_00000004", "step_best"]


# two runs at once


def test_a_second_run_in_one_directory_is_refused(tmp_path: Path, train_digits: Train) -> None:
    """Two runs would write one log and delete each other's checkpoints; one that died must not keep its place."""
    script = ("import fcntl, os, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
              "print('process', os.getpid(), file=f, flush=True); print(flush=True); time.sleep(600)")  # fmt: skip
    command = [sys.executable, "-c", script, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
        try:
            assert first.stdout
            first.stdout.readline()
            with pytest.raises(BlockingIOError, match=f"is in use by process {first.pid}: .* another --output_dir"):
                train_digits(tmp_path, "--steps", "1")
            assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        finally:
            first.kill()
    train_digits(tmp_path, "--steps", "1")
    release(acquire(tmp_path))  # let go at the end, though this process lives on
    with pytest.raises(ValueError, match="fewer than one batch"):
        train_digits(tmp_path, "--batch_size", "999")
    release(acquire(tmp_path))  # and after an error


def test_workers_do_not_hold_the_lock(tmp_path: Path) -> None:
    """A killed run could not be resumed until the last worker of its loader had noticed."""
    held = acquire(tmp_path)
    worker = os.fork()
    if not worker:
        time.sleep(60)
        os._exit(0)
    try:
        os.close(held)  # what the system does when a process is killed
        for _ in range(100):
            try:
                release(acquire(tmp_path))
                break
            except BlockingIOError:
                time.sleep(0.02)  # the child has only begun
        else:
            raise AssertionError("the child holds the lock")
    finally:
        os.kill(worker, 9)
        os.waitpid(worker, 0)
