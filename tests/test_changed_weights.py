"""Whatever changes weights, and however quietly, the next output is that of the new weights: nothing made of weights
may outlive them. Users would lose silently: outputs of an old model from a new one."""

import copy
import inspect
import multiprocessing
import threading
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from conftest import randomize, shallow
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common.models.registry import create_model, list_models

MICRO = list_models("a_*_micro", exclude_filters="upernet_*")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FUSED: list[type[torch.optim.Optimizer]] = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]


def step(optimizer: Callable[..., torch.optim.Optimizer], **options: bool) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(3)
        parameters = [p for p in model.parameters() if optimizer is not torch.optim.Muon or p.ndim == 2]
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.grad = noise.to_sparse() if optimizer is torch.optim.SparseAdam else noise
        optimizer(parameters, lr=0.1, **options).step(*[lambda: 1.0] * (optimizer is torch.optim.LBFGS))

    return change


def copy_weights(model: nn.Module, source: Iterable[Tensor]) -> None:
    for parameter, other in zip(model.parameters(), source, strict=True):
        parameter.data.copy_(other.data)


def average(model: nn.Module) -> None:
    """As averages of weights do for an evaluation."""
    ema = ModelEmaV3(randomize(copy.deepcopy(model), seed=5), decay=0.5)
    ema.update(model)
    copy_weights(model, ema.module.parameters())


def from_vector(model: nn.Module) -> None:
    """The base is restored in between, so that addresses of weights are used again."""
    base = parameters_to_vector(model.parameters()).detach().clone()
    vector_to_parameters(base * 1.5, model.parameters())
    model(torch.zeros(2, 3, 32, 32).to(base))
    vector_to_parameters(base, model.parameters())
    vector_to_parameters(base * 0.5, model.parameters())


def assign(model: nn.Module) -> None:
    other = randomize(copy.deepcopy(model), seed=6)
    model.load_state_dict(other.state_dict(), assign=True)


def swap(model: nn.Module) -> None:
    other = randomize(copy.deepcopy(model), seed=7)
    for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
        torch.utils.swap_tensors(parameter, new)


def in_a_thread(model: nn.Module) -> None:
    thread = threading.Thread(target=scale_data, args=(model,))
    thread.start()
    thread.join()


def scale_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def scale_memory(model: nn.Module) -> None:
    """As ``dist.broadcast(p.detach())`` writes, past all that torch counts."""
    for parameter in model.parameters():
        torch.from_dlpack(parameter.detach()).mul_(0.5)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    **{f"fused {kind.__name__}": step(kind, fused=True) for kind in FUSED},
    **{f"foreach {kind.__name__}": step(kind, foreach=True) for kind in (torch.optim.AdamW, torch.optim.RMSprop)},
    "plain AdamW": step(torch.optim.AdamW, foreach=False),
    **({"capturable AdamW": step(torch.optim.AdamW, capturable=True)} if "cuda" in DEVICES else {}),
    ".data": scale_data,
    "a thread": in_a_thread,
    "memory": scale_memory,
    "average": average,
    "vector_to_parameters": from_vector,
    "assign": assign,
    "swap_tensors": swap,
    "bfloat16 and back": lambda model: model.bfloat16().float(),
}
NOT_IN_TORCH = {("capturable AdamW", "cpu"), ("fused Adagrad", "cuda")}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MICRO)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_outputs_follow_the_weights(name: str, training: bool, device: str) -> None:
    x = torch.randn(2, 3, 32, 32, device=device)
    for kind, change in CHANGES.items():
        if (kind, device) in NOT_IN_TORCH:
            continue
        model = randomize(create_model(name)).to(device).train(training)
        with torch.no_grad():
            before = model(x)
            change(model)  # at once: even a load of the same state would show that weights have changed
            fresh = create_model(name).to(device).train(training)
            fresh = fresh.bfloat16().float() if kind == "bfloat16 and back" else fresh  # tables are rounded, too
            fresh.load_state_dict(model.state_dict())
            if kind == "vector_to_parameters":  # products of weights at odd addresses are rounded otherwise on a GPU
                vector_to_parameters(parameters_to_vector(fresh.parameters()), fresh.parameters())
            expected, after = fresh(x), model(x)
        assert torch.equal(after, expected), kind
        assert not torch.equal(after, before), kind


def optimizers(device: str) -> Iterator[tuple[str, Callable[[nn.Module], None]]]:
    """All of torch's, in each of their forms that run on this device."""
    for name, kind in vars(torch.optim).items():
        if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
            continue
        forms = inspect.signature(kind).parameters.keys() & {"foreach", "fused", *(["capturable"] * (device == "cuda"))}
        for form in ("", *sorted(forms)):
            yield f"{form} {name}", step(kind, **({form: True} if form else {}))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MICRO)
def test_outputs_follow_every_optimizer(name: str, device: str) -> None:
    x, tried = torch.randn(2, 3, 32, 32, device=device), 0
    for kind, change in optimizers(device):
        if (kind, device) in NOT_IN_TORCH:
            continue
        model, fresh = (randomize(create_model(name)).to(device).eval() for _ in range(2))
        with torch.no_grad():
            before = model(x)
            change(model)
            fresh.load_state_dict(model.state_dict())
            after = model(x)
            assert torch.equal(after, fresh(x)), kind
        assert not torch.equal(after, before), kind
        tried += 1
    assert tried >= 31


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MICRO)
@torch.no_grad()
def test_an_average_may_come_and_go(name: str, device: str) -> None:
    """Store, copy, restore, as for an evaluation in the middle of a training."""
    x = torch.randn(2, 3, 32, 32, device=device)
    model, other = randomize(create_model(name)).to(device).eval(), randomize(create_model(name), 5).to(device).eval()
    before, stored = model(x), [parameter.data.clone() for parameter in model.parameters()]
    copy_weights(model, other.parameters())
    other.load_state_dict(model.state_dict())  # statistics of norms are not averaged
    assert torch.equal(model(x), other(x))
    copy_weights(model, stored)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MICRO)
def test_gradients_are_those_of_the_current_weights(name: str, device: str) -> None:
    """After fused steps, which raise no version counter, outside of graphs: as the engine trains on a GPU."""
    model, x = randomize(create_model(name)).to(device).train(), torch.randn(16, 3, 32, 32, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    fresh = create_model(name).to(device).train()
    fresh.load_state_dict(model.state_dict())
    optimizer.zero_grad()
    for each in (model, fresh):
        each(x).square().mean().backward()
    for a, b in zip(model.parameters(), fresh.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MICRO)
def test_models_built_in_inference_mode_follow_what_is_loaded(name: str, device: str) -> None:
    x = torch.randn(2, 3, 32, 32, device=device)
    other = randomize(create_model(name)).to(device).eval().requires_grad_(False)
    with torch.inference_mode():
        model = create_model(name).to(device).eval().requires_grad_(False)  # torch convolves otherwise for a gradient
        model(x)
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MICRO)
@torch.no_grad()
def test_a_functional_call_and_a_copy_have_weights_of_their_own(name: str, device: str) -> None:
    x = torch.randn(2, 3, 32, 32, device=device)
    model, other = randomize(create_model(name)).to(device).eval(), create_model(name).to(device).eval()
    model.requires_grad_(False), other.requires_grad_(False)  # torch convolves otherwise for a gradient
    model(x)
    assert torch.equal(torch.func.functional_call(model, dict(other.state_dict()), (x,)), other(x))
    twin = copy.deepcopy(model)
    scale_data(model)
    other.load_state_dict(randomize(create_model(name)).state_dict())  # on a GPU itself, random numbers are others
    assert torch.equal(twin(x), other(x))


@pytest.mark.parametrize("name", MICRO)
@torch.no_grad()
def test_a_forked_process_has_weights_of_its_own(name: str) -> None:
    """As a loader's worker or a server's does. On a GPU no process can be forked."""
    x, model, changed = torch.randn(2, 3, 32, 32), randomize(create_model(name)).eval(), create_model(name).eval()
    before = model(x)
    changed.load_state_dict({n: t * 0.5 if t.requires_grad else t for n, t in model.state_dict(keep_vars=True).items()})
    expected, context = changed(x), multiprocessing.get_context("fork")
    right = context.Value("i", 0)

    def child() -> None:
        scale_data(model)
        right.value = torch.equal(model(x), expected)

    process = context.Process(target=child)
    process.start()
    process.join(60)
    assert right.value
    assert torch.equal(model(x), before)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MICRO)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_compiled_model_follows_the_weights(name: str, training: bool, device: str) -> None:
    """Traced once, on a CPU without a compiler behind: weights are inputs of the graph, never part of it. The bits are
    those of a fresh model that is compiled in the same way."""
    on_gpu = device == "cuda"
    options = {"mode": "reduce-overhead"} if on_gpu else {"backend": "eager"}
    model, fresh = (randomize(create_model(name, **shallow(name))).to(device).train(training) for _ in range(2))
    compiled, expected = (torch.compile(each, fullgraph=True, **options) for each in (model, fresh))
    state, x = copy.deepcopy(model.state_dict()), torch.randn(2, 3, 32, 32, device=device)
    kept = ("fused AdamW", ".data", "average")  # on a GPU: graphs are recorded anew where addresses change
    for kind, change in CHANGES.items():
        if (kind, device) in NOT_IN_TORCH or (on_gpu and kind not in kept):
            continue
        model.load_state_dict(state)
        with torch.no_grad():
            for _ in range(3 if on_gpu else 1):  # a CUDA graph is recorded in the second call
                before = compiled(x).clone()
            change(model)
            if kind == "bfloat16 and back":  # tables are rounded, too
                change(fresh)
            fresh.load_state_dict(model.state_dict())
            after = compiled(x).clone()
            assert torch.equal(after, expected(x)), kind
        assert not torch.equal(after, before), kind
