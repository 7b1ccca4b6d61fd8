"""Rows of a table: as by an index, but their gradient adds in a fixed order, whatever compiles it."""

import sys
from collections.abc import Callable

import pytest
import torch
from conftest import randomize
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from common import create_model
from common.models.positions import circular_rows, linear_rows
from common.models.windows import relative_position_index
from common.ops.lookup import _LookUp, look_up

INDICES = {"windows": relative_position_index((3, 5)), "circular": circular_rows(8, 4), "linear": linear_rows(4, 8),
           "fine": circular_rows(6, 6)}  # fmt: skip


@pytest.fixture(params=INDICES)
def index(request: pytest.FixtureRequest) -> Tensor:
    return INDICES[request.param]


def test_no_row_twice_for_a_query(index: Tensor) -> None:
    """What the gradient relies on."""
    assert all(len(row.unique()) == len(row) for row in index)


def test_gradients_are_those_of_an_index(index: Tensor) -> None:
    table = torch.randn(int(index.max()) + 3, 4, dtype=torch.float64, requires_grad=True)  # with rows that none uses
    along = torch.randn(*index.shape, 4, dtype=torch.float64)
    ours, plain = _LookUp.apply(table, index), table[index]
    assert torch.equal(ours, plain)
    assert torch.equal(look_up(table, index), plain)
    (found,), (expected,) = (torch.autograd.grad(rows, table, along) for rows in (ours, plain))
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradgradcheck(lambda t: _LookUp.apply(t, index), table)


def test_nothing_is_scattered(index: Tensor) -> None:
    """A scatter that adds is one of atomic additions on a GPU."""
    table = torch.randn(int(index.max()) + 1, 2)

    def gradient(table: Tensor) -> Tensor:
        table = table.detach().requires_grad_()
        return torch.autograd.grad(_LookUp.apply(table, index).square().sum(), table)[0]

    calls = [str(node.target) + str(node.args[3:]) for node in make_fx(gradient)(table).graph.nodes]
    assert not any("index_put" in call and "True" in call for call in calls)
    assert not any("scatter" in call or "index_add" in call for call in calls)
    assert any("index_put" in call for call in calls)  # the one that says which pairs use a row


def test_batched_gradients(index: Tensor) -> None:
    tables, along = torch.randn(3, int(index.max()) + 1, 2), torch.randn(*index.shape, 2)
    apart = torch.func.vmap(torch.func.grad(lambda t: (_LookUp.apply(t, index) * along).sum()))(tables)
    expected = torch.func.vmap(torch.func.grad(lambda t: (t[index] * along).sum()))(tables)
    torch.testing.assert_close(apart, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swin_micro", "swinv2_micro", "mvitv2_micro"])
def test_models_are_traced_with_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: in whole graphs, with the gradients of an index."""
    model, x = randomize(create_model(name)), torch.randn(2, 3, 32, 32)
    parameters = dict(model.named_parameters())

    def gradients(forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(forward(x).square().mean(), list(parameters.values())))

    expected = gradients(model)
    monkeypatch.setattr(sys.modules[type(model).__module__], "look_up", _LookUp.apply)
    assert_close(gradients(model), expected)
    assert_close(gradients(torch.compile(model, backend="aot_eager", fullgraph=True)), expected)


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * float(1 + b.abs().max()))
