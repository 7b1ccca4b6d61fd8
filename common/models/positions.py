"""Relative positions along one axis, for attention between q queries and k keys that share it (A-RPE).

The finer of the two grids has M = max(q, k) places; query i stands at i M/q, key j at j M/k. A table of 2M - 1 rows
holds one row per signed distance, and row (k - 1) M/k = M - M/k is the one of distance zero, so that the linear
distances of an array, from 1 - k to q - 1 steps of their grid, fill the table from row 0.

On a torus the distance is taken modulo M (the paper's Adaptive RPE). Of the residues the *signed minimal* one is used,
-M/2 < d <= M/2: M rows of the same table are read, the stock table loads, and near neighbours keep their rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["circular_rows", "in_eights", "linear_rows", "one_hot_places"]


def linear_rows(queries: int, keys: int) -> Tensor:
    """(queries, keys) rows d + M - M/k of the linear distance d = i M/q - j M/k."""
    fine, distance = _distances(queries, keys)
    return distance + fine - fine // keys


def circular_rows(queries: int, keys: int) -> Tensor:
    """(queries, keys) rows d + M - M/k of d = (i M/q - j M/k) mod M, less M where that exceeds M/2.

    The smallest row is floor(M/2) + 1 - M/k: keys more than M/2 + 1 places apart, that is a single key beside three
    queries or more, have no rows.
    """
    fine, distance = _distances(queries, keys)
    if fine // keys > fine // 2 + 1:
        raise ValueError(f"{keys} keys for {queries} queries are {fine // keys} places apart, at most {fine // 2 + 1} "
                         "have circular relative positions: use a larger image or a smaller key stride")  # fmt: skip
    distance = distance % fine
    distance = torch.where(distance > fine // 2, distance - fine, distance)
    return distance + fine - fine // keys


def _distances(queries: int, keys: int) -> tuple[int, Tensor]:
    fine = max(queries, keys)
    if fine % queries or fine % keys:
        raise ValueError(f"{queries} queries and {keys} keys do not share a grid: one number must divide the other")
    i, j = torch.arange(queries) * (fine // queries), torch.arange(keys) * (fine // keys)
    return fine, i[:, None] - j


def in_eights(x: Tensor, dim: int) -> Tensor:
    """Pad ``dim`` with zeros to a multiple of 8, the width that GPUs multiply matrices in."""
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim % x.ndim) + (0, -x.shape[dim] % 8))


def one_hot_places(rows: int, columns: int) -> Tensor:
    """(rows columns, channels): 1 in the row and 1 in the column of each key, rows first, each kind in eights."""
    row, column = torch.eye(rows).repeat_interleave(columns, 0), torch.eye(columns).repeat(rows, 1)
    return torch.cat([in_eights(row, 1), in_eights(column, 1)], 1)
