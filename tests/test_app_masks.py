"""The tab segmentation: pixels are marked and counted whose label changed, and no others."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from app_helpers import ADAPTIVE, SEGMENTER, SEGMENTERS, browsing, serving
from torch import Tensor

from common import from_pretrained
from segmentation.data import load_digit_scenes
from segmentation.preprocess import ScenePreprocess
from shiftvit.page.masks import (
    CHANGED,
    OPENING_SCENE,
    UNSEEN,
    Segmenter,
    colour,
    colours,
    compare,
    draw_masks,
    draw_names,
    load_scene_images,
    load_segmenters,
)
from shiftvit.page.move import OPENINGS

IMAGES = load_scene_images()


def test_masks_of_the_adaptive_model_move_with_the_scene() -> None:
    """Else the tab would not show what the project is about."""
    assert torch.equal(torch.cat(IMAGES), load_digit_scenes(1, 200)[1].images[: len(IMAGES)])  # held out
    for image, (dx, dy) in zip(IMAGES, ((1, 0), (0, 1), (-2, 4), (7, -9), (31, -32), (16, 16)), strict=False):
        (before, back), (still, moved) = (compare(side, image, dx, dy) for side in SEGMENTERS)
        assert torch.equal(still, moved)
        assert (before != back).sum() > 20
    for side in SEGMENTERS:  # nothing moved: nothing may seem to change
        assert torch.equal(*compare(side, IMAGES[0], 0, 0))


def test_the_tab_opens_on_a_scene_that_both_models_see() -> None:
    labels = load_digit_scenes(1, len(IMAGES))[1].labels[OPENING_SCENE]
    for side in SEGMENTERS:
        before, _ = compare(side, IMAGES[OPENING_SCENE], *OPENINGS[0])
        assert (before == labels)[labels > 0].float().mean() > 0.85


class Corner(torch.nn.Module):
    """Labels bright pixels 1, and the corner of the array 1 whatever is there."""

    num_classes = 2

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, 0] > 0.5
        mask[:, 0, 0] = True
        return F.one_hot(mask.long(), 2).permute(0, 3, 1, 2).float()


@pytest.mark.parametrize(("kind", "changed", "unseen"), [("circular", 2, 0), ("standard", 1, 8 * 8 - 5 * 6)])
def test_a_pixel_is_marked_where_it_is_in_place(kind: str, changed: int, unseen: int) -> None:
    """Else people look at the wrong place. Moved right by 2 and down by 3, the corner of the array shows what was at
    (-3, -2): it comes back at the lower right, or not at all. In place it was (0, 0)."""
    model: Any = Corner()
    side = Segmenter("default", model, ScenePreprocess(size=(8, 8), mean=(0, 0, 0), std=(1, 1, 1)))
    image = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    before, back = compare(side, image, 2, 3, kind)
    expected = torch.zeros(8, 8, dtype=torch.bool)
    expected[0, 0] = True
    if kind == "circular":
        expected[-3, -2] = True
    assert torch.equal((before != back) & (back >= 0), expected)
    assert int((back < 0).sum()) == unseen
    view, cards = draw_masks([side], image, 2, 3, kind)
    said = f"{changed} of {64 - unseen} pixels changed ({100 * changed / (64 - unseen):.1f} %)"
    assert said in cards
    assert f"{changed} <small>pixels changed</small>" in view
    pixels = colour(before, back, 2)[0].permute(1, 2, 0)
    assert torch.equal((pixels == torch.tensor(CHANGED)).all(2), expected)
    assert int((pixels == torch.tensor(UNSEEN)).all(2).sum()) == unseen
    assert torch.equal(pixels[1, 1], torch.from_numpy(colours(2)[0]))


def test_colours_are_told_apart_and_named() -> None:
    """Else a mask cannot be read."""
    table = [*map(tuple, colours(11).tolist()), CHANGED, UNSEEN]
    assert len(set(table)) == 13
    assert min(sum(abs(a - b) for a, b in zip(x, y, strict=True)) for i, x in enumerate(table) for y in table[:i]) > 40
    drawn = draw_names(("<b>", "cat"))
    names = re.findall(r"rgb\((\d+,\d+,\d+)\)\"></i>(.*?)</span>", drawn)
    assert [name for _, name in names] == ["&lt;b&gt;", "cat", "changed", "not in view"]
    assert names[2][0] == "255,0,0"


def test_other_models_are_refused() -> None:
    """Else the tab fails later, in a place that does not say why."""
    with pytest.raises(ValueError, match="a_swin_micro is not a UperNet for digit scenes, whose classes are"):
        load_segmenters(SEGMENTER, ADAPTIVE)


def test_a_segmenter_of_another_size_is_refused(tmp_path: Path) -> None:
    """Else it sees the scene moved by another distance, and both models' changes are compared as if it were one."""
    model = from_pretrained(SEGMENTER, adaptive=False, img_size=96)
    assert load_segmenters(SEGMENTER, SEGMENTER)[0].model.img_size == (64, 64)
    model.save_pretrained(tmp_path)
    for pair in ((str(tmp_path), SEGMENTER), (SEGMENTER, str(tmp_path))):
        with pytest.raises(ValueError, match="takes a scene at 96x96, and the page moves it at 64x64"):
            load_segmenters(*pair)


@pytest.mark.slow
def test_a_person_can_move_a_scene(tmp_path: Path) -> None:
    """Else nothing moves: keys act in the tab that is open, the pointer drags, another scene can be chosen."""
    with serving(tmp_path / "gradio") as address, browsing(address, tmp_path) as (page, wrong):
        elsewhere = page.locator("#digits-move-panels .cards").get_attribute("data-shift")
        page.get_by_role("tab", name="segmentation").click()
        changed(page, IMAGES[OPENING_SCENE], *OPENINGS[0])
        page.locator("#masks-reset").click()
        assert changed(page, IMAGES[OPENING_SCENE], 0, 0) == [0, 0]
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        counts = changed(page, IMAGES[OPENING_SCENE], 1, 1)
        assert counts[0] > counts[1] == 0
        box = page.locator("#masks-view .picture").bounding_box()
        page.mouse.move(box["x"] + 50, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 50 + 9 * box["width"] / 64, box["y"] + 50, steps=3)
        page.mouse.up()
        changed(page, IMAGES[OPENING_SCENE], 10, 1)
        page.locator("#masks-kind").get_by_text("standard", exact=True).click()
        page.locator("#masks-examples button").nth(2).click()
        changed(page, IMAGES[2], 10, 1, "standard")
        page.locator("#masks-kind").get_by_text("standard", exact=True).click()  # what has the focus leaves us the keys
        page.keyboard.press("ArrowRight")
        changed(page, IMAGES[2], 11, 1, "standard")
        assert elsewhere == page.locator("#digits-move-panels .cards").get_attribute("data-shift")
        assert wrong == []


def changed(page: Any, image: Tensor, dx: int, dy: int, kind: str = "circular") -> list[int]:
    """Pixels that changed, as the page says once it has drawn what we draw here."""
    counts = re.findall(r'data-changed="(\d+)"', draw_masks(SEGMENTERS, image, dx, dy, kind)[1])
    place = f'#masks-panels .cards[data-shift="{dx},{dy},{kind}"]'
    for title, count in zip(("default", "adaptive"), counts, strict=True):
        page.wait_for_selector(f'{place} .card[data-model="{title}"][data-changed="{count}"]')
    return list(map(int, counts))
