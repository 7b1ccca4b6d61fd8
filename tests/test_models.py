"""Every registered model: shapes, gradients, equivariance, bits, errors. One file, parametrised over the registry."""

import pytest
import torch
from conftest import ALL_PHASES, LARGE_SHIFTS, Uninitialised, awkward_images, randomize, shallow
from torch import Tensor
from torch.func import grad, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import create_model, kernels, list_models
from common.evaluation.equivariance import anchored, assert_shift_equivariant, shift_error
from common.models.classifier import Classifier
from common.shifts import roll

MICRO = list_models("*_micro", exclude_filters="upernet_*")
ADAPTIVE_MICRO = [name for name in MICRO if name.startswith("a_")]
FULL = {  # square side and a non-square size
    "swin_tiny": (224, (448, 224)),
    "swinv2_tiny": (256, (512, 256)),
    "cvt_13": (224, (256, 224)),
    "mvitv2_tiny": (224, (224, 448)),
}
ADAPTIVE_FULL = [f"a_{name}" for name in FULL]


def build(name: str, **kwargs) -> Classifier:
    with Uninitialised():
        model = create_model(name, drop_path_rate=0.0, **kwargs)
    assert isinstance(model, Classifier)
    return randomize(model)


@pytest.mark.parametrize("name", MICRO)
def test_forward_as_in_timm(name: str) -> None:
    model = build(name).eval()
    x = torch.randn(2, 3, *model.img_size)
    logits = model(x)
    assert logits.shape == (2, 10)
    assert torch.equal(model.forward_head(model.forward_features(x)), logits)
    final, stages = model.forward_intermediates(x)
    assert torch.equal(model.forward_head(final), logits)
    for info, stage in zip(model.feature_info, stages, strict=True):
        side = [s // info["reduction"] for s in model.img_size]
        assert stage.shape == (2, info["num_chs"], *side)
    last = model.forward_intermediates(x, indices=1, intermediates_only=True, output_fmt="NHWC")
    assert torch.equal(last[0].permute(0, 3, 1, 2), stages[-1])
    early = model.forward_intermediates(x, indices=[0], stop_early=True, intermediates_only=True)
    assert torch.equal(early[0], stages[0])
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)
    model.reset_classifier(0)
    assert model(x).shape == (2, model.num_features)


@pytest.mark.parametrize("name", MICRO)
def test_micro_models_are_micro(name: str) -> None:
    model = create_model(name)
    assert sum(p.numel() for p in model.parameters()) <= 500_000
    assert 28 <= min(model.img_size) <= max(model.img_size) <= 64


@pytest.mark.parametrize("name", [*ADAPTIVE_MICRO, *ADAPTIVE_FULL])
def test_adaptive_has_the_parameters_of_the_default(name: str) -> None:
    adaptive, default = create_model(name), create_model(name.removeprefix("a_"))
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (adaptive, default)]
    assert list(shapes[0]) == list(shapes[1])
    assert shapes[0] == shapes[1]
    adaptive.load_state_dict(default.state_dict(), strict=True)


@pytest.mark.parametrize("name", MICRO)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_parameter_gets_a_gradient(name: str, checkpointing: bool) -> None:
    model = build(name).train()
    model.set_grad_checkpointing(checkpointing)
    features = model.forward_features(torch.randn(3, 3, *model.img_size))  # all tokens: CvT's logits see one alone
    (features.square().sum() + model.forward_head(features).square().sum()).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without


@pytest.mark.parametrize("name", ADAPTIVE_MICRO)
@pytest.mark.parametrize("training", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adaptive_micro_is_equivariant_by_itself(name: str, training: bool) -> None:
    """float64, canonical anchor off: the paper's modules alone make the logits and every stage exact."""
    model = build(name, canonical=False).double().train(training)
    side = model.img_size[0]
    x = torch.randn(2, 3, *model.img_size, dtype=torch.float64)
    shifts = [(h, w) for h in range(0, side, 3) for w in range(0, side, 5)] + [*ALL_PHASES, *LARGE_SHIFTS]
    assert_shift_equivariant(model, x, shifts)
    for i, info in enumerate(model.feature_info):

        def stage(x: Tensor, i: int = i) -> tuple[Tensor, Tensor]:
            return model.forward_intermediates(x, [i], stop_early=True, intermediates_only=True, return_offsets=True)[0]

        assert_shift_equivariant(stage, x, [(1, 0), (3, 2), *LARGE_SHIFTS], anchored(info["reduction"]))


FEW_BLOCKS = {"a_swin_tiny": (2, 2, 2, 2), "a_swinv2_tiny": (2, 2, 2, 2), "a_cvt_13": (1, 1, 2),
              "a_mvitv2_tiny": (1, 2, 2, 2)}  # fmt: skip
"""Every kind of block at every resolution."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTIVE_FULL)
@pytest.mark.parametrize("case", ["square, many phases", "square, train mode", "non-square"])
def test_adaptive_full_size_is_equivariant_by_itself(name: str, case: str) -> None:
    side, other = FULL[name.removeprefix("a_")]
    size, few = other if case == "non-square" else (side, side), {"depths": FEW_BLOCKS[name]}
    model = build(name, canonical=False, img_size=size, **({} if "phases" in case else few))
    model = model.double().train("train" in case)
    x = torch.randn(1 if case != "square, train mode" else 2, 3, *size, dtype=torch.float64)
    shifts = [(1, 2), (-5, side - 1), (225, 450)]
    if "phases" in case:  # a third of them; micro models have all
        shifts = [(4 * 11 * i + h, 4 * 7 * i + w) for i, (h, w) in enumerate(ALL_PHASES[::3])]
        shifts += LARGE_SHIFTS[1:3]
    assert_shift_equivariant(model, x, shifts)


TIES = ("two identical objects", "two identical objects, half a patch apart")
"""Sums over tokens are equal for two arrangements that differ: no anchor can tell them apart, the canonical one can."""


@pytest.mark.parametrize("name", ADAPTIVE_MICRO)
def test_awkward_images_do_not_tie(name: str) -> None:
    model = build(name, canonical=False).double().eval()
    for kind, x in awkward_images(model.img_size[0]).items():
        if kind not in TIES:
            assert_shift_equivariant(model, x.double(), [(1, 0), (0, 1), (2, 3), (-7, 13), (16, 16)])


@pytest.mark.parametrize("name", [n for n in MICRO if not n.startswith("a_")])
def test_stock_models_fail_the_same_check(name: str) -> None:
    model = build(name).double().eval()
    x = torch.randn(2, 3, *model.img_size, dtype=torch.float64)
    assert min(shift_error(model, x, shift) for shift in [(1, 0), (0, 1), (3, 2), (17, 9)]) > 1e-3


@pytest.mark.parametrize("name", ADAPTIVE_MICRO)
@pytest.mark.parametrize("precision", ["float32", "bf16", "bf16 autocast", "fp16 autocast"])
def test_logits_are_bit_identical(name: str, precision: str) -> None:
    model = build(name).eval()
    images = awkward_images(model.img_size[0])
    x = torch.cat([*images.values(), torch.randn(5, 3, *model.img_size)])
    if precision == "bf16":
        model, x = model.bfloat16(), x.bfloat16()
    autocast = "autocast" in precision
    dtype = torch.float16 if "fp16" in precision else torch.bfloat16
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=autocast):
        expected = model(x)
        for shift in [(1, 0), (0, 1), (2, 3), (-7, 13), (16, 16), (31, 5)]:
            moved = model(roll(x, torch.tensor(shift).expand(len(x), 2)))
            names = [*images, *["noise"] * 5]
            differing = [n for n, a, b in zip(names, moved, expected, strict=True) if not torch.equal(a, b)]
            assert not differing, f"{differing} at shift {shift}"
    assert expected.isfinite().all()


@pytest.mark.parametrize("name", ADAPTIVE_FULL)
@pytest.mark.parametrize("autocast", [
    pytest.param(False, id="float32"), pytest.param(True, id="bf16", marks=pytest.mark.slow),
])  # fmt: skip
def test_photographs_keep_their_logits_to_the_bit(name: str, autocast: bool, photos: Tensor) -> None:
    model = build(name).eval()
    photos = photos[:1] if autocast else photos  # slow on a CPU
    x = photos if model.img_size == (224, 224) else torch.nn.functional.interpolate(photos, model.img_size)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model(x)
        for shift in [(1, 2), (-37, 150)]:
            assert torch.equal(model(roll(x, torch.tensor(shift).expand(len(x), 2))), expected)


@pytest.mark.parametrize("name", ADAPTIVE_MICRO)
def test_gradients_move_with_the_image(name: str) -> None:
    """The gradient of the rolled image is the rolled gradient, and the weights' gradients are the same bits."""
    model = build(name).train()
    x, offset = torch.randn(3, 3, *model.img_size), torch.tensor([[5, 9], [-3, 1], [0, 17]])
    gradients = []
    for images in (x, roll(x, offset)):
        images.requires_grad_()
        model.zero_grad()
        torch.manual_seed(0)
        torch.nn.functional.cross_entropy(model(images), torch.tensor([1, 2, 3])).backward()
        gradients.append((images.grad, [p.grad for p in model.parameters()]))
    assert torch.equal(roll(gradients[0][0], offset), gradients[1][0])
    assert all(torch.equal(a, b) for a, b in zip(gradients[0][1], gradients[1][1], strict=True))


@pytest.mark.parametrize("name", ADAPTIVE_MICRO)
def test_second_derivatives_forwards(name: str) -> None:
    """Curvature as torch.func has it, with ``jvp`` of ``grad``: an error otherwise, also of default models."""
    model = randomize(create_model(name)).eval().requires_grad_(False)
    x, along = torch.randn(2, 1, 3, 32, 32)
    with sdpa_kernel(SDPBackend.MATH):
        slope = grad(lambda image: model(image).square().sum())
        _, forwards = jvp(slope, (x,), (along,))
        _, back = vjp(slope, x)
        assert torch.allclose(forwards, *back(along), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", MICRO)
def test_traces_into_one_graph_forward_and_backward(name: str) -> None:
    """No graph break, no ``.item()``, no branch on data. Traced by the compiler, run by the eager backend."""
    model = build(name, **shallow(name)).train()
    x = torch.randn(4, 3, *model.img_size)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss, expected = compiled(x).square().sum(), model(x).square().sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTIVE_MICRO)
def test_compiled_model_gives_the_same_labels_and_stays_exact(name: str) -> None:
    stages = 3 if name in ("a_cvt_micro", "a_mvitv2_micro") else 2
    model = build(name, depths=(1,) * stages).eval()
    x = torch.randn(4, 3, *model.img_size)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        assert (compiled(x) - model(x)).abs().max() < 1e-4
        assert torch.equal(compiled(x).argmax(1), model(x).argmax(1))
        assert torch.equal(compiled(x.roll((5, 9), (2, 3))), compiled(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swin_micro", "a_swin_micro"])
def test_compiled_in_place_checks_model_and_modes_but_not_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, graphs = build(name).eval(), []
    x, plain = torch.randn(2, 3, *model.img_size), model.forward

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model.compile(backend=backend, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        with monkeypatch.context() as patch:
            patch.setattr(kernels.base, "AVAILABLE", not kernels.base.AVAILABLE)  # a constant that it has read
            assert torch.equal(model(x), model(x))
        assert len(graphs) == 1
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == torch.bfloat16
        model.reset_classifier(7)
        assert model(x).shape == (2, 7)
    assert model(x).requires_grad
    assert len(graphs) == 4


def test_compiled_in_place_takes_torchs_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = create_model("swin_micro"), []
    monkeypatch.setattr(torch, "compile", lambda _, **how: asked.append(how))
    for how in ({}, {"mode": "reduce-overhead"}, {"options": {"trace.enabled": False}}, {"backend": "eager"},
                {"backend": "x", "mode": "y"}, {"mode": "default", "options": {}}):  # fmt: skip
        model.compile(dynamic=False, **how)
    free = {"guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe}
    assert [(how["mode"], how["options"]) for how in asked] == [
        (None, free), (None, free | {"triton.cudagraphs": True}), (None, free | {"trace.enabled": False}), (None, free),
        ("y", None), ("default", {})]  # fmt: skip
    assert all(how["dynamic"] is False for how in asked)


@pytest.mark.parametrize("name", MICRO)
def test_bad_input_is_explained(name: str) -> None:
    model = create_model(name).eval()
    height, width = model.img_size
    images = (
        ([torch.zeros(3, height, width)], TypeError, r"expected a tensor of images \(B, 3, H, W\), got list"),
        (torch.zeros(3, height, width), ValueError, r"add a batch dimension with x\[None\]"),
        (torch.zeros(1, 1, height, width), ValueError, r"expected 3 channels, got 1 .*x.expand\(-1, 3, -1, -1\)"),
        (torch.zeros(1, 3, height, width, dtype=torch.uint8), TypeError, "got torch.uint8: convert with"),
        (torch.zeros(1, 3, height + 1, width), ValueError, f"image size {height + 1}x{width}: .* nearest valid"),
    )
    for x, error, message in images:
        with pytest.raises(error, match=message):
            model(x)
