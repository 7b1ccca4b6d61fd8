"""One evaluation for all tables: if a part of it measured something else, a table would be wrong without a sign."""

import json
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, randomize
from test_finetuning import write_tree
from torch import nn

from common import create_model, from_pretrained
from common.data.preprocess import PREPROCESSOR_NAME, Preprocess
from common.data.sources import load_data
from common.evaluation.battery import FULL, battery, battery_of, metrics_of
from common.evaluation.evaluate import default_crop, evaluate
from common.evaluation.evaluate import main as measure
from common.evaluation.exactness import count_identical
from common.evaluation.perturb import ShiftAverage, erased, half_pixel
from common.evaluation.tokens import token_errors
from swin.recipes import RECIPES


def test_a_patch_of_each_image_is_erased_and_no_more() -> None:
    x, index = torch.ones(400, 1, 20, 30), torch.arange(400)
    y = erased(x, index, 7, seed=3)
    counts = (y == 0).sum((1, 2, 3))
    assert set(counts.tolist()) == {side**2 for side in range(8)}
    rows, columns = (y == 0).any(3).sum(2).flatten(), (y == 0).any(2).sum(2).flatten()
    assert torch.equal(rows * columns, counts)  # squares
    assert torch.equal(y[17:40], erased(x[17:40], index[17:40], 7, seed=3))  # whatever the batch
    assert not torch.equal(y, erased(x, index, 7, seed=4))
    assert (y == 0).any(0).any(1).all()  # anywhere: in the first and the last row
    assert (y == 0).any(0).any(2).all()


def test_standard_shifts_are_those_of_the_training(tmp_path: Path) -> None:
    """Else a model of ImageNet's recipe for standard shifts is measured with zeros, unless told otherwise by hand."""
    from_pretrained(ROOT / "swin" / "checkpoints" / "swin_micro").save_pretrained(tmp_path)
    preprocess = replace(Preprocess.load(tmp_path / PREPROCESSOR_NAME), resize=48)
    preprocess.save(tmp_path)
    flags = ["--model", str(tmp_path), "--limit", "90", "--metrics", "s_cons"]
    with pytest.warns(UserWarning, match="cropped from 48 px, and standard shifts fill with zeros: --crop"):
        zeros = measure("", flags)
    (tmp_path / "results.json").write_text('{"settings": {"crop": true}}')
    cropped = measure("", flags)
    assert cropped == measure("", [*flags, "--crop"])
    assert (zeros.get("crop"), cropped["crop"]) == (None, True)
    assert zeros == measure("", [*flags, "--no-crop"])
    assert zeros["s_cons"] != cropped["s_cons"]
    found = battery_of(tmp_path, "digits", limit=90, parts=("plain",), exact_images=1)
    assert found["s_cons"] == cropped["s_cons"]
    trained = [measure("", [*flags, "--crop", "--split", "train"]), battery_of(
        tmp_path, "digits", limit=90, split="train", parts=("plain",), exact_images=1)]  # fmt: skip
    assert [(part["split"], part["s_cons"]) for part in trained] == [("train", trained[0]["s_cons"])] * 2
    assert trained[0]["s_cons"] != cropped["s_cons"]
    told = measure("", [*flags, "--resize", "40", "--model_args", "canonical=false", "--no-crop"])
    assert (told["resize"], told["model_args"]) == (40, {"canonical": False})
    assert not default_crop(tmp_path, replace(preprocess, resize=None))  # there is no room
    (tmp_path / "results.json").write_text('{"settings": null}')
    assert not default_crop(tmp_path, preprocess, ["top1"])
    (tmp_path / "results.json").write_text('{"settings": {"cro')
    with pytest.raises(ValueError, match=r"results\.json is not valid JSON .*: fetch the file anew"):
        default_crop(tmp_path, preprocess)


def test_a_battery_says_what_it_measured_and_nothing_else(tmp_path: Path) -> None:
    """What training measured, elsewhere and in another precision, would stand there as the battery's."""
    from_pretrained(ROOT / "swin" / "checkpoints" / "swin_micro").save_pretrained(tmp_path)
    training = {"recipe": "digits", "epochs": 40, "settings": {"lr": 1e-3}, "train_seconds": 7.5}
    measured = {"top1": 12.5, "c_cons": 99.0, "images": 12345, "device": "abacus", "processes": 64}
    (tmp_path / "results.json").write_text(json.dumps(training | measured))
    found = battery_of(tmp_path, "digits", limit=4, parts=("flipped",), exact_images=2, target=tmp_path / "found.json")
    assert found | training == found
    assert (found["data"], found["images"], found["processes"]) == ("digits", 4, 1)
    assert not {"top1", "c_cons"} & found.keys()
    assert json.loads((tmp_path / "found.json").read_text()).keys() == found.keys()


def test_a_count_that_fails_leaves_tf32_as_it_was() -> None:
    """All that a process computed afterwards would have three digits."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        assert torch.backends.cudnn.allow_tf32
        raise RuntimeError("out of memory")

    images, before = torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(RuntimeError, match="out of memory"):
        count_identical(broken, images, Preprocess(size=(32, 32)), "tf32", 1)  # type: ignore[arg-type]
    assert (before, torch.backends.cuda.matmul.allow_tf32) == (False, False)


def test_two_half_pixels_are_one() -> None:
    x = torch.randn(2, 3, 15, 21)  # odd sides: no frequency is lost
    assert torch.allclose(half_pixel(half_pixel(x, x, 0, 0), x, 0, 0), x.roll((1, 1), (2, 3)), atol=1e-5)
    assert not torch.allclose(half_pixel(x, x, 0, 0), x, atol=0.1)


def test_metrics_of_changed_images() -> None:
    """What stands behind the colon happens to the images first, for every kind of metric."""
    split, preprocess = load_data("digits")[1].head(40), Preprocess(size=(32, 32))

    def bottom(x: torch.Tensor) -> torch.Tensor:  # the label is the half that is brighter
        halves = x.mean((1, 3))
        return torch.stack([halves[:, :16].sum(1), halves[:, 16:].sum(1)], 1)

    found = evaluate(bottom, split, preprocess, ["kept:flipped", "kept:half", "c_cons:flipped"], progress=False)
    assert found["kept:flipped"] == 0
    assert found["kept:half"] > 80
    with pytest.raises(ValueError, match="unknown metric 'top1:sideways'"):
        evaluate(bottom, split, preprocess, ["top1:sideways"], progress=False)


def test_averages_over_shifts() -> None:
    """Invariant to the shifts of its own lattice, as a sum over them must be, and not to others."""

    class Corner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :, 0, 0]

    x = torch.randn(3, 4, 8, 8)
    average = ShiftAverage(Corner(), 2)
    seen = sum(x[:, :, -i, -j].softmax(-1) for i in (0, 5) for j in (0, 5)) / 4
    assert torch.allclose(average(x).exp(), seen, atol=1e-6)


def test_tokens_of_an_adaptive_model_stay_and_others_do_not() -> None:
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    errors = {
        name: [row["mean"] for row in token_errors(randomize(create_model(name, canonical=False)).double().eval(), x)]
        for name in ("a_cvt_micro", "cvt_micro")
    }
    assert max(errors["a_cvt_micro"]) < 1e-12
    assert min(errors["cvt_micro"]) > 0.05


def test_the_battery(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """All parts, of an adaptive and a default model: both columns where there are two, nothing left out."""
    split, preprocess = load_data("digits")[1].head(6), Preprocess(size=(32, 32))
    parts = tuple(part for part in FULL if part != "worst")
    for name in ("a_swin_micro", "swin_micro"):
        model = randomize(create_model(name)).eval()
        found = battery(model, split, preprocess, parts=parts, exact_images=4, figure=tmp_path / f"{name}.png")
        assert all(metric in found for part in parts for metric in metrics_of(part, 32))
        assert ("canonical_off" in found) == model.adaptive
        averaged = {f"{metric}:averaged@{shifts}" for metric in ("top1", "c_cons", "s_cons") for shifts in (4, 16)}
        assert averaged & found.keys() == (set() if model.adaptive else averaged)
        assert [row["canonical"] for row in found["bits"]] == (
            [True, True, False, False] if model.adaptive else 2 * [False]
        )
        assert (found["bits"][0]["bit-identical"] == 4) == model.adaptive
        assert found["config"]["score"] == "signed"
        assert found["torch"] == torch.__version__
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    assert metrics_of("magnitudes", 224) == ["c_cons@56", "c_cons@112", "c_cons@168", "c_cons@223", "c_cons_near@32"]
    assert metrics_of("erased", 224)[::2] == ["top1:erased@28", "top1:erased@42", "top1:erased@56", "top1:erased@70"]


def test_the_battery_of_a_compiled_model_reports_each_part() -> None:
    """The long passes go through the graph, and what has been measured is there if the rest is cut."""
    split, preprocess = load_data("digits")[1].head(4), Preprocess(size=(32, 32))
    model, seen, calls = randomize(create_model("a_swin_micro")).eval(), [], []

    def note(graph: Any, inputs: Any) -> Any:
        return lambda *args: calls.append(1) or graph(*args)

    compiled = torch.compile(model, backend=note)
    battery(model, split, preprocess, parts=("plain", "flipped"), exact_images=2, compiled=compiled,
            report=lambda results: seen.append(set(results)))  # fmt: skip
    assert calls
    assert "top1" in seen[0]
    assert "top1:flipped" in seen[1] - seen[0]


def test_a_run_lands_in_the_row_of_its_recipe_and_arguments() -> None:
    """A default model trained with circular shifts is no default row, and another score is not the paper's."""
    results = runpy.run_path(str(ROOT / "scripts" / "results.py"))
    rows = dict(results["rows_of"]("cifar10")[::-1])  # Swin's, which come first

    def run(name: str, **changed: Any) -> dict[str, Any]:
        return {"recipe": name, "settings": json.loads(json.dumps({**rows[name].settings(), **changed}))}

    def landed(run: dict[str, Any]) -> list[str]:
        return [name for name, recipe in rows.items() if results["matches"](run, name, recipe)]

    assert landed(run("cifar10_default")) == ["cifar10_default"]
    assert landed(run("cifar10_augmented", epochs=50)) == ["cifar10_augmented"]
    assert landed(run("cifar10")) == ["cifar10"]
    assert not landed(run("cifar10", model_args={}))
    assert landed(run("cifar10_ours", seed=3)) == ["cifar10_ours"]
    assert not landed(run("cifar10", batch_size=256))
    assert not landed(run("cifar10") | {"limit": 2000})
    assert not landed(run("cifar10_default", mixup=0.0))
    old = run("cifar10_default")
    del old["settings"]["mixup"]  # of a run before there was such a setting
    assert not landed(old)
    assert results["mean"]([90.0, 92.0]) == "91.00 ± 1.41"


def test_a_row_takes_its_longest_runs_and_says_how_long_they_were() -> None:
    results = runpy.run_path(str(ROOT / "scripts" / "results.py"))
    rows = dict(results["rows_of"]("cifar10")[::-1])
    recipe = rows["cifar10_default"]

    def run(epochs: int, of: int, top1: float) -> dict[str, Any]:
        settings = {**json.loads(json.dumps(recipe.settings())), "epochs": of}
        return {"recipe": "cifar10_default", "epochs": epochs, "top1": top1, "settings": settings}

    runs = [run(15, 15, 70.0), run(80, 80, 86.0), run(80, 80, 88.0)]
    found = results["longest"](runs, "cifar10_default", recipe)
    row = results["paper_row"]("cifar10_default", recipe, found)
    assert (row["top1 ours"], row["epochs"], row["runs"]) == ("87.00 ± 1.41", "80", 2)
    assert results["length"](run(20, 30, 0.0)) == "20 of 30"
    assert not results["longest"]([], "cifar10_default", recipe)


def test_measures_stand_beside_the_papers() -> None:
    """By shares of the side, as SwinV2's images are larger; what was not run says so; what cannot be has a dash."""
    results = runpy.run_path(str(ROOT / "scripts" / "results.py"))
    errors = [{"stage": "stages.0", "mean": 0.25, "largest": 7.0}]
    runs = [{"model": "swinv2_tiny", "recipe": "cifar10_default", "epochs": 50, "config": {"img_size": 256},
             "c_cons@64": 70.0, "token_errors": errors},
            {"model": "a_swin_tiny", "recipe": "cifar10_ours", "epochs": 80, "config": {"img_size": [224, 224]},
             "c_cons@56": 100.0, "canonical_off": {"c_cons@56": 99.9}, "top1:erased@28": 87.0,
             "token_errors": []}]  # fmt: skip
    rows = {row.pop("measure"): row for row in results["battery_rows"](runs)}
    assert list(rows["C-Cons, shifts up to 1/4"].values()) == ["70.00", 92.13, "100.00 / 99.90", 100.0]
    assert list(rows["top-1, a patch of up to 1/8 erased"].values()) == ["not run", "-", "87.00", 93.27]
    assert list(rows["C-Cons, flipped"].values()) == ["not run", "-", "not run", 100.0]
    assert list(rows["C-Cons, averaged over 4 shifts"].values()) == ["not run", "-", "-", "-"]
    assert list(rows["mean token error after stage 1, one pixel on"].values()) == ["25", "-", "-", "-"]
    peer = {**runs[1], "recipe": "cifar10_canonical", "c_cons@56": 98.0}  # of a model by the same name
    row = results["battery_rows"]([runs[1], peer])[0]
    assert {*row} == {"measure", "a_swin_tiny, 80 epochs", "a_swin_tiny paper",
                      "a_swin_tiny, cifar10_canonical, 80 epochs"}  # fmt: skip
    assert row["a_swin_tiny, cifar10_canonical, 80 epochs"] == "98.00 / 99.90"


def test_seeds_of_the_study_are_averaged(tmp_path: Path) -> None:
    """A row without runs says so; what was measured with and without the canonical anchor has both."""
    results = runpy.run_path(str(ROOT / "scripts" / "results.py"))
    assert all(row["seeds"] is None for row in results["study_rows"](tmp_path))
    runs = [{"row": "ours", "seed": seed, "top1": 95.0 + seed, "c_cons": 100.0, "c_cons_off": 99.0, "s_cons": 90.0}
            for seed in (0, 2)]  # fmt: skip
    (tmp_path / "modules_and_peers.json").write_text(json.dumps({"runs": runs}))
    rows = {row.pop("model"): row for row in results["study_rows"](tmp_path)}
    assert rows["A-Swin, our score"] == {"top1": "96.00 ± 1.41", "c_cons": "100.00 ± 0.00 / 99.00 ± 0.00",
                                         "s_cons": "90.00 ± 0.00", "seeds": 2}  # fmt: skip
    assert rows["Swin"]["top1"] is None
    assert {f"digits_{name}" for name in results["STUDY"] if "averaged" not in name} <= RECIPES.keys()


def test_leads_are_those_of_trainings_as_long_as_the_defaults() -> None:
    results = runpy.run_path(str(ROOT / "scripts" / "results.py"))

    def log(*top1: float) -> list[dict[str, Any]]:
        return [{"epoch": 10 * n, "top1": value} for n, value in enumerate(top1, 1)]

    logs = {"cifar10_default": log(50, 60, 70, 75, 80), "cifar10_ours": log(45, 60, 71, 77, 80.5),
            "cifar10_canonical": log(40, 50), "cifar10_augmented": [log(0, 0, 0, 0, 79)[-1]]}  # fmt: skip
    ours, augmented = results["lead_rows"]("swin", logs)  # not of what was trained for 20 epochs of the 50
    assert list(ours.values()) == ["cifar10_ours", "a_swin_tiny", "50", "-5.00", "+0.00", "+1.00", "+2.00", "+0.50"]
    assert list(augmented.values())[:3] == ["cifar10_augmented", "swin_tiny", "50"]
    assert (augmented["20 %"], augmented["100 %"]) == (None, "-1.00")


def test_exactness_is_counted_of_a_trained_model_by_its_name(tmp_path: Path, call: Callable[..., None],
                                                            capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Lost otherwise: counts of random weights under the name of a checkpoint, of images prepared for another model."""
    flags = "--images", "40", "--precisions", "float32", "--device", "cpu", "--json", str(tmp_path / "counts.json")
    call("scripts/exactness.py", "--models", "swin_micro", "swin/checkpoints/swin_micro", "cvt_micro", *flags)
    named, given, _ = json.loads((tmp_path / "counts.json").read_text())
    assert {**named, "model": given["model"]} == given
    assert 0 < named["same label"] < 40
    assert re.findall("(.*): random weights", capsys.readouterr().out) == ["cvt_micro"]


@pytest.mark.parametrize(("script", "flags"), [
    ("scripts/exactness.py", ("--models", "a_swin_micro", "--precisions", "float32", "--batch_size", "3")),
    ("scripts/anchor_stability.py", ("--strides", "4", "--pairs", "1")),
])  # fmt: skip
def test_photographs_are_read_where_a_folder_is_asked_for(script: str, flags: tuple[str, ...], tmp_path: Path,
                                                          call: Callable[..., None]) -> None:  # fmt: skip
    """Lost otherwise: counts on images of one's own, which are decoded on demand; the commands ended in a traceback."""
    write_tree(tmp_path, classes=2, count=2)
    target = tmp_path / "out.json"
    call(script, "--data", str(tmp_path), "--images", "3", "--device", "cpu", "--json", str(target), *flags)
    found = json.loads(target.read_text())
    (row,) = found if isinstance(found, list) else [found]
    assert row["images"] == 3
    assert row.get("bit-identical", 3) == 3
