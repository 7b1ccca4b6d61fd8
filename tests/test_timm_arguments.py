"""Arguments that people know from timm do here what they do there, or an error names what does."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from accelerate import Accelerator
from conftest import ROOT, randomize, timm_keeps_arguments
from timm.data import create_transform, resolve_model_data_config
from timm.models import PretrainedCfg, save_for_hf

from common import adapt, create_model, from_pretrained, list_models
from common.data.preprocess import PREPROCESSOR_NAME, Preprocess
from common.models.timm_models import input_of_timm

CLASSIFIERS = list_models("*_micro", exclude_filters="upernet_*")


@pytest.mark.filterwarnings("ignore:maps of an adaptive model")
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_features_are_those_that_timm_would_give(name: str) -> None:
    """Lost otherwise: a line that works through timm.create_model ends in a TypeError here."""
    create: Any
    for out_indices in (None, (0, 1), (-1,)):
        found = []
        for create in (create_model, timm.create_model):
            features = randomize(create(name, features_only=True, out_indices=out_indices, img_size=64)).eval()
            maps = features(torch.linspace(-1, 1, 2 * 3 * 64 * 64).view(2, 3, 64, 64))
            found.append((type(features), features.feature_info.channels(), features.feature_info.reduction(), maps))
        (*ours, our_maps), (*theirs, their_maps) = found
        assert ours == theirs
        assert all(map(torch.equal, our_maps, their_maps))
        assert len(our_maps) == len(their_maps)


def test_maps_of_an_adaptive_model_are_told_here_too() -> None:
    create: Any
    for create in (create_model, timm.create_model):
        with pytest.warns(UserWarning, match="begin where its anchors chose.*return_offsets=True") as told:
            create("a_swin_micro", features_only=True)
        assert [warning.filename for warning in told] == [__file__]


@pytest.mark.parametrize("create", [create_model, timm.create_model])
def test_stages_of_a_whole_model_are_not_passed_over(create: Any) -> None:
    for name in ("swin_micro", "upernet_swin_micro") if create is create_model else ("swin_micro",):
        with pytest.raises(TypeError, match="which features_only=True gives"):
            create(name, out_indices=(0,))


@pytest.mark.parametrize("create", [create_model, timm.create_model])
def test_a_pooling_that_no_config_holds_is_refused_with_what_works(create: Any) -> None:
    """A loaded model would pool in another way than the trained one."""
    x = torch.zeros(2, 3, 32, 32)
    assert create("swin_micro", global_pool="avg")(x).shape == create("cvt_micro", global_pool="token")(x).shape
    for name, pool in (("swin_micro", "max"), ("mvitv2_micro", ""), ("cvt_micro", "avg")):
        with pytest.raises(ValueError, match=r"global_pool is .* reset_classifier.*forward_features\(x\)"):
            create(name, global_pool=pool)
    model: Any = create("swin_micro")
    model.reset_classifier(5, global_pool="max")
    assert model(x).shape == (2, 5)
    assert model.forward_features(x).shape == (2, 4, 4, model.num_features)


def test_segmenters_name_their_maps() -> None:
    with pytest.raises(ValueError, match=r"for classifiers: .* model.forward_backbone\(x\)"):
        create_model("upernet_swin_micro", features_only=True)


HALF = (0.5, 0.5, 0.5)
THEIRS = "swin_tiny_patch4_window7_224"
LEVELS = {"mean": HALF, "std": HALF}
SOURCE = str(ROOT / "swin" / "checkpoints" / "a_swin_micro")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"pretrained_cfg": LEVELS}, {**LEVELS, "resize": 36}),  # timm's crop_pct of 0.875
        ({"pretrained_cfg": PretrainedCfg(**LEVELS)}, {**LEVELS, "resize": 36}),
        ({"pretrained_cfg_overlay": {**LEVELS, "crop_pct": 0.5}}, {**LEVELS, "resize": 64}),
        ({"pretrained_cfg_overlay": {**LEVELS, "crop_pct": 1.0}, "img_size": 32}, {**LEVELS, "resize": None}),
        ({"pretrained_cfg_overlay": {**LEVELS, "input_size": (3, 64, 64)}}, {**LEVELS, "resize": 36}),
        ({"pretrained_cfg_overlay": {"mean": 0.5, "std": (0.5,)}}, {**LEVELS, "resize": 36}),
        ({"pretrained": True, "pretrained_cfg": {"file": SOURCE}, "pretrained_cfg_overlay": {"mean": HALF}},
         {"mean": HALF, "std": (0.35, 0.35, 0.35), "resize": None}),
        ({"pretrained": True, "pretrained_cfg": PretrainedCfg(file=SOURCE)},
         {"mean": (0.0, 0.0, 0.0), "std": (0.35, 0.35, 0.35), "resize": None}),
    ],
)  # fmt: skip
def test_what_timm_was_told_of_images_is_saved(arguments: dict[str, Any], expected: dict[str, Any],
                                               tmp_path: Path) -> None:  # fmt: skip
    """Lost otherwise: the saved model sees images with ImageNet's mean and deviation, and is wrong without a word."""
    model: Any = timm.create_model("a_swin_micro", **arguments)
    told = resolve_model_data_config(model)
    model.save_pretrained(tmp_path)
    assert Preprocess.load(tmp_path / PREPROCESSOR_NAME) == Preprocess(size=(32, 32), **expected)
    for loaded in (from_pretrained(str(tmp_path)), timm.create_model(f"local-dir:{tmp_path}", pretrained=True)):
        heard = resolve_model_data_config(loaded)
        assert [heard[key] for key in LEVELS] == [Preprocess(size=(32, 32), **expected).__dict__[key] for key in LEVELS]
    assert heard["crop_mode"] == told["crop_mode"]  # which timm alone has


def test_timm_hears_of_images_what_the_preprocessor_file_says(tmp_path: Path) -> None:
    """It is written after config.json, which then still has ImageNet's."""
    Preprocess((32, 32), mean=HALF, std=HALF, resize=40).save(create_model("a_swin_micro").save_pretrained(tmp_path))
    model: Any = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert resolve_model_data_config(model) == resolve_model_data_config(from_pretrained(str(tmp_path)))
    assert (model.pretrained_cfg["mean"], model.pretrained_cfg["crop_pct"]) == (HALF, 0.8)
    grey: Any = timm.create_model("a_swin_micro", in_chans=1, pretrained_cfg=LEVELS)
    assert grey.stored_input is None  # a file holds three means


def test_a_timm_model_without_values_is_not_adapted() -> None:
    """timm's own is compared with ours first; a default model of ours needs no values."""
    with torch.device("meta"):
        theirs = timm.create_model(THEIRS, depths=(1, 1, 1, 1))
        ours: Any = adapt(create_model("swin_micro"))
    with pytest.raises(ValueError, match="is on the meta device, .*: build it and load its weights on a CPU"):
        adapt(theirs)
    x = torch.randn(1, 3, 32, 32)
    trained = from_pretrained(SOURCE)
    ours.to_empty(device="cpu").load_state_dict(trained.state_dict())
    assert torch.equal(ours.eval()(x), trained(x))


def test_timm_resizes_as_the_preprocessor_file_says() -> None:
    """For some sizes, such as 128 cut from 186, timm rounded to a pixel less: another image than in our evaluation."""
    model: Any = create_model("swin_micro")
    for size in (32, 96, 128, 160, 192, 224, 256, 320, 384, 448):
        for resize in range(size, 2 * size):
            model.set_input(size=(size, size), resize=resize, **LEVELS)
            assert input_of_timm(model)["resize"] == (resize if resize > size else None)
    model.set_input(size=(128, 128), resize=186, **LEVELS)
    seen = create_transform(**resolve_model_data_config(model), is_training=False).transforms[0]
    assert seen.size == (186, 186)


@pytest.mark.parametrize("name", ["a_swin_micro", "upernet_swin_micro"])
def test_accelerates_example_saves_a_model(name: str, tmp_path: Path) -> None:
    """As its documentation writes it; processes that hold a part of the weights, or none, write nothing."""
    accelerator, model = Accelerator(cpu=True), create_model(name)
    wrapped = accelerator.prepare(model)
    for main, files in ((False, []), (True, ["config.json", "model.safetensors"])):
        state = accelerator.get_state_dict(wrapped) if main else {}
        accelerator.unwrap_model(wrapped).save_pretrained(
            tmp_path, is_main_process=main, save_function=accelerator.save, state_dict=state
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == files
    loaded = from_pretrained(str(tmp_path)).state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in model.state_dict().items())
    with pytest.raises(TypeError, match="max_shard_size"):
        model.save_pretrained(tmp_path, max_shard_size="1GB")


@timm_keeps_arguments
@pytest.mark.parametrize("crop", [0.875, 1.0])
def test_what_timm_saves_of_our_models_timm_loads(crop: float, tmp_path: Path) -> None:
    """By timm's own functions to save and to share; else the weights are there, and no name builds their model."""
    images = {**LEVELS, "crop_pct": crop}
    arguments = {"canonical": False, "sketch": 3, "num_classes": 4, "pretrained_cfg_overlay": images}
    model: Any = randomize(timm.create_model("a_swin_micro", **arguments)).eval()
    save_for_hf(model, tmp_path, safe_serialization=True)
    loaded: Any = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, 3, 32, 32)
    assert loaded.config == model.config
    assert torch.equal(loaded(x), model(x))
    assert loaded.stored_input == model.stored_input
    assert loaded.stored_input["mean"] == HALF


def test_what_timm_leaves_out_of_our_models_is_told(tmp_path: Path) -> None:
    """An adapted model came back as the default one, of timm or ours, with other logits; others not at all."""
    models = {"ours": create_model("a_swin_micro"), "loaded": from_pretrained(SOURCE),
              "adapted": adapt(timm.create_model("swin_micro")),
              "timm's": adapt(timm.create_model(THEIRS, depths=(1, 1), num_heads=(3, 6)))}  # fmt: skip
    for name, model in models.items():
        save_for_hf(model, tmp_path / name, safe_serialization=True)
        for load in (from_pretrained, lambda path: timm.create_model(f"local-dir:{path}", pretrained=True)):
            with pytest.raises(ValueError, match=r"leaves out the arguments .* model.save_pretrained\(DIRECTORY\)"):
                load(str(tmp_path / name))


@timm_keeps_arguments
def test_models_of_other_libraries_say_what_loads_them(tmp_path: Path) -> None:
    """Else the first thing that many people try ends in a list of keys, or of types that they never heard of."""
    theirs, ours, swin = (str(tmp_path / name) for name in ("theirs", "ours", "swin"))
    for name, directory in ((THEIRS, theirs), ("a_swin_micro", ours)):
        model = timm.create_model(name, **({"depths": (1, 1), "num_heads": (3, 6)} if directory == theirs else {}))
        save_for_hf(model, directory, safe_serialization=True)
        with pytest.raises(ValueError, match=r"saved by timm: .*'local-dir:.*', pretrained=True\) loads it, and adapt"):
            from_pretrained(directory)
        assert adapt(timm.create_model(f"local-dir:{directory}", pretrained=True)).adaptive
    transformers.SwinConfig(architectures=["SwinForImageClassification"]).save_pretrained(swin)
    with pytest.raises(ValueError, match="model of transformers: .*--source transformers of the folder's convert.py"):
        from_pretrained(swin)


def test_a_segmenter_tells_timm_of_its_images() -> None:
    """Lost otherwise: scenes of 64 px that timm enlarges to 224 and normalises as ImageNet's."""
    config = resolve_model_data_config(from_pretrained("upernet_a_swin_micro"))
    assert (config["input_size"], config["mean"], config["std"]) == ((3, 64, 64), (0.0,) * 3, (0.35,) * 3)
    assert (config["crop_pct"], config["crop_mode"]) == (1.0, "squash")
    larger = from_pretrained("upernet_a_swin_micro", img_size=96)
    assert resolve_model_data_config(larger) == {**config, "input_size": (3, 96, 96)}
    assert resolve_model_data_config(create_model("upernet_swin_micro"))["input_size"] == (3, 64, 64)
    adapted = adapt(from_pretrained("upernet_a_swin_micro", adaptive=False))
    assert resolve_model_data_config(adapted) == config
