"""peft: adapters around any linear layer or convolution learn, keep the model exact, and can be merged into it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import both, interpreted, randomize
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from common import create_model, from_pretrained, list_models
from common.evaluation.equivariance import assert_shift_equivariant

MICRO = list_models("a_*_micro", exclude_filters="upernet_*")


def adaptable(model: nn.Module) -> list[str]:
    """All that peft puts adapters around, the embeddings and mergings that anchors score among them."""
    dense = {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d) and module.groups == 1}
    return [*dense, *(name for name, module in model.named_modules() if isinstance(module, nn.Linear))]


@pytest.mark.parametrize("name", MICRO)
def test_adapters_keep_a_model_exact_and_can_be_merged(name: str, tmp_path: Path) -> None:
    """Lost otherwise: an adapter around an embedding ends in an error, breaks equivariance by padding with zeros, or
    gives another model once merged, for anchors that looked at the weights without it choose other grids then."""
    x = torch.randn(2, 3, 32, 32)
    base: Any = randomize(create_model(name, num_classes=3)).eval()
    before = base(x)
    settings = LoraConfig(r=2, target_modules=adaptable(base), init_lora_weights=False)
    model: Any = get_peft_model(base, settings).eval()
    logits = model(x)
    assert not torch.allclose(logits, before, atol=1e-2)
    assert torch.equal(model(x.roll((5, -9), (2, 3))), logits)
    logits.square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())] == []
    with torch.no_grad():
        assert torch.allclose(base(x), logits)  # adapters lie inside of the model
        with model.disable_adapter():
            assert torch.allclose(model(x), before, atol=1e-5, rtol=1e-4)
        merged = model.merge_and_unload()
        assert torch.allclose(merged(x), logits, atol=1e-5, rtol=1e-4)
        merged.save_pretrained(tmp_path)
        assert torch.equal(from_pretrained(tmp_path)(x), merged(x))


@pytest.mark.parametrize("name", MICRO)
def test_adapted_anchors_alone_are_exact(name: str) -> None:
    base: Any = randomize(create_model(name, canonical=False)).double().eval()
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=adaptable(base), init_lora_weights=False))
    model.double().eval()
    assert_shift_equivariant(model, torch.randn(2, 3, 32, 32, dtype=torch.float64), [(1, 0), (0, 3), (17, 5)])


def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    """As in peft's own guides, with a head that is trained as a whole."""
    x, settings = torch.randn(2, 3, 32, 32), LoraConfig(r=2, target_modules=["qkv", "proj"], init_lora_weights=False)
    settings.modules_to_save = ["head.fc"]
    model: Any = get_peft_model(randomize(create_model("a_swin_micro")), settings).eval()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(randomize(create_model("a_swin_micro")), tmp_path).eval()
    assert torch.equal(loaded(x), model(x))


@interpreted
@pytest.mark.parametrize("name", MICRO)
@torch.no_grad()
def test_kernels_score_with_adapters_or_not_at_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost otherwise: on a GPU anchors look at weights without adapters, and choose other grids than on a CPU."""
    base: Any = randomize(create_model(name)).eval()
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=adaptable(base), init_lora_weights=False)).eval()
    x = torch.randn(1, 3, 32, 32)
    fast, plain = both(monkeypatch, lambda: model(x))
    assert torch.allclose(fast, plain, atol=1e-5, rtol=1e-4)
