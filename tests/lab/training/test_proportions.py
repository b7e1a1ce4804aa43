from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outergrad_lab.training.split import fitted_counts, whole_shares


@given(st.lists(st.integers(1, 100), min_size=1, max_size=9), st.integers(0, 10_000))
def test_shares_are_whole_in_proportion_and_add_up(weights, total):
    weights = torch.tensor(weights)
    shares = whole_shares(weights, total)
    assert shares.sum() == total
    assert (shares - weights / weights.sum() * total).abs().max() <= 1.01


@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=6),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_counts_have_both_sums(rows, shares, seed):
    row_sums = torch.tensor(rows)
    column_sums = whole_shares(torch.tensor(shares), int(row_sums.sum()))
    size = (len(rows), len(shares))
    weights = torch.randint(1, 4, size, generator=torch.Generator().manual_seed(seed))
    counts = fitted_counts(weights, row_sums, column_sums)
    assert counts.min() >= 0
    assert counts.sum(dim=1).equal(row_sums)
    assert counts.sum(dim=0).equal(column_sums)


@pytest.mark.parametrize("factor", [1, 7])
def test_a_table_that_fits_stays_as_it_is(factor):
    table = torch.tensor([[30, 10, 20], [5, 15, 25]])
    assert fitted_counts(factor * table, table.sum(dim=1), table.sum(dim=0)).equal(table)
