"""RandAugment on batches: the operations of timm's, image by image."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import auto_augment

from common.data.preprocess import Preprocess
from common.data.rand_augment import OPERATIONS, RandAugment, augment

TIMM = ("AutoContrast", "Equalize", "Invert", "Rotate", "PosterizeIncreasing", "SolarizeIncreasing", "SolarizeAdd",
        "ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing", "ShearX", "ShearY",
        "TranslateXRel", "TranslateYRel")  # fmt: skip
FILL = (10, 20, 30)
PICTURES = [np.array(Image.fromarray(photo).resize((70, 50))) for photo in load_sample_images().images]
PICTURES.append(np.full((50, 70, 3), 7, dtype=np.uint8))  # one colour: nothing to stretch
IMAGES = torch.from_numpy(np.stack(PICTURES)).permute(0, 3, 1, 2).float()


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_timms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else "the default augmentation" is another one than in everybody's tables."""
    k = OPERATIONS.index(name)
    for level in (0.37, 0.9, 1.0):
        for sign in (1.0, -1.0):
            monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value, sign=sign: sign * value)
            read = auto_augment.LEVEL_TO_ARG[TIMM[k]]
            arguments = read(10 * level, {}) if read else ()
            options = {"fillcolor": FILL, "resample": Image.Resampling.BILINEAR}
            if (name, *arguments) == ("posterize", 0):  # no bits: black, but an error from Pillow 13 on
                expected = list(np.zeros_like(PICTURES))
            else:
                expected = [np.array(auto_augment.NAME_TO_OP[TIMM[k]](Image.fromarray(picture), *arguments, **options))
                            for picture in PICTURES]  # fmt: skip
            count = len(PICTURES)
            given = torch.full((count,), k), torch.full((count,), level), torch.full((count,), sign)
            found = augment(IMAGES, *given, torch.tensor(FILL)).permute(0, 2, 3, 1)
            away = (found - torch.from_numpy(np.stack(expected))).abs()
            assert away.max() <= 1, (level, sign)  # a level, where sums of products are rounded
            assert (away > 0).float().mean() < 0.04, (level, sign)
            still = augment(IMAGES, torch.full((count,), -1), *given[1:], torch.tensor(FILL))
            assert torch.equal(still, IMAGES)


def test_what_an_image_gets_depends_on_its_index_alone() -> None:
    """Else another batch size, another number of processes or a resumed run would train on other images."""
    operations = RandAugment.read("rand-m9-mstd0.5-inc1", (0.5, 0.5, 0.5))
    images, index = IMAGES[[0, 1, 0, 1, 0, 1, 0, 1]], torch.arange(8)
    together = operations(images, index, 5, 1)
    assert torch.equal(together[3:], operations(images[3:], index[3:], 5, 1))
    assert not torch.equal(together, operations(images, index, 5, 2))
    assert not torch.equal(together, operations(images, index, 6, 1))
    assert torch.equal(together, together.round().clamp(0, 255))


def test_operations_are_drawn_evenly_and_as_often_as_asked() -> None:
    drawn = []

    def note(
        x: torch.Tensor, operation: torch.Tensor, level: torch.Tensor, sign: torch.Tensor, fill: object
    ) -> torch.Tensor:
        drawn.append((operation, level, sign))
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.data.rand_augment.augment", note)
        RandAugment.read("rand-m8-n3-mstd0.5-p0.6-inc1", (0.5, 0.5, 0.5))(
            torch.zeros(9000, 3, 1, 1), torch.arange(9000)
        )
    assert len(drawn) == 3
    for operation, level, sign in drawn:
        counts = torch.bincount(operation[operation >= 0], minlength=15) / 9000
        assert (counts - 0.04).abs().max() < 0.008  # 0.6 / 15
        assert abs(level.mean() - 0.8) < 0.01
        assert abs(level.std() - 0.05) < 0.005
        assert abs(sign.mean()) < 0.05
    assert not torch.equal(drawn[0][0], drawn[1][0])


def test_it_works_on_what_the_model_sees() -> None:
    """On the crop, before normalisation; what comes in has the mean colour."""
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.2, 0.2)
    plain = Preprocess(size=(24, 20), resize=28, mean=mean, std=std)
    never = Preprocess(
        size=(24, 20), resize=28, mean=mean, std=std, rand_augment=RandAugment.read("rand-p0-inc1", mean)
    )
    pixels, index = IMAGES[:2].byte(), torch.arange(2)
    assert torch.allclose(never.train(pixels, index, 0), plain.train(pixels, index, 0), atol=0.5 / 255 / 0.2 + 1e-5)
    always = RandAugment.read("rand-p1-n4-inc1", mean)
    assert always.fill == (128.0, 102.0, 76.0)
    assert Preprocess(size=(24, 20), rand_augment=always).train(pixels, index, 0).shape == (2, 3, 24, 20)


@pytest.mark.slow
def test_compiled_it_gives_the_same_pixels() -> None:
    """Else ``--compile`` trains on other images. A level, where products and sums of a move are fused."""
    images, index = IMAGES.repeat(20, 1, 1, 1), torch.arange(60)
    plain, compiled = (
        RandAugment.read("rand-m9-n1-mstd0.5-p1-inc1", (0.5, 0.4, 0.3), fused) for fused in (False, True)
    )
    for epoch in range(2):
        away = (compiled(images, index, 3, epoch) - plain(images, index, 3, epoch)).abs()
        assert away.max() <= 1
        assert (away > 0).float().mean() < 0.02


@pytest.mark.parametrize(
    "wrong", ["m9-inc1", "rand-m9", "rand-m9-inc0", "rand-mx-inc1", "rand-m9-w0-inc1", "rand-m9..1-inc1"]
)
def test_another_specification_is_refused(wrong: str) -> None:
    """Else something else is trained than was written."""
    with pytest.raises(ValueError, match="is not known: write it like rand-m9-mstd0.5-inc1"):
        RandAugment.read(wrong, (0.5, 0.5, 0.5))
