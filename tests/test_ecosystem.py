"""timm: our models under its name, and its models made adaptive by one line. torch.func: several models at once."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import ROOT, randomize, timm_keeps_arguments
from timm.data import create_transform, resolve_data_config, resolve_model_data_config
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap
from torchvision.transforms.functional import to_pil_image

from common import adapt, create_model, from_pretrained, list_models
from common.data.preprocess import PREPROCESSOR_NAME, Preprocess
from common.data.splits import load_digits_data
from common.evaluation.equivariance import assert_shift_equivariant, shift_error
from common.evaluation.evaluate import from_timm, load_for_evaluation

SHIFTS = ((1, 0), (0, 3), (17, 5), (-31, 40))
MICRO = list_models("a_*_micro")
COARSE = partial(torch.nn.LayerNorm, eps=1e-3)


@pytest.mark.parametrize("name", MICRO)
def test_timm_builds_our_models(name: str) -> None:
    """People who use timm find ours by name, with the arguments and methods they know."""
    model: Any = timm.create_model(name, num_classes=7, drop_path_rate=0.1)
    assert type(model) is type(create_model(name))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    config = resolve_data_config({}, model=model)
    assert config["input_size"] == (3, 32, 32)
    assert model.get_submodule(model.pretrained_cfg["first_conv"]).in_channels == 3
    assert model.get_submodule(model.pretrained_cfg["classifier"]).out_features == 7
    assert model.get_classifier() is model.get_submodule(model.pretrained_cfg["classifier"])
    model.reset_classifier(3)
    model.set_grad_checkpointing()
    assert model.train()(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    _, stages = model.forward_intermediates(torch.zeros(2, 3, 32, 32), indices=[0, -1])
    assert len(stages) == 2


@pytest.mark.parametrize("name", MICRO)
def test_features_only(name: str) -> None:
    """Whoever builds a detector on them must hear that their maps do not lie on the image."""
    with pytest.warns(UserWarning, match="begin where its anchors chose.*return_offsets=True"):
        features: Any = timm.create_model(name, features_only=True, out_indices=(0, 1))
    maps = features(torch.zeros(2, 3, 32, 32))
    assert [m.shape[1] for m in maps] == features.feature_info.channels()
    assert [32 // m.shape[2] for m in maps] == features.feature_info.reduction()


def test_timms_own_names_stay_timms() -> None:
    assert type(timm.create_model("mvitv2_tiny")).__module__.startswith("timm.")
    assert "a_mvitv2_tiny" in timm.list_models("a_*")
    with pytest.raises(RuntimeError, match="no weights of a_swin_micro are published"):
        timm.create_model("a_swin_micro", pretrained=True)


def test_pretrained_weights_by_timms_configuration() -> None:
    source = "swin/checkpoints/a_swin_micro"
    model = timm.create_model("a_swin_micro", pretrained=True, pretrained_cfg={"file": source}).eval()
    expected: Any = create_model("a_swin_micro")
    expected = type(expected).from_pretrained(source)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x), expected(x))


def test_weights_by_timms_configuration_come_with_their_arguments(tmp_path: Path) -> None:
    """CvT's anchors were of another sketch than those of its training: of 200 images 92 changed their label."""
    source, x = "cvt/checkpoints/a_cvt_micro", torch.randn(8, 3, 32, 32)
    model: Any = timm.create_model("a_cvt_micro", pretrained=True, pretrained_cfg={"file": source}).eval()
    assert torch.equal(model(x), from_pretrained(source)(x))
    given: Any = timm.create_model("cvt_micro", pretrained=True, pretrained_cfg={"file": source}, sketch=3)
    assert (given.config["sketch"], given.adaptive) == (3, False)
    with pytest.raises(ValueError, match=r"depths \(1, 1, 2\), not \(2, 4, 1\) as a_cvt_mini.*'local-dir:FOLDER'"):
        timm.create_model("a_cvt_mini", pretrained=True, pretrained_cfg={"file": source})
    shutil.copy(ROOT / source / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text('{"architecture": "of timm", "pretrained_cfg": {"url": "https://x.y/z"}}')
    bare: Any = timm.create_model("a_cvt_micro", pretrained=True, pretrained_cfg={"file": str(tmp_path)})
    assert bare.config["sketch"] == create_model("a_cvt_micro").config["sketch"] != model.config["sketch"]


SAVED = sorted(str(path.parent) for path in ROOT.glob("*/checkpoints/a_*_micro/config.json"))


def accuracy(model: Any) -> float:
    """On held-out digits, prepared as timm prepares images for this model."""
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    split = load_digits_data()[1].head(100)
    x = torch.stack([transform(to_pil_image(image)) for image in split.images])
    with torch.no_grad():
        return (model.eval()(x).argmax(1) == split.labels).float().mean().item()


@pytest.mark.parametrize("source", SAVED)
def test_timm_prepares_images_as_the_model_was_trained(source: str) -> None:
    """Lost otherwise: timm's users get ImageNet's mean and std, and half of the labels are wrong without a word."""
    model = from_pretrained(source)
    config = resolve_model_data_config(model)
    stored = Preprocess.load(Path(source) / PREPROCESSOR_NAME)
    assert (config["mean"], config["std"]) == (stored.mean, stored.std)
    assert (config["input_size"], config["crop_pct"]) == ((3, *stored.size), 1.0)
    assert accuracy(model) > 0.9
    adapted = from_pretrained(source, adaptive=False)
    assert resolve_model_data_config(adapt(adapted)) == config


def test_a_crop_from_a_larger_image_is_known_to_timm(tmp_path: Path) -> None:
    model = create_model("a_swin_micro")
    Preprocess((32, 32), resize=40).save(model.save_pretrained(tmp_path))
    config = resolve_model_data_config(from_pretrained(str(tmp_path)))
    assert (config["crop_pct"], config["crop_mode"]) == (0.8, "squash")


@pytest.mark.parametrize("source", SAVED)
def test_timm_loads_what_we_saved(source: str) -> None:
    """``local-dir:`` and ``hf-hub:`` read ``architecture`` and ``pretrained_cfg`` of config.json."""
    model: Any = timm.create_model(f"local-dir:{source}", pretrained=True).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x), from_pretrained(source)(x))
    assert accuracy(model) > 0.9
    with pytest.warns(UserWarning, match="start anew for 3"):
        model = timm.create_model(f"local-dir:{source}", pretrained=True, num_classes=3)
    assert model(x).shape == (2, 3)
    assert timm.create_model(f"local-dir:{source}", pretrained=True, num_classes=0)(x).shape == (2, model.num_features)
    fresh = timm.create_model(f"local-dir:{source}")
    assert fresh.state_dict().keys() == model.state_dict().keys()
    assert not torch.equal(fresh(x)[:, :3], model(x))


def test_the_architecture_of_saved_models_needs_a_source() -> None:
    with pytest.raises(RuntimeError, match="create 'local-dir:FOLDER' or 'hf-hub:OWNER/NAME'"):
        timm.create_model("shiftvit_swin")


@pytest.mark.parametrize(("name", "arguments", "size"), [
    ("swin_tiny_patch4_window7_224", {"img_size": 56, "depths": (2, 2), "num_heads": (3, 6), "embed_dim": 48}, 56),
    ("swinv2_tiny_window8_256", {"img_size": 64, "depths": (2, 2), "num_heads": (3, 6), "embed_dim": 48}, 64),
    ("mvitv2_tiny", {"img_size": 64}, 64),
])  # fmt: skip
def test_a_timm_model_becomes_adaptive_in_place(name: str, arguments: dict[str, Any], size: int) -> None:
    """The one line: the same object, the same parameters, exact in float64 by its anchors alone."""
    model: Any = randomize(timm.create_model(name, num_classes=5, **arguments)).double().eval()
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    assert max(shift_error(model, x, shift) for shift in SHIFTS) > 1e-3  # what there is to cure
    parameters, before = list(model.parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    parameters[0].requires_grad_(False)
    adapted = adapt(model, canonical=False)
    assert adapted is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert not parameters[0].requires_grad
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert_shift_equivariant(model, x, SHIFTS)
    assert model.config["adaptive"]
    assert not model.training


@pytest.mark.parametrize("name", [n.removeprefix("a_") for n in MICRO])
def test_our_default_models_become_adaptive_in_place(name: str) -> None:
    model: Any = randomize(create_model(name)).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert max(shift_error(model, x, shift) for shift in SHIFTS) > 1e-3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adapt(model, canonical=False)
    assert_shift_equivariant(model, x, SHIFTS)
    before = model.head.fc.weight.clone()
    model.train()(x).sum().backward()
    optimizer.step()  # holds the same parameters
    assert not torch.equal(model.head.fc.weight, before)


def test_what_cannot_be_adapted_is_refused_and_left_alone() -> None:
    resnet = timm.create_model("resnet10t")
    with pytest.raises(TypeError, match="cannot adapt a ResNet: expected"):
        adapt(resnet)
    with pytest.raises(ValueError, match="a part of a model.* adapt the whole model.* missing norm.bias"):
        adapt(create_model("upernet_swin_micro").backbone)
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, depths=(2, 2), num_heads=(3, 6), embed_dim=48
    )
    other = timm.create_model("swin_s3_tiny_224", num_classes=5)  # windows that differ from stage to stage
    with pytest.raises(ValueError, match="computes something diff|does not fit|size mismatch|options that ours lacks"):
        adapt(other)
    assert type(other).__module__.startswith("timm.")
    with pytest.raises(TypeError, match="before it is compiled or wrapped"):
        adapt(torch.nn.DataParallel(model))
    with pytest.raises(ValueError, match=r"\['num_classes'\] cannot change with anchors"):
        adapt(create_model("swin_micro"), num_classes=3)  # else torch complains of shapes
    plain = MultiScaleVit(MultiScaleVitCfg(depths=(1, 1, 1, 1), rel_pos_type=""), img_size=64)
    with pytest.raises(ValueError, match="no relative positions"):
        adapt(plain)


def test_options_of_timm_are_found_in_layers_that_begin_with_zeros() -> None:
    """SwinV2's blocks add nothing before they are trained, whatever activation timm was told to use."""
    small = {"img_size": 64, "depths": (1, 1), "num_heads": (3, 6), "embed_dim": 48, "num_classes": 3}
    model = timm.create_model("swinv2_tiny_window8_256", **small, act_layer="relu")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="something different from our model"):
        adapt(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("name", "options"), [("swinv2_tiny_window8_256", {"act_layer": "gelu_tanh"}),
                                               ("swinv2_tiny_window8_256", {"act_layer": "quick_gelu"}),
                                               ("swin_tiny_patch4_window7_224", {"norm_layer": COARSE})])  # fmt: skip
def test_small_differences_of_timm_models_are_found(name: str, options: dict[str, Any]) -> None:
    """Another GELU or another eps of norms: logits would differ by 1e-5 to 1e-3, without a word."""
    size = 64 if "v2" in name else 56
    model = timm.create_model(name, img_size=size, depths=(1, 1), num_heads=(3, 6), embed_dim=48, **options)
    with pytest.raises(ValueError, match="something different from our model"):
        adapt(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_timm_models_without_biases_of_queries_are_adapted(name: str, dtype: torch.dtype) -> None:
    """They were refused for an option that ours have; in half precision SwinV2's tables are coarse, in both."""
    size = 64 if "v2" in name else 56
    model: Any = timm.create_model(name, img_size=size, depths=(1, 1), num_heads=(3, 6), embed_dim=48, qkv_bias=False)
    x = torch.randn(1, 3, size, size, dtype=dtype)
    adapt(model.to(dtype).eval())
    assert torch.equal(model(x), model(x.roll((3, 21), (2, 3))))


def test_a_timm_model_in_bfloat16_is_adapted_and_keeps_how_images_are_prepared(tmp_path: Path) -> None:
    """Else a copy that is saved is evaluated with ImageNet's mean, whatever timm's configuration says."""
    cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25), "crop_pct": 0.9, "input_size": (3, 56, 56)}
    model: Any = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1), num_heads=(3, 6),
                                   embed_dim=48, num_classes=3, pretrained_cfg_overlay=cfg).bfloat16()  # fmt: skip
    adapt(model).save_pretrained(tmp_path)
    assert model.head.fc.weight.dtype == torch.bfloat16
    stored = Preprocess.load(tmp_path / PREPROCESSOR_NAME)
    assert (stored.size, stored.resize, stored.mean, stored.std) == ((56, 56), 62, cfg["mean"], cfg["std"])


@timm_keeps_arguments
def test_adapted_timm_models_see_what_timm_models_see(tmp_path: Path) -> None:
    """timm takes 0.875 where no crop_pct is given: else an adapted model sees images at another scale."""
    cfg = {"crop_pct": None, "input_size": (3, 56, 56)}
    model: Any = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1), num_heads=(3, 6),
                                   embed_dim=48, num_classes=3, pretrained_cfg_overlay=cfg)  # fmt: skip
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    adapt(model)
    assert Preprocess(**model.stored_input) == from_timm(f"local-dir:{tmp_path}")[1]
    assert model.stored_input["resize"] == 64
    other: Any = adapt(timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1), num_heads=(3, 6),
                                         embed_dim=48))  # fmt: skip
    assert (other.stored_input["size"], other.stored_input["resize"]) == ((56, 56), None)  # not 224, cut from 248
    assert resolve_model_data_config(other)["input_size"] == (3, 56, 56)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", list_models("*_micro", exclude_filters="upernet_*"))
@torch.no_grad()
def test_several_models_at_once(name: str) -> None:
    """An ensemble by ``vmap`` over stacked weights gives what each model gives."""
    models = [randomize(create_model(name), seed).eval() for seed in range(2)]
    weights, buffers = stack_module_state(models)  # type: ignore[arg-type]
    skeleton, x = create_model(name).eval().to("meta"), torch.randn(2, 3, 32, 32)

    def call(weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return functional_call(skeleton, (weights, buffers), (x,))

    found = vmap(call)(weights, buffers)
    for one, model in zip(found, models, strict=True):
        assert torch.allclose(one, model(x), atol=1e-5, rtol=1e-4)


def test_a_copy_of_a_model_keeps_its_preprocessing(tmp_path: Path) -> None:
    """Else the copy is evaluated with ImageNet's mean and deviation, and is wrong without a word."""
    source = ROOT / "swin" / "checkpoints" / "a_swin_micro"
    from_pretrained(source).save_pretrained(tmp_path)
    assert Preprocess.load(tmp_path / PREPROCESSOR_NAME) == Preprocess.load(source / PREPROCESSOR_NAME)


def test_what_belongs_to_a_model_survives_adapt(tmp_path: Path) -> None:
    """How its images are prepared, what is frozen, hooks and their handles, recomputation, how its head pools."""
    model, seen = from_pretrained(ROOT / "swin" / "checkpoints" / "swin_micro"), []
    handle = model.layers[1].blocks[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    model.freeze(1)
    model.set_grad_checkpointing()
    model.reset_classifier(4, global_pool="max")
    model.epoch = 7  # the user's own
    model.train().layers[1].blocks[1].eval()
    stored, x = model.stored_input, torch.randn(2, 3, 32, 32)
    adapt(model)
    assert model.training
    assert not any(module.training for module in model.layers[1].blocks[1].modules())
    model.train()(x)
    assert model.adaptive
    assert model.stored_input == stored is not None
    assert model.epoch == 7
    assert model.grad_checkpointing
    assert model.head.global_pool.pool_type == "max"
    assert {*model.frozen} >= {model.layers[0], model.patch_embed}
    assert {*model.frozen} <= {*model.modules()}
    assert not model.layers[0].training
    assert model.layers[1].training
    assert seen
    handle.remove()
    del seen[:]
    model(x)
    assert not seen
    model.freeze(0)
    assert all(p.requires_grad for p in model.parameters())
    theirs: Any = timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), num_classes=3)
    theirs.set_grad_checkpointing()
    assert adapt(theirs).grad_checkpointing


def test_timm_prepares_images_as_a_directory_says(tmp_path: Path) -> None:
    """Also by the route that our own error names, and at another size; a head of other classes is told."""
    source = str(ROOT / "swin" / "checkpoints" / "a_swin_micro")
    model: Any = timm.create_model("a_swin_micro", pretrained=True, pretrained_cfg={"file": source})
    assert resolve_model_data_config(model) == resolve_model_data_config(from_pretrained(source))
    assert resolve_model_data_config(model)["std"] == (0.35, 0.35, 0.35)
    for name, more in ((f"local-dir:{source}", {}), ("a_swin_micro", {"pretrained_cfg": {"file": source}})):
        larger: Any = timm.create_model(name, pretrained=True, img_size=64, **more)
        assert resolve_model_data_config(larger)["input_size"] == (3, *larger.img_size) == (3, 64, 64)
    create_model("a_swin_micro", num_classes=3).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="belong to other classes"):
        timm.create_model("a_swin_micro", pretrained=True, pretrained_cfg={"file": str(tmp_path)})


def test_stages_that_there_are_not_are_refused() -> None:
    model, x = create_model("swin_micro"), torch.zeros(1, 3, 32, 32)
    with pytest.raises(ValueError, match="indices 0 do not fit"):  # not all stages
        timm.create_model("swin_micro", features_only=True, out_indices=0)(x)
    for asked in (0, 3, [2], []):
        with pytest.raises(ValueError, match="do not fit a model of 2 stages"):
            model.forward_intermediates(x, asked)
    with pytest.raises(ValueError, match="choose NCHW or NHWC"):
        model.forward_intermediates(x, output_fmt="NLC")
    assert len(model.forward_intermediates(x, 1, intermediates_only=True)) == 1


def test_evaluation_hears_the_arguments_of_a_model() -> None:
    source = str(ROOT / "swin" / "checkpoints" / "a_swin_micro")
    model, preprocess = load_for_evaluation(source, 10, img_size=64)
    assert preprocess.size == model.img_size == (64, 64)
    assert preprocess.std == (0.35, 0.35, 0.35)
    assert not load_for_evaluation(f"timm:local-dir:{source}", 10, canonical=False)[0].canonical
    with pytest.raises(ValueError, match="nonsense"):
        load_for_evaluation(f"timm:local-dir:{source}", 10, nonsense=3)
