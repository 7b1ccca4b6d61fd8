"""Layers that someone has wrapped (LoRA, quantisation, hooks) are called, never read behind their backs. Else users
train adapters that nothing uses, or quantise a model that no longer runs."""

import copy
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from conftest import randomize
from torch import Tensor, nn
from torch.nn.utils import prune, weight_norm

from common import kernels
from common.models.registry import create_model, list_models
from common.ops import embed
from common.ops.merge_energy import merging_dtype
from common.ops.weights import is_plain

names = ("residual", "depthwise", "pooling", "merge")
residual, depthwise, pooling_ops, merge = (import_module(f"common.ops.{name}") for name in names)

ADAPTIVE = list_models("a_*_micro", exclude_filters="upernet_*")
MICRO = [*ADAPTIVE, *(name.removeprefix("a_") for name in ADAPTIVE)]


class LowRank(nn.Module):
    """A layer plus a low-rank term, as adapters are; its weight is that of the layer alone."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.calls = base, 0
        self.down = nn.Parameter(torch.randn(2, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.base(x) + x @ self.down.T @ self.up.T


def wrap(model: nn.Module) -> dict[str, LowRank]:
    """Every linear layer, by name."""
    found = {name: LowRank(layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    for name, layer in found.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return found


@pytest.mark.parametrize("name", MICRO)
def test_every_wrapped_layer_is_called_learns_and_counts(name: str) -> None:
    model, x = randomize(create_model(name)).eval(), torch.randn(2, 3, 32, 32)
    wrapped = wrap(model)
    logits = model(x)
    logits.square().sum().backward()
    assert [n for n, layer in wrapped.items() if not layer.calls] == []
    assert [n for n, layer in wrapped.items() if layer.up.grad is None or not layer.up.grad.any()] == []
    with torch.no_grad():
        for n, layer in wrapped.items():
            before = layer.up.clone()
            layer.up.zero_()
            assert not torch.equal(model(x), logits), n
            layer.up.copy_(before)


@pytest.mark.parametrize("name", MICRO)
def test_every_hooked_layer_is_called(name: str) -> None:
    """Also convolutions and norms: who looks at features or prunes through hooks must see all of them."""
    model, calls = randomize(create_model(name)).eval(), []
    layers = {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d, nn.LayerNorm))}
    expected = model(torch.ones(1, 3, 32, 32))
    for n, layer in layers.items():
        layer.register_forward_hook(lambda *_, n=n: calls.append(n))
        assert not is_plain(layer)
    assert torch.allclose(model(torch.ones(1, 3, 32, 32)), expected, atol=1e-4, rtol=1e-4)
    assert set(calls) == set(layers)


@pytest.mark.parametrize("name", MICRO)
def test_hooks_of_all_modules_see_every_layer(name: str) -> None:
    """As profilers and counters of operations set them, on no layer in particular."""
    model, calls = randomize(create_model(name)).eval(), []
    layers = {id(m) for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d, nn.LayerNorm))}
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(id(module)))
    try:
        model(torch.ones(1, 3, 32, 32))
    finally:
        hook.remove()
    assert layers <= set(calls)


@pytest.mark.parametrize("name", [name for name in ADAPTIVE if name != "a_cvt_micro"])  # which scores no linear layer
def test_a_wrapper_without_a_weight_is_named(name: str) -> None:
    """Anchors score by weights: else an attribute is missing somewhere within."""
    model = create_model(name).eval()
    for n in [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]:
        model.set_submodule(n, nn.Sequential(model.get_submodule(n)))
    with pytest.raises(TypeError, match="the anchor needs a layer with a weight, but got a Sequential"):
        model(torch.ones(1, 3, 32, 32))


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", ADAPTIVE)
def test_weights_made_before_every_forward_are_not_those_of_the_last(name: str) -> None:
    """Pruned and normalised layers make their weight when they are called; anchors look at it before. Else the first
    output after a step or after loading belongs to a mixture of old and new weights."""
    for make in (weight_norm, lambda layer: prune.random_unstructured(layer, "weight", 0.3)):
        model, x = randomize(create_model(name)).eval(), torch.randn(2, 3, 32, 32)
        for layer in [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]:
            make(layer)
        before = model(x)
        before.sum().backward()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(("weight_orig", "weight_v")):
                    parameter.copy_(torch.randn_like(parameter) / parameter[0].numel() ** 0.5)
            after = model(x)
            assert torch.equal(model(x), after)
            assert torch.equal(copy.deepcopy(model)(x), after)  # all layers are called: no weight is left of a graph
        assert not torch.allclose(after, before, atol=1e-2)


@pytest.fixture
def quantised_engine() -> Iterator[None]:
    engine = next((e for e in torch.backends.quantized.supported_engines if e != "none"), None)
    if engine is None:
        pytest.skip("this torch has no engine for quantised layers")
    before, torch.backends.quantized.engine = torch.backends.quantized.engine, engine
    yield
    torch.backends.quantized.engine = before


@pytest.mark.filterwarnings("ignore")  # torch announces where quantisation moves to
@pytest.mark.usefixtures("quantised_engine")
@pytest.mark.parametrize("name", ADAPTIVE)
@torch.no_grad()
def test_quantised_models_run_and_stay_exact(name: str) -> None:
    model, x = randomize(create_model(name)).eval(), torch.randn(3, 3, 32, 32)
    small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert not [n for n, layer in small.named_modules() if type(layer) is nn.Linear]
    logits = small(x)
    for shift in ((1, 0), (5, -3), (16, 31)):
        assert torch.equal(small(x.roll(shift, (2, 3))), logits)
    apart = (logits - model(x)).norm() / model(x).norm()
    assert 0 < apart < 0.5, apart


@pytest.mark.parametrize("name", ADAPTIVE)
@torch.no_grad()
def test_conversions_that_swap_parameters_work(name: str) -> None:
    model, x = randomize(create_model(name)).eval(), torch.randn(2, 3, 32, 32)
    expected = model(x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double().to("cpu").float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert torch.equal(model(x), expected)


def test_kernels_do_not_read_wrapped_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels run, they would read the weights of a layer instead of calling it."""
    for name in ("add_norm", "depthwise_norm", "pooled", "image_tokens", "merge_kernel", "merged_product"):
        monkeypatch.setattr(kernels, f"fits_{name}", lambda *_: True)
    attention: Any = create_model("a_cvt_micro").stages[0].blocks[0].attn
    pooling: Any = create_model("a_mvitv2_micro").stages[0].blocks[0].attn
    x, norm, start = torch.zeros(1, 8, 8, 32), nn.LayerNorm(32), torch.zeros(1, 2, dtype=torch.long)
    merged, reduction = nn.LayerNorm(128), nn.Linear(128, 8, bias=False)
    pools, norms = [pooling.pool_q, pooling.pool_k, pooling.pool_v], [pooling.norm_q, pooling.norm_k, pooling.norm_v]
    questions: list[tuple[nn.Module, Callable[[], Any]]] = [
        (norm, lambda: residual._fits(x, x, norm)),
        (attention.k.conv, lambda: depthwise._fits_project(x, x, attention.q, attention.k, attention.v, None)),
        (attention.v.norm, lambda: depthwise._fits_project(x, x, attention.q, attention.k, attention.v, None)),
        (pools[2], lambda: pooling_ops._fits_pool(x, pools, norms, 1, None, x)),
        (norms[1], lambda: pooling_ops._fits_pool(x, pools, norms, 1, None, x)),
        (merged, lambda: merge._fits_merge(x, start, merged)),
        (reduction, lambda: merging_dtype(x, None, reduction)),
    ]
    for layer, fits in questions:
        assert fits()
        hook = layer.register_forward_hook(lambda *_: None)
        assert not fits(), layer
        hook.remove()
    conv = nn.Conv2d(3, 8, 4, stride=4)
    conv.register_forward_hook(lambda *_: None)
    embed(torch.zeros(1, 3, 8, 8), conv)  # else the kernel, which is not there, fails
    norm.register_forward_hook(lambda *_: None)
    assert residual.norm_ahead(x, norm) is None
