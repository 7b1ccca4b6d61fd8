"""Publishing: a run that is not what it says is refused, and what arrives from the Hub is what was sent, to the bit.
The Hub is a stand-in over HTTP, its client the real one."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from hub_server import TOKEN, HubServer, Repository
from huggingface_hub import constants
from publishing_helpers import CHECKPOINTS, MANIFESTS, edit
from safetensors.torch import load_file, save_file

from common.data.sources import load_data
from common.data.splits import Encoded
from common.publishing import manifest as manifests
from segmentation.labels import Labelling
from segmentation.splits import EncodedScenes

_spec = importlib.util.spec_from_file_location("publish", ROOT / "scripts" / "publish.py")
assert _spec is not None
assert _spec.loader is not None
publish: Any = importlib.util.module_from_spec(_spec)
sys.modules["publish"] = publish
_spec.loader.exec_module(publish)


def results_of(directory: Path) -> dict[str, Any]:
    found = (json.loads(path.read_text()) for path in (ROOT / "results").glob("*digits*.json"))
    return next(run for run in found if isinstance(run, dict) and run["model"] == directory.name)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory as training leaves it."""
    return make_run("a_swin_micro", tmp_path / "run")


def make_run(name: str, target: Path) -> Path:
    (source,) = (path for path in CHECKPOINTS if path.name == name)
    target.mkdir(parents=True)
    for file in manifests.FILES:
        shutil.copyfile(source / file, target / file)
    (target / "results.json").write_text(json.dumps(results_of(source)))
    (target / "log.jsonl").write_text("{}\n")  # stays at home
    return target


# checks


def refuse(run: Path, *arguments: str) -> str:
    """The reason why a run is not published."""
    with pytest.raises(SystemExit) as stopped:
        publish.main([str(run), "--repo_id", "team/model", "--dry-run", "--sample", "24", *arguments])
    assert isinstance(stopped.value.code, str)
    assert not (run / "README.md").exists()
    return stopped.value.code


def test_a_dry_run_does_everything_but_the_upload(run: Path, capsys: pytest.CaptureFixture[str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    publish.main([str(run), "--repo_id", "team/model", "--dry-run", "--sample", "48"])
    said = capsys.readouterr().out
    assert "top1, 48 of 360" in said
    assert re.search(r"float32 under shifts, 48 images +\| +bit-identical \| +bit-identical \| +ok", said)
    assert "dry run: nothing was uploaded to team/model" in said
    card = (run / "README.md").read_text()
    assert 'source = "team/model"' in card
    rows = json.loads((run / "publish.json").read_text())
    assert all(row["verdict"] == "ok" and row["found"] in card for row in rows)
    monkeypatch.setattr(publish, "check", lambda run: rows)
    publish.main([str(run), "--repo_id", "team/model", "--dry-run", "--revision", "v2"])
    branch = (run / "README.md").read_text()  # else the card of a branch loads what is on main
    assert branch.count('(source, revision="v2")') == branch.count('PREPROCESSOR_NAME, revision="v2")') == 1


def test_metrics_that_are_not_the_models_are_refused(run: Path) -> None:
    """Else a table of results could say anything."""
    edit(run / "results.json", top1=50.0)
    assert re.search(r"top1, 24 of 360: \d+\.\d\d, expected .* \(claimed 50.00\)", refuse(run))
    edit(run / "results.json", top1=97.78, parameters=1)
    assert "parameters: 210,502, expected 1" in refuse(run)


def test_a_single_exception_refutes_a_consistency_of_100(tmp_path: Path) -> None:
    """The default model's weights under an adaptive claim: its labels flicker."""
    run = make_run("swin_micro", tmp_path / "run")
    assert re.search("from different runs", refuse_with(run, model="a_swin_micro"))
    edit(run / "config.json", adaptive=True, anchors=[], canonical=False)
    reasons = refuse_with(run, c_cons=100.0)
    assert "c_cons, 24 of 360" in reasons
    assert "expected 100.00 (claimed 100.00)" in reasons
    assert "float64 equivariance" in reasons


def refuse_with(run: Path, **claims: Any) -> str:
    edit(run / "results.json", **claims)
    return refuse(run)


def test_an_anchor_that_is_missing_is_found_behind_the_canonical_one(run: Path) -> None:
    """The canonical anchor makes any network invariant: publishing looks without it, too."""
    edit(run / "config.json", anchors=["window", "merge"])
    reasons = refuse(run)
    assert "float64 equivariance, 4 images: not shift-equivariant" in reasons
    assert "float32 under shifts" not in reasons


def test_a_segmenter_is_checked_in_its_own_measures(tmp_path: Path) -> None:
    run = make_run("upernet_a_swin_micro", tmp_path / "run")
    publish.main([str(run), "--repo_id", "team/model", "--dry-run", "--sample", "8"])
    edit(run / "results.json", miou=30.0, mascc=99.0)
    rows = {row["check"]: row for row in publish.check_metrics(publish.load(run, 8, None))}
    assert "(claimed 30.00)" in rows["miou, 8 of 200"]["expected"]
    verdicts = {check.split(",")[0]: row["verdict"] for check, row in rows.items()}
    assert verdicts == {"miou": "FAILED", "mascc": "FAILED", "massc": "ok"}


def test_broken_runs_are_refused_with_the_reason(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weights = run / "model.safetensors"
    state = load_file(weights)
    save_file(state | {"norm.weight": torch.full_like(state["norm.weight"], torch.nan)}, weights)
    with pytest.raises(SystemExit, match="NaN or Inf in 1 of 63 tensors, such as norm.weight"):
        publish.main([str(run), "--repo_id", "team/model", "--dry-run", "--sample", "2"])
    save_file({key: value for key, value in state.items() if key != "norm.weight"}, weights)
    assert "missing norm.weight" in refuse(run)
    save_file(state, weights)
    assert "no data folder" in refuse(run, "--data", "nowhere/at/all/data")
    settings = json.loads((run / "results.json").read_text())["settings"]
    edit(run / "results.json", images=100_000)
    assert "digits has 360 images of 10 classes, the run was measured on 100,000 of 10" in refuse(run)
    edit(run / "results.json", images=360, settings=settings)
    (run / "preprocessor_config.json").unlink()
    assert "has no preprocessor_config.json" in refuse(run)
    (run / "results.json").write_text("{")
    assert "results.json is not valid JSON" in refuse(run)
    (run / "results.json").write_text("{}")
    assert "lacks ['model', 'recipe'" in refuse(run)
    (run / "results.json").unlink()
    assert "give the output directory of a finished training run" in refuse(run)
    for name in ("model", "a/b/c"):
        with pytest.raises(SystemExit, match=f"--repo_id {name}: "):
            publish.main([str(run), "--repo_id", name])
    with pytest.raises(SystemExit, match="--manifest .*none.json: no such file"):  # not after the upload
        publish.main([str(run), "--repo_id", "team/model", "--dry-run", "--manifest", str(tmp_path / "none.json")])
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    with pytest.raises(SystemExit, match="no token for the Hub"):
        publish.main([str(run), "--repo_id", "team/model"])


@pytest.mark.parametrize(
    ("claim", "total", "size"), [(97.78, 360, 64), (72.94, 10_000, 64), (100.0, 360, 24), (50.0, 200, 200)]
)
def test_honest_samples_pass_and_wrong_claims_do_not(claim: float, total: int, size: int) -> None:
    """A sample is off by chance: the check must let that pass, and nothing much beyond it."""
    low, high = publish.plausible(claim, size, total)
    right = round(claim * total / 100)
    drawn = 100 * np.random.RandomState(0).hypergeometric(right, total - right, size, 20_000) / size
    assert ((drawn < low - 1e-9) | (drawn > high + 1e-9)).mean() < 5e-4
    wrong = 100 * np.random.RandomState(1).hypergeometric(right // 2, total - right // 2, size, 2_000) / size
    assert ((wrong < low - 1e-9) | (wrong > high + 1e-9)).mean() > 0.9
    if size == total:  # nothing is left to chance but another device's rounding
        assert (low, high) == pytest.approx((claim - publish.SLACK, claim + publish.SLACK))


def test_samples_are_drawn_from_all_kinds_of_splits() -> None:
    """Image folders are sorted by class: the first images alone would say nothing about the others."""
    split: Any = load_data("digits")[1]
    few = publish.choose(split, 50)
    assert len(few) == 50
    assert len(few.labels.unique()) == 10
    assert torch.equal(few.images, publish.choose(split, 50).images)
    assert publish.choose(split, 0) is split
    labels = torch.arange(100) // 10
    encoded = Encoded(list(range(100)), lambda i: np.full((4, 4, 3), i, np.uint8), labels, tuple("0123456789"), str)
    few = publish.choose(encoded, 20)
    assert torch.equal(few.labels, torch.tensor(few.items) // 10)
    assert len(few.labels.unique()) > 5
    scenes = EncodedScenes(list(range(100)), lambda i: (b"", b""), Labelling(("a", "b")), str)
    assert len(publish.choose(scenes, 20).items) == 20


# over the wire


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "storage") as server:
        yield server


def ask(hub: HubServer, home: Path, *command: str, xet: bool = False) -> str:
    """What a fresh process says whose Hub is the stand-in, and which has nothing in its cache."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0",
                   "HF_HUB_DISABLE_XET": "0" if xet else "1", "PYTHONPATH": str(ROOT),
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


ROUND_TRIP = """
import sys, torch
from huggingface_hub.errors import HfHubHTTPError
from common import create_model, from_pretrained
sys.path.insert(0, "tests")
from conftest import randomize  # now: it switches the Hub off for whoever comes after
for name in sys.argv[1:]:
    model = randomize(create_model(name)).eval()
    address = model.push_to_hub(f"team/{name}", private=True, files={"README.md": "---\\nlicense: mit\\n---\\n"})
    loaded = from_pretrained(f"team/{name}", revision=address.rpartition("/")[2])
    x = torch.randn(2, 3, *model.img_size)
    assert type(loaded) is type(model) and loaded.config == model.config
    print(name, torch.equal(loaded(x), model(x)))
model.push_to_hub(f"team/{name}", revision="v1")
print("branch", torch.equal(from_pretrained(f"team/{name}", revision="v1")(x), model(x)))
try:
    model.push_to_hub(f"team/{name}", token="hf_wrong")
except HfHubHTTPError as error:
    print("wrong token:", error.response.status_code)
"""

LOAD = """
import torch
torch.manual_seed(0)
published = from_pretrained("team/published", token=False)  # anybody
local = from_pretrained("swin/checkpoints/a_swin_micro")
x = torch.randn(4, 3, 32, 32)
print("published", torch.equal(published(x), local(x)))
import timm
theirs = timm.create_model("hf-hub:team/published@main", pretrained=True).eval()
print("timm", torch.equal(theirs(x), local(x)), *timm.data.resolve_model_data_config(theirs)["std"])
import transformers, common.transformers_models
theirs = transformers.AutoModelForImageClassification.from_pretrained("team/published")
print("transformers", torch.equal(theirs(x).logits, local(x)))
"""


@pytest.mark.slow
def test_what_is_published_comes_back_to_the_bit(hub: HubServer, run: Path, tmp_path: Path) -> None:
    """From the command that people type to the logits that others get; then every kind of model, over LFS."""
    manifest = Path(shutil.copyfile(MANIFESTS["swin"], tmp_path / "manifest.json"))
    said = ask(hub, tmp_path / "home", "scripts/publish.py", str(run), "--repo_id", "team/published", "--sample", "16",
               "--manifest", str(manifest))  # fmt: skip
    repository = hub.repositories["team/published"]
    oid = repository.branches["main"]
    assert f'published: from_pretrained("team/published", revision="{oid}")' in said
    files = repository.commits[oid]
    assert set(files) == {"README.md", "config.json", "model.safetensors", "preprocessor_config.json", "publish.json",
                          "results.json"}  # fmt: skip
    assert files["model.safetensors"].content == (run / "model.safetensors").read_bytes()
    assert files["README.md"].content == (run / "README.md").read_bytes()
    assert repository.messages == ["initial commit", "Publish a checked run"]
    entered = next(m for m in json.loads(manifest.read_text())["models"] if m["name"] == "a_swin_micro")
    assert (entered["published"], entered["hub_id"], entered["revision"]) == (True, "team/published", oid)
    assert entered["sha256"]["model.safetensors"] == files["model.safetensors"].sha256
    edit(run / "results.json", epochs=1)
    publish.record(manifest, manifests.entry(json.loads((run / "results.json").read_text()), published=True, sha256={},
                                             hub_id="team/another"))  # fmt: skip
    anew = {model["name"]: model for model in manifests.manifest("swin", json.loads(manifest.read_text()))["models"]}
    assert anew["a_swin_micro"] == entered  # what was published stays so
    assert anew["another"]["path"] is None  # and takes no other model's place

    names = ["a_swin_micro", "swin_micro", "a_swinv2_micro", "a_cvt_micro", "a_mvitv2_micro", "upernet_a_swin_micro"]
    said = ask(hub, tmp_path / "other_home", "-c", ROUND_TRIP + LOAD, *names)
    assert said.splitlines() == [*(f"{name} True" for name in names), "branch True", "wrong token: 401",
                                 "published True", "timm True 0.35 0.35 0.35",
                                 "transformers True"]  # fmt: skip
    assert all(hub.repositories[f"team/{name}"].private for name in names)
    assert any(request.startswith("PUT /objects/") for request in hub.requests)


@pytest.mark.slow
def test_large_files_may_also_travel_by_xet(hub: HubServer, tmp_path: Path) -> None:
    """The client's own way where its package hf_xet is installed, as it is by default."""
    if not xet_keeps_files_locally(hub):
        pytest.skip("this version of hf_xet keeps no data in a folder: there is no storage to test with")
    names = ["cvt_micro", "upernet_swin_micro"]
    said = ask(hub, tmp_path / "home", "-c", ROUND_TRIP, *names, xet=True)
    assert said.splitlines() == [*(f"{name} True" for name in names), "branch True", "wrong token: 401"]
    assert not any(request.startswith("PUT /objects/") for request in hub.requests)
    assert any("xet-read-token" in request for request in hub.requests), hub.requests


def xet_keeps_files_locally(hub: HubServer) -> bool:
    probe = f"""
import hf_xet
with hf_xet.XetSession().new_upload_commit(
    token_refresh_url="{hub.url}/api/models/team/probe/xet-read-token/main",
    token_refresh_headers={{}},
    custom_headers={{}},
) as commit:
    commit.start_upload_bytes(b"probe" * 1000, sha256=hf_xet.COMPUTE_SHA256, name="probe")
"""
    hub.repositories["team/probe"] = Repository(private=False)
    return subprocess.run([sys.executable, "-c", probe], capture_output=True, timeout=60).returncode == 0
