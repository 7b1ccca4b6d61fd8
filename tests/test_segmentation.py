"""UperNet: against transformers, masks that move with the image, to the bit, and arguments that are refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import randomize
from safetensors.torch import load_file
from segmentation_helpers import balance, build
from torch import Tensor

from common import adapt, create_model, from_pretrained, list_models
from common.evaluation.equivariance import assert_shift_equivariant, dense, shift_error
from common.evaluation.metrics import mascc
from common.shifts import roll
from segmentation import UperNet, convert
from segmentation.decoder import BoxMean, Level, resample
from segmentation.preprocess import ScenePreprocess

MICRO = list_models("upernet_*_micro")
ADAPTIVE_MICRO = list_models("upernet_a_*_micro")
SLIM = dict(channels=24, auxiliary_channels=16, drop_rate=0.0, drop_path_rate=0.0, canonical=False)
"""A decoder of few channels: the geometry of the full one at a fraction of its time."""


def slim(name: str, **kwargs: Any) -> UperNet:
    """All four stages, shifted windows among them, in few channels."""
    args = dict(embed_dim=16, depths=(1, 2, 1, 2), num_heads=(1, 1, 2, 4))
    return build(name, backbone_args=args, **SLIM, **kwargs)


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


@pytest.mark.parametrize("auxiliary", [32, 16, 0])
def test_a_converted_file_becomes_a_model_directory(auxiliary: int, tmp_path: Path) -> None:
    """Without it, nobody gets from a file of transformers to ``UperNet.from_pretrained``, of whatever width."""
    from safetensors.torch import save_file

    model = build("upernet_swin_micro", num_classes=5, channels=24, auxiliary_channels=auxiliary)
    save_file(convert.to_transformers(model.state_dict()), tmp_path / "theirs.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "upernet", "id2label": dict(enumerate("abcde"))}))
    convert.main([str(tmp_path / "theirs.safetensors"), str(tmp_path / "ours"), "--model", "upernet_swin_micro"])
    loaded = UperNet.from_pretrained(tmp_path / "ours")
    assert loaded.num_classes == 5
    assert loaded.class_names == tuple("abcde")
    assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in model.state_dict().items())
    with pytest.raises(SystemExit, match="only safetensors"):
        convert.main([str(tmp_path / "pytorch_model.bin"), str(tmp_path / "ours")])


def test_weights_of_swinv2_are_converted_for_other_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They fit any window: the masks would be another model's, without a word."""
    from safetensors.torch import save_file

    model = build("upernet_swinv2_micro", num_classes=5, backbone_args={"window_size": 8}).eval()
    save_file(convert.to_transformers(model.state_dict()), tmp_path / "theirs.safetensors")
    words = [str(tmp_path / "theirs.safetensors"), str(tmp_path / "ours"), "--model", "upernet_swinv2_micro"]
    convert.main(words)
    assert "built with window_size=4" in capsys.readouterr().out
    convert.main([*words, "--model_args", "backbone_args={'window_size': 8}"])
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(UperNet.from_pretrained(tmp_path / "ours")(x), model(x))


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    source, target = Level((8, 8), 8, offset), Level((16, 16), 4, fine)
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


def test_a_model_made_adaptive_keeps_what_is_frozen_and_takes_its_images(tmp_path: Path) -> None:
    """Frozen layers would drop paths again; images would be prepared at sizes that the model refuses."""
    model = build("upernet_swin_micro", drop_path_rate=0.5, drop_rate=0.0)
    ScenePreprocess(size=(64, 64), resize=(96, 48), multiple=(4, 4)).save(model.save_pretrained(tmp_path))
    model.backbone.freeze(-1)
    adapt(model.train())
    assert not any(module.training for module in model.backbone.patch_embed.modules())
    assert not any(module.training for module in model.backbone.layers[0].modules())
    assert model.decode_head.training
    adapted, larger = UperNet.from_pretrained(tmp_path), UperNet.from_pretrained(tmp_path, img_size=128, adaptive=True)
    for loaded, size in ((adapt(adapted), (64, 64)), (larger, (128, 128))):
        preprocess = ScenePreprocess.load(loaded.save_pretrained(tmp_path / "again") / "preprocessor_config.json")
        assert (preprocess.size, preprocess.multiple) == (size, loaded.multiple)
        loaded.check_size(preprocess.evaluation_size((30, 40)))


def test_what_is_no_backbone_is_refused() -> None:
    """``--backbone`` would start from half a checkpoint without a word."""
    model = create_model("upernet_a_swin_micro")
    with pytest.raises(ValueError, match="the backbone is a Swin, cannot start from a SwinV2"):
        model.load_backbone(create_model("swinv2_micro"))
    with pytest.raises(ValueError, match="unexpected layers.0.blocks.2"):
        model.load_backbone(create_model("swin_micro", depths=(3, 2)))


def test_a_backbone_tells_what_it_had_otherwise() -> None:
    """Weights fit whatever comes between the layers, and would go on computing something else without a word."""
    model = create_model("upernet_a_swin_micro")
    assert model.load_backbone(create_model("swin_micro", num_classes=3)) == "backbone of Swin"
    said = model.load_backbone(create_model("swin_micro", antialias=True, drop_path_rate=0.3))
    assert said.splitlines()[1:] == ["that model has antialias=True; this one antialias=False (backbone_args "
                                     "changes it)"]  # fmt: skip


def test_bad_arguments_and_images_are_explained() -> None:
    """A user would be left with a shape error from the depths of the model."""
    with pytest.raises(ValueError, match="does not report two stages or more .* choose among .*'swin_tiny'"):
        UperNet(backbone="upernet_swin_micro", img_size=64)
    with pytest.raises(ValueError, match="give the default's name, 'swin_tiny', and adaptive=True"):
        UperNet(backbone="a_swin_tiny")
    with pytest.raises(ValueError, match="upsampling is 'nearest', expected 'bilinear' or 'unpool'"):
        UperNet(upsampling="nearest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="padding_mode='zeros' breaks"):
        create_model("upernet_a_swin_micro", padding_mode="zeros")
    with pytest.raises(ValueError, match="image size 512x512.*multiples of 224x224"):
        create_model("upernet_a_swin_tiny", img_size=512)
    model = create_model("upernet_a_swin_micro", auxiliary_channels=0).eval()
    with pytest.raises(ValueError, match="num_classes is 0: a segmenter labels every pixel"):
        from_pretrained("upernet_a_swin_micro", num_classes=0)
    with pytest.raises(ValueError, match="image size 64x40.*nearest valid sizes are 64x32 and 64x64"):
        model(torch.zeros(1, 3, 64, 40))
    with pytest.raises(ValueError, match="no auxiliary head"):
        model.forward_heads(torch.zeros(1, 3, 64, 64))
