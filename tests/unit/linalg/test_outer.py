"""Sums of outer products."""

from __future__ import annotations

import torch

from outergrad import Factors
from outergrad.linalg.outer import (
    bias_gradient,
    coalesce,
    lookup_gradient,
    stack,
    weight_gradient,
)


def test_the_product_of_a_stack_is_the_sum_of_the_products():
    parts = [Factors(torch.randn(2, n, 5), torch.randn(2, n, 4)) for n in (3, 1, 6)]
    expected = sum(weight_gradient(part) for part in parts)
    torch.testing.assert_close(weight_gradient(stack(parts)), expected)
    torch.testing.assert_close(weight_gradient(stack(parts), 0.25), expected / 4)
    biases = sum(part.d_GRO.sum(dim=1).flatten() for part in parts)
    torch.testing.assert_close(bias_gradient(parts, 0.5), biases / 2)


def test_large_and_small_products_agree():
    d, a = torch.randn(1, 30, 200), torch.randn(1, 30, 150)
    large = weight_gradient(Factors(d, a))
    small = weight_gradient(Factors(d[..., :20], a))
    torch.testing.assert_close(large[:20], small)
    torch.testing.assert_close(
        large.double(), d[0].double().T @ a[0].double(), atol=1e-4, rtol=1e-5
    )


def test_many_rows_are_summed_exactly_enough():
    """Ten thousand positive terms: a float32 loop would be off by 1e-5."""
    d, a = torch.rand(1, 10_000, 3), torch.rand(1, 10_000, 2)
    exact = d[0].double().T @ a[0].double()
    assert ((weight_gradient(Factors(d, a)) - exact).norm() / exact.norm()) < 1e-7


def test_lookups():
    ids, d = torch.tensor([3, 1, 3, 0]), torch.randn(4, 5)
    distinct, sums = coalesce(ids, d)
    assert distinct.tolist() == [0, 1, 3]
    torch.testing.assert_close(sums[2], d[0] + d[2])
    dense = torch.zeros(6, 5).index_add(0, ids, d)
    part = Factors(sums[None], distinct)
    torch.testing.assert_close(lookup_gradient([part], 6), dense)
    torch.testing.assert_close(lookup_gradient([part, part], 6, 0.5), dense)
    both = stack([part, part])
    assert both.a_GRI.tolist() == [0, 1, 3], "one row per id, however often it was looked up"
