"""What a compiler finds out about a kernel is kept by all that it depends on."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from compiled_targets import CARDS, MODELS, _zeros, anywhere, launches
from torch._dynamo.backends.common import aot_autograd

from common.kernels import rolling, tracing
from common.ops.roll import roll

triton = pytest.importorskip("triton")
CARD = SimpleNamespace(get_current_target=lambda: triton.backends.compiler.GPUTarget("cuda", 90, 32),
                       get_current_device=lambda: 0)  # fmt: skip


def kernel(module: str = rolling.__name__) -> Any:
    """What stands for a kernel, a new one for each call, of one function."""
    run.__module__ = module
    return SimpleNamespace(fn=run)


def run() -> None: ...


ARGUMENTS = {"x": torch.zeros(2), "n": 8, "S": 4, "FLAG": True, "NAME": "tf32"}


@pytest.fixture
def asked() -> tuple[Any, list[dict[str, Any]]]:
    """An analysis that remembers, and what it was really asked."""
    calls: list[dict[str, Any]] = []

    def analyse(kernel: Any, kwargs: dict[str, Any], metadata: dict[str, Any]) -> list[str]:
        calls.append(kwargs)
        return ["x"]

    return tracing.remembered(analyse), calls


def test_equal_launches_are_analysed_once(asked: Any) -> None:
    analyse, calls = asked
    box = SimpleNamespace(get_dtype=lambda: torch.float32)  # as a compiler has tensors
    for same in ({}, {"x": torch.ones(3, 3)}, {"x": box}, {"n": 48, "S": 2}, {"n": sympy.Integer(8)}):
        found = analyse(kernel(), ARGUMENTS | same, {})
        assert found == ["x"]
        found.append("y")  # who gets it may change it
    assert len(calls) == 1


@pytest.mark.parametrize("other", [{"x": torch.zeros(2).half()}, {"n": 0}, {"S": 0.0}, {"FLAG": 1}, {"NAME": "ieee"},
                                   {"more": 1}])  # fmt: skip
def test_launches_that_differ_are_analysed_each(asked: Any, other: dict[str, Any]) -> None:
    analyse, calls = asked
    for arguments in (ARGUMENTS, ARGUMENTS | other) * 2:
        analyse(kernel(), arguments, {})
    assert len(calls) == 2


@pytest.mark.parametrize(("module", "metadata", "more"), [
    ("flash.kernels", {}, {}), (rolling.__name__, {"x": 1}, {}), (rolling.__name__, {}, {"n": sympy.Symbol("n")}),
])  # fmt: skip
def test_what_is_not_known_is_left_alone(asked: Any, module: str, metadata: Any, more: Any) -> None:
    analyse, calls = asked
    for _ in range(2):
        analyse(kernel(module), ARGUMENTS | more, metadata)
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["swinv2_tiny", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS)])
def test_what_a_kernel_writes_does_not_depend_on_sizes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Else it is taken from a launch of another size, and a graph misses a write."""
    from torch._higher_order_ops import triton_kernel_wrap as torch_has

    tracing.analyse_once()  # puts its own in place of torch's
    (analyse,) = (getattr(torch_has, name).__wrapped__ for name in tracing.ANALYSES if hasattr(torch_has, name))
    monkeypatch.setattr(triton.runtime.driver, "_active", CARD)
    alike: dict[Any, list[tuple[Any, dict[str, Any]]]] = {}
    for launch in launches(name, CARDS["H200"], training=True):
        kernel = getattr(import_module(launch.module), launch.kernel)
        given = [torch.empty(1, dtype=arg) if isinstance(arg, torch.dtype) else arg for arg in launch.args]
        arguments = dict(zip([param.name for param in kernel.params], given, strict=False)) | dict(launch.constants)
        key = launch.kernel, *((name, tracing.type_of(value)) for name, value in sorted(arguments.items()))
        alike.setdefault(key, []).append((kernel, arguments))
    groups = [group for group in alike.values() if len(group) > 1]
    assert groups
    for group in groups:
        first, last = (written(analyse(*group[k], {}), group[k][1]) for k in (0, -1))
        assert first == last != set()


def written(found: Any, arguments: dict[str, Any]) -> set[str]:
    """Names of tensors, by what versions of torch return."""
    names = found if isinstance(found, list) else [dep.name for dep in found.read_writes.writes]
    return {name for name in names if isinstance(arguments[name], torch.Tensor)}


def test_a_graph_analyses_a_kernel_once_and_finds_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._higher_order_ops import triton_kernel_wrap

    monkeypatch.setattr(triton.runtime.driver, "_active", CARD)
    lowered, written, lower = [], [], triton_kernel_wrap.generate_ttir
    monkeypatch.setattr(triton_kernel_wrap, "generate_ttir",
                        lambda kernel, *args: lowered.append(kernel.fn.__name__) or lower(kernel, *args))  # fmt: skip
    mutated = triton_kernel_wrap.get_mutated_tensors
    monkeypatch.setattr(triton_kernel_wrap, "get_mutated_tensors",
                        lambda *args: written.append(mutated(*args)) or written[-1])  # fmt: skip

    def twice(x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return roll(roll(x, o, (1, 2), within=True).relu(), o, (1, 2), within=True)

    torch.compiler.reset()
    with anywhere(), torch.no_grad():
        graph = torch.compile(twice, fullgraph=True, backend=aot_autograd(fw_compiler=_zeros))
        graph(torch.zeros(3, 10, 14, 24), torch.zeros(3, 2, dtype=torch.int64))
    assert lowered == [rolling._rolled_forward.fn.__name__]
    assert len(written) >= 2
    assert written == [["out"]] * len(written)


def test_graphs_on_disk_are_of_these_kernels(tmp_path: Path) -> None:
    """torch looks for them by its own key and this tag; an operator's name in it says nothing of its kernels."""
    config = torch.compiler.config
    mine = [tag for tag in config.cache_key_tag.split() if tag.startswith(tracing.MARK)]
    assert len(mine) == 1
    tags = []
    with config.patch(cache_key_tag="a-user's-own"):  # type: ignore[attr-defined]
        for source in ("x = 1", "x = 2", "x = 1"):
            (tmp_path / "kernel.py").write_text(source)
            tracing.mark_graphs(tmp_path)
            tags.append(config.cache_key_tag.split())
    assert tags[0] == tags[2] != tags[1]
    assert all(len(tag) == 2 and tag[0] == "a-user's-own" for tag in tags)
