"""Bases of one matrix are the same on every kind of device."""

import pytest
import torch

from outergrad.linalg.orthonormal import cholesky_qr2, orthonormal


@pytest.mark.parametrize("shape", [(1, 20, 4), (3, 9, 9), (2, 50, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_have_the_same_signs_by_either_way(shape, dtype):
    """Sites that sum sketches along them may be of different kinds."""
    torch.manual_seed(0)
    y_GWK = torch.randn(shape, dtype=dtype)
    by_qr, by_cholesky = orthonormal(y_GWK), cholesky_qr2(y_GWK)
    assert torch.allclose(by_qr, by_cholesky, atol=1e-4)
    identity = torch.eye(shape[2], dtype=dtype)
    assert torch.allclose(by_qr.mT @ by_qr, identity.expand(shape[0], -1, -1), atol=1e-5)


def test_where_cholesky_gives_up_its_signs_remain():
    torch.manual_seed(0)
    y_GWK = torch.randn(1, 20, 3)
    y_GWK[..., 2] = y_GWK[..., 0] + 1e-6 * torch.randn(1, 20)
    assert torch.allclose(cholesky_qr2(y_GWK)[..., :2], orthonormal(y_GWK)[..., :2], atol=1e-4)
    r_GKK = cholesky_qr2(y_GWK).mT @ y_GWK
    assert (r_GKK.diagonal(dim1=1, dim2=2) > 0).all()
