"""Spectra, effective ranks and what truncations lose."""

from __future__ import annotations

import pytest
import torch
from spectra import (
    SHAPES,
    cast,
    decaying,
    discarded_energy,
    gradient,
    relative_error,
    spectrum,
    with_spectrum,
)

from outergrad import Factors
from outergrad.linalg.leading import effective_rank
from outergrad.linalg.low_rank import small_core


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["slow", "fast", "geometric"])
def test_the_spectrum_is_that_of_the_gradient(shape, kind):
    for dtype, allowed in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        exact = cast(decaying(kind, *shape, groups=2), dtype)
        expected = torch.linalg.svdvals(gradient(exact))[:, : min(shape)]
        found = spectrum(exact)
        assert found.shape == expected.shape
        assert ((found - expected).abs() <= allowed * expected[:, :1]).all()


def test_effective_rank():
    """One for one direction, R for R alike, between for others, whatever the scale."""
    assert effective_rank(torch.tensor([5.0, 0.0, 0.0])).item() == 1
    assert effective_rank(torch.full((7,), 1e-20)).item() == pytest.approx(7, rel=1e-6)
    assert effective_rank(torch.zeros(3)).item() == 0
    assert effective_rank(torch.zeros(2, 0)).tolist() == [0, 0]
    assert effective_rank(torch.tensor([float("nan"), 1.0])).isnan()
    found_G = effective_rank(torch.tensor([[0.5, 0.25, 0.25], [1.0, 1.0, 0.0]]))
    torch.testing.assert_close(found_G, torch.tensor([2**1.5, 2.0]))


@pytest.mark.parametrize("shape", SHAPES)
def test_discarded_energy_of_any_approximation(shape):
    """Rounded, scaled or unrelated: it is the error of what is given."""
    exact = cast(decaying("geometric", *shape, groups=2), torch.float32)
    found = small_core(exact, 6).factors()
    others = {
        "rounded": cast(found, torch.bfloat16),
        "scaled": Factors(found.d_GRO * 0.9, found.a_GRI),
        "unrelated": cast(decaying("slow", *shape, groups=2, seed=5), torch.float32),
        "nothing": Factors(found.d_GRO[:, :0], found.a_GRI[:, :0]),
    }
    for other in others.values():
        error = relative_error(other, exact)
        assert discarded_energy(exact, other) == pytest.approx(error**2, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_discarded_energy_at_large_and_small_scales(scale):
    exact = cast(decaying("slow", *SHAPES[0]), torch.float32)
    exact = Factors(exact.d_GRO * scale, exact.a_GRI * scale)
    error = small_core(exact, 3, 0.01).relative_error
    found = small_core(Factors(exact.d_GRO.double(), exact.a_GRI.double()), 3).factors()
    assert discarded_energy(exact, found) == pytest.approx(error**2, rel=1e-5)


def test_discarded_energy_of_zero_and_of_itself():
    zero = Factors(torch.zeros(1, 3, 5), torch.zeros(1, 3, 4))
    exact = with_spectrum(torch.tensor([2.0, 1.0]), 3, 5, 4)
    assert discarded_energy(zero, zero) == 0
    assert abs(discarded_energy(exact, exact)) < 1e-12


def test_rows_for_the_wire():
    found = small_core(cast(decaying("slow", *SHAPES[0]), torch.float32), 3)
    bias = torch.randn(1, 60)
    padded = found.factors(rows=5, b_GO=bias)
    assert padded.d_GRO.shape == (1, 5, 60)
    assert padded.a_GRI.shape == (1, 5, 80)
    assert padded.b_GO is bias
    torch.testing.assert_close(gradient(padded), gradient(found.factors()))
