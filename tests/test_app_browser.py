"""The page in a browser: a person with no network can move the image."""

import re
from pathlib import Path
from typing import Any

import pytest
from app_helpers import EXAMPLES, SIDES, bomb, browsing, cards, labels, png, serving
from sklearn.datasets import load_sample_images
from torch import Tensor

from common import create_model
from common.data.preprocess import Preprocess
from shiftvit.page.move import choose_opening, examine
from shiftvit.page.sides import draw_pixels


@pytest.mark.slow
def test_a_person_can_use_the_page(tmp_path: Path) -> None:
    """Else there is no page. One test, for a server takes long to start."""
    with serving(tmp_path / "gradio") as address:
        with browsing(address, tmp_path) as (page, wrong):
            opens_moved(page)
            move_by_slider_and_keys(page)
            choose_and_upload(page)
            drag_both_kinds(page)
            assert wrong == []
        phone = dict(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, color_scheme="dark")
        with browsing(address, tmp_path, **phone) as (page, wrong):
            use_a_phone(page)
            assert wrong == []


def opens_moved(page: Any) -> None:
    """The difference is there at first sight, in light colours."""
    index, dx, dy = choose_opening(SIDES[0], EXAMPLES)
    default, adaptive = cards(page, (dx, dy))
    assert f"{index} →" in default
    assert "label changed" in default
    assert "label kept" in adaptive
    assert brightness(page) > 200
    page.locator("#digits-move-examples button").nth(0).click()
    page.locator("#digits-move-reset").click()
    cards(page, (0, 0))
    page.wait_for_selector('#digits-move-panels .card[data-label="0"] >> nth=1')


def brightness(page: Any) -> float:
    """Of the ground of the page, 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def move_by_slider_and_keys(page: Any) -> None:
    """Both models' cards follow: the default one's changes, the adaptive one's does not."""
    assert labels(page) == ["0", "0"]
    start = cards(page, (0, 0))
    assert all("bit-identical: yes" in text for text in start)
    still = page.locator("#digits-move-view img").get_attribute("src")

    slider = page.locator("#digits-move-dx input[type=range]")
    box = slider.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 8, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    dx = int(slider.input_value())
    assert -16 < dx < -8
    default, adaptive = cards(page, (dx, 0))
    assert "bit-identical: no" in default
    assert default != start[0]
    assert adaptive == start[1]
    assert page.locator("#digits-move-view img").get_attribute("src") != still

    page.keyboard.press("ArrowDown")  # the dx slider has the focus and must not take it for its own
    page.keyboard.press("ArrowDown")
    assert cards(page, (dx, 2))[1] == start[1]
    for _ in range(dx + 12, 0):
        page.keyboard.press("ArrowRight")
    for _ in range(dx + 12):
        page.keyboard.press("ArrowLeft")
    default, adaptive = cards(page, (-12, 2))
    expected = [str(int(examine(side, EXAMPLES[0], -12, 2).moved.argmax())) for side in SIDES]
    assert labels(page) == expected
    assert expected[0] != expected[1] == "0"
    assert "label changed" in default
    assert adaptive == start[1]

    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    assert cards(page, (15, 2))[1] == start[1]  # out on the left, in on the right
    page.locator("#digits-move-dx input[type=number]").fill("")  # a box being typed in is no error
    cards(page, (0, 2))
    page.locator("#digits-move-reset").click()
    assert cards(page, (0, 0)) == start


def choose_and_upload(page: Any) -> None:
    """Other images can be seen, and a bad file neither kills the page nor goes unanswered."""

    def shows(image: Tensor) -> None:
        source = re.search(r'src="(.*)"', draw_pixels(image, "")).group(1)  # type: ignore[union-attr]
        page.wait_for_selector(f'#digits-move-view img[src="{source}"]')

    page.locator("#digits-move-examples button").nth(7).click()
    shows(EXAMPLES[7])
    page.keyboard.press("ArrowUp")
    cards(page, (0, -1))
    shows(EXAMPLES[7].roll(-1, 2))
    assert labels(page)[1] == "7"

    for i, content in enumerate((bomb(12_000), b"<script>alert(1)</script>")):
        page.locator("input[type=file]").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": content})
        page.get_by_text("This file cannot be shown").nth(i).wait_for()
    shows(EXAMPLES[7].roll(-1, 2))
    own = png(EXAMPLES[3][0].permute(1, 2, 0).numpy())
    page.locator("input[type=file]").set_input_files({"name": "own.png", "mimeType": "image/png", "buffer": own})
    shows(EXAMPLES[3])  # a new image begins in place
    cards(page, (0, 0))
    assert page.locator(".note").count() == 0
    photograph = png(load_sample_images().images[0])
    page.locator("input[type=file]").set_input_files({"name": "own.png", "mimeType": "image/png", "buffer": photograph})
    page.get_by_text("This does not look like a light digit").wait_for()


def drag_both_kinds(page: Any) -> None:
    """With the mouse, across the border: a circular shift comes back, a standard one stops there."""
    page.locator("#digits-move-examples button").nth(3).click()
    page.locator(".note").wait_for(state="detached")
    page.locator("#digits-move-reset").click()
    start = cards(page, (0, 0))
    box = page.locator("#digits-move-view .picture").bounding_box()
    pixel = box["width"] / 32
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for kind, (right, down), then in (("circular", (5, -3), (5, -3)), ("circular", (12, 0), (-15, -3)),
                                      ("standard", (-20, 1), (-16, -2))):  # fmt: skip
        page.locator("#digits-move-kind").get_by_text(kind, exact=True).click()
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + right * pixel, y + down * pixel, steps=4)
        page.mouse.up()
        default, adaptive = cards(page, then, kind)
        assert default != start[0]
        assert (adaptive == start[1]) == (kind == "circular")
    page.mouse.move(x, y)  # a button that is up drags nothing
    cards(page, then, kind)


def use_a_phone(page: Any) -> None:
    """In every tab both verdicts stand beside the image, in dark colours, and a finger drags it without scrolling."""
    for tab, picture in (
        ("segmentation", "#masks-view .picture"),
        ("pan", ".pan .window"),
        ("move", "#digits-move-view .picture"),
    ):
        page.get_by_role("tab", name=tab).tap()
        page.locator(picture).wait_for()
        box = page.locator(picture).bounding_box()
        verdicts = page.locator(f":has(> {picture.split()[-1]}) > .verdicts > div:visible")
        assert verdicts.count() == 2, tab
        for place in (verdict.bounding_box() for verdict in verdicts.all()):
            assert place["x"] >= box["x"] + box["width"], tab
            assert abs(place["y"] + place["height"] / 2 - box["y"] - box["height"] / 2) < box["height"] / 2, tab
            assert place["y"] + place["height"] < 844, tab
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab
    assert brightness(page) < 60
    one_line = """() => { const label = document.querySelector("#digits-move-panels .label");
        label.textContent = "automobile";
        return label.clientHeight < 2 * parseFloat(getComputedStyle(label).fontSize) }"""
    assert page.evaluate(one_line)  # the longest name of a class
    page.locator("#digits-move-reset").tap()
    cards(page, (0, 0))
    touch = page.context.new_cdp_session(page)
    x, y, pixel = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, box["width"] / 32
    for kind, by in (("touchStart", 0), ("touchMove", -2), ("touchMove", -6), ("touchEnd", None)):
        points = [] if by is None else [{"x": x, "y": y + by * pixel}]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    cards(page, (0, -6))
    assert page.evaluate("window.scrollY") == 0


@pytest.mark.slow
def test_a_person_can_choose_photographs_or_digits(tmp_path: Path) -> None:
    """Else a model of photographs hides the digits, or keys move an image that nobody sees."""
    model = create_model("swin_mini", num_classes=3)
    model.name_classes(["cat", "frog", "truck"])
    Preprocess(size=(32, 32)).save(model.save_pretrained(tmp_path / "model"))
    with (
        serving(tmp_path / "gradio", "--default", str(tmp_path / "model")) as address,
        browsing(address, tmp_path) as (page, wrong),
    ):
        page.wait_for_selector("#photographs-move-panels .card >> nth=1")
        assert "cat" in page.locator("#photographs-move-panels").inner_text()
        assert not page.locator("#digits-move-panels").is_visible()
        page.locator("#move-source").get_by_text("digits", exact=True).click()
        page.locator("#digits-move-panels").wait_for(state="visible")
        assert not page.locator("#photographs-move-panels").is_visible()
        _, dx, dy = choose_opening(SIDES[0], EXAMPLES)
        cards(page, (dx, dy))
        page.keyboard.press("ArrowRight")
        cards(page, (dx + 1, dy))
        page.get_by_role("tab", name="pan").click()
        page.locator("#photographs-pan-panel .pan").wait_for(state="visible")
        page.locator("#pan-source").get_by_text("digits", exact=True).click()
        page.locator("#digits-pan-panel .pan").wait_for(state="visible")
        assert wrong == []
