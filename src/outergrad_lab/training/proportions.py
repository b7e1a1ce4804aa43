"""Whole numbers in proportion to weights, with exact sums."""

import torch
from torch import Tensor

ROUNDS = 200
"""Rounds of fitting; a table whose entries differ by a factor of three needs some twenty."""


def whole_shares(weights: Tensor, total: int) -> Tensor:
    """Splits a total exactly, in proportion to weights within 1, into int64 shares."""
    ends = (weights.double().cumsum(0) / weights.double().sum() * total).round().long()
    return ends.diff(prepend=ends.new_zeros(1))


def fitted_counts(weights: Tensor, row_sums: Tensor, column_sums: Tensor) -> Tensor:
    """Returns the table of whole numbers with given sums, nearest in shape to positive weights.

    Source: Deming and Stephan, 1940 (iterative proportional fitting).

    Args:
        weights: Shape of the table, (rows, columns).
        row_sums: Wanted sums, int64, (rows,).
        column_sums: Wanted sums, int64, (columns,), of the same total.
    """
    table, smallest = weights.double(), torch.finfo(torch.float64).tiny
    for _ in range(ROUNDS):
        table = table * (row_sums / table.sum(dim=1).clamp_min(smallest))[:, None]
        table = table * (column_sums / table.sum(dim=0).clamp_min(smallest))
    return _rounded(table, row_sums, column_sums)


def _rounded(table: Tensor, row_sums: Tensor, column_sums: Tensor) -> Tensor:
    """Rounds down, and adds what is missing where a row and a column both lack some."""
    counts = table.floor().long()
    rows = torch.arange(len(row_sums)).repeat_interleave(row_sums - counts.sum(dim=1))
    columns = torch.arange(len(column_sums)).repeat_interleave(column_sums - counts.sum(dim=0))
    return counts.index_put((rows, columns), torch.ones_like(rows), accumulate=True)
