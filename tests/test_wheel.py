"""The wheel, away from the repository: what people get from an index works without the checkout on the path."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from PIL import Image

from common.data.splits import load_digits_data

SCRIPT = """
import sys, timm, torch
import common, swin
from common.publishing.export import export_model, load_exported
assert common.__file__.startswith(sys.argv[1]), common.__file__
model = common.from_pretrained(sys.argv[2])
x = torch.rand(2, 3, 32, 32)
assert torch.equal(model(x), model(x.roll((3, 9), (2, 3))))
print("label", model(x).argmax(1).tolist())
exported = load_exported(export_model(model, x, "model.pt2"))
assert torch.equal(exported(x).argmax(1), model(x).argmax(1))
theirs = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(2, 2), num_heads=(3, 6), embed_dim=48)
common.adapt(theirs.eval())
y = torch.rand(1, 3, 56, 56)
assert torch.equal(theirs(y), theirs(y.roll((5, 1), (2, 3))))
"""


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def build_wheel(directory: Path) -> Path:
    source = directory / "source"  # a copy: building leaves files behind
    for package in ("common", "swin", "swinv2", "cvt", "mvitv2", "segmentation", "shiftvit", "scripts"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run([*PIP, "wheel", "--no-deps", "--wheel-dir", str(directory), str(source)], check=True, cwd=directory)
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_loads_predicts_adapts_and_exports(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    site = tmp_path / "site"
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, cwd=tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def say(*command: str) -> str:
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, text=True, capture_output=True,
                              check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert "label" in say("-c", SCRIPT, str(site), "a_swin_micro")
    shiftvit = str(site / "bin" / "shiftvit")  # the command that people type
    Image.fromarray(load_digits_data()[1].images[0].permute(1, 2, 0).numpy()).save(tmp_path / "two.png")
    said = say(shiftvit, "predict", "--model", "a_swin_micro", "two.png", "--top", "1", "--device", "cpu")
    assert "two.png, a_swin_micro" in said
    said = say(shiftvit, "evaluate", "--model", "swin/checkpoints/a_swin_micro", "--limit", "16", "--metrics", "c_cons")
    assert "100.00" in said
    assert "--recipe NAME" in say(shiftvit, "train", "segmentation", "--help")
