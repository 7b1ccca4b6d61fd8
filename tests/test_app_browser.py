"""The page in a browser: a person with no network can move the image."""

import re
from pathlib import Path
from typing import Any

import pytest
from app_helpers import EXAMPLES, SIDES, bomb, browsing, cards, labels, png, serving
from torch import Tensor

from shiftvit.page.move import examine
from shiftvit.page.sides import draw_pixels


@pytest.mark.slow
def test_a_person_can_use_the_page(tmp_path: Path) -> None:
    """Else there is no page. One test, for a server takes long to start."""
    with serving(tmp_path / "gradio") as address, browsing(address, tmp_path) as (page, wrong):
        move_by_slider_and_keys(page)
        choose_and_upload(page)
        assert wrong == []


def move_by_slider_and_keys(page: Any) -> None:
    """Both models' cards follow: the default one's changes, the adaptive one's does not."""
    assert labels(page) == ["0", "0"]
    start = cards(page, (0, 0))
    assert all("bit-identical: yes" in text for text in start)
    still = page.locator("#view img").get_attribute("src")

    slider = page.locator("#dx input[type=range]")
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
    assert page.locator("#view img").get_attribute("src") != still

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
    page.locator("#dx input[type=number]").fill("")  # a box being typed in is no error
    cards(page, (0, 2))
    page.locator("#reset").click()
    assert cards(page, (0, 0)) == start


def choose_and_upload(page: Any) -> None:
    """Other images can be seen, and a bad file neither kills the page nor goes unanswered."""

    def shows(image: Tensor) -> None:
        source = re.search(r'src="(.*)"', draw_pixels(image, "")).group(1)  # type: ignore[union-attr]
        page.wait_for_selector(f'#view img[src="{source}"]')

    page.locator("#examples button").nth(7).click()
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
    shows(EXAMPLES[3].roll(-1, 2))
