"""Default models against the libraries people use, with converted weights: a model that differs here is another model.

Weights are randomised, so that no bias, gain or position table hides. Float32 is compared relative to the scale of the
output: the references themselves differ from their own float64 by as much.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from conftest import Uninitialised, randomize
from safetensors.torch import load_file
from torch import Tensor, nn

import cvt.convert
import mvitv2.convert
import swin.convert
import swinv2.convert
from common import create_model

TIMM = {
    "swin_tiny": ("swin_tiny_patch4_window7_224", swin.convert),
    "swin_small": ("swin_small_patch4_window7_224", swin.convert),
    "swin_base": ("swin_base_patch4_window7_224", swin.convert),
    "swinv2_tiny": ("swinv2_tiny_window8_256", swinv2.convert),
    "swinv2_small": ("swinv2_small_window8_256", swinv2.convert),
    "swinv2_base": ("swinv2_base_window8_256", swinv2.convert),
    "mvitv2_tiny": ("mvitv2_tiny", mvitv2.convert),
    "mvitv2_small": ("mvitv2_small", mvitv2.convert),
    "mvitv2_base": ("mvitv2_base", mvitv2.convert),
}
PARAMETERS = {"swin_tiny": 28.3, "swinv2_tiny": 28.3, "cvt_13": 20.0, "mvitv2_tiny": 24.2}


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def assert_equal_outputs(ours: nn.Module, theirs: Callable[[Tensor], tuple[Tensor, list[Tensor]]], x: Tensor) -> None:
    tolerance = 1e-10 if x.dtype == torch.float64 else 1e-5
    with torch.no_grad():
        logits, stages = theirs(x)
        final, features = ours.forward_intermediates(x)
        assert relative(ours.forward_head(final), logits) < tolerance  # as forward does: test_models.py
        for i, (mine, reference) in enumerate(zip(features, stages, strict=True)):
            assert relative(mine, reference) < tolerance, f"stage {i}"


@pytest.mark.parametrize(("name", "dtype"), [
    *(pytest.param(name, torch.float64, marks=() if "tiny" in name else pytest.mark.slow) for name in TIMM),
    *((name, torch.float32) for name in TIMM if "tiny" in name)
], ids=str)  # fmt: skip
def test_equals_timm(name: str, dtype: torch.dtype) -> None:
    reference_name, convert = TIMM[name]
    with Uninitialised():
        reference, ours = timm.create_model(reference_name), create_model(name)
    reference, ours = randomize(reference).to(dtype).eval(), ours.to(dtype).eval()
    state = reference.state_dict()
    ours.load_state_dict(convert.from_timm(state), strict=True)
    back = convert.to_timm(ours.state_dict())
    assert list(back) == list(state)
    assert all(torch.equal(back[key], state[key]) for key in state)

    def theirs(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        final, features = reference.forward_intermediates(x)
        return reference.forward_head(final), features

    assert_equal_outputs(ours, theirs, torch.randn(1, 3, *ours.img_size, dtype=dtype))


@pytest.mark.parametrize("name", ["swin_tiny", "swinv2_tiny"])
def test_windows_of_odd_grids_are_those_of_timm(name: str) -> None:
    """Merging rounds odd sides up: 15 x 11 tokens, then 8 x 6, 4 x 3 and 2 x 2, each a single window."""
    narrow: dict[str, Any] = dict(img_size=(60, 44), window_size=16, embed_dim=24, depths=(1, 1, 2, 1), num_classes=3)
    reference = randomize(timm.create_model(TIMM[name][0], **narrow)).double().eval()
    ours: Any = create_model(name, **narrow).double().eval()
    ours.load_state_dict(reference.state_dict(), strict=True)
    assert ours.windows == [(15, 11), (8, 6), (4, 3), (2, 2)]
    x = torch.randn(1, 3, 60, 44, dtype=torch.float64)
    assert_equal_outputs(ours, lambda x: (reference(x), reference.forward_intermediates(x)[1]), x)


@pytest.mark.parametrize("name", [name for name in TIMM if "tiny" in name])
def test_learns_as_timm(name: str) -> None:
    reference_name, convert = TIMM[name]
    small: dict[str, Any] = dict(img_size=56 if name == "swin_tiny" else 64, num_classes=10, drop_path_rate=0.0)
    reference, ours = randomize(timm.create_model(reference_name, **small)), create_model(name, **small)
    assert_equal_gradients(ours, reference, reference, convert.from_timm)


def test_learns_as_transformers() -> None:
    config = transformers.CvtConfig(depth=[1, 2, 10], num_labels=10, drop_path_rate=[0.0, 0.0, 0.0])
    reference = randomize(transformers.CvtForImageClassification(config))
    ours = create_model("cvt_13", img_size=64, num_classes=10, drop_path_rate=0.0)
    assert_equal_gradients(ours, reference, lambda x: reference(x).logits, cvt.convert.from_transformers)


def assert_equal_gradients(ours: Any, reference: nn.Module, theirs: Callable[[Tensor], Tensor],
                           convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:  # fmt: skip
    """By what a step changes, in training mode: operations have backward passes of their own, and batch norms keep
    averages. Softmax does not see a bias of keys, which has no gradient."""
    reference.double().train(), ours.double().train()
    ours.load_state_dict(convert(reference.state_dict()), strict=True)
    before = {key: tensor.clone() for key, tensor in ours.state_dict().items() if tensor.is_floating_point()}
    x, y = torch.randn(2, 3, *ours.img_size, dtype=torch.float64), torch.tensor([3, 7])
    for model, parameters in ((ours, ours.parameters()), (theirs, reference.parameters())):
        step = torch.optim.SGD(parameters, 1.0)
        F.cross_entropy(model(x), y).backward()
        step.step()
    found, expected = ours.state_dict(), convert(reference.state_dict())
    unmoved = []
    for key, start in before.items():
        moved = expected[key] - start
        if moved.abs().max() < 1e-12:
            unmoved.append(key)
        assert (found[key] - expected[key]).abs().max() < 1e-9 * moved.abs().max() + 1e-14, key
    assert len(unmoved) < len(before) / 10, unmoved


@pytest.mark.parametrize("version", ["swin", "swinv2"])
def test_windows_that_do_not_fit_are_those_of_transformers(version: str) -> None:
    """19 x 19 tokens, then 10 x 10, in windows of 7: padded, then shifted. timm shifts first."""
    shape: dict[str, Any] = dict(image_size=76, embed_dim=24, depths=[2, 2], num_heads=[3, 6], window_size=7)
    more: dict[str, Any] = {}
    if version == "swin":
        reference: Any = transformers.SwinForImageClassification(transformers.SwinConfig(**shape))
        convert: Any = swin.convert
    else:
        reference = transformers.Swinv2ForImageClassification(transformers.Swinv2Config(**shape))
        convert, more = swinv2.convert, {"pretrained_window_sizes": (0, 0)}
    reference = randomize(reference).double().eval()
    ours: Any = create_model(f"{version}_tiny", img_size=76, embed_dim=24, depths=(2, 2), num_heads=(3, 6),
                             window_size=7, num_classes=2, **more).double().eval()  # fmt: skip
    ours.load_state_dict(convert.from_transformers(reference.state_dict()), strict=True)
    x = torch.randn(1, 3, 76, 76, dtype=torch.float64)
    assert_equal_outputs(ours, lambda x: (reference(x).logits, ours.forward_intermediates(x)[1]), x)


def transformers_model(name: str) -> tuple[nn.Module, Any]:
    """A classifier of transformers with the shape of our ``name``, and our converter for it."""
    if name == "swin_tiny":
        config: Any = transformers.SwinConfig(num_labels=1000)
        return transformers.SwinForImageClassification(config), swin.convert
    if name == "swinv2_tiny":
        config = transformers.Swinv2Config(image_size=256, window_size=8, num_labels=1000)
        return transformers.Swinv2ForImageClassification(config), swinv2.convert
    config = transformers.CvtConfig(depth=[1, 2, 10] if name == "cvt_13" else [1, 4, 16], num_labels=1000)
    return transformers.CvtForImageClassification(config), cvt.convert


@pytest.mark.parametrize(("name", "dtype"), [
    ("cvt_13", torch.float32), ("cvt_13", torch.float64), pytest.param("cvt_21", torch.float64, marks=pytest.mark.slow),
    ("swin_tiny", torch.float64), ("swinv2_tiny", torch.float64),
], ids=str)  # fmt: skip
def test_equals_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    with Uninitialised():
        (reference, convert), ours = transformers_model(name), create_model(name).to(dtype).eval()
    reference = randomize(reference).to(dtype).eval()
    reference.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    ours.load_state_dict(convert.from_transformers(reference.state_dict()), strict=True)
    ours.load_state_dict(convert.from_transformers(state), strict=True)
    back = convert.to_transformers(ours.state_dict())
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)

    def theirs(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        output = reference(x, output_hidden_states=True)
        stages = output.hidden_states if "cvt" in name else []  # the Swins report merged, not stage, features
        return output.logits, stages or ours.forward_intermediates(x)[1]

    assert_equal_outputs(ours, theirs, torch.randn(1, 3, *ours.img_size, dtype=dtype))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    count = sum(p.numel() for p in create_model(f"a_{name}").parameters())
    assert round(count / 1e6, 1) == PARAMETERS[name]


@pytest.mark.parametrize("convert", [swin.convert, swinv2.convert])
def test_the_original_layout_of_patch_merging_is_understood(convert: Any) -> None:
    """The first release keeps merging at the end of a stage, calls the head by one name and stores buffers."""
    name = f"{convert.__name__.split('.')[0]}_micro"
    state = create_model(name).state_dict()
    old = {key.replace("layers.1.downsample", "layers.0.downsample").replace("head.fc.", "head."): tensor
           for key, tensor in state.items()}  # fmt: skip
    old["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 16, 16)
    old["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.long)
    create_model(name).load_state_dict(convert.from_timm(old), strict=True)
