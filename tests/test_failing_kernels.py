"""Kernels that fail on a card nobody has tried: their operations run in torch, in and outside of graphs."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_targets import CARDS, anywhere
from conftest import ROOT, interpreted, randomize, shallow
from torch import Tensor, nn

from common import create_model, kernels
from common.kernels import base, cards
from common.ops import attend_in_windows, depthwise, embed, merge_patches, pool_maximum, reduce_patches, roll
from common.ops import dispatch as rule
from common.ops.choice import best_partition, moments
from common.ops.weights import product

RTX, H200 = CARDS["RTX 40"], CARDS["H200"]


@pytest.fixture(autouse=True)
def _first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which nothing has failed so far."""
    monkeypatch.setattr(rule, "_FAILED", set())
    monkeypatch.setattr(rule, "_REHEARSED", set())
    monkeypatch.setattr(base, "_REPORTED", set())
    monkeypatch.setattr(cards, "_REFUSED", {})
    monkeypatch.setattr(cards, "_SMALLER", {})


class Broken:
    """Kernels of which those of some names raise, as compilers and drivers do; ``tried`` are the names of these."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, breaks: Callable[[str], bool] = lambda name: True) -> None:
        self.tried: list[str] = []
        launch = base._launch

        def run(kernel: Any, *args: Any, **constants: Any) -> None:
            if not breaks(kernel.__name__):
                return launch(kernel, *args, **constants)
            self.tried.append(kernel.__name__)
            raise RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376")

        monkeypatch.setattr(base, "_launch", run)


def caught(f: Callable[[], Any]) -> tuple[Any, list[str]]:
    """A result, and what it warned of."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = f()
    return result, [str(w.message) for w in seen if "kernel" in str(w.message)]


def tokens(channels: int = 32) -> Tensor:
    return torch.randn(2, 8, 8, channels)


def offsets() -> Tensor:
    return torch.tensor([[1, 3], [0, 5]])


OPERATIONS: dict[str, Callable[[], Any]] = {
    "roll": lambda: roll(tokens(), offsets(), (1, 2)),
    "attend_in_windows": lambda: attend_in_windows(torch.randn(2, 8, 8, 3, 2, 16), torch.randn(2, 16, 16), None, (4, 4),
                                                   (0, 0), None, offsets()),
    "depthwise": lambda: depthwise(tokens(), torch.randn(3, 3, 32), 2, True, offsets()),
    "embed": lambda: embed(torch.randn(2, 3, 16, 16), nn.Conv2d(3, 32, 4, 4), offsets())[0],
    "embed tokens": lambda: embed(tokens().permute(0, 3, 1, 2), nn.Conv2d(32, 32, 3, 2, 1, padding_mode="circular"),
                                  offsets())[0],
    "merge_patches": lambda: merge_patches(tokens(), offsets(), nn.LayerNorm(128)),
    "reduce_patches": lambda: reduce_patches(tokens(), offsets(), nn.LayerNorm(128),
                                             nn.Linear(128, 64, bias=False))[0],
    "pool_maximum": lambda: pool_maximum(tokens(), 2, True, offsets()),
    "moments": lambda: moments(tokens(), torch.randn(32)),
    "best_partition": lambda: best_partition(torch.rand(2, 8, 8), torch.randn(2, 8, 8), torch.rand(4), (4, 4), 2, 0.1),
    "product": lambda: product(torch.randn(4, 32), torch.randn(32, 8)),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_whose_kernels_fail_runs_in_torch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On an unknown card a model must be right; one warning names the kernel and what to do."""

    def run() -> Any:
        torch.manual_seed(1)
        with torch.no_grad():
            return OPERATIONS[name]()

    with rule.reference():
        expected = run()
    broken = Broken(monkeypatch)
    result, said = caught(run)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert len(said) == len(set(broken.tried)) > 0
    assert all(kernel in message for kernel, message in zip(dict.fromkeys(broken.tried), said, strict=True))
    assert all("SHIFT_VITS_KERNELS" in message for message in said)
    before = len(broken.tried)
    again, said = caught(run)
    assert not said
    assert len(broken.tried) == before  # for good
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


@interpreted
@pytest.mark.parametrize("name", ["roll", "embed", "merge_patches", "best_partition"])
def test_a_developer_sees_the_failure(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("SHIFT_VITS_STRICT", "1")
    Broken(monkeypatch)
    with torch.no_grad(), pytest.raises(base.KernelError, match="out of resource"):
        OPERATIONS[name]()
    assert not rule.failed()


@interpreted
@pytest.mark.parametrize("name", ["a_swin_micro", "a_swinv2_micro", "a_cvt_micro", "a_mvitv2_micro"])
def test_a_model_whose_kernels_all_fail_gives_the_same(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = randomize(create_model(name)).eval()
    x = torch.randn(2, 3, *model.img_size)
    with torch.no_grad(), rule.reference():
        expected = model(x)
    broken = Broken(monkeypatch)
    with torch.no_grad():
        logits, said = caught(lambda: model(x))
        assert torch.allclose(logits, expected, atol=1e-5, rtol=1e-4)
        assert len(said) == len(set(broken.tried)) > 0
        before = len(broken.tried)
        again, said = caught(lambda: model(x))
    assert not said
    assert len(broken.tried) == before
    assert torch.equal(again, logits)


def gradients(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = f(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    return y, grad


@interpreted
@pytest.mark.parametrize("name", ["roll", "depthwise", "merge_patches", "attend_in_windows"])
def test_a_backward_that_fails_is_found_before_it_is_needed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In the midst of a backward pass nothing could take over, and a training run would end."""
    norm, weight, bias = nn.LayerNorm(128), torch.randn(3, 3, 32), torch.randn(2, 16, 16)
    f: dict[str, Callable[[Tensor], Tensor]] = {
        "roll": lambda x: roll(x, offsets(), (1, 2)),
        "depthwise": lambda x: depthwise(x, weight, 2, True, offsets()),
        "merge_patches": lambda x: merge_patches(x, offsets(), norm),
        "attend_in_windows": lambda x: attend_in_windows(x, bias, None, (4, 4), (0, 0), None, offsets()),
    }
    x = torch.randn(2, 8, 8, 3, 2, 16) if name == "attend_in_windows" else tokens()
    with rule.reference():
        expected = gradients(f[name], x)
    broken = Broken(monkeypatch, lambda kernel: kernel.endswith("_backward"))
    with cards.assumed(RTX):
        result, said = caught(lambda: gradients(f[name], x))
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert len(said) == len(set(broken.tried)) == len(broken.tried) > 0


@interpreted
@pytest.mark.parametrize("name", ["a_swin_micro", "a_cvt_micro", "a_mvitv2_micro"])
def test_a_model_trains_where_backwards_fail(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also what is computed again in the backward pass, which must save what the forward pass did."""
    model = randomize(create_model(name))
    x = torch.randn(2, 3, *model.img_size)

    def step() -> list[Tensor]:
        torch.manual_seed(1)
        loss = model(x).square().mean()
        return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True))

    with rule.reference():
        expected = step()
    broken = Broken(monkeypatch, lambda kernel: kernel.endswith("_backward"))
    with cards.assumed(RTX):
        result, said = caught(step)
    assert len(said) == len(set(broken.tried)) > 0
    for ours, theirs in zip(result, expected, strict=True):  # both are 3e-3 off those in float64: a norm over 2 images
        assert (ours - theirs).abs().max() <= 2e-2 * theirs.abs().max() + 1e-4


@pytest.mark.skipif(kernels.INTERPRETED, reason="compiles")
def test_a_graph_traced_after_a_failure_has_the_torch_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call outside of graphs finds what does not run; a graph must not run it again, nor break."""
    found: list[str] = []

    def see(graph: Any, inputs: list[Tensor]) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    monkeypatch.setattr(rule, "usable", lambda x: base.ENABLED)
    monkeypatch.setattr(rule, "_FAILED", {"roll"})
    x, offset = tokens(), offsets()
    y = torch.compile(lambda x: roll(x, offset, (1, 2)), fullgraph=True, backend=see)(x)
    assert not any("shift_vits" in target for target in found)
    assert base.ENABLED
    with rule.reference():
        assert torch.equal(y, roll(x, offset, (1, 2)))


@pytest.mark.skipif(kernels.INTERPRETED, reason="compiles")
@pytest.mark.parametrize(
    "training",
    [
        pytest.param(False, id="inference"),
        pytest.param(True, id="training", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", [
    "a_swin_micro", *(pytest.param(name, marks=pytest.mark.slow) for name in ("swinv2_micro", "a_cvt_micro",
                                                                              "a_mvitv2_micro")),
])  # fmt: skip
def test_a_graph_has_no_kernel_that_fails(monkeypatch: pytest.MonkeyPatch, name: str, training: bool) -> None:
    """On a card that nobody has tuned on, a model like it runs before it is traced. Its own state stays as it is."""
    found: list[str] = []

    def see(graph: Any, inputs: list[Tensor]) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compiler.reset()
    model = randomize(create_model(name, **shallow(name))).train(training)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    x, generator = torch.randn(2, 3, *model.img_size), torch.get_rng_state()
    with torch.set_grad_enabled(training), rule.reference():
        expected = model(x)
    torch.set_rng_state(generator)
    model.load_state_dict(state)
    with anywhere(), cards.assumed(RTX), torch.set_grad_enabled(training):
        broken = Broken(monkeypatch)
        graph = torch.compile(model, fullgraph=True, backend=see)
        y, said = caught(lambda: graph(x))
        assert len(said) == len(set(broken.tried)) > 0
        assert not any("shift_vits" in target for target in found)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        assert not caught(lambda: graph(torch.randn(3, 3, *model.img_size)))[1]
    batches = "num_batches_tracked"
    assert all(value == 2 for key, value in model.state_dict().items() if training and batches in key)


@pytest.mark.skipif(kernels.INTERPRETED, reason="compiles")
def test_where_kernels_were_tuned_nothing_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    model, broken = create_model("a_swin_micro").eval(), Broken(monkeypatch)
    found: list[str] = []

    def see(graph: Any, inputs: list[Tensor]) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return lambda *_: (torch.zeros(2, 10),)

    with anywhere(), cards.assumed(H200), torch.no_grad():
        torch.compile(model, fullgraph=True, backend=see)(torch.randn(2, 3, 32, 32))
    assert any("shift_vits" in target for target in found)
    assert not broken.tried


def test_an_environment_variable_switches_kernels_off() -> None:
    command = (
        "import torch; from common.kernels import base; from common.ops import dispatch, roll; "
        "base._launch = None; print(dispatch.usable(torch.zeros(1)), "
        "roll(torch.arange(4.).view(1, 2, 2, 1), torch.tensor([[1, 0]]), (1, 2)).flatten().tolist())"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "SHIFT_VITS_KERNELS": "0", "SHIFT_VITS_STRICT": "1",
                   "PYTHONPATH": str(ROOT)}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", command], env=environment, text=True, capture_output=True, check=True)
    assert done.stdout.split("\n")[0] == "False [2.0, 3.0, 0.0, 1.0]"
