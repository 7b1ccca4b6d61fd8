"""How kernels are launched and traced, and how they score tokens."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Uninitialised, interpreted, launches, shallow
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule, Node
from torch.library import infer_schema

from common import create_model, kernels
from common.anchors import ConvAnchor, best_offset
from common.anchors.energy import at_every_position, phase_energies
from common.kernels.cards import Card, assumed
from common.models import classifier
from common.ops.choice import moments
from common.ops.energy import plain_taps
from common.ops.strided import Strided

if kernels.AVAILABLE:
    import triton
    from triton.backends.compiler import GPUTarget


@pytest.mark.skipif(not kernels.AVAILABLE, reason="needs Triton")
def test_torch_can_read_the_signature_of_what_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 infers the schema again, of the function that it is given, though it is given the schema too."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(kernels.base, "triton_op", lambda name, **keys: lambda function: given.update(keys, f=function))
    monkeypatch.setattr(kernels.base.torch.ops.shift_vits, "twice", SimpleNamespace(default=None), raising=False)

    @kernels.base.operator("shift_vits::twice")
    def twice(x: Tensor, times: int) -> Tensor:
        return x * times

    assert infer_schema(given["f"], mutates_args={}) == given["schema"] == "(Tensor x, SymInt times) -> Tensor"


def test_a_kernel_is_compiled_once_for_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is launched again for tensors of the same types and alignment, equal numbers and constants; no others."""
    compiled, launched = [], []

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args: launched.append((grid, *args))

    class Kernel:
        fn, params = object(), [SimpleNamespace(name=name) for name in ("x", "n", "SIZE", "WIDE")]

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*args: Any, **constants: Any) -> Compiled:
                compiled.append((grid, args, constants))
                return Compiled()

            return run

    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # as tensors here have no number of a device
    monkeypatch.setattr(kernels.base, "INTERPRETED", False)
    kernel, x = Kernel(), torch.zeros(64)
    kernels.base.launch(kernel, (2,), x, 5, WIDE=True, SIZE=3, num_warps=4)
    assert compiled == [((2,), (x, 5), {"WIDE": True, "SIZE": 3, "num_warps": 4})]
    kernels.base.launch(kernel, (3, 2), x[4:], 5, WIDE=True, SIZE=3, num_warps=4)
    assert len(compiled) == 1
    assert [launched[0][0], *launched[0][2:]] == [(3, 2, 1), 5, 3, True]
    assert torch.equal(launched[0][1], x[4:])
    for others, (tensor, n, size, warps) in enumerate(
        [(x[1:], 5, 3, 4), (x.double(), 5, 3, 4), (x, 6, 3, 4), (x, 5, 4, 4), (x, 5, 3, 8)], start=2
    ):
        kernels.base.launch(kernel, (2,), tensor, n, WIDE=True, SIZE=size, num_warps=warps)
        assert len(compiled) == others
    assert len(launched) == 1


@pytest.mark.skipif(not kernels.AVAILABLE, reason="needs Triton")
def test_others_are_compiled_before_the_first_kernel_that_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else the first output waits for kernels one by one, or an evaluation for a trace that finds all compiled."""
    from triton.runtime.cache import get_cache_manager

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(kernels.base, "INTERPRETED", False)
    told: list[int] = []

    def compile_others() -> None:
        told.append(1)
        store(7)

    def store(size: int) -> None:
        cache = get_cache_manager(f"{size:04}")
        cache.put_group("kernel.json", {"kernel.json": cache.put("{}", "kernel.json")})

    class Kernel:
        fn, params = object(), [SimpleNamespace(name=name) for name in ("x", "SIZE")]

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, SIZE: get_cache_manager(f"{SIZE:04}").get_group("kernel.json")  # noqa: N803

    def launch(size: int) -> Any:
        kernels.base.launch(kernel, (2,), x, SIZE=size)
        return list(kernels.base._COMPILED.values())[-1][0]

    kernel, x = Kernel(), torch.zeros(64)
    monkeypatch.setattr(kernels.base, "_COMPILED", {})
    monkeypatch.setattr(kernels.base, "ON_COMPILING", compile_others)
    store(5)
    assert launch(5)
    assert not told  # Triton has it
    assert launch(7)
    assert told == [1]  # and took what was compiled with the others
    assert kernels.base.ON_COMPILING is None
    assert launch(9) is None
    assert told == [1]
    monkeypatch.setattr(kernels.base, "ON_COMPILING", compile_others)
    assert launch(11) is None  # is not among the others: Triton compiles it
    assert told == [1, 1]
    assert type(get_cache_manager("0011")).__name__ == "FileCacheManager"


IMAGE = {"canonical_place": 1, "image_phases": 1, "image_tokens": 1}
WINDOWS = {"window_attention": 12, "gelu": 12, "best_window": 3, "windows_and_weights": 1, "token_scores": 1,
           "token_choice": 2, "merged_product": 3}  # fmt: skip


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen and traced as for one. Nothing runs."""
    if not kernels.AVAILABLE or kernels.INTERPRETED:
        pytest.skip("needs Triton, as a compiler sees it")
    gpu = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", gpu)
    for module in list(sys.modules.values()):
        if module.__name__.split(".")[0] in ("common", "swin", "swinv2", "cvt", "mvitv2") and hasattr(module, "usable"):
            monkeypatch.setattr(module, "usable", lambda x: True)


def trace(name: str, backend: Callable[..., Any], batch: int, learning: bool = False) -> None:
    with Uninitialised():
        model = create_model(name, **shallow(name)).train(learning)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.inference_mode(not learning), torch.autocast("cpu", torch.bfloat16):
        logits = compiled(torch.zeros(batch, 3, *model.img_size))
    if learning:
        logits.sum().backward()


def launched(name: str) -> Counter[str]:
    """Kernels in the graph of a model, for a batch on a GPU in half precision."""
    found: Counter[str] = Counter()

    def see(graph: GraphModule, inputs: list[Tensor]) -> Any:
        called = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        found.update(target.split(".")[1] for target in called if target.startswith("shift_vits."))
        return lambda *args: (torch.zeros(128, 1000),)

    trace(name, see, 128)
    return found


A_SWIN = {**IMAGE, **WINDOWS, "best_phase": 2, "add_norm": 12}


@pytest.mark.slow
@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize(("name", "expected"), [
    ("swin_tiny", {"image_tokens": 1, "window_attention": 12, "gelu": 12, "add_norm": 12}),
    ("a_swin_tiny", A_SWIN),
    ("a_swinv2_tiny", {**IMAGE, **WINDOWS, "best_phase": 2}),
    ("a_cvt_13", {**IMAGE, "best_phase": 3, "token_scores": 2, "token_choice": 3, "depthwise_norm": 26, "gelu": 13,
                  "add_norm": 17, "depthwise_taps": 3, "convolution_taps": 2, "convolved": 2, "normed_taps": 13}),
    ("a_mvitv2_tiny", {**IMAGE, "best_phase": 3, "token_scores": 2, "token_choice": 3, "pooled": 30, "positioned": 10,
                       "pooled_maximum": 3, "gelu": 10, "add_norm": 10, "pooled_taps": 1}),
])  # fmt: skip
def test_compilers_see_one_graph(name: str, expected: dict[str, int]) -> None:
    """What decides between kernels breaks no graph."""
    assert launched(name) == expected


@pytest.mark.usefixtures("pretended_gpu")
def test_a_card_with_less_memory_gets_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With smaller tiles; without them no adaptive model would run on it at all."""
    monkeypatch.setattr(classifier, "rehearse", lambda model, x: None)  # there is no such card here
    with assumed(Card("RTX 4090", 89, 101_376)):
        assert launched("a_swin_tiny") == A_SWIN


@pytest.mark.slow
@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("name", ["a_swin_micro", "a_cvt_micro", "a_mvitv2_micro"])
@pytest.mark.parametrize("learning", [False, True])
def test_compilers_know_what_kernels_write(name: str, learning: bool) -> None:
    """Lost otherwise: speed, for what a kernel may write to is copied before; and, of slices, what lies between them.
    A compiler takes a number that a function makes of a pointer for the pointer."""
    written: list[Any] = []

    def see(graph: GraphModule, inputs: list[Tensor]) -> Any:
        for node in graph.graph.nodes:
            if "triton_kernel_wrapper" in str(node.target):
                written.extend(node.kwargs["kwargs"][name] for name in node.kwargs["tensors_to_clone"])
        values = [node.meta["val"] if isinstance(node, Node) else node for node in graph.graph.output_node().args[0]]
        like = [(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else None for v in values]
        return make_boxed_func(lambda *args: [None if t is None else torch.zeros(t[0], dtype=t[1]) for t in like])

    trace(name, aot_autograd(fw_compiler=see, bw_compiler=see, inference_compiler=see), 2, learning)
    assert len(written) > 10
    sources = [node.args[0] if "unsqueeze" in str(node.target) else node for node in written]
    assert all("empty" in str(node.target) for node in sources)


@interpreted
@pytest.mark.parametrize("programs", [1, 400], ids=["long strips", "short strips"])
@pytest.mark.parametrize(("kernel", "stride", "size", "channels", "norm"), [
    (2, 2, (8, 10), 32, "patch"),
    (2, 2, (8, 28), 96, "patch"),
    (2, 2, (8, 56), 64, None),
    (3, 2, (12, 14), 96, None),
    (3, 2, (6, 6), 128, None),
    (3, 4, (8, 28), 96, None),
    (3, 4, (12, 4), 256, None),
    (3, 2, (6, 6), 384, None),
    (2, 2, (8, 6), 384, "patch"),
])  # fmt: skip
def test_tokens_are_read_once(monkeypatch: pytest.MonkeyPatch, kernel: int, stride: int, size: tuple[int, int],
                              channels: int, norm: str | None, programs: int) -> None:  # fmt: skip
    """One pass over tokens gives what a product with all taps gives, and the readable code: in one strip of rows or in
    many, which of a few channels go row by row, some images side by side."""
    pairs = {} if programs == 1 else {"pairs": 16}  # so few that no image is one product
    module = kernels.token_scores
    readings = {c: how._replace(programs=programs, **pairs) for c, how in module.READINGS.items()}
    monkeypatch.setattr(module, "READINGS", readings)
    monkeypatch.setattr(kernels.token_rows, "PROGRAMS", programs)
    score, direction = "energy" if norm is None else "signed", ConvAnchor().direction
    conv = Strided((kernel, kernel), (stride, stride), (kernel - 2, kernel - 2))
    x = torch.randn(3, 1 + size[0] * size[1], channels)[:, 1:].unflatten(1, size)  # behind another token
    x = x.add(torch.randn(3, *size, 1)) if norm == "patch" else x
    weight, bias = torch.randn(4, channels, kernel, kernel), torch.randn(4)
    known = [None, None, None]
    if norm == "patch":
        known = [weight.sum((1, 2, 3)), *moments(x, direction)[:2]]
    launched = launches(monkeypatch, "token_energy", "token_rows", "token_scores", "choices")

    def scores(parts: Tensor) -> Tensor:
        energy, along = parts.double().sum(1).unbind(1)
        rms = (energy.sum((1, 2), keepdim=True) / (size[0] * size[1])).sqrt()
        return energy + 0.01 * rms * along if score == "signed" else energy

    given = [*plain_taps(weight, bias, x.dtype, True), direction, *known, kernel, stride, 1e-5]
    fast = scores(module.token_scores(x, *given))
    assert torch.equal(kernels.best_of_tokens(x, *given, score == "signed"), best_offset(fast))
    assert ("_best_phase" in launched) == (programs > 1)
    assert ("_token_rows" in launched) == (norm is None and channels <= 128)
    assert ("_token_scores" in launched) == (programs == 1 or norm is not None or channels > 128)
    taps, constant = plain_taps(weight, bias, x.dtype, False)
    other = scores(kernels.token_energies(nn.functional.linear(x, taps), constant, direction, *known, channels, kernel,
                                          conv.padding[0], stride, 1e-5))  # fmt: skip
    t = at_every_position(x.permute(0, 3, 1, 2), weight, conv)
    if norm == "patch":
        patches = torch.stack([x.roll((-i, -j), (1, 2)) for i in (0, 1) for j in (0, 1)], -1).flatten(3)
        mean, inverse = patches.mean(-1), (patches.var(-1, correction=0) + 1e-5).rsqrt()
        t = (t - mean[:, None] * known[0].view(1, -1, 1, 1)) * inverse[:, None]
    plain = phase_energies(t + bias.view(1, -1, 1, 1), conv.stride, score)
    assert torch.allclose(fast, plain, rtol=1e-4)
    assert torch.allclose(other, plain, rtol=1e-4)
    assert torch.equal(best_offset(fast), best_offset(plain))


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_images_are_scored_apart() -> None:
    """An image that is no number spoils no other."""
    anchor, conv = ConvAnchor(sketch=4), nn.Conv2d(32, 16, 3, 2, 1)
    x = torch.randn(3, 32, 6, 14)
    expected = anchor.offset(x, conv, low_precision=True)
    x[1, :, 3, 5:7] = torch.tensor([float("nan"), float("inf")])
    assert torch.equal(anchor.offset(x, conv, low_precision=True)[[0, 2]], expected[[0, 2]])
