"""Canonical factors: the same product, and a function of the product alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outergrad import Factors
from outergrad.linalg.outer import weight_gradient
from outergrad.linalg.power import canonical


def product(factors: Factors) -> torch.Tensor:
    return weight_gradient(factors)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(1, 3),
    rows=st.integers(1, 12),
    outputs=st.integers(1, 12),
    inputs=st.integers(1, 12),
    rank=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_product_and_bias_are_kept_whatever_the_shape_and_rank(
    groups, rows, outputs, inputs, rank, seed
):
    generator = torch.Generator().manual_seed(seed)
    # In float64, or rounding gives d a higher rank, of directions so weak that some are dropped.
    mix = torch.randn(groups, rows, min(rank, rows), generator=generator).double()
    d = mix @ torch.randn(groups, min(rank, rows), outputs, generator=generator).double()
    a = torch.randn(groups, rows, inputs, generator=generator)
    sent = min(rows, outputs, inputs)
    found = canonical(Factors(d, a), sent, bias=True)
    assert found.d_GRO.shape == (groups, sent, outputs)
    assert found.a_GRI.shape == (groups, sent, inputs)
    expected = d.double().mT @ a.double()
    # Small columns of the sketch are lost relative to its norm: 3e-9 at most in 1e8 random cases.
    assert relative(found.d_GRO.mT @ found.a_GRI, expected) < 6e-9
    torch.testing.assert_close(found.b_GO, d.double().sum(dim=1))


@pytest.mark.parametrize(("outputs", "inputs"), [(30, 20), (20, 30), (25, 25)])
def test_two_batches_with_the_same_gradient_have_the_same_factors(outputs, inputs):
    """Mixed rows, split rows and reordered rows: nothing but the product can be seen."""
    d, a = torch.randn(1, 6, outputs).double(), torch.randn(1, 6, inputs).double()
    mix = torch.randn(6, 6).double()
    others = {
        "mixed": Factors(torch.linalg.inv(mix).T @ d, mix @ a),
        "scaled": Factors(d * 8, a / 8),
        "reordered": Factors(d.flip(1), a.flip(1)),
        "split": Factors(torch.cat([d, d], 1) / 2, torch.cat([a, a], 1)),
        "padded": Factors(torch.cat([d, d * 0], 1), torch.cat([a, a + 1], 1)),
    }
    expected = canonical(Factors(d, a), 12, bias=False)
    for name, other in others.items():
        torch.testing.assert_close(product(other), product(Factors(d, a)), msg=name)
        found = canonical(other, 12, bias=False)
        torch.testing.assert_close(found.d_GRO, expected.d_GRO, rtol=1e-7, atol=1e-9, msg=name)
        torch.testing.assert_close(found.a_GRI, expected.a_GRI, rtol=1e-7, atol=1e-9, msg=name)


def test_float32_batches_with_the_same_gradient_agree_to_rounding():
    d, a = torch.randn(1, 8, 40), torch.randn(1, 8, 50)
    mix = torch.linalg.qr(torch.randn(8, 8))[0]
    one = canonical(Factors(d, a), 8, bias=False)
    two = canonical(Factors(mix @ d, mix @ a), 8, bias=False)
    assert relative(one.d_GRO, two.d_GRO) < 1e-4
    assert relative(one.a_GRI, two.a_GRI) < 1e-4


@pytest.mark.parametrize("condition", [1e0, 1e4, 1e8])
def test_small_singular_values_survive(condition):
    """The error stays at float32's rounding of the whole, however the spectrum falls."""
    spectrum = torch.logspace(0, -torch.log10(torch.tensor(condition)), 16).double()
    d = torch.linalg.qr(torch.randn(60, 16).double())[0].T * spectrum[:, None]
    a = torch.linalg.qr(torch.randn(70, 16).double())[0].T
    expected = d.T @ a
    found = canonical(Factors(d[None], a[None]), 16, bias=False)
    rounded = Factors(found.d_GRO.float(), found.a_GRI.float())
    assert relative(rounded.d_GRO[0].double().T @ rounded.a_GRI[0].double(), expected) < 1e-7


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(bad):
    d, a = torch.randn(1, 4, 6), torch.randn(1, 4, 5)
    d[0, 1, 2] = bad
    found = canonical(Factors(d, a), 4, bias=True)
    assert not torch.isfinite(found.d_GRO.mT @ found.a_GRI).any()


def test_zero_gradient_has_zero_factors():
    found = canonical(Factors(torch.zeros(1, 4, 6), torch.randn(1, 4, 5)), 4, bias=False)
    assert found.d_GRO.count_nonzero() == found.a_GRI.count_nonzero() == 0
