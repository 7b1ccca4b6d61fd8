"""Augmentation: what happens to an image depends on (seed, epoch, index) and on nothing else."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from common.data.preprocess import Mixing, Preprocess
from common.seeding import seeded


def images(count: int = 8, side: int = 32) -> Tensor:
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)


def test_augmentation_does_not_depend_on_the_batch() -> None:
    """Otherwise another number of processes, or a resumed run, would train on other images."""
    preprocess = Preprocess(size=(32, 32), resize=36, flip=True, rotate=10, scale=0.1, circular=True, erase=0.5)
    x, index = images(), torch.arange(100, 108)
    whole = preprocess.train(x, index, 7, 3)
    halves = torch.cat([preprocess.train(x[part], index[part], 7, 3) for part in (slice(0, 3), slice(3, 8))])
    assert torch.allclose(whole, halves, atol=1e-6)
    assert not torch.allclose(whole, preprocess.train(x, index, 7, 4), atol=1e-2)


def test_flips_and_circular_shifts_are_what_they_say() -> None:
    """Half of the images mirrored, none upside down; content anywhere on the torus."""
    plain, index, x = Preprocess(size=(32, 32)), torch.arange(200), images(200)
    seen = Preprocess(size=(32, 32), flip=True).train(x, index, 0, 0)
    same, mirrored = ((seen == plain.evaluate(y)).flatten(1).all(1) for y in (x, x.flip(-1)))
    assert (same ^ mirrored).all()
    assert 70 < mirrored.sum() < 130
    pixel = torch.zeros(200, 3, 32, 32, dtype=torch.uint8)
    pixel[..., 0, 0] = 255
    moved = Preprocess(size=(32, 32), circular=True).train(pixel, index, 0, 0)
    place = moved.sum(1).flatten(1).argmax(1)
    for axis in (place // 32, place % 32):
        assert len(axis.unique()) > 28
        assert (axis.min(), axis.max()) == (0, 31)


def test_standard_shifts_bring_in_the_mean_colour() -> None:
    """Content moves by up to so many pixels to each side, and what leaves does not come back."""
    white = torch.full((300, 3, 32, 32), 255, dtype=torch.uint8)
    x = Preprocess(size=(32, 32), shift=4).train(white, torch.arange(300), 0, 0)
    for seen in ((x != 0).any(3), (x != 0).any(2)):  # rows, then columns
        sides = seen[:, 0].long()  # B, 32
        first, last = sides.argmax(1), 31 - sides.flip(1).argmax(1)
        assert torch.equal(last - first + 1, sides.sum(1))
        move = torch.where(first > 0, first, last - 31)
        assert sorted(move.unique().tolist()) == list(range(-4, 5))


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    """Else a published model is shown other colours, or another crop, than it was trained on."""
    preprocess = Preprocess(size=(24, 32), resize=36, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    preprocess.save(tmp_path)
    assert Preprocess.load(tmp_path / "preprocessor_config.json") == preprocess


def test_erasing_puts_noise_into_one_rectangle() -> None:
    """The share of erased images and the erased area are those of the original recipes."""
    count = 400
    preprocess = Preprocess(size=(32, 32), mean=(0, 0, 0), std=(1, 1, 1), erase=0.25)
    x = preprocess.train(torch.zeros(count, 3, 32, 32, dtype=torch.uint8), torch.arange(count), 0, 0)
    erased = x != 0
    hit = erased.flatten(1).any(1)
    assert 0.18 < hit.float().mean() < 0.32
    rows, columns = erased.any(1).any(2), erased.any(1).any(1)  # B, side
    area = rows.sum(1) * columns.sum(1)
    assert torch.equal(erased.flatten(1).sum(1), 3 * area)  # a full rectangle, in all channels
    share = area[hit] / 32**2
    assert share.min() > 0.01
    assert share.max() < 0.36
    noise = x[erased]
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02


@pytest.mark.parametrize(("old", "new"), [(32, 64), (64, 32), (50, 40), (33, 32)])
def test_resizing_is_torchs(old: int, new: int) -> None:
    """Images are normalised, then resized by matrix products, larger or smaller: it must be the same map."""
    preprocess = Preprocess(size=(new - 8, new - 4), resize=new)
    x = images(2, old)
    resized = torch.nn.functional.interpolate(x.float() / 255, (new, new), mode="bilinear", antialias=new < old)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (preprocess.mean, preprocess.std))
    assert torch.allclose(preprocess.evaluate(x), ((resized - mean) / std)[..., 4:-4, 2:-2], atol=1e-5)


def test_mixing_blends_images_and_targets_alike() -> None:
    mixing = Mixing(mixup=0.8, cutmix=1.0, label_smoothing=0.1, num_classes=4)
    x, labels = torch.rand(6, 3, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    mixed, targets = mixing(x.clone(), labels, 0, 1, 2)
    again, _ = mixing(x.clone(), labels, 0, 1, 2)
    assert torch.equal(mixed, again)
    assert torch.allclose(targets.sum(1), torch.ones(6), atol=1e-6)
    assert not torch.allclose(mixed, x)
    kinds = set()
    for number in range(12):  # one of the two per batch
        mixed, targets = mixing(x.clone(), labels, 0, 0, number)
        share = (mixed == x).float().mean().item()
        kinds.add("cutmix" if share > 0.01 else "mixup")
    assert kinds == {"cutmix", "mixup"}


def test_some_batches_are_left_unmixed() -> None:
    """With all of them mixed, a small model may never learn what a whole image looks like."""
    mixing = Mixing(mixup=0.8, cutmix=1.0, label_smoothing=0.1, num_classes=4, probability=0.5)
    x, labels = torch.rand(6, 3, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    found = [mixing(x.clone(), labels, 0, 0, number) for number in range(24)]
    whole = [targets for mixed, targets in found if torch.equal(mixed, x)]
    assert 6 <= len(whole) <= 18
    smoothed = 0.025 + 0.9 * torch.nn.functional.one_hot(labels, 4)
    assert all(torch.allclose(targets.float(), smoothed) for targets in whole)


def test_seeded_blocks_restore_the_generators() -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), np.random.random(), torch.rand(()).item()

    with seeded(5):
        expected, after = draw(), draw()
    with seeded(5):
        assert draw() == expected
        with seeded(1):
            assert not set(draw()) & set(after)
        assert draw() == after


def test_no_step_copies_constants_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from the host waits for the GPU, which then waits for the host: half of its time, at small batches."""
    preprocess = Preprocess(size=(28, 28), resize=32, flip=True, circular=True)
    mixing = Mixing(mixup=0.8, cutmix=1.0, label_smoothing=0.1, num_classes=10)
    images, labels, index = torch.randint(0, 256, (4, 3, 16, 16)).byte(), torch.arange(4), torch.arange(4)

    def step(number: int) -> torch.Tensor:
        return mixing(preprocess.train(images, index, 0, number), labels, 0, number)[0]

    before, copied = [step(number) for number in range(3)], torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: pytest.fail("a copy") if kwargs else copied(*args))
    assert all(torch.equal(step(number), image) for number, image in enumerate(before))


def test_what_a_resize_keeps_serves_every_mode() -> None:
    """Else images that are resized after an export have no values, and after inference mode no gradient."""
    preprocess, x = Preprocess(size=(46, 46)), torch.rand(1, 3, 31, 31, requires_grad=True)

    class Resize(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return preprocess.resized(images)

    torch.export.export(Resize(), (x.detach(),), strict=False)
    with torch.inference_mode():
        expected = preprocess.resized(x)
    assert type(expected) is torch.Tensor
    preprocess.resized(x).sum().backward()
    assert torch.allclose(torch.autograd.grad(preprocess.resized(x).sum(), x)[0], x.grad)
