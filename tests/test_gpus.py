"""Cards that nobody has tuned on: kernels that do not fit are not used, and those that fail are replaced."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_targets import CARDS, anywhere, launches
from conftest import ROOT, interpreted, randomize
from torch import Tensor, nn

from common import create_model, kernels
from common.anchors import Canonical, ConvAnchor
from common.kernels import base, cards
from common.kernels.ahead import compile_all, compile_for
from common.kernels.cards import Card
from common.ops import ahead as ahead_of_use
from common.ops import attend_in_windows, depthwise, embed, merge_patches, pool_maximum, reduce_patches, roll
from common.ops import dispatch as rule
from common.ops.choice import best_partition, moments
from common.ops.energy import plain_taps
from common.ops.weights import product

RTX, T4, A100, H200 = (CARDS[name] for name in ("RTX 40", "T4", "A100", "H200"))


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
    "embed": lambda: embed(nn.Conv2d(3, 32, 4, 4), torch.randn(2, 3, 16, 16), offsets())[0],
    "embed tokens": lambda: embed(nn.Conv2d(32, 32, 3, 2, 1, padding_mode="circular"),
                                  tokens().permute(0, 3, 1, 2), offsets())[0],
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
    for ours, theirs in zip(result, expected, strict=True):
        assert (ours - theirs).abs().max() <= 5e-3 * theirs.abs().max() + 1e-4


@pytest.mark.skipif(kernels.INTERPRETED, reason="compiles")
def test_a_graph_traced_after_a_failure_has_the_torch_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call outside of graphs finds what does not run; a graph must not run it again, nor break."""
    found: list[str] = []

    def see(graph: Any, inputs: list[Tensor]) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    for module in (base, rule, kernels.rolling):
        monkeypatch.setattr(module, "usable", lambda x: base.ENABLED)
    monkeypatch.setattr(rule, "_FAILED", {"roll"})
    x, offset = tokens(), offsets()
    y = torch.compile(lambda x: roll(x, offset, (1, 2)), fullgraph=True, backend=see)(x)
    assert not any("shift_vits" in target for target in found)
    assert base.ENABLED
    with rule.reference():
        assert torch.equal(y, roll(x, offset, (1, 2)))


def test_an_environment_variable_switches_kernels_off() -> None:
    command = (
        "import torch; from common.kernels import base; from common.ops import roll; "
        "base._launch = None; print(base.usable(torch.zeros(1)), "
        "roll(torch.arange(4.).view(1, 2, 2, 1), torch.tensor([[1, 0]]), (1, 2)).flatten().tolist())"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "SHIFT_VITS_KERNELS": "0", "SHIFT_VITS_STRICT": "1",
                   "PYTHONPATH": str(ROOT)}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", command], env=environment, text=True, capture_output=True, check=True)
    assert done.stdout.split("\n")[0] == "False [2.0, 3.0, 0.0, 1.0]"


@pytest.mark.parametrize(("card", "bf16", "half"), [
    (H200, True, True), (A100, True, True), (RTX, True, True), (T4, False, True),
    (Card("GTX 1080", 61, 49_152), False, False),
])  # fmt: skip
def test_old_cards_run_no_kernels_in_bfloat16(card: Card, bf16: bool, half: bool) -> None:
    with cards.assumed(card):
        assert base._modern(torch.zeros(1, dtype=torch.bfloat16)) == bf16
        assert base._modern(torch.zeros(1, dtype=torch.float16)) == half
        with torch.autocast("cpu", torch.bfloat16):
            assert base._modern(torch.zeros(1)) == bf16


def test_where_kernels_were_tuned_all_fit() -> None:
    """Whatever is counted: there the choice is as it was."""
    x = torch.zeros(1)
    assert cards.tuned(x)
    for card, expected in ((H200, True), (Card("B200", 100, 232_448), True), (A100, False), (RTX, False)):
        with cards.assumed(card):
            assert cards.holds(x, "_choose", 10**9) == expected
            assert cards.tuned(x) == expected
    assert set(cards.refused()) == {"_choose"}


@pytest.mark.skipif(kernels.INTERPRETED, reason="kernels run there")
def test_doctor_says_that_there_is_no_gpu(call: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    call("scripts/doctor.py", "--device", "cpu")
    said = capsys.readouterr().out
    assert torch.__version__ in said
    assert "every operation runs in its torch form" in said


@interpreted
def test_doctor_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch, call: Callable[..., None],
                                     capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """One that does not fail but computes something else is what nothing but a comparison can find."""
    launch = base._launch

    def run(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        launch(kernel, grid, *args, **constants)
        if kernel.__name__ == "_rolled_merge_backward":
            args[4].mul_(1.1)  # gradients of tokens

    monkeypatch.setattr(base, "_launch", run)
    with pytest.raises(AssertionError, match="Wrong: merge_patches \\(backward\\), reduce_patches \\(backward\\)\\."):
        call("scripts/doctor.py", "--model", "a_swin_micro", "--batch", "1", "--precision", "float32", "--device",
             "cpu")  # fmt: skip
    said = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert sum("WRONG" in cell for line in said for cell in line) == 2
    assert ["roll", "right"] in [[line[1].strip(), line[-2].strip()] for line in said]


@interpreted
@torch.no_grad()
@pytest.mark.parametrize(("channels", "side", "norm"), [(192, 2, True), (96, 3, False), (64, 3, False)])
def test_tokens_read_in_small_tiles_score_the_same(channels: int, side: int, norm: bool) -> None:
    """Where a card has no room for all taps, tokens are read a chunk of channels at a time."""
    x, weight = torch.randn(2, 8, 8, channels), torch.randn(4, channels, side, side)
    direction = ConvAnchor().direction
    known = [weight.sum((1, 2, 3)), *moments(x, direction)[:2]] if norm else [None, None, None]
    given = [*plain_taps(weight, torch.randn(4), x.dtype, True), direction, *known, side, 2, 1e-5]
    expected = kernels.token_scores.token_scores(x, *given).sum(1)
    with cards.assumed(Card("small", 75, 40_000)):
        assert kernels.fits_token_scores(x, 4, side, side - 2)
        torch.testing.assert_close(kernels.token_scores.token_scores(x, *given).sum(1), expected, rtol=1e-4, atol=1e-2)
        assert "_token_scores" in cards.smaller()


@interpreted
@torch.no_grad()
def test_small_tiles_of_products_and_images_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, offset, norm, reduction = tokens(96), offsets(), nn.LayerNorm(384), nn.Linear(384, 192, bias=False)
    monkeypatch.setitem(kernels.canonical.TILES, "side", 64)
    images, place = torch.randn(2, 3, 40, 50), Canonical()
    merged, expected = reduce_patches(x, offset, norm, reduction)[0], place.offset(images)
    with cards.assumed(Card("small", 75, 8_000)):
        assert kernels.merging._product_tiles(x, 96, 192)["K"] == 16  # type: ignore[index]
        torch.testing.assert_close(reduce_patches(x, offset, norm, reduction)[0], merged, rtol=1e-4, atol=1e-4)
    with cards.assumed(Card("small", 89, 19_000)):
        assert torch.equal(place.offset(images), expected)
    assert set(cards.smaller()) == {"_merged_product", "_choose"}
    assert not cards.refused()


@pytest.mark.skipif(not kernels.AVAILABLE or kernels.INTERPRETED, reason="needs Triton's compiler")
def test_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In other processes, into Triton's cache, where the first use then finds them; the model is as it was."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    model, found = create_model("a_swin_micro").eval(), []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with anywhere(), monkeypatch.context() as patch:
        patch.setattr(ahead_of_use, "compile_all", lambda launches, capability, workers: found.extend(launches))
        assert model.warm_up(2, training=True) > model.warm_up(2, 32) > 5
    assert {launch.kernel for launch in found} >= {"_read", "_choose", "_rolled_merge_backward"}
    assert not model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    small = next(launch for launch in found if launch.kernel == "_best_window")
    compile_all([small], 86)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written
    compile_for(small, 86)
    assert sorted(path.name for path in tmp_path.iterdir()) == written


HEAVY = "_choose", "_merged_product", "_token_scores"


@pytest.mark.skipif(not kernels.AVAILABLE or kernels.INTERPRETED, reason="needs Triton's compiler")
@pytest.mark.parametrize(("name", "card", "training", "compiled"), [
    ("a_swin_tiny", "RTX 40", False, False),
    pytest.param("a_cvt_13", "T4", False, False, marks=pytest.mark.slow),
    pytest.param("a_swin_tiny", "RTX 50", False, False, marks=pytest.mark.slow),
    pytest.param("a_swin_tiny", "RTX 30", True, True, marks=pytest.mark.slow),
    pytest.param("a_swinv2_tiny", "A100", False, False, marks=pytest.mark.slow),
])  # fmt: skip
def test_what_fits_a_card_compiles_for_it(request: pytest.FixtureRequest, name: str, card: str, training: bool,
                                          compiled: bool) -> None:  # fmt: skip
    """Else a kernel is let through that the card can not launch. All cards and models: compiled_targets.py."""
    slow = request.node.get_closest_marker("slow") is not None
    found = launches(name, CARDS[card], training, compiled=compiled)
    assert set(HEAVY[:1]) <= {launch.kernel for launch in found}
    heavy = {launch.kernel: launch for launch in found if launch.kernel in HEAVY}
    for launch in found:
        if slow or launch in heavy.values():
            needs = compile_for(launch, CARDS[card].capability)
            assert needs <= CARDS[card].memory, launch.kernel
