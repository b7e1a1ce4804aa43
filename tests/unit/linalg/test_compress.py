"""What every solver must do, whatever its way: run over the table of solvers and dtypes."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spectra import (
    DECAYS,
    SHAPES,
    best_error,
    cast,
    decaying,
    discarded_energy,
    relative_error,
    spectrum,
    with_spectrum,
)

from outergrad import Factors
from outergrad.linalg.compress import Solver, choose_solver, compress

SOLVERS = get_args(Solver)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EXACT = {"small_core"}
INEXACT = 1.02

pytestmark = pytest.mark.parametrize("solver", SOLVERS)


def same(one, two) -> bool:
    return torch.equal(one.d_GRO, two.d_GRO) and torch.equal(one.a_GRI, two.a_GRI)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 2, 7])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_a_gradient_of_low_rank_is_reproduced(solver, shape, rank, dtype, allowed):
    exact = cast(with_spectrum(torch.arange(rank, 0, -1), *shape), dtype)
    for most in (rank, rank + 3):
        found = compress(exact, most, solver=solver)
        assert found.rank == rank
        assert relative_error(found.factors(), exact) < allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(solver, dtype):
    exact = Factors(torch.randn(1, 4, 60).to(dtype), torch.randn(1, 4, 70).to(dtype))
    found = compress(exact, 4, solver=solver)
    assert found.d_GRO.dtype == found.a_GRI.dtype == torch.float32
    assert relative_error(found.factors(), exact) < 1e-5


def test_factors_of_two_precisions(solver):
    exact = Factors(torch.randn(1, 4, 60).bfloat16(), torch.randn(1, 4, 70).double())
    assert relative_error(compress(exact, 4, solver=solver).factors(), exact) < 1e-10


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 4, 12])
def test_as_good_as_the_best_approximation(solver, kind, shape, rank):
    exact = cast(decaying(kind, *shape), torch.float32)
    found = compress(exact, rank, solver=solver)
    assert found.rank == rank
    worse = relative_error(found.factors(), exact) / best_error(exact, rank)
    assert worse <= (1.0001 if solver in EXACT else INEXACT)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 90),
    inputs=st.integers(1, 24),
    outputs=st.integers(1, 24),
    groups=st.integers(1, 3),
    rank=st.integers(1, 12),
    iterations=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_never_worse_than_nothing_whatever_the_shape(
    solver, rows, inputs, outputs, groups, rank, iterations, dtype, seed
):
    """One iteration from a random start is poor, but a projection all the same."""
    generator = torch.Generator().manual_seed(seed)
    d = torch.randn(groups, rows, outputs, generator=generator).to(dtype)
    exact = Factors(d, torch.randn(groups, rows, inputs, generator=generator).to(dtype))
    found = compress(exact, rank, solver=solver, iterations=iterations)
    assert 1 <= found.rank <= min(rank, rows, inputs, outputs)
    assert found.d_GRO.shape == (groups, found.rank, outputs)
    assert found.a_GRI.shape == (groups, found.rank, inputs)
    assert relative_error(found.factors(), exact) <= 1 + 1e-6
    identity = torch.eye(found.rank, dtype=found.a_GRI.dtype)
    torch.testing.assert_close(
        found.a_GRI @ found.a_GRI.mT, identity.expand(groups, -1, -1), rtol=0, atol=1e-5
    )
    assert (found.sigma_GR.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tolerance", [0.9, 0.3, 0.1, 0.03])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_rank_within_the_tolerance(solver, shape, tolerance, dtype):
    exact = cast(decaying("geometric", *shape), dtype)
    found = compress(exact, 40, tolerance, solver=solver)
    rank = found.rank
    assert relative_error(found.factors(), exact) <= tolerance * (1 + 1e-5)
    fewer = Factors(found.d_GRO[:, : rank - 1], found.a_GRI[:, : rank - 1])
    assert relative_error(fewer, exact) > tolerance * (1 - 1e-5)
    least = next(r for r in range(41) if best_error(exact, r) <= tolerance)
    assert rank - least in ((0,) if solver in EXACT else (0, 1))


def test_the_rank_ends_at_the_limit_where_the_tolerance_needs_more(solver):
    exact = cast(decaying("slow", *SHAPES[1]), torch.float32)
    found = compress(exact, 3, 0.1, solver=solver)
    assert found.rank == 3
    assert found.relative_error > 0.1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["slow", "geometric"])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_the_error_is_known(solver, shape, kind, dtype, allowed):
    exact = cast(decaying(kind, *shape), dtype)
    found = compress(exact, 10, 0.01, solver=solver)
    error = relative_error(found.factors(), exact)
    energy = spectrum(exact).square().sum().item()
    assert found.relative_error**2 == pytest.approx(error**2, rel=allowed)
    assert found.energy.sum().item() == pytest.approx(energy, rel=1e-6)
    assert discarded_energy(exact, found.factors()) == pytest.approx(error**2, rel=1e-7)


@pytest.mark.parametrize("tolerance", [0.0, 0.1])
@pytest.mark.parametrize("rows", [0, 1, 5, 100])
def test_a_zero_gradient_has_no_rank(solver, rows, tolerance):
    nothing = [
        Factors(torch.zeros(2, rows, 30), torch.randn(2, rows, 20)),
        Factors(torch.randn(2, rows, 30), torch.zeros(2, rows, 20)),
    ]
    for factors in nothing:
        found = compress(factors, 4, tolerance, solver=solver)
        assert found.rank == 0
        assert found.d_GRO.shape == (2, 0, 30)
        assert found.a_GRI.shape == (2, 0, 20)
        assert found.relative_error in (0, None)


@pytest.mark.parametrize("tolerance", [0.0, 0.01])
def test_one_row_and_duplicate_rows(solver, tolerance):
    row = Factors(torch.randn(1, 1, 30), torch.randn(1, 1, 20))
    many = Factors(row.d_GRO.expand(1, 50, 30), row.a_GRI.expand(1, 50, 20) * 1.0)
    for exact in (row, many):
        found = compress(exact, 4, tolerance, solver=solver)
        assert found.rank == 1
        assert relative_error(found.factors(), exact) < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_cancel_leave_rounding_at_most(solver, seed):
    generator = torch.Generator().manual_seed(seed)
    d = torch.randn(1, 12, 60, generator=generator)
    a = torch.randn(1, 12, 70, generator=generator)
    cancelled = Factors(torch.cat([d, -d], 1), torch.cat([a, a], 1))
    found = compress(cancelled, 4, 0.1, solver=solver)
    assert (found.d_GRO.mT @ found.a_GRI).norm() < 1e-5 * (d.mT @ a).norm()
    assert found.relative_error <= 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("scale_d", "scale_a"),
    [
        (6e4, 6e4),
        (1e-7, 1e-7),
        (1e-20, 1e-15),
        (1e20, 1e15),
        (1e30, 1e-36),
        (1e-36, 1e30),
        (1e-12, 1.0),
    ],
)
def test_scales_whose_squares_are_out_of_range(solver, shape, scale_d, scale_a):
    exact = cast(decaying("harmonic", *shape), torch.float32)
    scaled = Factors(exact.d_GRO * scale_d, exact.a_GRI * scale_a)
    found = compress(scaled, 4, 0.01, solver=solver)
    assert found.rank == 4
    assert relative_error(found.factors(), scaled) <= INEXACT * best_error(scaled, 4)
    assert found.relative_error == pytest.approx(best_error(scaled, 4), rel=0.02)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("tolerance", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("groups", [1, 2])
def test_what_is_not_finite_is_not_hidden(solver, bad, tolerance, shape, groups):
    exact = cast(decaying("harmonic", *shape, groups=groups), torch.float32)
    for spoilt in exact[:2]:
        kept = spoilt[0, 1, 2].item()
        spoilt[0, 1, 2] = bad
        found = compress(exact, 4, tolerance, solver=solver).factors()
        assert (found.d_GRO.mT @ found.a_GRI)[0].isnan().all()
        assert (found.d_GRO.mT @ found.a_GRI)[1:].isfinite().all()
        spoilt[0, 1, 2] = kept


@pytest.mark.parametrize("tolerance", [0.0, 0.2])
def test_groups_are_decomposed_apart_and_share_a_rank(solver, tolerance):
    sigma_GK = torch.tensor([[3.0, 2, 1], [5.0, 0, 0], [0.0, 0, 0]])
    exact = cast(with_spectrum(sigma_GK, 40, 30, 20, groups=3), torch.float32)
    found = compress(exact, 8, tolerance, solver=solver)
    assert found.rank == (3 if tolerance == 0 else 2)  # 1 of 14 + 25 is within 0.2² of it
    torch.testing.assert_close(
        found.sigma_GR.float(), sigma_GK[:, : found.rank], rtol=1e-5, atol=1e-5
    )
    assert relative_error(found.factors(), exact) <= max(tolerance, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_every_time(solver, dtype):
    exact = cast(decaying("slow", *SHAPES[2]), dtype)
    first = compress(exact, 4, 0.1, solver=solver)
    torch.manual_seed(123)
    assert same(first, compress(exact, 4, 0.1, solver=solver))


def test_inputs_are_left_alone(solver):
    exact = cast(decaying("slow", *SHAPES[0]), torch.float32)
    before = Factors(exact.d_GRO.clone(), exact.a_GRI.clone())
    compress(exact, 4, 0.1, solver=solver)
    assert same(exact, before)


def test_arguments_out_of_range(solver):
    exact = decaying("slow", *SHAPES[0])
    with pytest.raises(ValueError, match="rank must be at least 1, not 0"):
        compress(exact, 0, solver=solver)
    with pytest.raises(ValueError, match="tolerance"):
        compress(exact, 1, 1.0, solver=solver)
    with pytest.raises(ValueError, match="iterations"):
        compress(exact, 1, solver=solver, iterations=0)
    with pytest.raises(ValueError, match="solver must be one of"):
        compress(exact, 1, solver=solver + "s")


def test_auto_picks_by_shape(solver):
    assert choose_solver(8, 1024, 1024, 4, 3) == "small_core"
    assert choose_solver(2048, 16, 1024, 4, 3) == "small_core"
    assert choose_solver(2048, 1024, 1024, 4, 3) == "subspace_iteration"
    assert choose_solver(64, 1024, 1024, 60, 3) == "small_core"
