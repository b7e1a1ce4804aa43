"""Merging the factors of several sites."""

from __future__ import annotations

import pytest
import torch
from spectra import best_error, cast, decaying, gradient, relative_error, with_spectrum

from outergrad import Factors
from outergrad.linalg.compress import compress
from outergrad.linalg.low_rank import merge
from outergrad.linalg.outer import stack


def sites(count: int, *, groups: int = 1, dtype: torch.dtype = torch.float32) -> list[Factors]:
    """Factors of unequal ranks from sites whose gradients are unlike."""
    return [
        cast(decaying("harmonic", 5 + s, 40, 30, groups=groups, seed=s), dtype)
        for s in range(count)
    ]


def total(parts: list[Factors], weights: list[float]) -> Factors:
    pairs = zip(parts, weights, strict=True)
    return stack([Factors(part.d_GRO.double() * w, part.a_GRI.double()) for part, w in pairs])


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_the_best_approximation_of_the_mean(count, groups, rank):
    parts = sites(count, groups=groups)
    mean = total(parts, [1 / count] * count)
    found = merge(parts, rank)
    best = best_error(mean, rank)
    assert relative_error(found.factors(), mean) <= 1.0001 * best + 1e-6
    assert found.relative_error == pytest.approx(best, rel=1e-4, abs=1e-6)


def test_weights():
    parts, weights = sites(3), [0.5, 0.3, 0.0]
    found = merge(parts, 30, weights=weights)
    assert relative_error(found.factors(), total(parts, weights)) < 1e-6
    assert found.rank == 5 + 6
    with pytest.raises(ValueError, match="zip"):
        merge(parts, 4, weights=[1.0])


def test_the_smallest_rank_within_the_tolerance():
    parts = sites(4)
    mean = total(parts, [0.25] * 4)
    rank = merge(parts, 26, 0.2).rank
    assert best_error(mean, rank) <= 0.2 < best_error(mean, rank - 1)


@pytest.mark.parametrize("count", [3, 8])
def test_a_tree_of_merges_equals_one_merge_where_the_rank_suffices(count):
    """What all sites have in common has a rank, and merges two by two keep it."""
    common = with_spectrum(torch.tensor([3.0, 2.0, 1.0]), 3, 40, 30)
    generator = torch.Generator().manual_seed(1)
    parts = [
        Factors(torch.randn(1, 3, 3, generator=generator).double() @ common.d_GRO, common.a_GRI)
        for _ in range(count)
    ]
    level = [(part, 1) for part in parts]
    while len(level) > 1:
        (one, m), (two, n), *level = level
        merged = merge([one, two], 3, weights=[m / (m + n), n / (m + n)])
        level.append((merged.factors(), m + n))
    assert level[0][0].d_GRO.shape[1] == 3
    assert relative_error(level[0][0], total(parts, [1 / count] * count)) < 1e-12


def test_parts_in_half_precision_are_weighted_in_single():
    parts = sites(3, dtype=torch.bfloat16)
    assert relative_error(merge(parts, 30).factors(), total(parts, [1 / 3] * 3)) < 1e-6


def test_sites_without_rows_and_sites_that_cancel():
    part = sites(1)[0]
    nothing = Factors(part.d_GRO[:, :0], part.a_GRI[:, :0])
    assert merge([nothing, nothing], 4).rank == 0
    assert relative_error(merge([part, nothing], 8, weights=[1, 1]).factors(), part) < 1e-6
    found = merge([part, Factors(-part.d_GRO, part.a_GRI)], 8)
    assert gradient(found.factors()).norm() < 1e-6 * gradient(part).norm()


def test_what_solvers_return_can_be_merged():
    parts = sites(3)
    found = merge([compress(part, 4).factors(rows=6) for part in parts], 12)
    kept = total([compress(part, 4).factors() for part in parts], [1 / 3] * 3)
    assert found.rank == 12
    assert relative_error(found.factors(), kept) < 1e-5


def test_what_is_not_finite_is_not_hidden():
    parts = sites(2)
    parts[1].d_GRO[0, 0, 0] = float("nan")
    assert gradient(merge(parts, 2).factors()).isnan().all()
