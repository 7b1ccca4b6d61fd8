"""The trained models that travel with the project: they load, they are accurate, and they do not flicker."""

from pathlib import Path

import pytest
import torch
from conftest import DATA
from torch import Tensor

from common import from_pretrained
from common.data.preprocess import Preprocess
from common.data.sources import load_data, load_split
from common.evaluation.evaluate import load_for_evaluation
from common.evaluation.metrics import c_cons, top1
from common.shifts import random_shifts, roll

ROOT = Path(__file__).resolve().parents[1]
DIGITS = sorted(ROOT.glob("*/checkpoints/a_*_micro"))
ADAPTIVE = [*DIGITS, *sorted(ROOT.glob("*/checkpoints/a_*_mini"))]
LIMIT = 24 * 2**20  # bytes of all checkpoints together: they are in every clone and wheel


def name(path: Path) -> str:
    return path.name


@pytest.fixture(scope="module")
def cifar10() -> Tensor:
    return load_split(DATA / "cifar10", ("test",)).images[:100]


def test_all_four_are_here() -> None:
    for size in ("micro", "mini"):
        names = {path.name for path in ADAPTIVE if path.name.endswith(size)}
        assert names == {f"a_{family}_{size}" for family in ("swin", "swinv2", "cvt", "mvitv2")}
    assert sum(path.stat().st_size for path in ROOT.glob("*/checkpoints/*/*")) <= LIMIT


@pytest.mark.parametrize("path", DIGITS, ids=name)
def test_accuracy_and_consistency_on_held_out_digits(path: Path) -> None:
    _, test = load_data("digits")
    model, preprocess = load_for_evaluation(str(path), 10)
    model.eval()
    images = preprocess.evaluate(test.images)
    assert top1(model, (images, test.labels)) >= (96.0 if path.name == "a_swin_micro" else 95.0)
    assert c_cons(model, images) == 100.0
    assert c_cons(model, images[:40], worst=4) == 100.0


@pytest.mark.skipif(not (DATA / "cifar10").is_dir(), reason="the real CIFAR-10 is not beside the checkout")
@pytest.mark.parametrize(("path", "precision"), [
    pytest.param(path, precision, id=f"{path.name}-{precision}",
                 marks=[pytest.mark.slow] * (precision == "fp16" and path not in DIGITS))  # most of a minute
    for path in ADAPTIVE for precision in ("float32", "bf16", "fp16")
])  # fmt: skip
def test_photographs_keep_their_bits(path: Path, precision: str, cifar10: Tensor) -> None:
    """100 CIFAR-10 photographs at two random shifts each: the same logits, to the bit, and so the same labels."""
    model = from_pretrained(str(path))
    x = Preprocess(size=(32, 32)).evaluate(cifar10)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=precision != "float32"):
        expected = model(x)
        for seed in (1, 2):
            assert torch.equal(model(roll(x, random_shifts(torch.arange(100), (0, 0), (31, 31), seed))), expected)
    assert len(expected.argmax(1).unique()) > 1
