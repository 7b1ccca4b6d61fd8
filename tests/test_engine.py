"""Training: it runs from the command line, resumes to the same bits, and does the same with two processes as with one.

Runs are real but short: a few steps of the micro model on digits, in their own processes.
"""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tqdm.auto import tqdm

from common import from_pretrained
from common.data.splits import EpochSampler
from common.publishing.results import command as command_of
from common.training import reproduce
from common.training.checkpoints import Progress
from common.training.engine import _schedule
from common.training.log import RunLog
from common.training.recipe import Recipe, parse_command_line
from swin.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
SHORT = ["--limit", "170", "--batch_size", "32", "--epochs", "4", "--metrics", "top1", "c_cons", "--eval_every", "4"]


def command(output: Path, *flags: str, launcher: tuple[str, ...] = ()) -> list[str]:
    python = [sys.executable, "-m", "accelerate.commands.launch", *launcher] if launcher else [sys.executable]
    return [*python, "swin/train.py", *SHORT, "--output_dir", str(output), *flags]


def run(output: Path, *flags: str, launcher: tuple[str, ...] = ()) -> str:
    done = subprocess.run(command(output, *flags, launcher=launcher), cwd=ROOT, env=ENVIRONMENT, text=True,
                          capture_output=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def log(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run in one process."""
    output = tmp_path_factory.mktemp("reference")
    stdout = run(output)
    assert "a_swin_micro" in stdout
    return output


def test_a_run_leaves_a_loadable_model_and_its_results(reference: Path) -> None:
    results = json.loads((reference / "results.json").read_text())
    assert results["c_cons"] == 100.0
    assert results["images"] == results["training_images"] == results["limit"] == 170
    assert command_of(results).endswith("--limit 170")  # a part of the data is no row of a table
    assert results["settings"]["batch_size"] == 32
    assert from_pretrained(str(reference))(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert (reference / "best" / "model.safetensors").exists()
    assert (reference / "curves.png").stat().st_size > 1000
    losses = [row["loss"] for row in log(reference) if "loss" in row]
    assert len(losses) == 20
    assert all(loss > 0 for loss in losses)


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_bits(reference: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of an epoch, then --resume_from_checkpoint latest: as if nothing had happened."""
    process = subprocess.Popen(command(tmp_path, "--checkpointing_steps", "2"), cwd=ROOT, env=ENVIRONMENT,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "checkpoints" / "step_00000006").exists():
        assert process.poll() is None, "training ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "results.json").exists()
    for name in (".step_00000008", "step_00000002"):  # killed while it wrote one, or deleted one
        (tmp_path / "checkpoints" / name).mkdir(exist_ok=True)
        (tmp_path / "checkpoints" / name / "optimizer.bin").write_bytes(b"half of it")
    (tmp_path / "checkpoints" / "step_00000002" / "progress.json").unlink(missing_ok=True)
    stdout = run(tmp_path, "--checkpointing_steps", "2", "--resume_from_checkpoint", "latest")
    assert "resumed from" in stdout
    one, other = (load_file(path / "model.safetensors") for path in (reference, tmp_path))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    same = [{k: row[k] for k in ("step", "loss") if k in row} for row in log(reference)]
    assert [{k: row[k] for k in ("step", "loss") if k in row} for row in log(tmp_path)] == same
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2  # the last two are kept, no temporary one is left


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_brings_a_checkpoint_and_a_clean_end(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(command(tmp_path, "--epochs", "300"), cwd=ROOT, env=ENVIRONMENT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip
    deadline = time.monotonic() + 120
    while not ((tmp_path / "log.jsonl").exists() and (tmp_path / "log.jsonl").stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "go on with --resume_from_checkpoint" in stdout
    assert list((tmp_path / "checkpoints").glob("step_*/model.safetensors"))


@pytest.mark.slow
def test_two_processes_do_what_one_does(reference: Path, tmp_path: Path) -> None:
    """The same global batch on two processes: the same losses to rounding, the same evaluation counts exactly.

    ``--multi_gpu`` is Accelerate's name for its torchrun launcher; told to use the CPU, the processes talk over gloo.
    170 images divide neither into batches of 32 nor, to evaluate, into two processes: padding must not count twice.
    """
    run(tmp_path, "--eval_batch_size", "33", launcher=("--multi_gpu", "--num_processes", "2"))
    ours = [row["loss"] for row in log(tmp_path) if "loss" in row]
    single = [row["loss"] for row in log(reference) if "loss" in row]
    assert ours == pytest.approx(single, abs=1e-5)
    results = [json.loads((path / "results.json").read_text()) for path in (tmp_path, reference)]
    assert results[0]["processes"] == 2
    assert results[0]["images"] == results[1]["images"] == 170
    assert [results[0][m] for m in ("top1", "c_cons")] == [results[1][m] for m in ("top1", "c_cons")]


@pytest.mark.slow
def test_two_machines_do_what_one_does(reference: Path, tmp_path: Path) -> None:
    """A launcher on each, by the file for several nodes, as ``scripts/slurm.sbatch`` starts them; both stand here. They
    share a folder, in which the first alone writes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start(rank: int, *flags: str) -> "subprocess.Popen[str]":
        nodes = ("--config_file", "scripts/accelerate/multi_node.yaml", "--mixed_precision", "no", "--num_machines",
                 "2", "--num_processes", "2", "--machine_rank", str(rank), "--main_process_ip", "127.0.0.1",
                 "--main_process_port", str(port))  # fmt: skip
        return subprocess.Popen(command(tmp_path, *flags, launcher=nodes), cwd=ROOT, env=ENVIRONMENT, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip

    machines = [start(rank, "--checkpointing_steps", "7") for rank in (0, 1)]
    printed = [machine.communicate(timeout=240) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], printed[0][1][-3000:]
    assert ["model, log and results" in stdout for stdout, _ in printed] == [True, False]
    ours = [row["loss"] for row in log(tmp_path) if "loss" in row]
    assert ours == pytest.approx([row["loss"] for row in log(reference) if "loss" in row], abs=1e-5)
    assert json.loads((tmp_path / "results.json").read_text())["processes"] == 2
    assert list((tmp_path / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_every_process_measures_the_statistics_that_are_saved(tmp_path: Path) -> None:
    """Batch norm of each process follows its own images: results would be of several models, none of them the saved."""
    (tmp_path / "train.py").write_text(
        "import os\nfrom common.training.engine import main\nfrom common.training.task import Classification\n"
        "from cvt.recipes import RECIPES\n\nclass Telling(Classification):\n    def evaluate(self, model):\n"
        "        values = [b.double().sum().item() for name, b in model.named_buffers() if 'running' in name]\n"
        "        with open(f'{os.path.dirname(__file__)}/{os.getpid()}.txt', 'a') as file:\n"
        "            print(len(values), sum(values), file=file)\n"
        "        return super().evaluate(model)\n\nmain(RECIPES, 'digits', task=Telling)\n"
    )
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    done = subprocess.run([*launch, str(tmp_path / "train.py"), "--model", "cvt_micro", "--epochs", "1", "--limit",
                           "32", "--batch_size", "8", "--metrics", "top1", "--output_dir", str(tmp_path / "out")],
                          cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = [path.read_text().splitlines() for path in tmp_path.glob("*.txt")]
    assert [len(lines) for lines in told] == [2, 2]  # two processes: after the last epoch, and the saved model
    assert len({line for lines in told for line in lines}) == 1
    assert int(told[0][0].split()[0]) > 0


def test_gradient_accumulation_is_a_larger_batch(reference: Path, tmp_path: Path, call: Callable[..., None]) -> None:
    call("swin/train.py", *SHORT, "--output_dir", str(tmp_path), "--gradient_accumulation_steps", "4")
    one, other = (load_file(path / "model.safetensors") for path in (reference, tmp_path))
    assert max((one[name] - other[name]).abs().max().item() for name in one) < 1e-4
    ours = [row["loss"] for row in log(tmp_path) if "loss" in row]  # of the whole batch, not of its last part
    assert ours == pytest.approx([row["loss"] for row in log(reference) if "loss" in row], abs=1e-5)


def test_accumulation_that_accelerate_is_told_of(tmp_path: Path, train_digits: Callable[..., dict],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Its variable goes before the flag: else batches are larger than asked for, and epochs more, without a word."""
    train_digits(tmp_path / "flag", "--gradient_accumulation_steps", "2")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    train_digits(tmp_path / "variable")
    ours, theirs = ([row["loss"] for row in log(tmp_path / name) if "lr" in row] for name in ("variable", "flag"))
    assert ours == theirs


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, call: Callable[..., None],
                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("SHIFTVIT_TRACEBACK", "1")
    flags = ("swin/train.py", *SHORT, "--output_dir", str(tmp_path), "--epochs", "1", "--eval_every", "1")
    call(*flags, "--checkpointing_steps", "5")
    with pytest.raises(ValueError, match="belongs to another run") as error:
        call(*flags, "--resume_from_checkpoint", "latest", "--model", "swin_micro")
    assert "model: 'a_swin_micro' there, 'swin_micro' here" in str(error.value)  # what differs, not the whole recipe
    assert len(str(error.value)) < 500


def test_command_line_overrides_recipes_and_refuses_unknown_flags(capsys: pytest.CaptureFixture[str]) -> None:
    name, recipe, options = parse_command_line(RECIPES, "digits", ["--recipe", "cifar10", "--epochs", "7", "--no-flip",
                                                                   "--betas", "0.8", "0.9"])  # fmt: skip
    assert (name, recipe.epochs, recipe.flip, recipe.betas) == ("cifar10", 7, False, (0.8, 0.9))
    assert recipe.resize == RECIPES["cifar10"].resize
    assert options.output_dir == "outputs/cifar10"
    with pytest.raises(SystemExit):
        parse_command_line(RECIPES, "digits", ["--epoch_count", "7"])
    assert "unrecognized arguments: --epoch_count" in capsys.readouterr().err


def test_schedule_warms_up_then_follows_a_cosine() -> None:
    recipe = Recipe(
        model="m", epochs=10, batch_size=64, lr=1e-3, lr_batch=32, warmup_epochs=2, warmup_lr=1e-4, min_lr=1e-5
    )
    assert recipe.scaled(recipe.lr) == pytest.approx(2e-3)
    factor = _schedule(recipe, steps_per_epoch=5, total=50)
    values = [factor(step) for step in range(51)]
    assert values[0] == pytest.approx(0.1)
    assert values[10] == pytest.approx(1.0)
    assert values[30] == pytest.approx(0.01 + 0.99 * 0.5)
    assert values[50] == pytest.approx(0.01)
    assert values[:11] == sorted(values[:11])
    assert values[10:] == sorted(values[10:], reverse=True)


def test_poly_schedule_falls_in_a_line_after_its_warm_up() -> None:
    recipe = Recipe(model="m", lr=6e-5, lr_batch=0, batch_size=16, schedule="poly", warmup_steps=10, warmup_lr=6e-11,
                    min_lr=0.0)  # fmt: skip
    assert recipe.scaled(recipe.lr) == 6e-5
    factor = _schedule(recipe, steps_per_epoch=5, total=100)
    assert [factor(step) for step in (0, 10, 50, 100)] == pytest.approx([1e-6, 0.9, 0.5, 0.0])


@pytest.mark.parametrize(("folder", "rates"), [
    ("swin", (1e-6, 1e-3, 1e-5)), ("swinv2", (1e-6, 1e-3, 1e-5)),  # two times what is stated for 512 images
    ("cvt", (1e-6, 2e-3, 1e-5)),  # eight GPUs multiply the peak alone
    ("mvitv2", (1e-8, 2.5e-4, 1e-6)),
])  # fmt: skip
def test_rows_of_imagenet_have_the_learning_rates_of_the_originals(folder: str, rates: tuple[float, ...]) -> None:
    """First, highest and last of the run. If this fails, weeks of GPUs train with rates that the original did not have:
    CvT's warm-up and final rate were once scaled with the batch as its peak is, and ended eight times too high."""
    recipes = import_module(f"{folder}.recipes").RECIPES
    for row in ("imagenet", "imagenet_default", "imagenet_standard", "imagenet_standard_default"):
        recipe = recipes[row]
        factor = _schedule(recipe, steps_per_epoch=10, total=10 * recipe.epochs)
        steps = (0, round(10 * recipe.warmup_epochs), 10 * recipe.epochs)
        assert [recipe.scaled(recipe.lr) * factor(step) for step in steps] == pytest.approx(rates)


def test_an_evaluation_makes_no_training_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the images of the steps before it count, their seconds do not: the log shows several times the rate."""
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)  # each look at the clock takes a second
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    progress = Progress()
    run_log = RunLog(Accelerator(), tmp_path / "log.jsonl", progress, "top1")
    for progress.step in range(1, 5):
        run_log.step(tqdm(disable=True), torch.zeros(()), 0.1, progress, images=10, every=2)
        if progress.step == 3:
            run_log.evaluation(tqdm(disable=True), {"top1": 50.0}, progress)
    assert [row["images_per_s"] for row in log(tmp_path) if "lr" in row] == [20.0, 10.0]


def test_sampling_depends_on_seed_and_epoch() -> None:
    sampler = EpochSampler(50, seed=3, batch_size=8)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    sampler.set_epoch(0)
    assert len(first) == len(second) == 48  # whole batches only, whatever the accumulation
    assert {epoch for epoch, _ in second} == {1}
    assert len({index for _, index in first}) == 48
    assert [index for _, index in first] != [index for _, index in second]
    assert list(sampler) == first


def test_reproduce_and_evaluate_from_the_command_line(tmp_path: Path, call: Callable[..., None],
                                                      capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """A minute's version of the paper's rows, and the evaluation of a model it leaves behind."""
    call("swin/reproduce.py", "--scale", "smoke", "--rows", "cifar10", "cifar10_default", "--output_dir", str(tmp_path))
    rows = json.loads((tmp_path / "smoke.json").read_text())
    assert [row["model"] for row in rows] == ["a_swin_micro", "swin_micro"]
    assert rows[0]["c_cons ours"] == 100.0
    assert rows[0]["top1 paper"] == 93.39
    capsys.readouterr()
    call("swin/reproduce.py", "--scale", "smoke", "--rows", "cifar10_default", "--seeds", "0", "1", "1",
         "--output_dir", str(tmp_path))  # fmt: skip
    rows = json.loads((tmp_path / "smoke.json").read_text())  # seed 0 was trained already
    first, second = (row["top1 ours"] for row in rows if row["row"] == "cifar10_default")
    assert (tmp_path / "smoke" / "swin_micro_cifar10_default_seed1" / "model.safetensors").exists()
    assert first != second
    assert f"{(first + second) / 2:.2f} ± {abs(first - second) / 2**0.5:.2f}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="holds this run with --mixed_precision no: give another --output_dir"):
        reproduce.main(RECIPES, "", ["--scale", "smoke", "--rows", "cifar10_default", "--mixed_precision", "bf16",
                                     "--output_dir", str(tmp_path)])  # fmt: skip
    call("swin/evaluate.py", "--model", str(tmp_path / "smoke" / "a_swin_micro_cifar10"), "--metrics", "top1", "c_cons",
         "c_cons_worst@2", "--limit", "50", "--json", str(tmp_path / "evaluation.json"))  # fmt: skip
    measured = json.loads((tmp_path / "evaluation.json").read_text())
    assert measured["images"] == 50
    assert measured["c_cons"] == measured["c_cons_worst@2"] == 100.0


def test_rows_of_other_arguments_and_named_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Else a row takes the place of one with arguments of its own, and one named twice counts as two trainings."""
    monkeypatch.setattr(reproduce, "train", lambda name, recipe, *_: {"top1": float(recipe.seed)})
    command = ["--scale", "smoke", "--output_dir", str(tmp_path), "--rows", "cifar10", "cifar10"]
    for more in (["--model_args", "sketch=16"], [], [], ["--seeds", "0", "1"]):
        reproduce.main(RECIPES, "", command + more)
    rows = json.loads((tmp_path / "smoke.json").read_text())
    assert [(row.get("sketch"), row["seed"]) for row in rows] == [(16, 0), (None, 0), (None, 1)]
    last = capsys.readouterr().out.splitlines()[-2]
    assert "0.50 ± 0.71" in last
    assert "2 seeds" in last


@pytest.mark.slow
def test_rows_of_imagenet_and_plugged_in_anchors_run(tmp_path: Path, call: Callable[..., None]) -> None:
    """RandAugment, mixup, cutmix and erasing together; and the row that starts from another row's weights."""
    smoke = "cvt/reproduce.py", "--scale", "smoke", "--output_dir", str(tmp_path), "--rows"
    call(*smoke, "imagenet_standard", "cifar10_default", "cifar10_adapted")
    rows = json.loads((tmp_path / "smoke.json").read_text())
    assert [row["model"] for row in rows] == ["a_cvt_micro", "cvt_micro", "a_cvt_micro"]
    call(*smoke, "cifar10_adapted", "--battery")  # of what is trained already
    assert json.loads((tmp_path / "smoke.json").read_text()) == rows  # the others stay
    measured = json.loads((tmp_path / "smoke" / "a_cvt_micro_cifar10_adapted" / "battery.json").read_text())
    assert measured["recipe"] == "cifar10_adapted"
    assert measured["canonical_off"]["c_cons"] == measured["c_cons_worst@8"] == 100.0
    assert rows[2]["c_cons ours"] == 100.0
