"""The page: what it shows is what the models do."""

import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from app_helpers import ADAPTIVE, DEFAULT, EXAMPLES, SCRIPT, SIDES, bomb, png
from torch import Tensor

from common import from_pretrained
from common.data.preprocess import Preprocess
from common.shifts import roll
from shiftvit.page.build import build_page
from shiftvit.page.move import BARS, Outcome, draw, draw_card, examine
from shiftvit.page.sides import Side, load_sides, read_upload
from swin import Swin

SHIFTS = [(1, 0), (0, 1), (2, 3), (-3, 2), (4, 4), (-12, 2), (8, -8), (15, 15), (-16, -16), (31, -33)]


def test_the_adaptive_card_shows_no_change_and_the_default_card_does() -> None:
    """Else the page would not show what the project is about."""
    changed = 0
    for i, (dx, dy) in enumerate(SHIFTS):
        default, adaptive = (examine(side, EXAMPLES[i], dx, dy) for side in SIDES)
        assert adaptive.identical
        assert torch.equal(adaptive.still, adaptive.moved)
        assert all(not error.any() for error in adaptive.errors)
        assert not default.identical
        assert all(error.max() > 0.05 for error in default.errors)
        assert [error.shape for error in default.errors] == [(32, 32)] * 2
        changed += int(default.still.argmax() != default.moved.argmax())
    assert changed >= 3
    for side in SIDES:  # nothing moved: nothing may seem to change
        outcome = examine(side, EXAMPLES[0], 0, 0)
        assert outcome.identical
        assert not any(error.any() for error in outcome.errors)


def test_errors_compare_a_token_with_itself() -> None:
    """Without the canonical roll, grids really move: a map aligned by other than the reported offsets is bright."""
    model = from_pretrained(ADAPTIVE, canonical=False)
    side = Side("adaptive", model, SIDES[1].preprocess)
    for i, (dx, dy) in enumerate(SHIFTS):
        outcome = examine(side, EXAMPLES[i], dx, dy)
        assert max(float(error.max()) for error in outcome.errors) < 1e-4, (dx, dy)


@pytest.mark.parametrize("origin", [(0, 0), (1, 2)])
def test_errors_are_drawn_where_the_token_is_on_the_moved_image(origin: tuple[int, int]) -> None:
    """Else people would look for the cause in the wrong place: the grid of this model doubles its token (2, 3)."""

    class Doubling:
        feature_info = ({"reduction": 4},)

        def forward_intermediates(self, x: Tensor, return_offsets: bool) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
            offset = torch.tensor([origin])
            tokens = F.avg_pool2d(roll(x, offset), 4)
            tokens[:, :, 2, 3] *= 2
            return tokens, [(tokens, offset)]

        def forward_head(self, x: Tensor) -> Tensor:
            return x.mean((2, 3))

    side = Side("stub", Doubling(), Preprocess(size=(32, 32), mean=(0, 0, 0), std=(1, 1, 1)))
    (error,) = examine(side, torch.full((1, 3, 32, 32), 255, dtype=torch.uint8), 4, 0).errors
    expected = torch.zeros(32, 32, dtype=torch.bool)
    top, left = 8 + origin[0], 12 + origin[1]  # the token that is doubled now, and beside it the one that was
    expected[top : top + 4, left : left + 8] = True
    assert torch.equal(error > 0, expected)


def test_cards_say_what_was_found() -> None:
    """Else a reader is told the wrong label, or the wrong verdict on the bits."""
    picture, cards = draw(SIDES, EXAMPLES[0], -12, 2)
    assert picture != draw(SIDES, EXAMPLES[0], 0, 0)[0]
    found = re.findall(r'data-model="(\w+)" data-label="(\d+)".*?label (kept|changed).*?bit-identical: (yes|no)', cards)
    outcomes = [examine(side, EXAMPLES[0], -12, 2) for side in SIDES]
    default, adaptive = (str(int(outcome.moved.argmax())) for outcome in outcomes)
    assert found == [("default", default, "changed", "no"), ("adaptive", adaptive, "kept", "yes")]
    assert re.findall(r"largest ([\d.]+)", cards)[2:] == ["0", "0"]
    assert f"<span>{100 * float(outcomes[0].moved.max()):.1f}</span>" in cards


def test_many_classes_give_few_bars() -> None:
    """Else a model of ImageNet's classes gets a page of a thousand bars."""
    probabilities = torch.rand(1000).softmax(0)
    card = draw_card("default", Outcome(probabilities, probabilities.roll(1), [torch.zeros(8, 8)], False))
    assert 5 <= card.count("<i style") <= BARS
    assert card.count('class="bar top"') == 1


def test_uploads_are_fitted_or_refused() -> None:
    """Else a person's own image is changed on its way, or a hostile file fills the server's memory."""
    preprocess = SIDES[0].preprocess
    pixels = EXAMPLES[3][0].permute(1, 2, 0).numpy()
    assert torch.equal(read_upload(png(pixels), preprocess), EXAMPLES[3])
    assert read_upload(png(np.zeros((50, 90, 3), np.uint8)), preprocess).shape == (1, 3, 32, 32)
    for content, reason in (
        (bomb(6_000), "6000 x 6000 pixels, more than 25,000,000"),
        (bomb(60_000), "exceeds"),
        (b"<b>", "unknown format"),
        (png(pixels)[:60], "This file cannot be shown"),
        (b"", "unknown format"),
    ):
        with pytest.raises(ValueError, match=reason):
            read_upload(content, preprocess)


def test_models_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    """Else the page fails later, in a place that does not say why."""
    model = Swin.from_pretrained(DEFAULT)
    model.reset_classifier(7)
    model.save_pretrained(tmp_path)
    shutil.copy(Path(DEFAULT) / "preprocessor_config.json", tmp_path)
    with pytest.raises(ValueError, match=r"\(\(32, 32\), 7\), the adaptive one \(\(32, 32\), 10\): give two models"):
        load_sides(str(tmp_path), ADAPTIVE)
    default, adaptive = load_sides(DEFAULT, DEFAULT)  # one set of weights serves both
    assert (default.model.adaptive, adaptive.model.adaptive) == (False, True)


def test_without_gradio_the_script_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else people see a traceback instead of the command that helps."""
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(sys, "argv", ["app.py"])
    monkeypatch.setattr("os.environ", dict(os.environ))  # the script sets some
    with pytest.raises(SystemExit, match=r"pip install 'shift-equivariant-vits\[app\]'"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_no_image_is_dropped_while_another_is_drawn() -> None:
    """Else, where drawing takes long, the page goes on showing an image that is not the last one chosen."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'shift-equivariant-vits[app]'")
    events = [event for event in build_page(SIDES).config["dependencies"] if event["backend_fn"]]
    assert len(events) == 5  # a slider moves; an example is chosen, then drawn; a file is uploaded, then drawn
    assert {event["trigger_mode"] for event in events} == {"always_last", "multiple"}  # "once" is the one that drops
