"""Singular values of rows and of products are those of an SVD; ranks are counted as numpy does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outergrad.linalg.spectra import numerical_rank, values_of, values_of_product


@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (5, 5), (1, 4)])
def test_values_are_those_of_an_svd(shape):
    x_GNW = torch.randn(2, *shape)
    wanted = torch.linalg.svdvals(x_GNW.double())
    assert torch.allclose(values_of(x_GNW), wanted, rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 6, 40])
def test_values_of_a_product_are_those_of_the_formed_one(rows):
    d_GNO, a_GNI = torch.randn(2, rows, 6), torch.randn(2, rows, 9)
    wanted = torch.linalg.svdvals(d_GNO.double().mT @ a_GNI.double())
    found = values_of_product(d_GNO, a_GNI)
    count = min(rows, 6)
    assert found.shape == (2, count)
    assert torch.allclose(found, wanted[:, :count], rtol=1e-6)
    assert (wanted[:, count:] < 1e-6 * wanted[:, :1]).all()


def test_what_is_not_finite_gives_nan():
    x_GNW = torch.full((1, 2, 3), torch.nan)
    assert values_of(x_GNW).isnan().all()
    assert values_of_product(x_GNW, torch.ones(1, 2, 4)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 1, 4])
def test_the_numerical_rank_is_that_of_the_factors(dtype, rank):
    matrix = torch.randn(20, rank, dtype=dtype) @ torch.randn(rank, 12, dtype=dtype)
    assert numerical_rank(matrix) == rank == np.linalg.matrix_rank(matrix.numpy())
    assert numerical_rank(torch.stack([matrix, 0 * matrix])) == rank


@pytest.mark.parametrize("wrong", [torch.ones(3), torch.full((2, 2), torch.inf)])
def test_what_has_no_rank_is_refused(wrong):
    with pytest.raises(ValueError, match="numerical_rank: "):
        numerical_rank(wrong)
