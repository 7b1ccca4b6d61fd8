"""MViTv2's anchors with kernels and without: tokens are read from where they begin."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import interpreted, launches, randomize
from torch import Tensor, nn

from common import kernels
from common.anchors import ProjectionAnchor
from common.models.registry import create_model
from common.shifts import roll
from mvitv2.model import MViTv2Block


def tokens(size: tuple[int, int], channels: int) -> Tensor:
    """Each with a mean far from zero and a spread of its own."""
    return torch.randn(3, *size, channels) * (0.5 + torch.rand(3, *size, 1)) + 4 * torch.randn(3, *size, 1)


@interpreted
@pytest.mark.parametrize(("stride_q", "stride_kv", "out_dim"), [(1, 4, 32), (1, 2, 32), (2, 2, 64), (2, 4, 64)])
def test_choices(monkeypatch: pytest.MonkeyPatch, stride_q: int, stride_kv: int, out_dim: int) -> None:
    """The same phases are chosen, and a block makes the same of what its anchor hands it."""
    anchor, modulus = ProjectionAnchor(sketch=4), max(stride_q, stride_kv)
    block = MViTv2Block(dim=32, out_dim=out_dim, size=(8, 8), num_heads=2, stride_q=stride_q, stride_kv=stride_kv,
                        mlp_ratio=2.0, drop_path=0.0, padding_mode="circular", circular=True,
                        modulus=modulus)  # fmt: skip
    randomize(block)
    x = tokens((8, 8), 32)
    with torch.no_grad():
        offset, known = anchor.offset(x, block.pooled, low_precision=True), (block.norm1(x), None)
        assert torch.equal(offset, anchor.choose(x, block.pooled, low_precision=True, prepared=known))
        out = block(x, offset)
        monkeypatch.setattr(kernels.base, "ENABLED", False)
        assert torch.equal(offset, anchor.offset(x, block.pooled, low_precision=True))
        assert torch.allclose(out, block(roll(x, offset, (1, 2), within=True)), atol=1e-4, rtol=1e-4)
    assert len({tuple(o) for o in offset.tolist()}) > 1


@interpreted
@pytest.mark.parametrize(("stride", "size", "width"), [(1, (5, 9), 0), (1, (4, 8), 3), (2, (6, 8), 4), (4, (4, 8), 2)])
def test_outputs_all_at_once_or_one_by_one(stride: int, size: tuple[int, int], width: int) -> None:
    """A graph has the one, eager the other: the bits are the same."""
    x, origin = tokens(size, 2 * 48), torch.tensor([[0, 0], [3, 1], [2, 2]], dtype=torch.int32)
    weight, gain, shift = torch.randn(3, 3, 48), torch.randn(48), torch.randn(48)
    tail = torch.randn(-(-size[0] // stride) * -(-size[1] // stride), width) if width else None
    with torch.no_grad():
        for circular, place in ((True, None), (True, origin), (False, None)):
            args = x, weight, gain, shift, 1e-6, stride, circular, tail, place
            assert torch.equal(kernels.pooled(*args, True), kernels.pooled(*args, False))


@interpreted
def test_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens lie where they did and logits are what they were, though in inference no more than a skip is rolled, and
    an anchor and its block share one norm; with gradients all is rolled, once for each anchor."""
    model: Any = randomize(create_model("a_mvitv2_micro")).eval()
    x = torch.randn(1, 3, 32, 32)

    def run() -> tuple[Tensor, list[Tensor]]:
        final, stages = model.forward_intermediates(x, return_offsets=True)
        return model.forward_head(final), [offset for _, offset in stages]

    anchored = [module for module in model.modules() if getattr(module, "modulus", 1) > 1]
    keep_their_grid = [block for block in anchored if block.stride == 1]
    assert (len(anchored), len(keep_their_grid)) == (4, 2)
    norms: Counter[str] = Counter()
    for name, module in model.named_modules():
        if name.endswith("norm1"):
            module.register_forward_hook(lambda *_, name=name: norms.update([name]))
    layer_norm, taken = F.layer_norm, []
    monkeypatch.setattr(F, "layer_norm", lambda *args: taken.append(1) or layer_norm(*args))
    launched = launches(monkeypatch, "rolling", "pooling")
    with torch.no_grad():
        logits, offsets = run()
    assert set(norms.values()) == {1}
    assert len(taken) == sum(isinstance(m, nn.LayerNorm) for m in model.modules()) - 15  # pooled ones are a kernel's
    assert launched.count("_rolled_forward") == 2
    assert launched.count("_pooled_maximum") == 2
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(kernels.base, "ENABLED", False)
        expected, places = run()
    assert torch.allclose(logits, expected, atol=1e-5, rtol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(offsets, places, strict=True))
    launched.clear()
    assert torch.allclose(model(x), expected, atol=1e-5, rtol=1e-4)
    assert launched == 4 * ["_rolled_forward"]
