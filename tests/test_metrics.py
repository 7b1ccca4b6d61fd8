"""Metrics against their definitions: a wrong count here would make every table wrong."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from common.data.preprocess import Preprocess, check_finite
from common.data.sources import load_data
from common.data.splits import Arrays
from common.evaluation import metrics
from common.evaluation.evaluate import evaluate, parse_metric
from common.evaluation.metrics import c_cons, mascc, massc, s_cons, top1
from common.shifts import random_shifts
from segmentation.data import load_scenes
from segmentation.evaluation import evaluate as evaluate_scenes
from segmentation.evaluation import parse_metric as parse_pixel_metric
from segmentation.preprocess import ScenePreprocess


def by_brightest_column(x: Tensor) -> Tensor:
    """A classifier that depends on where the light is: label = quarter of the width with most light."""
    return x.mean((1, 2)).view(len(x), 4, -1).sum(-1)


def by_mean(x: Tensor) -> Tensor:
    """A classifier that a circular shift cannot change."""
    mean = x.double().mean((1, 2, 3))
    return torch.stack([mean, -mean], 1)


def test_top1_counts_over_all_batches() -> None:
    x = torch.zeros(3, 1, 8, 8)
    x[0, :, :, 0] = x[1, :, :, 7] = x[2, :, :, 3] = 1
    assert top1(by_brightest_column, (x, torch.tensor([0, 3, 0]))) == pytest.approx(200 / 3)
    assert top1(by_brightest_column, [(x[:1], torch.tensor([0])), (x[1:], torch.tensor([3, 0]))]) == pytest.approx(
        200 / 3
    )
    with pytest.raises(ValueError, match="needs labels"):
        top1(by_brightest_column, x)
    with pytest.raises(ValueError, match="empty"):
        top1(by_brightest_column, [])


def test_c_cons_is_the_chance_that_two_shifts_agree() -> None:
    """One bright column: the label is its quarter, so two uniform shifts agree with probability 1/4."""
    x = torch.zeros(4000, 1, 4, 16)
    x[..., 5] = 1
    share = c_cons(by_brightest_column, x, seed=1) / 100
    assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 4000)
    assert c_cons(by_brightest_column, x, max_shift=0) == 100.0
    assert c_cons(by_brightest_column, x[:50], worst=3) == 100.0  # columns 5, 6, 7: one quarter
    assert c_cons(by_brightest_column, x[:50], worst=4) == 0.0


def test_metrics_do_not_depend_on_batching() -> None:
    x = torch.randn(30, 1, 16, 16)
    whole, parts = (
        c_cons(by_brightest_column, x, seed=3, pairs=2),
        c_cons(by_brightest_column, x.split(7), seed=3, pairs=2),
    )
    assert whole == parts
    assert s_cons(by_brightest_column, x, seed=3) == s_cons(by_brightest_column, x.split(11), seed=3)


def test_settings_of_the_measures_count() -> None:
    """Pairs of shifts would be one pair, a seed no seed, the worst case the last one."""
    x = torch.randn(40, 1, 16, 16)
    first, second = (c_cons(by_brightest_column, x, seed=seed) for seed in (5, 6))
    assert first != second
    assert c_cons(by_brightest_column, x, seed=5, pairs=2) != first
    assert s_cons(by_brightest_column, x) == s_cons(by_brightest_column, x, max_shift=2)  # an eighth of the side
    assert s_cons(by_brightest_column, x) != s_cons(by_brightest_column, x, max_shift=4)
    column = torch.zeros(1, 1, 4, 16)
    column[..., 5] = 1
    by_parity = lambda x: torch.stack([x[..., i::2].sum((1, 2, 3)) for i in (0, 1)], 1)  # noqa: E731
    assert c_cons(by_parity, column, worst=3) == 0.0  # one column further on the label is another, two on the same


def test_seeds_share_no_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the spread over seeds is too small: the second pair of one was the first of the next. A first pair alone is
    what every command measures, and stays."""
    drawn: list[Tensor] = []

    def draw(*arguments: Any) -> Tensor:
        drawn.append(random_shifts(*arguments))
        return drawn[-1]

    monkeypatch.setattr(metrics, "random_shifts", draw)
    x = torch.randn(20, 1, 16, 16)
    for seed in range(3):
        for measure in (c_cons, s_cons):
            measure(by_brightest_column, x, seed=seed, pairs=3)
    assert len({tuple(shifts.flatten().tolist()) for shifts in drawn}) == len(drawn) == 36
    for which in (1, 2):
        assert torch.equal(drawn[which - 1], random_shifts(torch.arange(20), (0, 0), (15, 15), 0, which))


def test_s_cons_sees_the_border() -> None:
    x = torch.zeros(64, 1, 16, 16)
    x[:, :, :, 0] = 1.0
    x[:, :, 3, 8] = -0.5
    assert c_cons(by_mean, x) == 100.0
    assert s_cons(by_mean, x, max_shift=2) < 100.0  # a shift to the left loses the bright column


def test_s_cons_with_a_crop_needs_the_margin() -> None:
    x = torch.randn(8, 1, 20, 20)
    assert 0 <= s_cons(by_brightest_column, x, crop=(16, 16)) <= 100
    with pytest.raises(ValueError, match="exceeds the margin"):
        s_cons(by_brightest_column, x, crop=(16, 16), max_shift=3)


def test_evaluate_agrees_with_the_metrics() -> None:
    _, test = load_data("digits")
    preprocess = Preprocess(size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
    images = preprocess.evaluate(test.images)
    measured = evaluate(by_brightest_column, test, preprocess, ["top1", "c_cons@8", "s_cons", "c_cons_worst@2",
                        "c_cons_near@3"], batch_size=77, seed=4, progress=False)  # fmt: skip
    assert measured["images"] == 360
    assert measured["top1"] == top1(by_brightest_column, (images, test.labels))
    assert measured["c_cons@8"] == c_cons(by_brightest_column, images, max_shift=8, seed=4)
    assert measured["s_cons"] == s_cons(by_brightest_column, images, seed=4)
    assert measured["c_cons_worst@2"] == c_cons(by_brightest_column, images, worst=2)
    assert measured["c_cons_near@3"] == c_cons(by_brightest_column, images, max_shift=3, near=True, seed=4)
    with pytest.raises(ValueError, match="unknown metric 'accuracy': choose among top1"):
        evaluate(by_brightest_column, test, preprocess, ["accuracy"])


def test_shifts_by_multiples() -> None:
    """Of a model that sees where in its patch of 8 x 8 something is, and not in which."""

    def by_place_in_patch(x: Tensor) -> Tensor:
        return x.flatten(1, 2).sum(1).unflatten(1, (-1, 8)).sum(1)

    _, test = load_data("digits")
    preprocess = Preprocess(size=(32, 32))
    names = ["c_cons@31/8", "c_cons@8/8", "c_cons@31/4", "c_cons@31/1", "c_cons@31"]
    measured = evaluate(by_place_in_patch, test, preprocess, names, progress=False)
    assert measured["c_cons@31/8"] == measured["c_cons@8/8"] == 100.0
    assert measured["c_cons@31"] == measured["c_cons@31/1"] < measured["c_cons@31/4"] < 100.0
    for name in ("c_cons/8", "s_cons@31/8", "c_cons@31/0"):
        with pytest.raises(ValueError, match="unknown metric"):
            parse_metric(name)


def test_near_shifts_go_both_ways() -> None:
    """The label is the row and the column of one bright pixel: so it tells by how much an image was shifted."""
    images, seen = torch.zeros(400, 1, 16, 16), []
    images[:, :, 5, 5] = 1

    def by_place(x: Tensor) -> Tensor:
        seen.append(x.flatten(1).argmax(1))
        return x.flatten(1)

    c_cons(by_place, images, max_shift=3, near=True)
    place = torch.cat(seen)
    assert set((place // 16 - 5).tolist()) == set((place % 16 - 5).tolist()) == {-3, -2, -1, 0, 1, 2}


def test_a_metric_that_measures_nothing_is_refused() -> None:
    """Else top1@5 is top-1 and looks like top-5, c_cons_worst@0 is that of 8, and the rest is 100 % or top-1."""
    names = ("top1@5", "kept@4:half", "kept", "top1:erased", "top1:half@3", "c_cons@0", "s_cons@0", "c_cons@3/4",
             "c_cons_worst@0", "c_cons_worst@1", "c_cons_near@0")  # fmt: skip
    for name in names:
        with pytest.raises(ValueError, match=f"the metric '{name}' changes nothing, or its number"):
            parse_metric(name)
    for name in ("mascc@0", "massc@0", "mascc_worst@1"):
        with pytest.raises(ValueError, match=f"the metric '{name}' shifts nothing"):
            parse_pixel_metric(name)


def test_a_metric_may_be_named_twice() -> None:
    """Else the command ends with a traceback after the first batch."""
    test = load_data("digits")[1].head(4)
    measured = evaluate(by_mean, test, Preprocess(size=(32, 32)), ["top1", "c_cons", "top1"], progress=False)
    assert measured["c_cons"] == 100.0


def test_measuring_draws_no_random_number() -> None:
    """Else ``--eval_every`` changes what a training on a CPU drops, and so its weights."""
    images, scenes = load_data("digits")[1].head(4), load_scenes("digits")[1].head(2)
    state = torch.get_rng_state()
    evaluate(by_mean, images, Preprocess(size=(32, 32)), ["top1"], progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    measure = ScenePreprocess(size=scenes.images.shape[-2:])  # type: ignore[attr-defined]
    evaluate_scenes(lambda x: x.new_zeros(len(x), 11, *x.shape[2:]), scenes, measure, ["miou"], progress=False)
    assert torch.equal(torch.get_rng_state(), state)


def test_digits_are_real_held_out_and_drawn_with_a_margin() -> None:
    train, test = load_data("digits")
    assert (len(train), len(test)) == (1437, 360)
    assert len(torch.cat([train.images, test.images]).flatten(1).unique(dim=0)) > 1790
    border = train.images.clone()
    border[:, :, 4:-4, 4:-4] = 0
    assert border.sum() == 0
    assert set(test.labels.tolist()) == set(range(10))


def test_bad_data_are_refused() -> None:
    images = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="3 images but 2 labels"):
        Arrays(images, torch.zeros(2, dtype=torch.long), ("a",))
    with pytest.raises(ValueError, match="labels run from 0 to 5, but there are 2 classes"):
        Arrays(images, torch.tensor([0, 5, 1]), ("a", "b"))
    with pytest.raises(ValueError, match="empty"):
        Arrays(images[:0], torch.zeros(0, dtype=torch.long), ("a",))
    broken = torch.zeros(2, 3, 8, 8)
    broken[1, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"predict: images \[1\] of the batch hold NaN or Inf"):
        check_finite(broken, "predict")


def test_augmentation_belongs_to_seed_epoch_and_image() -> None:
    train, _ = load_data("digits")
    preprocess = Preprocess(size=(32, 32), rotate=10, scale=0.1, flip=True, circular=True)
    index = torch.tensor([5, 900, 17])
    whole = preprocess.train(train.images[index], index, 0, 3)
    alone = preprocess.train(train.images[index[1:2]], index[1:2], 0, 3)
    assert torch.equal(whole[1:2], alone)
    assert not torch.equal(whole, preprocess.train(train.images[index], index, 0, 4))


def test_masks_are_shifted_back_before_they_are_compared() -> None:
    """Shifted back the wrong way, mASCC and mASSC would call a perfect segmenter inconsistent."""
    x = torch.randn(6, 1, 12, 20)

    def by_pixel(images: Tensor) -> Tensor:
        return torch.cat([images, -images], 1)  # a pixel's label is its sign, wherever it is

    for seed in range(3):
        assert mascc(by_pixel, x, seed=seed) == 100.0
        assert mascc(by_pixel, x, worst=3) == 100.0
        assert massc(by_pixel, x, max_shift=5, seed=seed) == 100.0  # the border that comes in is not compared
        assert massc(by_pixel, x, crop=(8, 12), seed=seed) == 100.0
    by_place = massc(lambda images: by_pixel(x[: len(images)]), x, max_shift=5)  # labels that stay where they are
    assert 20 < by_place < 80


def test_a_metric_that_would_measure_something_else_is_refused() -> None:
    """Each gave a number: S-Cons of images that cannot move is 100, labels of another shape are broadcast."""
    x, y = torch.zeros(3, 3, 16, 16), torch.zeros(3, dtype=torch.long)
    for images, crop in ((x, (16, 16)), (x, (15, 15)), (x[..., :7, :7], None)):
        with pytest.raises(ValueError, match="leave no room to shift"):
            s_cons(by_mean, images, crop=crop)
    with pytest.raises(ValueError, match=r"labels have shape \(3, 1\) for 3 images"):
        top1(by_mean, (x, y[:, None]))
    with pytest.raises(ValueError, match="measure a segmenter by miou"):
        c_cons(lambda images: images, x)  # which compared the brightest columns of each row
    assert top1(by_mean, [x, y]) == 100.0  # a batch as loaders give it
    assert c_cons(by_mean, [x, x]) == 100.0  # two batches of images
    with pytest.raises(ValueError, match="resized to 12 and then cropped to"):
        Preprocess(size=(16, 16), resize=12)


@pytest.mark.parametrize("measure", [c_cons, s_cons, mascc, massc])
def test_logits_that_are_nan_are_refused(measure: Any) -> None:
    """The place of NaN is taken for that of the highest logit: the same at all shifts, so 100 % consistent."""

    def model(x: Tensor) -> Tensor:
        logits = torch.stack([x.mean(1), x.mean(1) * math.nan], 1)
        return logits if measure in (mascc, massc) else logits.mean((2, 3))

    with pytest.raises(ValueError, match="logits are NaN"):
        measure(model, torch.randn(4, 3, 16, 16))


def test_labels_that_are_kept_are_none_of_nan() -> None:
    """Images that are changed would keep it, too."""
    split = load_data("digits")[1].head(4)
    with pytest.raises(ValueError, match="logits are NaN"):
        evaluate(lambda x: x.mean((2, 3)) * math.nan, split, Preprocess(size=(32, 32)), ["kept:half"], progress=False)
