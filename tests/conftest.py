"""What the tests share: one thread per process, real photographs, awkward images, weights that hide nothing."""

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

os.environ["HF_HUB_OFFLINE"] = "1"  # before any import: no test may depend on a network

import pytest
import timm
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from packaging.version import Version
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from common import kernels

torch.set_num_threads(1)

M = TypeVar("M", bound=nn.Module)

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
"""Real CIFAR-10 and CamVid, where they lie beside the checkout."""


ROOT = Path(__file__).resolve().parents[1]


timm_keeps_arguments = pytest.mark.skipif(Version(timm.__version__) < Version("1.0.31"),
                                          reason="timm before 1.0.31 saves a model without its arguments")  # fmt: skip

interpreted = pytest.mark.interpreted
"""Kernels against their torch forms, in Triton's interpreter: run by ``test_interpreter.py``."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != "test_interpreter.py")  # the longest first: none is left for the end
    if not kernels.INTERPRETED:
        for item in items:
            if item.get_closest_marker("interpreted"):
                item.add_marker(pytest.mark.skip(reason="run by test_interpreter.py, in a process of its own"))


def hasten_interpreter() -> None:
    """Much of its time is not what kernels compute. It replaces Triton's language when a kernel is launched, and
    again for every function that the kernel calls: what is replaced already is left alone. It checks every sum and
    product of integers for overflow, as compiled kernels do not: shapes of tests are far too small for one."""
    from triton import language
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None or not hasattr(interpreter, "_LangPatchScope"):  # another version
        return

    def patch_what_is_left(function: Any) -> Any:
        used = [value for value in function.__globals__.values() if value is language or value is language.core]
        replaced = used and all(module.static_print is print for module in used)
        return interpreter._LangPatchScope() if replaced else patch(function)

    interpreter._patch_lang = patch_what_is_left
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


if kernels.INTERPRETED:
    hasten_interpreter()


@pytest.fixture(autouse=True)
def few_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For an interpreter, which takes as long for a short program as for a long one: images are read, and weights of
    anchors mixed, in few, but where a test is marked ``as_on_gpu("images")`` or ``as_on_gpu("weights")``."""
    if not kernels.INTERPRETED:
        return
    real = {what for mark in request.node.iter_markers("as_on_gpu") for what in mark.args}
    if "images" not in real:
        for how in (kernels.image_conv.TOKENS, kernels.image_conv.PHASES):
            monkeypatch.setitem(how, "programs", 4)
    if "weights" not in real:
        for module, name in (
            (kernels.sketching, "COLUMNS"),
            (kernels.sketching, "POOLED"),
            (kernels.merge_weights, "MERGED"),
        ):
            monkeypatch.setattr(module, name, 256)


def both(monkeypatch: pytest.MonkeyPatch, f: Callable[[], Any]) -> tuple[Any, Any]:
    """A result with kernels, and without."""
    fast = f()
    monkeypatch.setattr(kernels.base, "ENABLED", False)
    return fast, f()


def pairs(monkeypatch: pytest.MonkeyPatch, f: Callable[[], list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Each result with kernels beside the one without."""
    return list(zip(*both(monkeypatch, f), strict=True))


def launches(monkeypatch: pytest.MonkeyPatch, *modules: str) -> list[str]:
    """Names of the kernels that modules of ``common.kernels`` launch from now on, in turn."""
    names: list[str] = []
    launch = kernels.base.launch

    def noted(kernel: Any, *args: Any, **constants: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, *args, **constants)

    for module in modules:
        monkeypatch.setattr(sys.modules[f"common.kernels.{module}"], "launch", noted)
    return names


def assert_same_logits_by_kernels(monkeypatch: pytest.MonkeyPatch, model: nn.Module, launched: list[str],
                                  calls: int) -> None:  # fmt: skip
    """That so many kernels are launched for a small image, and none without kernels, with the same logits."""
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        fast = model(x)
        assert len(launched) == calls
        monkeypatch.setattr(kernels.base, "ENABLED", False)
        assert torch.allclose(fast, model(x), atol=1e-5, rtol=1e-4)
    assert len(launched) == calls


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a script of ours as ``python script flags`` would, but in this process, where all is imported already."""

    def run(script: str, *flags: str) -> None:
        monkeypatch.setattr(sys, "argv", [script, *flags])
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(True)
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise AssertionError(f"{script} {flags} ended with {end.code}") from end
        finally:
            AcceleratorState._reset_state(True)

    return run


@pytest.fixture(scope="session")
def train_digits() -> Callable[..., dict[str, Any]]:
    """Train the default micro model on 64 digits in this process: ``train_digits(output, *flags, task=...)``."""
    from common.training.engine import train
    from common.training.recipe import parse_command_line
    from common.training.task import Classification
    from swin.recipes import RECIPES

    flags = ["--model", "swin_micro", "--limit", "64", "--batch_size", "16", "--epochs", "1", "--warmup_epochs", "0",
             "--report_to", "none", "--metrics", "top1"]  # fmt: skip

    def run(output: Path, *more: str, task: Any = Classification) -> dict[str, Any]:
        command = [*flags, "--output_dir", str(output), *more]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ACCELERATE_USE_CPU", "true")
            AcceleratorState._reset_state(True)
            try:
                return train(*parse_command_line(RECIPES, "digits", command), task)
            finally:
                AcceleratorState._reset_state(True)

    return run


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    """Compiled models share their code, and only so many graphs are kept of one: else tests would depend on others."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


SHALLOW: dict[str, tuple[int, ...]] = {"swin_micro": (2, 1), "swinv2_micro": (2, 1), "cvt_micro": (1, 1, 1),
                                       "mvitv2_micro": (1, 1, 1)}  # fmt: skip


def shallow(name: str) -> dict[str, Any]:
    """Arguments of a micro model with every kind of layer: what a compiler takes grows with their number."""
    depths = SHALLOW.get(name.removeprefix("a_"))
    return {} if depths is None else {"depths": depths}


class Uninitialised(TorchFunctionMode):
    """Models with zeros in place of the random numbers that they begin with, which take most of the time to build them:
    for tests that ``randomize`` them. Torch draws until all numbers are in range: memory as it comes would not do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = func in (Tensor.uniform_, Tensor.normal_, Tensor.erfinv_)
        return args[0].zero_() if drawn else func(*args, **kwargs or {})


def randomize(model: M, seed: int = 0) -> M:
    """Weights as after training: no zero bias, no unit gain, no equal position, lively running statistics."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator).to(tensor)
            if name.endswith(("running_var",)):
                tensor.copy_(1 + 0.3 * noise.abs())
            elif tensor.ndim < 2:
                tensor.copy_((1.0 if "norm" in name and name.endswith("weight") else 0.0) + 0.2 * noise)
            else:
                tensor.copy_(noise / tensor[0].numel() ** 0.5)
    return model


@pytest.fixture(scope="session")
def photos() -> Tensor:
    """Four real photographs, 224 x 224, normalised."""
    from skimage import data
    from sklearn.datasets import load_sample_images

    arrays = [*load_sample_images().images, data.astronaut(), data.coffee()]
    images = []
    for array in arrays:
        image = torch.from_numpy(array.copy()).permute(2, 0, 1)[None].float() / 255
        images.append(F.interpolate(image, (224, 224), mode="bilinear", antialias=True))
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (torch.cat(images) - mean) / std


def awkward_images(side: int) -> dict[str, Tensor]:
    """Images whose energies tie, in whole or in part."""
    zero = torch.zeros(1, 3, side, side)
    columns = torch.arange(side)
    generator = torch.Generator().manual_seed(7)
    blob = torch.rand(3, 6, 6, generator=generator)

    def put(places: list[tuple[int, int]], signs: tuple[int, ...] = (1, 1)) -> Tensor:
        image = zero.clone()
        for (h, w), sign in zip(places, signs, strict=True):
            image[0, :, h : h + 6, w : w + 6] = sign * blob
        return image

    far = side // 2
    bright = zero.clone()
    bright[0, 1, 3, 9] = 5.0
    return {
        "constant": zero + 0.4,
        "black": zero.clone(),
        "periodic": (columns % 4 < 2).float().expand(1, 3, side, side).contiguous(),
        "stripes": (1.0 - 2.0 * (columns % 4 < 2).float()).expand(1, 3, side, side).contiguous(),
        "checkerboard": ((columns[:, None] + columns) % 2).float().expand(1, 3, side, side).contiguous(),
        "half white": (columns < far).float()[:, None].expand(1, 3, side, side).contiguous(),
        "saturated": torch.randn(1, 3, side, side, generator=generator).sign() * 3,
        "one bright pixel": bright,
        "two identical objects": put([(1, 2), (far + 1, 12)]),
        "two identical objects, half a patch apart": put([(1, 2), (far + 3, 12)]),
        "object and its negative": put([(1, 2), (far + 2, 14)], (1, -1)),
    }


ALL_PHASES = [(h, w) for h in range(4) for w in range(4)]
LARGE_SHIFTS = [(17, 101), (-5, 223), (-64, 33), (225, 450), (112, -1)]


def lively(norm: nn.LayerNorm) -> nn.LayerNorm:
    """A norm that has learnt something."""
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm
