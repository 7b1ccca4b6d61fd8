"""Files: what was saved comes back to the bit, and what is broken or foreign is refused by name."""

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from conftest import ROOT, randomize
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from common import adapt, create_model, from_pretrained, list_models
from common.models.hub import CONFIG_NAME, PREPROCESSOR_NAME
from common.models.weights import load_weights
from swin import Swin


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return randomize(create_model("a_swin_micro")).save_pretrained(tmp_path / "model")


@pytest.mark.parametrize("name", list_models("*_micro"))
def test_save_and_load_give_the_same_logits(name: str, tmp_path: Path) -> None:
    model = randomize(create_model(name)).eval()
    model.save_pretrained(tmp_path)
    for loaded in (from_pretrained(str(tmp_path)), type(model).from_pretrained(tmp_path)):
        assert type(loaded) is type(model)
        assert loaded.config == model.config  # tuples are tuples again
        assert not loaded.training
        x = torch.randn(2, 3, *model.img_size)
        assert torch.equal(loaded(x), model(x))


def test_a_default_checkpoint_loads_as_adaptive(tmp_path: Path) -> None:
    model = randomize(create_model("swin_micro"))
    model.save_pretrained(tmp_path)
    adaptive = Swin.from_pretrained(tmp_path, adaptive=True)
    assert adaptive.adaptive
    assert all(
        torch.equal(a, b) for a, b in zip(adaptive.state_dict().values(), model.state_dict().values(), strict=True)
    )


def test_names_of_classes_are_stored(tmp_path: Path) -> None:
    model = create_model("a_swin_micro", num_classes=3)
    names = ["cat", "chest of drawers, old", "Käfer / 甲虫"]
    model.name_classes(names)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(str(tmp_path))
    assert loaded.class_names == tuple(names)
    with pytest.warns(UserWarning, match="belong to 3 classes: they start anew for 2"):
        assert from_pretrained(str(tmp_path), num_classes=2).class_names == ()
    loaded.reset_classifier(3)  # type: ignore[operator]
    assert loaded.class_names == ()
    with pytest.raises(ValueError, match="has 3 classes, but 2 names are given"):
        model.name_classes(["cat", "dog"])
    with pytest.raises(ValueError, match="is not a class name"):
        model.name_classes(["cat", "dog", "two\nlines"])
    for wrong in (["cat", "dog"], ["cat", "dog", "two\nlines"]):
        model.class_names = wrong  # else the model is saved, and can never be loaded
        with pytest.raises(ValueError, match="2 names are given|is not a class name"):
            model.save_pretrained(tmp_path)


@pytest.mark.parametrize(("by_name", "pretrained"), [(True, True), (False, True), (False, False)])
def test_timm_keeps_names_and_preprocessing(by_name: bool, pretrained: bool, tmp_path: Path) -> None:
    """Lost otherwise: a model that is trained on is saved without, and evaluated with ImageNet's mean and std."""
    source = str(ROOT / "swin/checkpoints/a_swin_micro")
    name, more = ("a_swin_micro", {"pretrained_cfg": {"file": source}}) if by_name else (f"local-dir:{source}", {})
    timm.create_model(name, pretrained=pretrained, **more).save_pretrained(tmp_path)  # type: ignore[operator]
    for file in (CONFIG_NAME, PREPROCESSOR_NAME):
        one, other = (json.loads((folder / file).read_text()) for folder in (tmp_path, Path(source)))
        assert one.get("id2label") == other.get("id2label")
        assert one.get("mean") == other.get("mean")


def test_reset_classifier_survives_saving(tmp_path: Path) -> None:
    model = create_model("a_swin_micro")
    model.reset_classifier(7)
    model.save_pretrained(tmp_path)
    assert from_pretrained(str(tmp_path))(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


def test_missing_extra_and_misshapen_tensors_are_named(saved: Path) -> None:
    path = saved / "model.safetensors"
    state = load_file(path)
    for change, message in (
        ({"norm.weight": None}, "missing norm.weight"),
        ({"extra": torch.zeros(1)}, "unexpected extra"),
        ({"norm.weight": torch.zeros(3)}, r"norm.weight has shape \(3,\), expected \(96,\)"),
    ):
        save_file({k: v for k, v in (state | change).items() if v is not None}, path)
        with pytest.raises(ValueError, match=message):
            from_pretrained(str(saved))


def test_truncated_and_hostile_weights_are_refused(saved: Path) -> None:
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    marker = saved / "executed"

    class Hostile:
        def __reduce__(self) -> tuple:
            return Path.touch, (marker,)

    for content in (whole[: len(whole) // 2], b"", pickle.dumps(Hostile()), (2**60).to_bytes(8, "little") + whole[8:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            from_pretrained(str(saved))
    assert not marker.exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_unless_asked_for(value: float, saved: Path) -> None:
    """A model that gives NaN for every image would be served, fine-tuned or published, and nobody told why."""
    path = saved / "model.safetensors"
    state = load_file(path)
    state["norm.bias"][3] = value
    save_file(state, path)
    with pytest.raises(ValueError, match="NaN or Inf in 1 of 63 tensors, such as norm.bias: .*allow_nonfinite=True"):
        from_pretrained(str(saved))
    fresh = create_model("a_swin_micro")
    with pytest.raises(ValueError, match="NaN or Inf"):
        load_weights(fresh, path, may_differ="head.")
    load_weights(fresh, path, allow_nonfinite=True)
    for model in (fresh, from_pretrained(str(saved), allow_nonfinite=True)):
        assert torch.equal(model.state_dict()["norm.bias"].isfinite(), state["norm.bias"].isfinite())


def test_missing_files_say_what_to_do(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin'\] are pickles and are never loaded"):
        from_pretrained(str(saved))
    (saved / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        from_pretrained(str(saved))
    with pytest.raises(FileNotFoundError, match=r"not a Hub id .*: create_model\(NAME\) builds"):
        from_pretrained("a_swin_tiny")
    with pytest.raises(FileNotFoundError, match="not a Hub id"):
        from_pretrained("/nowhere/at/all")
    with pytest.raises(ValueError, match="is a file"):
        from_pretrained(str(saved / "pytorch_model.bin"))


@pytest.mark.parametrize("known", [False, True])
def test_a_cache_without_preprocessing_is_told(known: bool, tmp_path: Path) -> None:
    """Else a download that broke off leaves a model whose images get ImageNet's mean and std, without a word: of 360
    held-out digits 150 are labelled right then, 352 with its own."""
    stored, oid = tmp_path / "models--o--n", "1" * 40
    for name in ("config.json", "model.safetensors"):
        path = stored / "snapshots" / oid / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(ROOT / "swin/checkpoints/a_swin_micro" / name)
    for path in (stored / "refs/main", *[stored / ".no_exist" / oid / PREPROCESSOR_NAME] * known):  # the Hub has none
        path.parent.mkdir(parents=True)
        path.write_text(oid)
    with warnings.catch_warnings(record=True) as said:
        from_pretrained("o/n", cache_dir=str(tmp_path), local_files_only=True)
    assert ["cannot be asked for it" in str(each.message) for each in said] == [True] * (not known)
    (stored / "snapshots" / oid / "config.json").unlink()  # a name of timm would take its own arguments, not these
    with pytest.raises(LocalEntryNotFoundError):
        timm.create_model("a_swin_micro", pretrained=True, pretrained_cfg={"hf_hub_id": "o/n"}, cache_dir=str(tmp_path))


def test_configs_hold_arguments_and_nothing_else(saved: Path) -> None:
    path = saved / "config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"auto_map": "evil.py"}, r"unknown keys \['auto_map'\]"),
        ({"model_type": "os"}, "model_type is 'os', expected one of"),
        ({"anchors": ["token", "everything"]}, r"unknown anchors \['everything'\]"),
    ):
        path.write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message):
            from_pretrained(str(saved))
    path.write_text("[1, 2")
    with pytest.raises(ValueError, match="not valid JSON"):
        from_pretrained(str(saved))


def test_unknown_names_suggest_near_ones() -> None:
    with pytest.raises(ValueError, match="unknown model 'a_swin_tinny': did you mean a_swin_tiny"):
        create_model("a_swin_tinny")
    with pytest.raises(TypeError, match="embed_dimm"):
        create_model("swin_micro", embed_dimm=3)
    assert "a_swin_tiny" in list_models("a_*")


def test_a_head_can_be_added_where_there_was_none(tmp_path: Path) -> None:
    create_model("a_swin_micro", num_classes=0).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="start anew for 5"):
        assert from_pretrained(tmp_path, num_classes=5)(torch.zeros(1, 3, 32, 32)).shape == (1, 5)


def test_what_a_config_cannot_hold_is_told_when_saving(tmp_path: Path) -> None:
    """A loaded model would pool in another way, or training would end with numbers that JSON does not know."""
    model = create_model("a_swin_micro", num_classes=np.int64(5))
    model.save_pretrained(tmp_path)
    assert from_pretrained(tmp_path).num_classes == 5
    model.reset_classifier(5, global_pool="max")
    with pytest.raises(ValueError, match="pools by 'max'"):
        model.save_pretrained(tmp_path)
    model.double().reset_classifier(0)
    model.reset_classifier(5, global_pool="avg")
    assert model(torch.zeros(1, 3, 32, 32, dtype=torch.float64)).shape == (1, 5)
    model.save_pretrained(tmp_path)


def test_what_could_not_be_loaded_again_is_told_when_saving(tmp_path: Path) -> None:
    """Else the loss shows when the weights are needed, and the model is gone."""
    model = create_model("a_swin_micro")
    model.head.fc = nn.Linear(model.num_features, 3)  # where reset_classifier belongs
    with pytest.raises(ValueError, match="after a layer was replaced.*head.fc.bias has shape"):
        model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []
    model.reset_classifier(3)
    model.canonical = False
    model.save_pretrained(tmp_path)
    assert not from_pretrained(tmp_path).canonical


def test_another_models_preprocessing_is_told(tmp_path: Path) -> None:
    """Else a model is evaluated with the mean and std of the one that was saved there before."""
    from_pretrained(ROOT / "swin/checkpoints/a_swin_micro").save_pretrained(tmp_path)
    fresh = create_model("swin_micro", num_classes=3)
    with pytest.warns(UserWarning, match="its preprocessor_config.json is still there"):
        fresh.save_pretrained(tmp_path)
    fresh.save_pretrained(tmp_path)  # no other model any more: nothing to tell


@pytest.mark.parametrize("name", list_models("*_micro"))
def test_a_model_built_without_memory_has_its_tables(name: str) -> None:
    """Large and sharded models are built so. Else tables of positions hold what was in memory: CvT gave other logits
    without a word, the others an IndexError."""
    model = randomize(create_model(name)).eval()
    with torch.device("meta"):
        empty = create_model(name).eval()
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    x = torch.randn(1, 3, *model.img_size)
    assert torch.equal(empty(x), model(x))


def test_a_model_built_in_double_precision_is_the_same_model() -> None:
    """Else its anchors look at other combinations of outputs, and weights from a file give other logits."""
    model, x = randomize(create_model("a_swin_micro", sketch=4)).double().eval(), torch.randn(2, 3, 32, 32).double()
    torch.set_default_dtype(torch.float64)
    try:
        double = create_model("a_swin_micro", sketch=4).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    double.load_state_dict(model.state_dict())
    assert torch.allclose(double(x), model(x), rtol=1e-6)


class Strict(TorchFunctionMode):
    """Random numbers as GPUs have them: a generator draws for its own kind of device alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        result = func(*args, **kwargs or {})
        if generator is not None and isinstance(result, Tensor) and result.device.type != generator.device.type:
            raise RuntimeError(f"Expected a '{result.device.type}' device type for generator")
        return result


def test_a_model_is_built_on_the_default_device() -> None:
    """Else ``with torch.device("cuda")`` raises an error, and with it ``torch.compile`` on a card not tuned for."""
    with torch.device("meta"), Strict():
        model = create_model("a_swin_micro", sketch=4)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    theirs = timm.create_model("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=24, depths=(1, 1),
                               num_heads=(1, 2))  # fmt: skip
    with torch.device("meta"), Strict():
        assert adapt(theirs).adaptive


def test_arguments_of_a_wrong_kind_are_refused_by_name() -> None:
    """Else a model is built that computes something else, or fails far from where the mistake was made."""
    for arguments, message in (
        ({"num_classes": -1}, "num_classes is -1, expected 0 or more"),
        ({"sketch": -4}, "sketch is -4, expected 0 or more"),
        ({"num_classes": "10"}, "num_classes is '10'"),
        ({"adaptive": "no"}, "adaptive is 'no'"),
    ):
        with pytest.raises(ValueError, match=message):
            Swin(**{"img_size": 32, "window_size": 4, **arguments})
    listed = create_model("swin_micro", depths=[1, 1], img_size=[32, 64])  # lists serve, as in timm
    assert (listed.config["depths"], listed.config["img_size"]) == ((1, 1), (32, 64))


def test_swinv2_has_any_number_of_stages(tmp_path: Path) -> None:
    """As Swin has; the error spoke of windows that nobody had named."""
    model = create_model("a_swinv2_micro", depths=(1, 1, 1), num_heads=(2, 4, 8)).eval()
    assert model.config["pretrained_window_sizes"] == (0, 0, 0)
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(from_pretrained(str(model.save_pretrained(tmp_path)))(x), model(x))
    with pytest.raises(ValueError, match=r"pretrained_window_sizes \(4, 4\) must have one entry for each of 3 stages"):
        create_model("swinv2_micro", depths=(1, 1, 1), num_heads=(2, 4, 8), pretrained_window_sizes=(4, 4))


@torch.no_grad()
def test_the_canonical_anchor_of_a_built_segmenter_is_switched(tmp_path: Path) -> None:
    """Else the paper's modules are measured behind it, and the model is saved as what it was not."""
    model, plain = from_pretrained("upernet_a_swin_micro"), from_pretrained("upernet_a_swin_micro", canonical=False)
    x = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    before, model.canonical = model(x), False
    assert not torch.equal(before, plain(x))
    assert torch.equal(model(x), plain(x))
    assert torch.equal(from_pretrained(str(model.save_pretrained(tmp_path)))(x), plain(x))


@pytest.mark.parametrize("name", ["swin/checkpoints/a_swin_micro", "segmentation/checkpoints/upernet_a_swin_micro"])
def test_preprocessing_is_saved_again(name: str, tmp_path: Path) -> None:
    """Else a copy is evaluated with ImageNet's mean and std, without a word."""
    from_pretrained(ROOT / name).save_pretrained(tmp_path)
    one, other = (json.loads((folder / PREPROCESSOR_NAME).read_text()) for folder in (tmp_path, ROOT / name))
    assert one == other


def test_a_broken_config_of_before_does_not_keep_a_model_from_being_saved(tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_bytes(b'{"a": "\xff"}')
    create_model("swin_micro").save_pretrained(tmp_path)
    assert from_pretrained(tmp_path)


@pytest.mark.parametrize("trained", [False, True])
def test_models_adapted_to_another_size_see_images_of_it(trained: bool, tmp_path: Path) -> None:
    """An adaptive model takes those of the old size, too: else it is used with them, without a word."""
    model: Any = from_pretrained("swin_micro") if trained else create_model("swin_micro")
    model.canonical = False
    adapt(model, img_size=64).save_pretrained(tmp_path)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    for each in (model, from_pretrained(tmp_path), loaded):
        assert tuple(timm.data.resolve_model_data_config(each)["input_size"]) == (3, 64, 64)
        assert not each.canonical  # as it was switched
    if trained:
        assert json.loads((tmp_path / PREPROCESSOR_NAME).read_text())["size"] == [64, 64]
