"""What only a GPU shows: places in a batch, the same bits twice, graphs captured by hand, streams. Without one, nothing
here runs."""

import pytest
import torch
import torch.nn.functional as F
from conftest import randomize
from torch import Tensor, nn

from common.models.registry import create_model, list_models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

EVERY = list_models("*_micro", exclude_filters="upernet_*")
ADAPTIVE = [name for name in EVERY if name.startswith("a_")]
PRECISIONS = [torch.float32, torch.bfloat16, torch.float16]


def build(name: str, seed: int = 0) -> nn.Module:
    return randomize(create_model(name), seed).cuda().eval()


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_logits_depend_on_neither_neighbours_nor_place(name: str, precision: torch.dtype) -> None:
    model, x, others, order = build(name), noise(16, 3, 32, 32), noise(16, 3, 32, 32), torch.randperm(16)
    others[5] = x[5]
    with torch.autocast("cuda", precision, enabled=precision != torch.float32):
        logits = model(x)
        assert torch.equal(model(x[order]), logits[order])
        assert torch.equal(model(others)[5], logits[5])
        assert torch.equal(model(x), logits)


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", ADAPTIVE)
@torch.no_grad()
def test_logits_of_moved_images_are_the_same_bits(name: str, precision: torch.dtype) -> None:
    model, x = build(name), noise(16, 3, 32, 32)
    with torch.autocast("cuda", precision, enabled=precision != torch.float32):
        logits = model(x)
        for shift in ((1, 0), (3, 30), (-7, 17)):
            assert torch.equal(model(x.roll(shift, (2, 3))), logits)


def trained(name: str, compiled: bool, precision: torch.dtype, steps: int = 5) -> list[Tensor]:
    torch.manual_seed(0)
    model = build(name).train()
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, y = noise(steps, 32, 3, 32, 32), torch.randint(10, (steps, 32), device="cuda")
    for images, labels in zip(x, y, strict=True):
        with torch.autocast("cuda", precision, enabled=precision != torch.float32):
            loss = F.cross_entropy(forward(images).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("precision", PRECISIONS[:2], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_one_seed_gives_one_training(name: str, precision: torch.dtype) -> None:
    first, second = (trained(name, False, precision) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_one_seed_gives_one_compiled_training(name: str) -> None:
    first, second = (trained(name, True, torch.bfloat16) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", ADAPTIVE)
@torch.no_grad()
def test_a_graph_captured_by_hand_follows_the_weights(name: str) -> None:
    """A graph holds addresses: what is prepared of weights must be prepared in the graph, or outlive it."""
    model, other, x = build(name), build(name, seed=5), noise(8, 3, 32, 32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(x)
    graph.replay()
    before = logits.clone()
    model.load_state_dict(other.state_dict())
    churn = [torch.full((1 << 16,), float("nan"), device="cuda") for _ in range(64)]  # freed memory is written over
    graph.replay()
    del churn
    assert torch.equal(logits, other(x))
    assert not torch.equal(logits, before)


@pytest.mark.parametrize("name", ADAPTIVE)
@torch.no_grad()
def test_streams_do_not_read_what_is_not_there_yet(name: str) -> None:
    """One stream prepares, another reads: each must have its own, or wait."""
    x = noise(64, 3, 32, 32)
    expected = build(name)(x)
    torch.cuda.synchronize()
    for _ in range(10):
        model, streams = build(name), [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        outputs = []
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(model(x))
        torch.cuda.synchronize()
        assert all(torch.equal(output, expected) for output in outputs)
