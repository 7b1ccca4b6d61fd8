"""Segmentation: measures that are the paper's, windows that slide, pictures that show what changes."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from segmentation_helpers import balance, build
from torch import Tensor

from common import create_model
from common.evaluation.metrics import confusion_matrix, mascc, massc, mean_iou, miou
from common.shifts import random_shifts, standard_shift
from segmentation import inference
from segmentation.inference import labels_at, pictures, slide, whole
from segmentation.preprocess import ScenePreprocess

interpolate = F.interpolate

# measures


def by_position(x: Tensor) -> Tensor:
    """A segmenter of three classes that looks at the array, not at the image alone."""
    columns = torch.linspace(-1, 1, x.shape[-1]).expand(x.shape[0], *x.shape[2:])
    return torch.stack([x[:, 0], columns, -x[:, 0]], 1)


def test_a_mask_of_a_photograph_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the mask of a phone's picture takes 12 GB, and the system ends the program."""
    logits, size = torch.randn(2, 7, 5, 4), (12, 9)
    whole = F.interpolate(logits, size, mode="bilinear", align_corners=False)
    assert torch.equal(labels_at(logits, size), whole.argmax(1))
    monkeypatch.setattr(inference, "AT_ONCE", 3 * 2 * 12 * 9)  # three classes
    seen = []
    monkeypatch.setattr(F, "interpolate", lambda x, *args, **kw: seen.append(x.shape[1]) or interpolate(x, *args, **kw))
    assert torch.equal(labels_at(logits, size), whole.argmax(1))
    assert seen == [3, 3, 1]
    for broken in range(7):  # else NaN in one part passes for a class of another
        logits[1, broken] = torch.nan
        assert (labels_at(logits, size)[1] == -1).all()
        assert torch.equal(labels_at(logits, size)[0], whole[0].argmax(0))
        logits[1, broken] = 0


def test_miou_is_that_of_the_whole_set() -> None:
    """Every mIoU in the tables would be another quantity: per image, or with ignored pixels in it."""
    x = torch.randn(5, 1, 6, 8)
    labels = torch.randint(0, 3, (5, 6, 8))
    labels[torch.rand(5, 6, 8) < 0.2] = 255
    predicted = by_position(x).argmax(1)
    scores = []
    for c in range(3):
        counted = labels != 255
        both = ((predicted == c) & (labels == c) & counted).sum()
        either = (((predicted == c) | (labels == c)) & counted).sum()
        scores.append((both / either).item())
    batches = [(x[:2], labels[:2]), (x[2:], labels[2:])]
    assert miou(by_position, batches) == pytest.approx(100 * sum(scores) / 3, rel=1e-6)
    matrix = confusion_matrix(predicted, labels, 5)  # two classes that never occur are left out
    assert mean_iou(matrix) == pytest.approx(100 * sum(scores) / 3, rel=1e-6)
    assert matrix.sum() == (labels != 255).sum()
    with pytest.raises(ValueError, match="miou needs labels"):
        miou(by_position, x)
    with pytest.raises(ValueError, match="a pixel has label 9, but there are 3 classes"):
        miou(by_position, (x, labels.clamp_max(9)))
    with pytest.raises(ValueError, match="a pixel has label -100, but there are 3 classes"):
        miou(by_position, (x, labels.where(labels != 255, -100)))
    with pytest.raises(ValueError, match="label 255 is one of 300 classes"):
        miou(lambda x: torch.zeros(len(x), 300, 6, 8), (x, labels))
    assert miou(lambda x: torch.eye(300)[labels].movedim(3, 1), (x, labels), ignore_index=-1) == 100.0
    with pytest.raises(ValueError, match="differ in size"):
        miou(by_position, (x, labels[:, :3]))


def test_rows_of_the_confusion_matrix_are_labels() -> None:
    """mIoU would not notice, but who reads which class is taken for which would read it the wrong way round."""
    matrix = confusion_matrix(torch.tensor([[[2, 2]]]), torch.tensor([[[0, 255]]]), 3)
    assert matrix.nonzero().tolist() == [[0, 2]]


def test_consistencies_follow_their_definitions() -> None:
    """mASCC and mASSC would not be the paper's: compared here pixel by pixel, in loops."""
    x, index = torch.randn(4, 1, 8, 16), torch.arange(4)
    shifts = [random_shifts(index, (0, 0), (7, 15), 3, which).tolist() for which in (1, 2)]
    moved = [random_shifts(index, (-3, -3), (3, 3), 3, which).tolist() for which in (1, 2)]
    circular, standard = [], []
    for i in range(4):
        image, outcomes = x[i : i + 1], []
        masks = [by_position(image.roll(s[i], (2, 3))).argmax(1)[0] for s in shifts]
        for h, w in itertools.product(range(8), range(16)):
            places = [((h + s[i][0]) % 8, (w + s[i][1]) % 16) for s in shifts]
            circular.append(masks[0][places[0]].item() == masks[1][places[1]].item())
        masks = [by_position(standard_shift(image, torch.tensor([s[i]]))).argmax(1)[0] for s in moved]
        for h, w in itertools.product(range(8), range(16)):
            places = [(h + s[i][0], w + s[i][1]) for s in moved]
            if all(0 <= a < 8 and 0 <= b < 16 for a, b in places):
                outcomes.append(masks[0][places[0]].item() == masks[1][places[1]].item())
        standard.append(sum(outcomes) / len(outcomes))
    assert mascc(by_position, x, seed=3) == pytest.approx(100 * sum(circular) / len(circular))
    assert mascc(by_position, x.split(3), seed=3) == mascc(by_position, x, seed=3)
    assert 0 < mascc(by_position, x, worst=3) < mascc(by_position, x, max_shift=2, pairs=3)
    assert massc(by_position, x, max_shift=3, seed=3) == pytest.approx(100 * sum(standard) / 4)
    assert 0 < massc(by_position, x, crop=(6, 12), seed=3) < 100  # real pixels come in
    assert massc(lambda x: torch.cat([x, -x], 1), x, crop=(6, 12)) == 100.0  # a pixel's own label, border unseen
    assert massc(lambda x: torch.cat([x - 9, -x], 1), x) == 100.0
    with pytest.raises(ValueError, match="up to 4 px may share no pixel of 8x16"):  # and would count as agreement
        massc(by_position, x, max_shift=4)


# inference


def test_sliding_windows_agree_where_windows_do() -> None:
    """Large images would get other logits at the seams."""
    x = torch.randn(2, 3, 20, 27)
    pixelwise = torch.nn.Conv2d(3, 4, 1)
    with torch.no_grad():
        assert torch.allclose(slide(pixelwise, x, (8, 12), (5, 7)), pixelwise(x), atol=1e-6)
        model = create_model("upernet_swin_micro").eval()
        image = torch.randn(1, 3, 64, 64)
        assert torch.equal(slide(model, image, (64, 64), (32, 32)), model(image))
        assert torch.equal(whole(model, image, model.multiple), model(image))
        assert whole(model, image[..., :50], (32, 32)).shape == (1, 11, 64, 50)
        halves = slide(lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 4, 4), x[:1, :, :4, :6], (4, 4), (4, 2))
        first, second = x[:1, :, :4, :4].mean((2, 3)), x[:1, :, :4, 2:6].mean((2, 3))
        for column, expected in ((0, first), (2, (first + second) / 2), (5, second)):
            assert torch.allclose(halves[..., 1, column], expected, atol=1e-6)
    with pytest.raises(ValueError, match="smaller than the window"):
        slide(pixelwise, x, (32, 32), (16, 16))
    with pytest.raises(ValueError, match="skips pixels"):
        slide(pixelwise, x, (8, 8), (9, 8))


def test_many_windows_add_up_in_half_precision() -> None:
    """A sum of a thousand logits in bfloat16 stops growing: in the middle of an image every class would be the same."""
    values = torch.tensor([3.0, 3.5], dtype=torch.bfloat16).view(1, 2, 1, 1)
    logits = slide(lambda x: values.expand(-1, -1, 32, 32), torch.zeros(1, 3, 48, 48), (32, 32), (1, 1))
    assert torch.equal(logits, values.float().expand(-1, -1, 48, 48))


@pytest.mark.parametrize("kind", ["circular", "standard"])
def test_pictures_show_what_changes(kind: Any, tmp_path: Path) -> None:
    """The figure would mark pixels that did not change, or miss those that did."""
    preprocess = ScenePreprocess(size=(64, 64))
    x = torch.randn(2, 3, 64, 64)
    names = {"default": "upernet_swin_micro", "adaptive": "upernet_a_swin_micro"}
    models = {key: balance(build(name).eval(), x) for key, name in names.items()}
    shift = torch.tensor([[3, 5], [-9, 14]])
    changes = pictures(models, x, shift, tmp_path / "new" / "figure.png", preprocess=preprocess, kind=kind)
    assert min(changes["default"]) > 0
    assert (changes["adaptive"] == [0.0, 0.0]) == (kind == "circular")
    with Image.open(tmp_path / "new" / "figure.png") as figure:
        assert figure.format == "PNG"
        assert figure.size[0] > 1000
