"""The page: what it shows is what the models do."""

import os
import re
import runpy
import shutil
import socket
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from app_helpers import ADAPTIVE, DEFAULT, EXAMPLES, SCRIPT, SEGMENTERS, SIDES, bomb, png
from sklearn.datasets import load_sample_images
from torch import Tensor

from common import create_model, from_pretrained
from common.data.preprocess import Preprocess
from common.shifts import roll
from shiftvit.page.build import build_page
from shiftvit.page.move import BARS, Outcome, choose_opening, draw, draw_card, examine, move_pixels
from shiftvit.page.sides import Side, fit, load_examples, load_sides, misfit, read_upload
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
    said = re.findall(r'<div class="(yes|no)"><b>(\w+)</b> (.*?) <small>([\d.]+) % sure</small>', picture)
    assert [words[:3] for words in said] == [("no", "default", f"0 → {default}"), ("yes", "adaptive", "0")]
    assert [words[3] for words in said] == [f"{100 * float(outcome.moved.max()):.1f}" for outcome in outcomes]
    assert re.findall(r'class="label">(.*?)</div><p class="sure">([\d.]+) %', cards) == [words[2:] for words in said]


def test_the_page_opens_where_the_models_differ() -> None:
    """Else a visitor sees two equal cards, and leaves."""
    index, dx, dy = choose_opening(SIDES[0], EXAMPLES)
    default, adaptive = (examine(side, EXAMPLES[index], dx, dy) for side in SIDES)
    assert default.still.argmax() == index != default.moved.argmax()
    assert default.moved.max() > 0.9
    assert adaptive.moved.argmax() == index


def test_standard_shifts_lose_what_leaves() -> None:
    """Else people take a roll for a camera that moves. What came in has no error: nothing was there before."""
    image = EXAMPLES[3]
    moved = move_pixels(image, 10, -3, "standard", (0, 0, 0))
    assert torch.equal(moved[..., :-3, 10:], image[..., 3:, :-10])
    assert not moved[..., -3:, :].any()
    assert not moved[..., :10].any()
    outcome = examine(SIDES[1], image, 10, -3, "standard")
    expected = SIDES[1].model(SIDES[1].preprocess.evaluate(moved)).softmax(1)[0]
    assert torch.equal(outcome.moved, expected)
    assert not outcome.identical  # ink has left
    for error in outcome.errors:
        assert error[-3:].isnan().all()
        assert error[:, :10].isnan().all()
        assert not error[:-3, 10:].isnan().any()
    assert "nan" not in draw_card("adaptive", outcome, SIDES[1].names)
    assert examine(SIDES[1], image, 2, 1, "standard").identical  # all ink is still there


def test_an_image_that_does_not_fit_the_model_says_so() -> None:
    """Else people laugh at a model of digits that takes a temple for a 7."""
    photograph = fit(load_sample_images().images[0], SIDES[0].preprocess)
    grey = photograph.float().mean(1, keepdim=True).expand(-1, 3, -1, -1).byte()
    for strange in (photograph, grey, 255 - EXAMPLES[3], torch.zeros_like(photograph)):
        assert "does not look like a light digit on dark ground" in misfit(strange, SIDES[0])
        assert misfit(strange, SIDES[0]) in draw(SIDES, strange, 1, 2)[0]
    assert not any(misfit(image, SIDES[0]) for image in EXAMPLES)
    assert "note" not in draw(SIDES, EXAMPLES[0], 1, 2)[0]
    other: Any = SimpleNamespace(class_names=("cat", "dog"))  # not of digits: it gets photographs, and takes them
    side = Side("default", other, SIDES[0].preprocess)
    assert not misfit(photograph, side)
    images = load_examples(side)
    assert {image.shape for image in images} == {(1, 3, 32, 32)}
    assert all(misfit(image, SIDES[0]) for image in images)


def test_many_classes_give_few_bars() -> None:
    """Else a model of ImageNet's classes gets a page of a thousand bars."""
    probabilities = torch.rand(1000).softmax(0)
    card = draw_card(
        "default",
        Outcome(probabilities, probabilities.roll(1), [torch.zeros(8, 8)], False),
        list(map(str, range(1000))),
    )
    assert 5 <= card.count("<i style") <= BARS
    assert card.count('class="bar top"') == 1


def test_uploads_are_fitted_or_refused() -> None:
    """Else a person's own image is changed on its way, or a hostile file fills the server's memory."""
    preprocess = SIDES[0].preprocess
    pixels = EXAMPLES[3][0].permute(1, 2, 0).numpy()
    assert torch.equal(fit(read_upload(png(pixels)), preprocess), EXAMPLES[3])
    assert fit(read_upload(png(np.zeros((50, 90, 3), np.uint8))), preprocess).shape == (1, 3, 32, 32)
    for content, reason in (
        (bomb(6_000), "6000 x 6000 pixels, more than 25,000,000"),
        (bomb(60_000), "exceeds"),
        (b"<b>", "unknown format"),
        (png(pixels)[:60], "This file cannot be shown"),
        (b"", "unknown format"),
    ):
        with pytest.raises(ValueError, match=reason):
            read_upload(content)


@pytest.mark.parametrize("side", [8, 20, 64, 100])
def test_uploads_are_prepared_as_in_evaluation(side: int) -> None:
    """Else the page shows other labels for a file than scripts/predict.py and evaluate.py: of small digits, a fifth."""
    preprocess = SIDES[0].preprocess
    pixels = np.random.default_rng(side).integers(256, size=(side, side, 3), dtype=np.uint8)
    levels = (preprocess.image(pixels)[None] * torch.tensor(preprocess.std).view(-1, 1, 1)) * 255  # the mean is 0
    assert (fit(pixels, preprocess) - levels).abs().max() <= 0.5 + 1e-3


def test_models_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    """Else the page fails later, in a place that does not say why."""
    model = Swin.from_pretrained(DEFAULT)
    model.reset_classifier(7)
    model.save_pretrained(tmp_path)
    shutil.copy(Path(DEFAULT) / "preprocessor_config.json", tmp_path)
    with pytest.raises(ValueError, match=r"\(\(32, 32\), 7\), the adaptive one \(\(32, 32\), 10\): give two models"):
        load_sides(str(tmp_path), ADAPTIVE)
    Swin.from_pretrained(DEFAULT).save_pretrained(tmp_path)  # else its labels are those of another crop of the image
    replace(SIDES[0].preprocess, resize=40).save(tmp_path)
    with pytest.raises(ValueError, match=r"resized to \(40, 40\) for the default model, to \(32, 32\) for"):
        load_sides(str(tmp_path), ADAPTIVE)
    renamed = Swin.from_pretrained(DEFAULT)
    renamed.name_classes([*"9876543210"])
    renamed.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="different class names, or the same in another order"):
        load_sides(str(tmp_path), ADAPTIVE)
    converted = str(create_model("swin_micro").save_pretrained(tmp_path / "converted"))  # without a preprocessor file
    assert load_sides(converted, converted)[1].preprocess == Preprocess(size=(32, 32))
    default, adaptive = load_sides(DEFAULT, DEFAULT)  # one set of weights serves both
    assert (default.model.adaptive, adaptive.model.adaptive) == (False, True)


def test_without_gradio_the_script_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else people see a traceback instead of the command that helps."""
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(sys, "argv", ["app.py"])
    monkeypatch.setattr("os.environ", dict(os.environ))  # the script sets some
    with pytest.raises(SystemExit, match=r"pip install 'shift-equivariant-vits\[app\]'"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_an_address_that_cannot_be_had_is_told_at_once(monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Else people wait for the models to load, and then read a traceback of gradio's or of its argument."""
    monkeypatch.setattr("shiftvit.page.masks.from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setattr("os.environ", dict(os.environ))  # the script sets some
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        for flag, said in ((taken, f"127.0.0.1:{taken} .*: choose another --port"), ("99999", "from 1 to 65535")):
            monkeypatch.setattr(sys, "argv", ["app.py", "--port", flag])
            with pytest.raises(SystemExit):
                runpy.run_path(str(SCRIPT), run_name="__main__")
            assert re.fullmatch(f"app.py: error: .*{said}.*\n", capsys.readouterr().err)


def test_no_image_is_dropped_while_another_is_drawn() -> None:
    """Else, where drawing takes long, the page goes on showing an image that is not the last one chosen."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'shift-equivariant-vits[app]'")
    events = [
        event for event in build_page({"digits": SIDES}, SEGMENTERS).config["dependencies"] if event["backend_fn"]
    ]
    # In tab move a slider moves; an example is chosen, then drawn; a file is uploaded, then drawn. In tab pan an
    # example is chosen or a file uploaded. In tab segmentation a slider moves; a scene is chosen, then drawn.
    assert len(events) == 5 + 2 + 3
    assert {event["trigger_mode"] for event in events} == {"always_last", "multiple"}  # "once" is the one that drops
    assert all(event["queue"] is not False for event in events)  # beside the queue there are no quotas


def test_the_page_says_what_it_is_and_links_only_what_is_known() -> None:
    """Else nobody knows what they look at, or follows a link to nowhere."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'shift-equivariant-vits[app]'")

    def title(links: dict[str, str]) -> str:
        components = build_page({"digits": SIDES}, SEGMENTERS, links).config["components"]
        return next(each["props"]["value"] for each in components if each["props"].get("elem_id") == "title")

    assert re.findall(r'href="(.*?)"', title({})) == ["https://arxiv.org/abs/2305.16316"]
    assert re.search("<h1>[^<]*vision transformer[^<]*shift-equivariant[^<]*</h1>", title({}))
    script = runpy.run_path(str(SCRIPT))
    found = script["find_links"](Namespace(default="owner/name", adaptive=ADAPTIVE, code_url="https://code.test/a?b&c"))
    assert found == {
        "code": "https://code.test/a?b&c",
        "card of the default model": "https://huggingface.co/owner/name",
    }
    assert 'href="https://code.test/a?b&amp;c"' in title(found)
    with pytest.raises(ValueError, match="javascript:alert.* is not an address that begins with https://"):
        script["find_links"](Namespace(default=DEFAULT, adaptive=ADAPTIVE, code_url="javascript:alert(1)"))


def test_the_page_opens_on_photographs() -> None:
    """Else people first see digits, or a model that keeps its label where the page says that it changes."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'shift-equivariant-vits[app]'")
    find_sources = runpy.run_path(str(SCRIPT))["find_sources"]
    sources = find_sources(Namespace(default=None, adaptive=None))
    assert list(sources) == ["photographs", "digits"]
    default, adaptive = sources["photographs"]
    assert default.model.class_names == adaptive.model.class_names
    assert "cat" in adaptive.model.class_names
    examples = load_examples(default)
    start, dx, dy = choose_opening(default, examples)
    outcomes = [examine(side, examples[start], dx, dy) for side in (default, adaptive)]
    assert [outcome.identical for outcome in outcomes] == [False, True]
    assert outcomes[0].still.argmax() != outcomes[0].moved.argmax()
    assert list(find_sources(Namespace(default=DEFAULT, adaptive=ADAPTIVE))) == ["digits", "photographs"]


def test_models_of_photographs_get_photographs() -> None:
    """Else a model of cats is asked about digits, and its names are nowhere."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'shift-equivariant-vits[app]'")
    sides = load_sides(DEFAULT, ADAPTIVE)
    for side in sides:
        side.model.class_names = tuple(f"animal {i} <b>" for i in range(10))
    parts = {each["props"].get("elem_id"): each["props"].get("value") for each in
             build_page({"photographs": sides, "digits": SIDES}, SEGMENTERS).config["components"]}  # fmt: skip
    for tab in ("move", "pan"):
        assert parts[f"photographs-{tab}-examples"].count("<img") == len(load_examples(sides[0])) == 4
        assert parts[f"digits-{tab}-examples"].count("<img") == 10
        assert parts[f"{tab}-source"] == "photographs"
    parts = {name.removeprefix("photographs-"): value for name, value in parts.items() if name}
    for text in (parts["move-panels"], parts["move-view"], parts["pan-panel"]):
        assert "animal" in text
        assert "<b>" not in text.replace("<b>default</b>", "").replace("<b>adaptive</b>", "").replace("<b></b>", "")
    assert "note" not in parts["move-view"] + parts["pan-panel"]
