"""What people try in their first ten minutes works, or ends in an error that names what does."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from conftest import ROOT
from PIL import Image

from common import adapt, create_model, from_pretrained, list_models
from common.data.splits import load_digits_data

SWIN = str(ROOT / "swin/checkpoints/a_swin_micro")


@pytest.mark.parametrize("name", list_models("*_micro"))
def test_inputs_that_no_model_computes_with(name: str) -> None:
    model = create_model(name).eval()
    height, width = model.img_size  # type: ignore[misc]
    with pytest.raises(ValueError, match="the batch is empty, of shape .*: leave out batches without images"):
        model(torch.zeros(0, 3, height, width))
    with pytest.raises(RuntimeError, match=r"use torch.export \(scripts/export.py .*\) or torch.compile"):
        torch.jit.trace(model, torch.zeros(1, 3, height, width))
    with pytest.raises(ValueError, match="give images on a CPU or GPU; .* torch.export.export traces"):
        model.to("meta")(torch.zeros(1, 3, height, width, device="meta"))


def test_the_checks_stay_out_of_graphs() -> None:
    model = create_model("a_swin_micro").eval()
    x = torch.randn(3, 3, 32, 32)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    assert program.module()(x[:2]).shape == (2, 10)


def test_an_image_size_names_the_window_that_fits_it() -> None:
    with pytest.raises(ValueError, match=r"nearest valid sizes are 224x224 and 448x448.* fits window_size=8$"):
        create_model("a_swin_tiny", img_size=256)
    model: Any = create_model("a_swin_tiny", img_size=256, window_size=8, depths=(1, 1, 1, 1))
    model.check_size((256, 256))
    with pytest.raises(ValueError, match="fits window_size=7$"):
        create_model("a_swinv2_tiny", img_size=224)
    with pytest.raises(ValueError, match="another img_size$"):
        create_model("a_swin_tiny", img_size=250)


@pytest.mark.parametrize("name", ["swin_tiny", "swinv2_tiny"])
def test_images_smaller_than_a_token_of_the_last_stage(name: str) -> None:
    """28 px, as of MNIST: 7, 4, 2 and 1 tokens a side."""
    narrow: dict[str, Any] = dict(img_size=28, window_size=7, embed_dim=24, depths=(1, 1, 1, 1), num_classes=10)
    assert create_model(name, **narrow).eval()(torch.randn(1, 3, 28, 28)).isfinite().all()
    with pytest.raises(ValueError, match="image size 28x28: .* the nearest valid size is 224x224. Resize"):
        create_model(f"a_{name}", **narrow)


@pytest.mark.parametrize("arguments", [
    {"depths": (1, 1)}, {"depths": (1, 1, 1, 1)}, {"patch_paddings": (2, 1)}, {"patch_strides": (4, 2)},
    {"num_heads": (1, 2)}, {"drop_path_rate": (0.0, 0.1)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["cvt_micro", "a_cvt_micro"])
def test_entries_that_are_not_one_for_each_stage_are_named(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^\w+ \(.*\) must have one entry for each of \d stages"):
        create_model(name, **arguments)


def test_features_of_timm_are_adapted_as_a_whole() -> None:
    settings: dict[str, Any] = dict(img_size=56, depths=(1, 1), num_heads=(1, 2), embed_dim=16)
    name = "swin_tiny_patch4_window7_224"
    features = timm.create_model(name, features_only=True, out_indices=(0, 1), **settings)
    with pytest.raises(TypeError, match="adapt the whole model, .* then call its forward_intermediates"):
        adapt(features)
    whole: Any = adapt(timm.create_model(name, **settings))
    assert len(whole.forward_intermediates(torch.zeros(1, 3, 56, 56), intermediates_only=True)) == 2


def test_other_classes_get_a_new_last_layer() -> None:
    for source in (SWIN, str(ROOT / "segmentation/checkpoints/upernet_a_swin_micro")):
        with pytest.warns(UserWarning, match=r"classifier|head.fc.* start anew for 3 and need training"):
            model: Any = from_pretrained(source, num_classes=3)
        assert model(torch.zeros(1, 3, *model.img_size)).shape[1] == 3
        stored = from_pretrained(source).state_dict()
        same = [torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items()
                if not name.startswith(model.last_layer)]  # fmt: skip
        assert all(same)


def test_predict_takes_models_of_timm(tmp_path: Path) -> None:
    predict = runpy.run_path(str(ROOT / "scripts" / "predict.py"))["main"]
    Image.fromarray(load_digits_data()[1].images[0].permute(1, 2, 0).numpy()).save(tmp_path / "two.png")
    arguments = [str(tmp_path / "two.png"), "--device", "cpu", "--model"]
    found, ours = (predict([*arguments, model])["predictions"][0] for model in (f"timm:local-dir:{SWIN}", SWIN))
    assert [best["name"] for best in found["predictions"]] == [best["name"] for best in ours["predictions"]]
    assert found["predictions"][0]["class"] == 2
    with pytest.raises(ValueError, match="fresh weights, whose labels mean nothing: give a directory"):
        predict([*arguments, "a_swin_tiny"])


def test_habits_of_timm_and_transformers_are_answered() -> None:
    assert type(create_model("a_swin_micro", pretrained=False)) is type(create_model("a_swin_micro"))
    with pytest.raises(ValueError, match=r"fresh weights: for trained ones, from_pretrained\(DIRECTORY\)"):
        create_model("a_swin_micro", pretrained=True)
    with pytest.raises(ValueError, match=r"^unknown arguments \['global_pool'\]: Swin takes"):  # not "config of ..."
        from_pretrained(SWIN, global_pool="max")
    small: dict[str, Any] = {"depths": (1, 1), "num_heads": (1, 2), "embed_dim": 16}
    larger = timm.create_model("swin_tiny_patch4_window7_224", img_size=256, **small)
    with pytest.raises(ValueError, match="image size 256x256: .* fits window_size=8$"):
        adapt(larger)
    config = transformers.SwinConfig(**small)
    with pytest.raises(TypeError, match="--source transformers of the folder's convert.py"):
        adapt(transformers.SwinForImageClassification(config))
