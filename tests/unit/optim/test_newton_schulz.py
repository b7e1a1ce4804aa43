"""Newton-Schulz: singular values close to 1, singular vectors as they were."""

from __future__ import annotations

import pytest
import torch

from outergrad.optim import newton_schulz

SHAPES = [(6, 6), (4, 9), (9, 4), (1, 5), (3, 5, 7), (2, 2, 7, 5)]


def matrix(shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.bfloat16])
def test_singular_values_come_close_to_one(shape, dtype):
    x = newton_schulz(matrix(shape, torch.float32).to(dtype))
    assert x.shape == shape
    assert x.dtype == dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values = torch.linalg.svdvals(x.to(wide))
    assert values.min() > 0.67
    assert values.max() < 1.21


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_vectors_stay(shape):
    m = matrix(shape)
    u, s, vh = torch.linalg.svd(m, full_matrices=False)
    inner = u.mH @ newton_schulz(m) @ vh.mH
    assert (inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-12
    assert inner.diagonal(dim1=-2, dim2=-1).shape == s.shape


@pytest.mark.parametrize("long", [40, 60, 200])
@pytest.mark.parametrize(("dtype", "off"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_every_singular_value_follows_the_polynomial(long, dtype, off):
    """Also where the iterations go through a matrix's Gram matrix, as it is long."""
    values = torch.logspace(-6, 0, 30, dtype=torch.float64)
    values /= values.norm()
    left, right = (torch.linalg.qr(matrix((size, 30))).Q for size in (40, long))
    expected = values
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    whole = newton_schulz((7.0 * (left * values) @ right.T).to(dtype)).double()
    torch.testing.assert_close((left.T @ whole @ right).diagonal(), expected, rtol=off, atol=off)
    across = newton_schulz((7.0 * (right * values) @ left.T).to(dtype)).double()
    torch.testing.assert_close(across, whole.mT, rtol=off, atol=off)


def test_directions_that_are_not_there_stay_away():
    thin = matrix((20, 3), torch.float32) @ matrix((3, 30), torch.float32)
    assert torch.linalg.matrix_rank(newton_schulz(thin), rtol=1e-3) == 3


def test_a_matrix_of_zeros_stays_zero():
    assert newton_schulz(torch.zeros(2, 3, 4)).eq(0).all()


def test_one_of_a_batch_does_not_depend_on_the_others():
    batch = matrix((3, 5, 8))
    batch[1] *= 1e6
    alone = torch.stack([newton_schulz(one) for one in batch])
    torch.testing.assert_close(newton_schulz(batch), alone, rtol=1e-12, atol=1e-12)
