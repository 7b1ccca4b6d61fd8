"""Cards that nobody has tuned on: kernels that do not fit take smaller tiles, or are not used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_targets import CARDS, anywhere, launches
from conftest import interpreted
from torch import nn

from common import create_model, kernels
from common.anchors import Canonical, ConvAnchor
from common.kernels import base, cards
from common.kernels.ahead import compile_all, compile_for
from common.kernels.cards import Card
from common.ops import ahead as ahead_of_use
from common.ops import dispatch, reduce_patches
from common.ops.choice import moments
from common.ops.energy import plain_taps

RTX, T4, A100, H200 = (CARDS[name] for name in ("RTX 40", "T4", "A100", "H200"))


@pytest.fixture(autouse=True)
def _first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which no card has refused a kernel so far."""
    monkeypatch.setattr(cards, "_REFUSED", {})
    monkeypatch.setattr(cards, "_SMALLER", {})


@pytest.mark.parametrize(("card", "bf16", "half"), [
    (H200, True, True), (A100, True, True), (RTX, True, True), (T4, False, True),
    (Card("GTX 1080", 61, 49_152), False, False),
])  # fmt: skip
def test_old_cards_run_no_kernels_in_bfloat16(card: Card, bf16: bool, half: bool) -> None:
    with cards.assumed(card):
        assert dispatch._modern(torch.zeros(1, dtype=torch.bfloat16)) == bf16
        assert dispatch._modern(torch.zeros(1, dtype=torch.float16)) == half
        with torch.autocast("cpu", torch.bfloat16):
            assert dispatch._modern(torch.zeros(1)) == bf16


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
    x, offset, norm, reduction = (
        torch.randn(2, 8, 8, 96),
        torch.tensor([[1, 3], [0, 5]]),
        nn.LayerNorm(384),
        nn.Linear(384, 192, bias=False),
    )
    monkeypatch.setitem(kernels.canonical.TILES, "side", 64)
    images, place = torch.randn(2, 3, 40, 50), Canonical()
    merged, expected = reduce_patches(x, offset, norm, reduction)[0], place.offset(images)
    with cards.assumed(Card("small", 75, 8_000)):
        assert kernels.merge_product._product_tiles(x, 96, 192)["K"] == 16  # type: ignore[index]
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
    told: list[int] = []
    for capability in (86, 86, 89):  # and it is known before, whether there is something to compile
        monkeypatch.setattr(base, "ON_COMPILING", lambda: told.append(len(written)))
        with base._told_of_compiling():
            compile_for(small, capability)
        assert len(told) == (capability == 89)
        if not told:
            assert sorted(path.name for path in tmp_path.iterdir()) == written


@pytest.mark.skipif(not kernels.AVAILABLE or kernels.INTERPRETED, reason="needs Triton's compiler")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float32])
def test_the_first_kernel_to_be_compiled_brings_the_others(monkeypatch: pytest.MonkeyPatch, mode: Any,
                                                           half: torch.dtype) -> None:  # fmt: skip
    """In the midst of a pass: the model, its state and the random numbers to come stay as they are."""
    monkeypatch.setattr(ahead_of_use, "_EXPECTED", set())
    monkeypatch.setattr(base, "ON_COMPILING", None)
    found: list[Any] = []
    monkeypatch.setattr(ahead_of_use, "compile_all", lambda launches, capability: found.append(set(launches)))
    model = create_model("a_swin_micro").train()
    model.norm.eval()
    x, like, training = torch.zeros(2, 3, 32, 32), create_model("a_swin_micro"), mode is torch.enable_grad
    with anywhere(), torch.autocast("cpu", half, enabled=half != x.dtype):
        expected = set(ahead_of_use.launches(like, tuple(x.shape), training))
    with anywhere(), mode(), torch.autocast("cpu", half, enabled=half != x.dtype):
        ahead_of_use.expect(model, x)
        assert base.ON_COMPILING is not None
        numbers = torch.get_rng_state()
        with torch.autocast("cpu", enabled=False):  # as a kernel may be launched
            base.ON_COMPILING()
        base.ON_COMPILING()
    assert found == [expected]
    assert len(expected) > 5
    assert torch.equal(torch.get_rng_state(), numbers)
    assert model.training
    assert not model.norm.training


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
    slow = request.node.get_closest_marker("slow") is not None and card in ("T4", "RTX 30")  # minutes each
    found = list(launches(name, CARDS[card], training, compiled=compiled))
    assert set(HEAVY[:1]) <= {launch.kernel for launch in found}
    first, last = ({launch.kernel: launch for launch in order} for order in (found[::-1], found))
    tried = [*first.values(), *last.values()] if slow else [last[kernel] for kernel in HEAVY if kernel in last]
    for launch in found:  # of many sizes of a kernel, the first stage's and the last's
        if launch in tried:
            needs = compile_for(launch, CARDS[card].capability)
            assert needs <= CARDS[card].memory, launch.kernel
