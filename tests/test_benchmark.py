"""The benchmark compares what it says it compares. Nothing here looks at how fast anything is."""

import json
import math
import runpy
import time
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from common import create_model, list_models
from common.evaluation.benchmark import benchmark, compare, race
from common.evaluation.benchmark_modules import benchmark_modules, module_calls
from common.evaluation.contenders import Contender, Setting, build, parse

ROOT = Path(__file__).resolve().parents[1]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "benchmark.py"))
QUICK = {"rounds": 2, "block_seconds": 0.001}
FLAGS = ["--rounds", "2", "--block_seconds", "0.001", "--batch_size", "2", "--device", "cpu"]


def test_options_of_a_contender_are_literals_or_words() -> None:
    assert parse("a_swin_tiny") == ("", "a_swin_tiny", {})
    assert parse("timm:x@compile_mode=reduce-overhead,fused_attn=2,anchors=('token','window')") == (
        "timm", "x", {"compile_mode": "reduce-overhead", "fused_attn": 2, "anchors": ("token", "window")})  # fmt: skip
    with pytest.raises(ValueError, match="NAME@key=value"):
        parse("swin_tiny@compile")


def test_options_reach_the_model_or_the_setting() -> None:
    model, x, setting = build("a_swin_micro@canonical=False,precision=bf16-weights", Setting(batch_size=2, img_size=64))
    assert model.canonical is False
    assert (setting.precision, x.dtype, x.shape) == ("bf16-weights", torch.bfloat16, (2, 3, 64, 64))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    fused = build("timm:swin_tiny_patch4_window7_224@fused_attn=2,depths=(1,)", Setting(batch_size=1))[0]
    stock = build("timm:swin_tiny_patch4_window7_224@depths=(1,)", Setting(batch_size=1))[0]
    assert [m.layers[0].blocks[0].attn.fused_attn for m in (fused, stock)] == [True, False]


def test_peers_are_built_for_the_image_size() -> None:
    for name, side in (("timm:mvitv2_tiny", 64), ("timm:resnet10t", 64), ("transformers:cvt-13", 64)):
        model, x, _ = build(name, Setting(batch_size=1, img_size=side))
        with torch.no_grad():
            assert model(x).shape == (1, 1000)


@pytest.mark.parametrize(("mode", "precision"), [("inference", "bf16"), ("train", "float32")])
def test_a_comparison_reports_every_contender(mode: str, precision: str) -> None:
    names = ["swin_micro", "a_swin_micro", "timm:test_vit", "no_such_model"]
    report = benchmark(names, Setting(mode=mode, precision=precision, batch_size=2), **QUICK, kernels=True)
    default, adaptive, peer, broken = report["rows"]
    assert (
        default["parameters"]
        == adaptive["parameters"]
        == sum(p.numel() for p in create_model("swin_micro").parameters())
    )
    assert adaptive["gflops"] > default["gflops"] > 0
    for row in (default, adaptive, peer):
        assert row["rounds"] == 2
        assert 0 < row["images_per_s_low"] <= row["images_per_s"] <= row["images_per_s_high"]
        assert row["allocated_mib"] == "not measured"
        assert row["kernels"] >= sum(kernel["calls"] for kernel in row["top_kernels"]) > 0
    assert adaptive["vs_default"] == adaptive["images_per_s"] / default["images_per_s"]
    assert adaptive["vs_peer"] == adaptive["images_per_s"] / peer["images_per_s"]
    assert "unknown model" in broken["error"]


def test_ratios_are_to_the_first_the_own_default_and_the_best_peer() -> None:
    speeds = {"timm:x": 8.0, "timm:x@fused_attn=2": 10.0, "a_m": 5.0, "m": 4.0, "a_m@sketch=0": 2.0}
    rows: dict[str, dict[str, Any]] = {name: {"images_per_s": speed} for name, speed in speeds.items()}
    rows["m"]["allocated_mib"], rows["a_m"]["allocated_mib"] = 100.0, 103.0
    compare(rows)
    assert rows["a_m"] == {"images_per_s": 5.0, "allocated_mib": 103.0, "vs_first": 5 / 8, "vs_peer": 0.5,
                           "vs_default": 1.25, "allocated_ratio": 1.03}  # fmt: skip
    assert rows["a_m@sketch=0"]["vs_default"] == 0.5
    assert "vs_peer" not in rows["timm:x"]
    assert "vs_default" not in rows["m"]


def test_rounds_interleave_and_end_with_the_budget() -> None:
    order: list[str] = []

    def fail() -> None:
        order.append("c")
        raise RuntimeError("out of memory")

    steps = {"a": lambda: order.append("a"), "b": lambda: order.append("b"), "c": fail}
    contenders = [Contender(name, step, Setting()) for name, step in steps.items()]
    assert race(contenders, 3, math.inf) is None
    assert order == ["a", "b", "c", "b", "a", "a", "b"]  # there and back; what has failed is left out
    assert contenders[2].row == {"error": "RuntimeError: out of memory"}
    assert race(contenders, 3, time.monotonic() - 1) == "the time was used up after 1 of 3 rounds"
    late = benchmark(["swin_micro"], Setting(batch_size=1), deadline=time.monotonic() - 1)
    assert "time" in late["rows"][0]["error"]


@pytest.mark.parametrize("family", ["swin", "swinv2", "cvt", "mvitv2"])
def test_modules_are_timed_with_what_a_forward_gave_them(family: str) -> None:
    names = [f"{family}_micro", f"a_{family}_micro"]
    rows = benchmark_modules(names, Setting(batch_size=2), **QUICK)["rows"]
    modules = {row["module"]: row for row in rows}
    assert all(isinstance(row[names[1]], float) for row in rows)
    assert modules["canonical place"][names[0]] is None
    tokens = modules.get("tokenization") or modules["tokenization 1"]
    assert isinstance(tokens[names[0]], float)
    selected = [label for label in modules if "selection" in label or "merging" in label]
    assert len(selected) == {"swin": 3, "swinv2": 3, "cvt": 3, "mvitv2": 4}[family]
    with pytest.raises(ValueError, match="list_models"):
        benchmark_modules(["timm:test_vit"], Setting(batch_size=2))
    with pytest.raises(ValueError, match="modules are timed in inference"):  # else a table of it is called training
        benchmark_modules(names, Setting(batch_size=2, mode="train"))


def test_the_papers_modules_are_found_in_the_papers_models() -> None:
    for family, name in (("swin", "a_swin_tiny"), ("mvitv2", "a_mvitv2_tiny")):
        model, x, setting = build(name, Setting(batch_size=1))
        calls = module_calls(model, x, setting)
        assert {label for known, label in SCRIPT["MODULES"] if known == family} <= set(calls)
        methods = ("forward", "choose", "place")
        left = [name for module in model.modules() for name in methods if name in vars(module)]
        assert not left  # recording leaves nothing behind
        anchored = calls["tokenization"]
        anchor = model.token_anchor
        assert [function for function, _, _ in anchored] == [anchor.choose, model.patch_embed]
        windows = sum(label.startswith("window selection") for label in calls)
        assert windows == (4 if family == "swin" else 0)  # of all stages


def test_presets_name_models_that_exist() -> None:
    for models in SCRIPT["FAMILIES"].values():
        for library, name, _ in map(parse, models):
            assert name in (timm.list_models() if library == "timm" else [*list_models(), "cvt-13"])
    assert set(SCRIPT["THROUGHPUT"]) == set(SCRIPT["MEMORY"]) <= set(list_models())


@pytest.mark.parametrize("preset", ["throughput", "modules", "memory", "scaling", "speed"])
def test_presets_write_what_they_print(preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--preset", preset, "--models", "swin_micro", "a_swin_micro", "--no-compile", *FLAGS]
    report = SCRIPT["main"]([*flags, "--json", str(tmp_path / "report.json")])
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report))
    assert [section["name"] for section in report["sections"]] == list(SCRIPT["PRESETS"][preset])
    assert "a_swin_micro" in capsys.readouterr().out
    assert not any("error" in row for section in report["sections"] for row in section["rows"])
    if preset == "scaling":
        assert [section["rows"][0]["img_size"] for section in report["sections"]] == [[32, 32], [64, 64], [128, 128]]


def test_profiles_are_text(tmp_path: Path) -> None:
    SCRIPT["main"](["swin_micro", "--profile", str(tmp_path), *FLAGS])
    (file,) = tmp_path.iterdir()
    assert "aten::addmm" in file.read_text()


def test_the_time_of_a_pixel_is_that_of_the_contenders_own_batch() -> None:
    """Else a contender with a batch size of its own looks as many times faster as its batch is smaller."""
    preset = ["--preset", "scaling", "--sections", "x1", "--no-compile"]
    report = SCRIPT["main"]([*preset, "--models", "swin_micro@batch_size=1", *FLAGS])
    (row,) = report["sections"][0]["rows"]
    assert row["ns_per_pixel"] == pytest.approx(1e6 * row["ms"] / 32**2)
