"""Every operation: its kernels against its reference, forward and, where they learn, backward. In Triton's interpreter;
``scripts/doctor.py`` does the same on a GPU at the shapes of a model."""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from conftest import interpreted, launches, lively, randomize
from torch import Tensor, nn

import common.ops
from common.anchors import Canonical, ConvAnchor, KeysAndValues, MergeAnchor, ProjectionAnchor, WindowAnchor
from common.anchors.base import Anchor
from common.models.windows import shifted_window_mask
from common.ops import (
    add_norm,
    attend_in_windows,
    embed,
    gelu,
    merge_patches,
    pool_heads,
    pool_maximum,
    project,
    reduce_patches,
    reference,
    roll,
    with_positions,
)
from common.ops.canonical import canonical_place
from common.ops.choice import best_partition, moments
from common.ops.depthwise import _depthwise
from common.ops.dispatch import gradients
from common.ops.energy import best_phase
from common.ops.weights import product
from cvt.model import ConvProjection
from mvitv2.model import MViTv2Block

INDIRECT = {"merging_weights", "norm_ahead"}
"""No case of their own: what ``best_phase`` and ``reduce_patches`` make of a merging's weights has no torch form; the
kernel of ``norm_ahead`` is that of ``add_norm``, see test_residual.py."""
COMPILED = {"add_norm", "gelu"}  # fit in graphs for inference alone


@dataclass
class Case:
    """A call of an operation. Results are equal or close, as far as ``atol`` and ``rtol`` say; ``learns``: so are the
    gradients by the tensors that need one. ``seen`` is what is compared of the results; ``launched`` are kernels that
    must be among those that run."""

    operation: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    atol: float = 0.0
    rtol: float = 0.0
    learns: bool = False
    launched: tuple[str, ...] = ()
    seen: Callable[[Any], Any] = field(default=lambda result: result)


def at(size: tuple[int, int], count: int = 3) -> Tensor:
    """Where images begin: not at (0, 0), and in a corner that is far away."""
    places = torch.tensor([[1 % size[0], size[1] - 1], [size[0] - 1, 0], [2 % size[0], 3 % size[1]]])
    return places.repeat(-(-count // 3), 1)[:count]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def cases() -> Iterator[Case]:
    torch.manual_seed(0)
    yield from windows()
    yield from choices()
    yield from phases()
    yield from convolutions()
    yield from mergings()
    yield from poolings()
    yield from the_rest()


def windows() -> Iterator[Case]:
    for window, size, shift, cosine, d in (
        ((7, 7), (14, 21), (3, 3), False, 32),
        ((4, 4), (8, 8), (0, 0), False, 16),
        ((8, 8), (16, 8), (4, 0), True, 32),
        ((4, 4), (8, 12), (2, 2), True, 16),
    ):
        n = window[0] * window[1]
        for placed in (False, True):
            scale = (torch.rand(2) + 0.5).requires_grad_() if cosine else None
            mask = None if placed else shifted_window_mask(size, window, shift, torch.device("cpu"))
            args = leaf(2, *size, 3, 2, d), leaf(2, n, n), scale, window, shift, mask, at(size, 2) if placed else None
            name = f"{window} of {size}{', cosine' * cosine}{', placed' * placed}"
            yield Case(attend_in_windows, name, args, atol=2e-5, rtol=1e-4, learns=True)


def choices() -> Iterator[Case]:
    direction = WindowAnchor().direction
    for size, gain in (((14, 21), 0.1), ((14, 21), 0.0), ((56, 56), 0.1), ((28, 70), 0.0), ((7, 7), 0.1), ((7, 7), 0)):
        x = torch.randn(2, *size, 16) + 1
        _, square, along = moments.reference(x, direction)  # type: ignore[attr-defined]
        weights = WindowAnchor().window_weights
        best = ("_best_token",) if size == (7, 7) else ()
        args = square, along, weights, (7, 7), 2, gain
        yield Case(best_partition, f"{size}, gain {gain}", args, launched=best)
    yield Case(moments, "33 channels", (torch.randn(3, 5, 7, 33), direction), atol=1e-5, rtol=1e-5)
    for channels, dtype in ((1, torch.float32), (3, torch.float16), (5, torch.float64)):
        x = (50 * torch.randn(3, channels, 24, 20)).to(dtype)[:, :, ::2]
        x[0, 0, 1, 1], x[1, 0, 2, 2] = float("nan"), float("inf")
        yield Case(
            canonical_place, f"{channels} channels, {dtype}", (x, Canonical().kernel), seen=lambda result: result[0]
        )


def phases() -> Iterator[Case]:
    def case(name: str, anchor: Anchor, x: Tensor, *layers: Any, origin: Tensor | None = None,
             prepared: Any = None) -> Case:  # fmt: skip
        energy = anchor.energy(*layers)  # type: ignore[attr-defined]
        return Case(best_phase, name, (x, lambda t: anchor.scores(t, *layers), energy, origin, prepared))

    for kernel, stride, channels, score, sketch in ((3, 2, 40, "signed", 4), (3, 2, 40, "energy", 8),
                                                    (2, 2, 16, "signed", 16), (3, 4, 64, "signed", 4),
                                                    (3, 4, 64, "energy", 16)):  # fmt: skip
        conv = nn.Conv2d(channels, 32, kernel, stride, kernel - 2)
        yield case(f"{kernel} x {kernel}, stride {stride}, {score}, {sketch}", ConvAnchor(score=score, sketch=sketch),
                   torch.randn(4, 8, 12, channels), conv)  # fmt: skip
    for kernel, padding, score in ((4, 0, "signed"), (7, 2, "energy"), (7, 3, "signed")):
        yield case(f"image, {kernel} x {kernel}, {score}", ConvAnchor(score=score, sketch=4),
                   torch.randn(4, 3, 20, 68).permute(0, 2, 3, 1), nn.Conv2d(3, 32, kernel, 4, padding),
                   origin=at((20, 68), 4))  # fmt: skip
    for channels, sketch, normalised in ((24, 16, True), (24, 16, False), (32, 4, True), (32, 4, False)):
        norm = lively(nn.LayerNorm(4 * channels)) if normalised else None
        yield case(f"merging, {channels} channels{', norm' * normalised}", MergeAnchor(sketch=sketch),
                   torch.randn(6, 8, 14, channels), nn.Linear(4 * channels, 48, bias=False), norm)  # fmt: skip
    x = torch.randn(6, 8, 14, 32) * (0.5 + torch.rand(6, 8, 14, 1)) + torch.randn(6, 8, 14, 1)
    pools = (nn.Conv2d(32, 32, 3, 2, 1, groups=32, bias=False) for _ in range(2))
    layer = KeysAndValues(lively(nn.LayerNorm(32)), *pools)
    yield case("keys and values", ProjectionAnchor(sketch=4), x, layer)
    normed = layer.norm(x).detach()
    yield case("keys and values, normalised", ProjectionAnchor(sketch=4), x, layer, prepared=(normed, None))
    for stride_q, stride_kv in ((1, 4), (2, 2)):
        block = MViTv2Block(dim=32, out_dim=64, size=(8, 8), num_heads=2, stride_q=stride_q, stride_kv=stride_kv,
                            mlp_ratio=2.0, drop_path=0.0, padding_mode="circular", circular=True,
                            modulus=max(stride_q, stride_kv))  # fmt: skip
        x = torch.randn(6, 8, 8, 32) * (0.5 + torch.rand(6, 8, 8, 1)) + 4 * torch.randn(6, 8, 8, 1)
        yield case(f"poolings, {stride_q} and {stride_kv}", ProjectionAnchor(sketch=4), x, randomize(block).pooled)


def convolutions() -> Iterator[Case]:
    for size, channels, stride in (
        ((4, 12), 64, 1),
        ((4, 12), 40, 2),
        ((14, 6), 32, 2),
        ((8, 8), 96, 4),
        ((1, 2), 40, 1),
        ((2, 17), 40, 1),
    ):
        for circular in (True, False):
            origin = at(size) if circular else None
            args = leaf(3, *size, channels), leaf(3, 3, channels), stride, circular, origin
            name = f"{size}, stride {stride}, {'circular' if circular else 'zeros'}"
            yield Case(_depthwise, name, args, atol=1e-4, rtol=1e-5, learns=True)
    for size, stride, mode, lead in (((4, 8), 1, "zeros", 0), ((6, 6), 2, "circular", 1)):
        q, k, v = (ConvProjection(dim=64, stride=s, bias=True, padding_mode=mode) for s in (1, stride, stride))  # type: ignore[arg-type]
        parts = [randomize(part, seed).eval() for seed, part in enumerate((q, k, v))]
        origin = at(size) if mode == "circular" else None
        args = torch.randn(3, *size, 64), torch.randn(3, lead, 64), *parts, origin
        yield Case(project, f"{size}, stride {stride}, {mode}", args, atol=1e-4, rtol=1e-5)
    for kernel, padding, mode in ((4, 0, "zeros"), (7, 2, "circular"), (7, 3, "zeros")):
        conv = nn.Conv2d(3, 24, kernel, 4, padding, padding_mode=mode)
        args = torch.randn(3, 3, 16, 24), conv, at((16, 24)) if mode == "circular" else None, lively(nn.LayerNorm(24))
        yield Case(
            embed, f"image, {kernel} x {kernel}, {mode}", args, atol=1e-4, rtol=1e-5, seen=lambda result: result[0]
        )
    conv = nn.Conv2d(32, 48, 3, 2, 1, padding_mode="circular")
    args = torch.randn(3, 8, 12, 32).permute(0, 3, 1, 2), conv, at((8, 12))
    yield Case(embed, "tokens", args, atol=1e-4, rtol=1e-5, seen=lambda result: result[0])


def mergings() -> Iterator[Case]:
    phases, far = [(0, 0), (0, 1), (1, 0), (1, 1)], [(5, 9), (4, 7), (0, 9), (3, 2)]  # of 6 x 10 tokens, both parities
    origin, both = torch.tensor(phases + far), ("_rolled_merge", "_rolled_merge_backward")
    for channels in (96, 20, 1):
        for kind in ("norm", "norm without bias", "no norm"):
            norm = None if kind == "no norm" else lively(nn.LayerNorm(4 * channels, bias=kind == "norm"))
            args = (3 + 2 * torch.randn(8, 6, 10, channels)).requires_grad_(), origin, norm
            yield Case(merge_patches, f"{channels} channels, {kind}", args, 2e-5, 1e-4, learns=True, launched=both)
    for kind in ("norm", "no norm"):
        norm = None if kind == "no norm" else lively(nn.LayerNorm(96))
        args = 3 + torch.randn(8, 6, 10, 24), origin, norm
        yield Case(merge_patches, f"inference, {kind}", args, 1e-5, 1e-5, launched=both[:1])
    for normalised in (True, False):
        norm = lively(nn.LayerNorm(128)) if normalised else None
        args = torch.randn(3, 8, 12, 32), at((8, 12)), norm, nn.Linear(128, 64, bias=False)
        yield Case(reduce_patches, f"32 channels{', norm' * normalised}", args, atol=1e-4, rtol=1e-5,
                   seen=lambda result: result[0])  # fmt: skip


def poolings() -> Iterator[Case]:
    for size, d, stride, circular, beside in (((4, 8), 96, 1, True, 16), ((6, 6), 32, 2, False, 0),
                                              ((7, 5), 40, 2, False, 24), ((8, 36), 48, 4, True, 8),
                                              ((5, 37), 40, 4, False, 0)):  # fmt: skip
        mode = "circular" if circular else "zeros"
        pools = [nn.Conv2d(d, d, 3, stride, 1, groups=d, bias=False, padding_mode=mode) for _ in range(3)]
        norms = [lively(nn.LayerNorm(d)) for _ in range(3)]
        tail = torch.randn(-(-size[0] // stride) * -(-size[1] // stride), beside)
        args = torch.randn(3, *size, 6 * d), pools, norms, 2, at(size) if circular else None, tail
        yield Case(pool_heads, f"{size}, stride {stride}, {mode}", args, atol=1e-5, rtol=1e-5,
                   seen=lambda result, d=d: (result[0], result[1], result[2][..., :d]))  # fmt: skip
    for size, keys, d, heads in (((3, 2), (8, 16), 96, 5), ((2, 3), (24, 8), 32, 70)):
        tables = (torch.randn(side, n, d) for side, n in zip(size, keys, strict=True))
        args = torch.randn(1, heads, size[0] * size[1], d), *tables
        yield Case(with_positions, f"{heads} heads of {d}", args, atol=1e-4, rtol=1e-5)
    yield Case(pool_maximum, "stride 2", (torch.randn(3, 6, 8, 40), 2, True, at((6, 8))))


def the_rest() -> Iterator[Case]:
    for shape in ((2, 5, 3, 96), (37, 64), (3, 768), (2, 3, 80)):
        norm = lively(nn.LayerNorm(shape[-1], bias=shape[-1] % 96 == 0))
        args = torch.randn(shape), 3 + torch.randn(shape), norm
        yield Case(add_norm, f"sum of {shape}", args, seen=lambda result: result[0])
        yield Case(add_norm, f"norm of {shape}", args, atol=1e-5, rtol=1e-5, seen=lambda result: result[1])
    args = torch.randn(3, 5, 4, 96), torch.randn(3, 5, 4, 96), lively(nn.LayerNorm(96)), at((5, 4))
    yield Case(add_norm, "sum, placed", args, seen=lambda result: result[0])
    yield Case(add_norm, "norm, placed", args, atol=1e-5, rtol=1e-5, seen=lambda result: result[1])
    for shape in ((3, 5), (2, 7, 800)):  # another formula than torch's: test_activation.py
        yield Case(gelu, f"{shape}", (4 * torch.randn(shape),), atol=1e-6, rtol=3e-5)
    for channels in (24, 33):
        args = leaf(3, 10, 14, channels), at((10, 14)), (1, 2), True
        yield Case(roll, f"{channels} channels", args, learns=True)
    yield Case(product, "38 rows", (torch.randn(38, 24), torch.randn(24, 20)), atol=1e-5, rtol=1e-5)


CASES = list(cases())


@interpreted
@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case.operation.__name__}: {case.name}") for case in CASES])
def test_kernel_is_its_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["common.kernels.depthwise"], "PROGRAMS", 4)  # several tiles for each of them
    monkeypatch.setattr(sys.modules["common.kernels.merging"], "PROGRAMS", 3)
    modules = [name for name, module in sys.modules.items() if name.startswith("common.kernels.")
               and hasattr(module, "launch")]  # fmt: skip
    launched = launches(monkeypatch, *(name.rpartition(".")[2] for name in modules))
    operation: Any = case.operation

    def run(form: Callable[..., Any]) -> list[Any]:
        with torch.set_grad_enabled(case.learns):
            seen, learnt = gradients(lambda *args: case.seen(form(*args)), case.args, {})
        assert seen
        assert bool(learnt) == case.learns
        return [*seen, *learnt]

    with torch.set_grad_enabled(case.learns):
        assert operation.__name__ in COMPILED or not hasattr(operation, "fits") or operation.fits(*case.args)
    fast = run(operation.kernel)
    assert launched
    assert set(case.launched) <= set(launched)
    launched.clear()
    with reference():
        plain = run(operation.reference)
    assert not launched
    for found, expected in zip(fast, plain, strict=True):
        assert found.shape == expected.shape
        assert expected.is_floating_point() or len(expected.unique(dim=0)) > 1  # else one that is constant would pass
        assert torch.allclose(found, expected.to(found.dtype), rtol=case.rtol, atol=case.atol)


def test_every_operation_has_a_case() -> None:
    names = [module.name for module in pkgutil.iter_modules(common.ops.__path__)]
    modules = [importlib.import_module(f"common.ops.{name}") for name in names]
    operations = {name for module in modules for name, value in vars(module).items() if hasattr(value, "reference")
                  and value.__module__ == module.__name__}  # fmt: skip
    assert len(operations) > 15
    assert operations - INDIRECT == {case.operation.__name__ for case in CASES}
