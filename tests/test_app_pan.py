"""The tab pan: a window that glides over a larger picture shows what is there, and flips are counted as they happen."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from app_helpers import EXAMPLES, SIDES, bomb, browsing, png, serving
from sklearn.datasets import load_sample_images

from shiftvit.page.build import opened
from shiftvit.page.pan import (
    FRAMES,
    REACH_DIGITS,
    REACH_PHOTOGRAPHS,
    Pan,
    choose_pan,
    digit_scene,
    draw_pan,
    glide,
    photograph_scene,
)


def test_the_adaptive_model_flips_less_and_the_digit_stays_in_view() -> None:
    """Else the curves would not show what anchors are for: other digits come in at every border, the one in the middle
    loses no more than its rim."""
    flips, right = [], []
    for label in range(10):
        scene = digit_scene(EXAMPLES, label)
        assert scene.shape == (1, 3, 96, 160)
        assert torch.equal(scene[..., 32:64, 64:96], EXAMPLES[label])
        pan = glide(SIDES, scene, REACH_DIGITS, label)
        assert torch.equal(pan.places[0], torch.tensor([32, 64]))
        assert (pan.places - pan.places[0]).abs().amax(0).tolist() == [8, 8]
        assert (pan.places[1:] - pan.places[:-1]).abs().max() == 1  # a camera that moves by single pixels
        flips.append([len(pan.flips(k)) for k in range(2)])
        right.append([float((p.argmax(1) == label).float().mean()) for p in pan.probabilities])
    default, adaptive = np.array(flips).T
    assert default.mean() > 20 > 3 > adaptive.mean()
    assert np.array(right)[:, 0].mean() < 0.5 < 0.9 < np.array(right)[:, 1].mean()


def test_the_tab_opens_where_the_adaptive_model_flips_least_beside_the_default_one() -> None:
    """Else a visitor first sees a picture on which both models flip alike."""
    pans = [glide(SIDES, digit_scene(EXAMPLES, label), REACH_DIGITS, label) for label in range(3)]
    gaps = [len(pan.flips(0)) - len(pan.flips(1)) for pan in pans]
    assert len(set(gaps)) > 1
    assert choose_pan(pans) is pans[int(np.argmax(gaps))]


def test_frames_are_what_the_models_see() -> None:
    """Else the curves belong to other windows than the one that is shown."""
    scene = photograph_scene(load_sample_images().images[0], (32, 32))
    pan = glide(SIDES, scene, 0.5)
    for i in (0, 13, 50):
        top, left = pan.places[i].tolist()
        x = SIDES[0].preprocess.evaluate(scene[..., top : top + 32, left : left + 32])
        for side, p in zip(SIDES, pan.probabilities, strict=True):
            torch.testing.assert_close(p[i], side.model(x).softmax(1)[0].detach())
    both = pan.probabilities[0] + pan.probabilities[1]
    assert pan.label == int(both.sum(0).argmax())
    rows, columns = pan.places.T
    assert (rows.min(), columns.min()) == (0, (scene.shape[3] - 32) // 2 - 16)
    assert rows.max() == scene.shape[2] - 32  # from the upper border to the lower one


@pytest.mark.parametrize("shape", [(427, 640), (640, 427), (1, 5000), (5000, 1), (7, 5), (64, 64)])
@pytest.mark.parametrize("window", [(32, 32), (20, 64)])
def test_any_picture_is_large_enough(shape: tuple[int, int], window: tuple[int, int]) -> None:
    """Else a narrow picture ends in an error, or in gigabytes."""
    pixels = np.random.default_rng(0).integers(0, 255, (*shape, 3), np.uint8)
    scene = photograph_scene(pixels, window)
    for side, have in zip(window, scene.shape[2:], strict=True):
        assert 2 * side <= have <= 4 * side + 64 * side * (1 in shape)
    if shape == (64, 64) and window == (32, 32):
        assert torch.equal(scene[0].permute(1, 2, 0), torch.from_numpy(pixels))


def test_flips_are_counted_and_drawn() -> None:
    """Else the number beside a model is not what happened. The label goes 3, 3, 8, 3, 3, ...: two flips."""
    pan = glide(SIDES, digit_scene(EXAMPLES, 3), REACH_DIGITS, 3)
    steady = torch.eye(10)[3].repeat(FRAMES, 1)
    once = steady.clone()
    once[2] = torch.eye(10)[8]
    pan = Pan(pan.scene, pan.places, 3, [once, steady])
    assert pan.flips(0).tolist() == [2, 3]
    drawn = draw_pan(SIDES, pan)
    assert re.findall(r'<div class="(\w+)" data-flips="(\d+)">', drawn) == [("default", "2"), ("adaptive", "0")]
    assert "2 flips of the label" in drawn
    assert "probability of 3 over time" in drawn
    default, adaptive = re.findall(r'<polyline points="(.*?)"/><path d="(.*?)"/>', drawn)
    heights = [float(point.split(",")[1]) for point in default[0].split()]
    assert heights == [200.0 if i == 2 else 0.0 for i in range(FRAMES)]
    assert default[1].count("v8") == 2
    assert "v8" not in adaptive[1]
    frames = json.loads(html.unescape(re.search('data-frames="(.*?)"', drawn)[1]))  # type: ignore[index]
    assert frames[2] == [*pan.places[2].flip(0).tolist(), "8", "100.0 % sure", False, "3", "100.0 % sure", True]
    one = replace(pan, probabilities=[torch.cat([once[2:3].repeat(9, 1), steady[9:]]), steady])
    assert "1 flip of" in draw_pan(SIDES, one)


def test_a_photograph_for_models_of_digits_says_so() -> None:
    photograph = glide(SIDES, photograph_scene(load_sample_images().images[0], (32, 32)), 0.5)
    assert "does not look like a light digit on dark ground" in draw_pan(SIDES, photograph)
    assert "class=note" not in draw_pan(SIDES, glide(SIDES, digit_scene(EXAMPLES, 3), REACH_DIGITS, 3))


def test_uploads_are_held_to_their_pixels() -> None:
    """Else the second tab takes what the first refuses."""
    gr = pytest.importorskip("gradio", reason="the page needs gradio: pip install 'shift-equivariant-vits[app]'")
    pixels = load_sample_images().images[1]
    assert np.array_equal(opened(png(pixels)), pixels)
    for content, reason in ((bomb(6_000), "6000 x 6000 pixels, more than 25,000,000"), (b"<b>", "unknown format")):
        with pytest.raises(gr.Error, match=reason):
            opened(content)


@pytest.mark.slow
def test_a_person_can_pan(tmp_path: Path) -> None:
    """Else nothing glides: the window plays, stops, follows the slider, and goes over a picture of one's own."""
    with serving(tmp_path / "gradio") as address, browsing(address, tmp_path) as (page, wrong):
        page.get_by_role("tab", name="pan").click()
        place = "getComputedStyle(document.querySelector('.pan')).getPropertyValue('--t')"
        page.wait_for_function(f"Number({place}) > 0.02")  # it plays
        page.locator(".pan .play").click()
        pan = choose_pan(glide(SIDES, digit_scene(EXAMPLES, label), REACH_DIGITS, label) for label in range(10))
        for index in (int(pan.flips(0)[0]) - 1, int(pan.flips(0)[0])):  # before and after the first flip
            shows(page, pan, index)
        page.locator("#digits-pan-examples button").nth(7).click()
        page.wait_for_selector('.pan[data-label="7"]')
        photograph = png(load_sample_images().images[0])
        files = page.locator("input[type=file]").last
        files.set_input_files({"name": "own.png", "mimeType": "image/png", "buffer": bomb(12_000)})
        page.get_by_text("This file cannot be shown").wait_for()
        files.set_input_files({"name": "own.png", "mimeType": "image/png", "buffer": photograph})
        page.get_by_text("This does not look like a light digit").wait_for()
        pan = glide(SIDES, photograph_scene(load_sample_images().images[0], (32, 32)), REACH_PHOTOGRAPHS)
        page.wait_for_function("document.querySelector('.pan').index === 0")  # from the beginning
        shows(page, pan, 12)
        assert wrong == []


def shows(page: Any, pan: Pan, index: int) -> None:
    """A frame: labels, where the window is in the picture, and the part of the picture that it shows."""
    page.locator(".pan .time").fill(str(index))
    page.wait_for_function(f"document.querySelector('.pan').index === {index}")
    assert page.locator(".pan .now").all_inner_texts() == [str(int(p[index].argmax())) for p in pan.probabilities]
    window, scene, frame, whole = (page.locator(f".pan {each}").bounding_box()
                                   for each in (".window", ".scene", "i", ".window img"))  # fmt: skip
    top, left = pan.places[index].tolist()
    height, width = pan.scene.shape[2:]
    assert abs((frame["x"] - scene["x"]) / scene["width"] - left / width) < 0.01
    assert abs((frame["y"] - scene["y"]) / scene["height"] - top / height) < 0.01
    assert abs((window["x"] - whole["x"]) / window["width"] - left / 32) < 0.02
    assert abs((window["y"] - whole["y"]) / window["height"] - top / 32) < 0.02
