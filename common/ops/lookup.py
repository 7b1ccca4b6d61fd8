"""Rows of a table, such as one of relative positions, with a gradient that is summed in a fixed order."""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["look_up"]


class _LookUp(torch.autograd.Function):
    """``table[index]``. Compilers make its gradient a scatter: threads of a GPU add as they arrive, and two runs of one
    seed differ in their last bits. Here every row reads what it was used for, and sums that."""

    generate_vmap_rule = True

    @staticmethod
    def forward(table: Tensor, index: Tensor) -> Tensor:
        return table[index]

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        table, index = inputs
        ctx.rows = len(table)
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (index,) = ctx.saved_tensors
        (queries, keys), device = index.shape, index.device
        query, pair = torch.arange(queries, device=device), torch.arange(queries * keys, device=device)
        used = torch.full((ctx.rows, queries), queries * keys, device=device)  # by each query, or none
        used = used.index_put((index, query[:, None]), pair.view(queries, keys))
        return F.pad(grad.flatten(0, 1), (0, 0, 0, 1))[used].sum(1), None


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]``: rows (n, C) for each pair of a query and a key, (queries, keys), no row twice for a query
    -> (queries, keys, C). On a CPU torch adds up its gradient in a fixed order itself."""
    return _LookUp.apply(table, index) if table.is_cuda and torch.is_grad_enabled() else table[index]
