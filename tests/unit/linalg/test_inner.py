"""Inner products are those of the gradients, in whatever form they come."""

import itertools

import pytest
import torch

from outergrad.core.types import Factors
from outergrad.linalg.inner import inner
from outergrad.linalg.leading import leading_values, values_of_rows
from outergrad.linalg.outer import product_of


def factors(rows, dtype=torch.float32, *, a_dtype=None, groups=2):
    a = torch.randn(groups, rows, 30).to(a_dtype or dtype)
    return Factors(torch.randn(groups, rows, 20).to(dtype), a)


def ids(count, *, table=50):
    return Factors(torch.randn(1, count, 8), torch.randperm(table)[:count])


def formed(gradient, *, table=50):
    """In float64."""
    if isinstance(gradient, torch.Tensor):
        return gradient.double()
    if gradient.a_GRI.dim() == 1:
        whole = torch.zeros(1, table, 8, dtype=torch.float64)
        whole[0, gradient.a_GRI] = gradient.d_GRO[0].double()
        return whole
    return product_of(Factors(gradient.d_GRO.double(), gradient.a_GRI.double()))


GRADIENTS = {
    "few rows": lambda: factors(5),
    "many rows": lambda: factors(400),
    "no rows": lambda: factors(0),
    "bf16": lambda: factors(7, torch.bfloat16),
    "mixed": lambda: factors(7, torch.float64, a_dtype=torch.float32),
    "formed": lambda: torch.randn(2, 20, 30),
    "formed in float64": lambda: torch.randn(2, 20, 30).double(),
}
TABLES = {"some ids": lambda: ids(9), "other ids": lambda: ids(20), "table": lambda: formed(ids(9))}


@pytest.mark.parametrize(
    ("one", "other"),
    [*itertools.product(GRADIENTS, repeat=2), *itertools.product(TABLES, repeat=2)],
)
def test_every_pair(one, other):
    torch.manual_seed(0)
    x, y = ((GRADIENTS | TABLES)[name]() for name in (one, other))
    expected = (formed(x) * formed(y)).sum().item()
    size = formed(x).norm().item() * formed(y).norm().item()
    assert inner(x, y) == pytest.approx(expected, abs=1e-5 * size + 1e-12)


@pytest.mark.parametrize("shape", [(1, 40, 30), (2, 30, 40), (1, 5, 40), (1, 40, 1), (1, 1, 40)])
def test_leading_values_from_a_cold_and_a_warm_start(shape):
    torch.manual_seed(0)
    sigma = torch.logspace(0, -3, min(shape[1:]))
    u, v = (torch.linalg.qr(torch.randn(shape[0], n, len(sigma))).Q for n in shape[1:])
    gradient, start = (u * sigma) @ v.mT, None
    for _ in range(3):
        found, start = leading_values(gradient, 16, start)
        assert found.shape == (shape[0], min(16, len(sigma)))
        assert torch.allclose(found, sigma[:16].expand_as(found), rtol=0.03, atol=1e-3)


def test_values_of_rows_that_depend_on_each_other():
    torch.manual_seed(0)
    d, a = torch.randn(2, 9, 20), torch.randn(2, 9, 6)
    found = values_of_rows(d @ d.mT, a @ a.mT, 6)
    expected = torch.linalg.svdvals((d.mT @ a).double())
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * expected.max().item())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_nan(value):
    gradient = torch.randn(1, 6, 5)
    gradient[0, 0, 0] = value
    found, start = leading_values(gradient, 4, None)
    assert found.isnan().all()
    assert start is None
    assert values_of_rows(gradient @ gradient.mT, gradient @ gradient.mT, 5).isnan().all()
