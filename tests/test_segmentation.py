"""Segmentation: UperNet against transformers, masks that move with the image, measures, scenes, windows, pictures."""

import io
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import DATA, randomize
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from common import create_model, from_pretrained, list_models
from common.evaluation.equivariance import assert_shift_equivariant, dense, shift_error
from common.evaluation.metrics import confusion_matrix, mascc, massc, mean_iou, miou
from common.shifts import random_shifts, roll, standard_shift
from segmentation import UperNet, convert
from segmentation.data import ADE20K, CAMVID, EncodedScenes, Labelling, Scenes, from_dataset, load_scenes, load_split
from segmentation.inference import pictures, slide, whole
from segmentation.model import BoxMean, Grid, resample
from segmentation.preprocess import ScenePreprocess, distort_colours, resize_labels

MICRO = list_models("upernet_*_micro")
ADAPTIVE_MICRO = list_models("upernet_a_*_micro")
SLIM = dict(channels=24, auxiliary_channels=16, drop_rate=0.0, drop_path_rate=0.0, canonical=False)
"""A decoder of few channels: the geometry of the full one at a fraction of its time."""


def build(name: str, **kwargs: Any) -> UperNet:
    model = create_model(name, **{"drop_path_rate": 0.0, **kwargs})
    assert isinstance(model, UperNet)
    return randomize(model)


def slim(name: str, **kwargs: Any) -> UperNet:
    """All four stages, shifted windows among them, in few channels."""
    args = dict(embed_dim=16, depths=(1, 2, 1, 2), num_heads=(1, 1, 2, 4))
    return build(name, backbone_args=args, **SLIM, **kwargs)


def balance(model: UperNet, x: Tensor) -> UperNet:
    """No class wins everywhere: random weights alone give masks of one colour."""
    with torch.no_grad():
        bias = model.decode_head.classifier.bias
        assert bias is not None
        bias -= model(x).mean((0, 2, 3))
    return model


def both_heads(model: UperNet, x: Tensor) -> Tensor:
    return torch.cat(model.forward_heads(x), 1)


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


# against transformers


@pytest.mark.parametrize("version", ["swin", "swinv2"])
def test_default_equals_transformers(version: str, tmp_path: Path) -> None:
    """Published weights of other libraries would give other masks here, and ours other masks there."""
    shape = dict(embed_dim=24, depths=[1, 1, 2, 2], num_heads=[1, 2, 2, 4], window_size=4)
    config: Any = transformers.SwinConfig if version == "swin" else transformers.Swinv2Config
    backbone = config(image_size=256, out_features=["stage1", "stage2", "stage3", "stage4"], **shape)
    head = transformers.UperNetConfig(backbone_config=backbone, num_labels=7, hidden_size=32, auxiliary_channels=16)
    reference = randomize(transformers.UperNetForSemanticSegmentation(head)).double().eval()
    reference.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    ours = UperNet(backbone=f"{version}_tiny", backbone_args=shape, img_size=256, num_classes=7, channels=32,
                   auxiliary_channels=16, stage_norms=version == "swin").double().eval()  # fmt: skip
    ours.load_state_dict(convert.from_transformers(state), strict=True)
    back = convert.to_transformers(ours.state_dict())
    assert {key for key in state if ".layernorm." not in key} == back.keys()  # a norm that no head reads
    assert all(torch.equal(back[key], state[key]) for key in back)

    auxiliary: list[Tensor] = []
    reference.auxiliary_head.register_forward_hook(lambda module, inputs, output: auxiliary.append(output))
    with torch.no_grad():
        for size in [(256, 256), (160, 272)]:  # the second pads windows and odd grids
            x = torch.randn(1, 3, *size, dtype=torch.float64)
            logits, auxiliary_logits = ours.forward_heads(x)
            assert relative(logits, reference(x).logits) < 1e-12
            expected = F.interpolate(auxiliary.pop(), size, mode="bilinear", align_corners=False)
            assert relative(auxiliary_logits, expected) < 1e-12
        x = torch.randn(1, 3, 256, 256)
        assert relative(ours.float()(x), reference.float()(x).logits) < 1e-5


def test_a_converted_file_becomes_a_model_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without it, nobody gets from a file of transformers to ``UperNet.from_pretrained``."""
    from safetensors.torch import save_file

    model = build("upernet_swin_micro", num_classes=5)
    save_file(convert.to_transformers(model.state_dict()), tmp_path / "theirs.safetensors")
    convert.main([str(tmp_path / "theirs.safetensors"), str(tmp_path / "ours"), "--model", "upernet_swin_micro"])
    loaded = UperNet.from_pretrained(tmp_path / "ours")
    assert loaded.num_classes == 5
    assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in model.state_dict().items())
    with pytest.raises(SystemExit, match="only safetensors"):
        convert.main([str(tmp_path / "pytorch_model.bin"), str(tmp_path / "ours")])


# the model


@pytest.mark.parametrize("name", MICRO)
def test_shapes_and_gradients(name: str) -> None:
    """Training would break: a parameter that learns nothing, a head of another size."""
    model = build(name, num_classes=6, drop_rate=0.0).train()
    assert sum(p.numel() for p in model.parameters()) <= 700_000
    assert model.img_size == (64, 64)
    x = torch.randn(2, 3, 64, 96)
    logits, auxiliary = model.forward_heads(x)
    assert logits.shape == auxiliary.shape == (2, 6, 64, 96)
    (logits.square().sum() + auxiliary.square().sum()).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    names = {n for n, _ in model.named_parameters()}
    assert model.no_weight_decay()
    assert model.no_weight_decay() <= names

    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model.set_grad_checkpointing()
    again, auxiliary = model.forward_heads(x)
    (again.square().sum() + auxiliary.square().sum()).backward()
    assert torch.equal(again, logits)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))  # type: ignore[arg-type]
    model.reset_classifier(3)
    assert model.eval()(x).shape == (2, 3, 64, 96)


def test_traces_into_one_graph_forward_and_backward() -> None:
    """``--compile`` would fail. Traced by the compiler, run by the eager backend."""
    model = build("upernet_a_swin_micro", backbone_args={"depths": (1, 1)}).train()
    x = torch.randn(2, 3, 64, 64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits, auxiliary = compiled(x, auxiliary=True)
    assert relative(logits, model.forward_heads(x)[0]) < 1e-4
    (logits.square().sum() + auxiliary.square().sum()).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", [*ADAPTIVE_MICRO, "upernet_a_swin_tiny", "upernet_a_swinv2_tiny"])
def test_adaptive_has_the_parameters_of_the_default(name: str) -> None:
    """A trained default segmenter could not be made adaptive."""
    args = {} if "micro" in name else {"backbone_args": {"embed_dim": 24, "num_heads": (1, 2, 2, 4)}, "channels": 16}
    adaptive, default = create_model(name, **args), create_model(name.replace("_a_", "_"), **args)
    shapes = [[(k, v.shape) for k, v in m.state_dict().items()] for m in (adaptive, default)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("upsampling", ["bilinear", "unpool"])
@pytest.mark.parametrize("name", ADAPTIVE_MICRO)
def test_micro_masks_move_with_the_image(name: str, upsampling: str) -> None:
    """float64, canonical anchor off, every phase of the coarsest stride: else a segmenter is not equivariant at all."""
    model = build(name, canonical=False, upsampling=upsampling).double().eval()
    x = torch.randn(1, 3, 64, 32, dtype=torch.float64)
    wraps = [(64, 0), (32, 17), (-13, 200), (31, -33)]
    phases = [(h, w) for h in range(8) for w in range(8)] if upsampling == "bilinear" else [(1, 2), (7, 5), (4, 3)]
    with torch.no_grad():
        assert_shift_equivariant(partial(both_heads, model), x, [*phases, *wraps], dense)
        model.train()  # batch statistics do not move
        x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
        assert_shift_equivariant(model, x, [(3, 5), (32, 17)], dense)


@pytest.mark.parametrize(("name", "size", "upsampling"), [
    ("upernet_a_swin_tiny", (448, 224), "bilinear"),
    ("upernet_a_swin_tiny", (224, 224), "unpool"),
    ("upernet_a_swinv2_tiny", (256, 256), "bilinear"),
])  # fmt: skip
def test_masks_move_with_the_image_through_four_stages(name: str, size: Any, upsampling: str) -> None:
    """float64, canonical anchor off, shifts that wrap every stage: what is fixed to the array shows only there."""
    model = slim(name, img_size=size, upsampling=upsampling).double().eval()
    x = torch.randn(1, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        assert_shift_equivariant(partial(both_heads, model), x, [(224, 0), (112, 31), (-5, 223)], dense)


@pytest.mark.parametrize("name", [n for n in MICRO if "_a_" not in n])
def test_stock_models_fail_the_same_check(name: str) -> None:
    """The check itself would be blind."""
    model = build(name, padding_mode="circular").double().eval()
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    assert min(shift_error(model, x, shift, dense) for shift in [(1, 0), (0, 1), (3, 2), (17, 9)]) > 1e-2


def test_pooling_into_fixed_bins_would_be_found_out() -> None:
    """An adaptive segmenter with one stock part must fail, or the tests above prove nothing about that part."""
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    model = build("upernet_a_swin_micro", canonical=False).double().eval()
    model.decode_head.psp_modules[2][0] = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(3), torch.nn.Upsample(size=8))
    assert shift_error(model, x, (32, 17), dense) > 1e-6
    model = build("upernet_a_swin_micro", canonical=False).double().eval()
    model.decode_head.fpn_convs[0].conv.padding_mode = "zeros"
    assert shift_error(model, x, (32, 17), dense) > 1e-6


@pytest.mark.parametrize("mode", ["bilinear", "unpool"])
def test_upsampling_displaces_nothing(mode: str) -> None:
    """Equivariance cannot see a constant displacement: masks would lie beside their objects.

    A coarse grid that holds the mean position of its pixels, upsampled, must give the position of every fine token
    (bilinear), or at the origin of each cell what was taken from there (unpooling).
    """
    offset, fine = torch.tensor([[5, 2]]), torch.tensor([[1, 10]])
    source, target = Grid((8, 8), 8, offset), Grid((16, 16), 4, fine)
    rows = torch.zeros(1, 1, 64, 64, dtype=torch.float64)
    rows[0, 0, 30, 21] = 1.0  # one bright pixel
    cells = F.avg_pool2d(roll(rows, offset), 8)
    moved = resample(cells, source, target, "unpool" if mode == "unpool" else "bilinear")[0, 0]
    weights = moved / moved.sum()
    place = torch.arange(16, dtype=torch.float64)
    centre = [(weights.sum(1) * place).sum().item(), (weights.sum(0) * place).sum().item()]  # in fine tokens
    cell = [(p - o) // 8 * 8 + o for p, o in zip((30, 21), (5, 2), strict=True)]  # first pixel of the coarse cell
    middle = 3.5 if mode == "bilinear" else 1.5  # its centre, or that of the fine token at its origin
    expected = [(c + middle - 1.5 - f) % 64 / 4 for c, f in zip(cell, (1, 10), strict=True)]
    assert centre == pytest.approx(expected)


def test_box_mean_is_what_the_docstring_says() -> None:
    """The pyramid would average the wrong neighbourhoods."""
    x = torch.randn(1, 2, 7, 14, dtype=torch.float64)
    taps = {2: ([0.5, 1, 1, 1, 0.5], [1.0] * 7), 3: ([1.0] * 3, [1.0] * 5), 6: ([0.5, 1, 0.5], [1.0] * 3)}
    for bins, sides in taps.items():
        expected = x
        for dim, weights in zip((2, 3), sides, strict=True):
            half = len(weights) // 2
            moved = [w * expected.roll(d, dim) for d, w in enumerate(weights, -half)]
            expected = torch.stack(moved).sum(0) / sum(weights)
        assert relative(BoxMean(bins)(x), expected) < 1e-12
    assert torch.equal(BoxMean(1)(x), x.mean((2, 3), keepdim=True))


@pytest.mark.parametrize("name", ADAPTIVE_MICRO)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
def test_pixel_logits_are_bit_identical(name: str, autocast: bool) -> None:
    """mASCC would be 99.9 %, not 100.00 %."""
    x = torch.randn(2, 3, 64, 64)
    model = balance(build(name).eval(), x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model(x)
        for shift in ([[1, 0], [3, 2]], [[-7, 13], [31, 5]], [[32, 32], [0, 63]]):
            offset = torch.tensor(shift)
            assert torch.equal(model(roll(x, offset)), roll(expected, offset))
        assert len(expected.argmax(1).unique()) > 3
        assert mascc(model, x) == 100.0
        assert mascc(model, x[:1], worst=2) == 100.0


def test_save_and_load(tmp_path: Path) -> None:
    """A trained segmenter would be lost, or come back as another."""
    model = build("upernet_swin_micro", backbone_args={"depths": [1, 2], "anchors": ["token", "window"]}).eval()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["backbone_args"]["depths"] == [1, 2]
    x = torch.randn(1, 3, 64, 64)
    for loaded in (from_pretrained(str(tmp_path)), UperNet.from_pretrained(tmp_path)):
        assert loaded.config == model.config
        assert torch.equal(loaded(x), model(x))
    adaptive = UperNet.from_pretrained(tmp_path, adaptive=True)
    assert adaptive.backbone.adaptive
    assert not torch.equal(adaptive(x), model(x))


def test_what_is_no_backbone_is_refused() -> None:
    """``--backbone`` would start from half a checkpoint without a word."""
    model = create_model("upernet_a_swin_micro")
    with pytest.raises(ValueError, match="the backbone is a Swin, cannot start from a SwinV2"):
        model.load_backbone(create_model("swinv2_micro"))
    with pytest.raises(ValueError, match="unexpected layers.0.blocks.2"):
        model.load_backbone(create_model("swin_micro", depths=(3, 2)))


def test_bad_arguments_and_images_are_explained() -> None:
    """A user would be left with a shape error from the depths of the model."""
    with pytest.raises(ValueError, match="does not report two stages or more .* choose among .*'swin_tiny'"):
        UperNet(backbone="upernet_swin_micro", img_size=64)
    with pytest.raises(ValueError, match="give the default's name, 'swin_tiny', and adaptive=True"):
        UperNet(backbone="a_swin_tiny")
    with pytest.raises(ValueError, match="unknown upsampling 'nearest'"):
        UperNet(upsampling="nearest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="padding_mode='zeros' breaks"):
        create_model("upernet_a_swin_micro", padding_mode="zeros")
    with pytest.raises(ValueError, match="image size 512x512.*multiples of 224x224"):
        create_model("upernet_a_swin_tiny", img_size=512)
    model = create_model("upernet_a_swin_micro", auxiliary_channels=0).eval()
    with pytest.raises(ValueError, match="image size 64x40.*nearest valid sizes are 64x32 and 64x64"):
        model(torch.zeros(1, 3, 64, 40))
    with pytest.raises(ValueError, match="no auxiliary head"):
        model.forward_heads(torch.zeros(1, 3, 64, 64))


# measures


def by_position(x: Tensor) -> Tensor:
    """A segmenter of three classes that looks at the array, not at the image alone."""
    columns = torch.linspace(-1, 1, x.shape[-1]).expand(x.shape[0], *x.shape[2:])
    return torch.stack([x[:, 0], columns, -x[:, 0]], 1)


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
    with pytest.raises(ValueError, match="differ in size"):
        miou(by_position, (x, labels[:, :3]))


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


# scenes


def encode(pixels: np.ndarray, mode: str | None = None) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels, mode).save(buffer, "PNG")
    return buffer.getvalue()


def scene(seed: int, size: tuple[int, int] = (12, 16), classes: int = 5) -> tuple[bytes, bytes]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, size, dtype=np.uint8)
    return encode(generator.integers(0, 256, (*size, 3), dtype=np.uint8)), encode(labels)


def write_parquet(path: Path, scenes: list[tuple[bytes, bytes]], label: str = "label") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"image": [{"bytes": image, "path": None} for image, _ in scenes],
               label: [{"bytes": labels, "path": None} for _, labels in scenes]}  # fmt: skip
    pq.write_table(pa.table(columns), path)


def test_digit_scenes_are_real_held_out_and_always_the_same() -> None:
    """The first run of every user would train on something else each time, or on its test digits."""
    (train, test), (again, _) = load_scenes("digits"), load_scenes("digits")
    assert isinstance(train, Scenes)
    assert isinstance(again, Scenes)
    assert torch.equal(train.images, again.images)
    assert torch.equal(train.labels, again.labels)
    assert len(train.classes) == len(test.classes) == 11
    assert set(train.labels.unique().tolist()) == set(test.labels.unique().tolist()) == set(range(11))
    assert ((train.images[:, 0] >= 64) == (train.labels > 0)).float().mean() > 0.99  # ink is what is labelled


def test_parquet_folders_and_their_labels(tmp_path: Path) -> None:
    """CamVid's void class or ADE20K's label 0 would be learned and counted as a class."""
    for part, count in (("train", 3), ("validation", 2)):
        write_parquet(tmp_path / "plain" / f"{part}-0.parquet", [scene(i) for i in range(count)])
        write_parquet(tmp_path / "camvid" / f"{part}.parquet", [scene(i, classes=12) for i in range(count)])
        write_parquet(tmp_path / "ade20k/data" / f"{part}.parquet",
                      [scene(i, (12 + i, 16), classes=151) for i in range(count)], "annotation")  # fmt: skip
    train, test = load_scenes(str(tmp_path / "plain"))
    assert isinstance(train, Scenes)
    assert (len(train), len(test), train.classes) == (3, 2, ("0", "1", "2", "3", "4"))
    train, _ = load_scenes(str(tmp_path / "camvid"))
    assert isinstance(train, Scenes)
    assert train.classes == CAMVID.classes
    stored = np.asarray(Image.open(io.BytesIO(scene(0, classes=12)[1])))
    assert torch.equal(train.labels[0] == 255, torch.from_numpy(stored == 11))
    train, _ = load_scenes(str(tmp_path / "ade20k"))
    assert isinstance(train, EncodedScenes)  # of different sizes: decoded on demand
    assert len(train.classes) == 150
    image, labels = train.decode(1)
    assert image.shape == (3, 13, 16)
    stored = np.asarray(Image.open(io.BytesIO(scene(1, (13, 16), classes=151)[1])))
    assert torch.equal(labels.long(), torch.from_numpy(np.where(stored == 0, 255, stored.astype(int) - 1)))


def test_the_tree_of_ade20k_and_the_hub(tmp_path: Path) -> None:
    """People who have ADE20K as it is published could not use it."""
    import datasets

    for part in ("training", "validation"):
        for i in range(2):
            image, labels = scene(i, (10, 12 + i), classes=151)
            for kind, content in (("images", image), ("annotations", labels)):
                path = tmp_path / kind / part / f"ADE_{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    train, test = load_scenes(str(tmp_path))
    assert isinstance(train, EncodedScenes)
    assert (len(train), len(test), len(train.classes)) == (2, 2, 150)
    (tmp_path / "annotations/training/ADE_1.png").unlink()
    with pytest.raises(FileNotFoundError, match="ADE_1.png has no labels: expected .*annotations"):
        load_scenes(str(tmp_path))

    rows = [dict(zip(("image", "annotation"), scene(i, (10, 12 + i), classes=151), strict=True)) for i in range(2)]
    features = datasets.Features({"image": datasets.Image(), "annotation": datasets.Image()})
    encoded = [{key: {"bytes": content, "path": None} for key, content in row.items()} for row in rows]
    split = from_dataset(datasets.Dataset.from_list(encoded, features=features), "owner/name", ADE20K)
    assert isinstance(split, EncodedScenes)
    assert all(torch.equal(a, b) for a, b in zip(split.decode(0), train.decode(0), strict=True))


def test_broken_scenes_are_named(tmp_path: Path) -> None:
    """A wrong row among 20,000 could not be found, or would train silently."""
    good = [scene(i) for i in range(3)]
    with pytest.raises(FileNotFoundError, match="no data folder .*missing"):
        load_scenes(str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match=r"has no train\*.parquet .*it holds"):
        load_scenes(str(tmp_path))
    write_parquet(tmp_path / "test.parquet", good)
    for rows, message in (
        ([good[0], (good[1][0], scene(1, (12, 15))[1])], "row 1 of .*train.parquet: the image is 12x16, its labels are "
                                                         "12x15: they must have one size"),
        ([good[0], (b"no image", good[1][1])], "row 1 of .* is not a readable scene"),
        ([good[0], (good[1][0], good[2][0])], "row 1 of .*one channel, got mode RGB"),
    ):  # fmt: skip
        write_parquet(tmp_path / "train.parquet", rows)
        with pytest.raises(ValueError, match=message):
            load_scenes(str(tmp_path))
    write_parquet(tmp_path / "train.parquet", good)
    with pytest.raises(ValueError, match="row 0 of .* has label 4, but there are 3 classes, labelled 0 to 2"):
        load_scenes(str(tmp_path), Labelling(("a", "b", "c")))
    write_parquet(tmp_path / "train.parquet", good, label="class")
    with pytest.raises(ValueError, match="has columns .* but none of"):
        load_scenes(str(tmp_path))
    images, labels = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="do not fit"):
        Scenes(images, labels[:, :4], ("a",))
    with pytest.raises(ValueError, match="labels run up to 3, but there are 2 classes"):
        Scenes(images, labels + 3, ("a", "b"))
    with pytest.raises(ValueError, match="empty"):
        Scenes(images[:0], labels[:0], ("a",))


@pytest.fixture
def mixed(tmp_path: Path) -> EncodedScenes:
    scenes = [scene(i, (20 + 4 * i, 30)) for i in range(3)]
    for part in ("train", "val"):
        write_parquet(tmp_path / f"{part}.parquet", scenes)
    split, _ = load_scenes(str(tmp_path), Labelling(tuple("abcde")))
    assert isinstance(split, EncodedScenes)
    return split


def test_crops_belong_to_seed_epoch_and_scene(mixed: EncodedScenes) -> None:
    """A resumed run, or one with other workers or batches, would train on other crops."""
    preprocess = ScenePreprocess(size=(24, 24), resize=(60, 24), ratio_range=(0.5, 2.0), flip=True, photometric=True,
                                 max_class_share=0.9)  # fmt: skip
    split = mixed.prepared(preprocess, seed=7)
    items = [split[(2, i)] for i in range(3)]
    index = torch.arange(3)
    pixels = [split.decode(i) for i in range(3)]
    whole_batch = preprocess.train([p[0] for p in pixels], [p[1] for p in pixels], index, 7, 2)
    by_workers = preprocess.train(torch.stack([i[0] for i in items]), torch.stack([i[1] for i in items]), index, 7, 2,
                                  cropped=True)  # fmt: skip
    alone = preprocess.train([pixels[1][0]], [pixels[1][1]], index[1:2], 7, 2)
    assert torch.equal(whole_batch[0], by_workers[0])
    assert torch.equal(whole_batch[1], by_workers[1])
    assert torch.equal(whole_batch[0][1:2], alone[0])
    assert whole_batch[0].shape == (3, 3, 24, 24)
    other = preprocess.train([p[0] for p in pixels], [p[1] for p in pixels], index, 7, 3)
    assert not torch.equal(other[0], whole_batch[0])


def test_what_a_crop_lacks_is_ignored() -> None:
    """The filling would be learned as a class; labels would not lie on their pixels."""
    preprocess = ScenePreprocess(size=(32, 32), ratio_range=(0.5, 2.0), flip=True)
    labels = torch.randint(0, 4, (8, 6, 5), dtype=torch.uint8).repeat_interleave(4, 1).repeat_interleave(4, 2)
    images = (labels * 60)[:, None].expand(-1, 3, -1, -1).contiguous()  # the label can be read off the pixel
    x, y = preprocess.train(images, labels, torch.arange(8), 0, 0)
    filled = y == 255
    assert filled.any()
    pixels = preprocess.denormalise(x)[:, 0]
    assert (pixels[filled] == round(0.485 * 255)).all()
    assert ((pixels.float() / 60).round().long() == y)[~filled].float().mean() > 0.8  # but where two classes mix
    halves = torch.zeros(8, 40, dtype=torch.uint8)
    halves[:, 20:] = 1
    image = halves.expand(3, -1, -1) * 200
    mixed = {}
    for most in (0.75, 1.0):
        crops = [ScenePreprocess(size=(8, 8), max_class_share=most).crop(image, halves, i, 0)[1] for i in range(40)]
        mixed[most] = sum(0.25 < crop.float().mean() < 0.75 for crop in crops)
    assert mixed[0.75] > mixed[1.0]


def test_evaluation_sizes_are_the_papers(mixed: EncodedScenes, tmp_path: Path) -> None:
    """Adaptive models would be measured at sizes they are not exact for, or refuse them."""
    preprocess = ScenePreprocess(size=(448, 448), resize=(1792, 448), multiple=(224, 224))
    assert preprocess.evaluation_size((512, 683)) == (448, 672)
    assert preprocess.evaluation_size((300, 900)) == (448, 1344)
    assert preprocess.evaluation_size((200, 1600)) == (224, 1792)
    assert ScenePreprocess(size=(360, 480), multiple=(224, 224)).evaluation_size((10, 10)) == (448, 672)
    preprocess.save(tmp_path)
    assert ScenePreprocess.load(tmp_path / "preprocessor_config.json") == preprocess
    small = ScenePreprocess(size=(8, 8), resize=(32, 16), multiple=(8, 8))
    image, labels, _ = mixed.prepared(small)[1]
    assert (image.shape[1:], labels.shape) == ((16, 24), (24, 30))  # masks are brought to the labels
    assert small.evaluate(image[None]).shape == (1, 3, 16, 24)
    with pytest.raises(ValueError, match="different sizes .*batch size of 1"):
        small.evaluate([torch.zeros(3, 20, 30, dtype=torch.uint8), torch.zeros(3, 20, 60, dtype=torch.uint8)])
    assert resize_labels(torch.arange(4)[None].expand(4, 4), (8, 8))[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert resize_labels(torch.arange(9)[None], (1, 3))[0].tolist() == [1, 4, 7]


def test_colours_are_distorted_as_in_opencv() -> None:
    """The recipe's photometric distortion would be another one. HSV by the standard library."""
    import colorsys

    x = torch.randint(0, 256, (1, 3, 5, 5), dtype=torch.uint8)
    still = [0.9, 0.0]
    same = torch.tensor([[*still, *still, *still, *still, 0.7]])
    assert (distort_colours(x, same) - x).abs().max() < 1e-3
    u = torch.tensor([[0.1, 0.75, *still, 0.2, 0.9, 0.3, 0.25, 0.7]])  # +16, saturation x 1.4, hue - 18 degrees
    distorted = distort_colours(x, u)
    for pixel, got in zip(x[0].flatten(1).T.tolist(), distorted[0].flatten(1).T, strict=True):
        h, s, v = colorsys.rgb_to_hsv(*(min(255, c + 16) / 255 for c in pixel))
        expected = torch.tensor(colorsys.hsv_to_rgb((h - 18 / 360) % 1, min(1.0, 1.4 * s), v)) * 255
        assert (got - expected).abs().max() < 0.05
    brighter = distort_colours(x, torch.tensor([[*still, 0.1, 0.0, *still, *still, 0.2]]))
    assert (brighter - x * 0.5).abs().max() < 1e-3


@pytest.mark.skipif(not (DATA / "camvid").is_dir(), reason="the real CamVid is not beside the checkout")
def test_the_real_camvid_is_read() -> None:
    """Its numbers of scenes and classes are those that tables name."""
    split = load_split(DATA / "camvid", ("val",), CAMVID)
    assert isinstance(split, Scenes)
    assert split.images.shape == (101, 3, 360, 480)
    assert len(split.classes) == 11
    assert set(split.labels.unique().tolist()) == {*range(11), 255}


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
    with pytest.raises(ValueError, match="leaves pixels"):
        slide(pixelwise, x, (8, 8), (9, 8))


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
