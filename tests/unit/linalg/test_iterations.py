"""What the iterative solvers do besides what all do: warm starts, bases, deflation."""

from __future__ import annotations

import pytest
import torch
from spectra import SHAPES, best_error, cast, decaying, gradient, relative_error, with_spectrum

from outergrad import Factors
from outergrad.linalg.orthonormal import cholesky_qr2, orthonormal
from outergrad.linalg.power import power_iteration
from outergrad.linalg.product import cheapest, product
from outergrad.linalg.subspace import subspace_iteration


def loss_of_orthogonality(q_GWK: torch.Tensor) -> float:
    q = q_GWK.double()
    return (q.mT @ q - torch.eye(q.shape[2]).double()).norm().item()


@pytest.mark.parametrize("method", [orthonormal, cholesky_qr2])
@pytest.mark.parametrize("condition", [1e0, 1e2, 1e4, 1e7])
def test_columns_are_orthonormal_however_ill_conditioned(method, condition):
    spectrum = torch.logspace(0, -torch.log10(torch.tensor(condition)), 12).double()
    y = cast(with_spectrum(spectrum, 12, 200, 200, groups=2), torch.float32)
    y_GWK = y.a_GRI.mT.contiguous() * torch.logspace(-3, 3, 12)
    q_GWK = method(y_GWK)
    assert loss_of_orthogonality(q_GWK) < 1e-5
    rest = y_GWK - q_GWK @ (q_GWK.mT @ y_GWK)
    assert (rest.norm(dim=1) <= 1e-5 * y_GWK.norm(dim=1)).all()


@pytest.mark.parametrize("method", [orthonormal, cholesky_qr2])
@pytest.mark.parametrize("kind", ["zero", "equal", "one zero column", "tiny", "square"])
def test_dependent_columns_still_give_an_orthonormal_basis(method, kind):
    y_GWK = torch.randn(2, 50, 6)
    if kind == "zero":
        y_GWK[1] = 0
    elif kind == "equal":
        y_GWK[1, :, 3] = y_GWK[1, :, 4]
    elif kind == "one zero column":
        y_GWK[:, :, 0] = 0
    elif kind == "tiny":
        y_GWK = y_GWK * 1e-25
    else:
        y_GWK = y_GWK[:, :6]
    assert loss_of_orthogonality(method(y_GWK)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_basis_of_a_half_precision_gradient_is_orthonormal(dtype):
    """Gram-Schmidt in bfloat16, as others publish it, is off by 0.5 for such a gradient."""
    exact = cast(decaying("fast", *SHAPES[2]), dtype)
    for solver in (subspace_iteration, power_iteration):
        found = solver(exact, 12)
        left = found.d_GRO.mT / found.sigma_GR[:, None].float()
        assert loss_of_orthogonality(left) < 1e-5
        assert loss_of_orthogonality(found.a_GRI.mT) < 1e-5


def test_a_warm_start_makes_one_iteration_enough():
    exact = cast(decaying("slow", *SHAPES[2]), torch.float32)
    noise = cast(decaying("slow", *SHAPES[2], seed=1), torch.float32)
    before = Factors(exact.d_GRO + 0.05 * noise.d_GRO, exact.a_GRI)
    q_GIR = subspace_iteration(before, 8, iterations=6).a_GRI.mT
    cold = subspace_iteration(exact, 8, iterations=1, oversampling=0)
    warm = subspace_iteration(exact, 8, iterations=1, oversampling=0, q_GIR=q_GIR)
    best = best_error(exact, 8)
    assert relative_error(warm.factors(), exact) < 1.01 * best
    assert relative_error(cold.factors(), exact) > 1.1 * best


@pytest.mark.parametrize("kind", ["zero", "nan", "inf", "too few", "too many", "half", "spent"])
def test_an_unusable_warm_start_does_no_harm(kind):
    exact = cast(decaying("geometric", *SHAPES[2], groups=2), torch.float32)
    q_GIR = torch.randn(2, 48, 4)
    if kind == "zero":  # the padding of a step that had a lower rank
        q_GIR[..., 1:] = 0
    elif kind in ("nan", "inf"):  # the step before overflowed
        q_GIR[0, 3, 2] = float(kind)
    elif kind == "too few":
        q_GIR = q_GIR[..., :0]
    elif kind == "too many":
        q_GIR = torch.randn(2, 48, 40)
    elif kind == "half":
        q_GIR = q_GIR.bfloat16()
    else:  # everything it points at has vanished from the gradient
        q_GIR = torch.linalg.svd(gradient(exact)).Vh[:, -4:].mT
    found = subspace_iteration(exact, 4, q_GIR=q_GIR)
    assert relative_error(found.factors(), exact) < 1.02 * best_error(exact, 4)


def test_more_iterations_come_nearer():
    exact = cast(decaying("slow", *SHAPES[2]), torch.float32)
    errors = [
        relative_error(subspace_iteration(exact, 8, iterations=i).factors(), exact)
        for i in (1, 2, 4, 12)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == pytest.approx(best_error(exact, 8), rel=1e-4)


def test_power_iteration_tells_close_and_equal_singular_values_apart():
    exact = with_spectrum(torch.tensor([1, 1, 1, 0.999, 0.5, 1e-5]), 40, 30, 20)
    found = power_iteration(exact, 6, iterations=200)
    expected = torch.tensor([1, 1, 1, 0.999, 0.5, 1e-5]).double()
    torch.testing.assert_close(found.sigma_GR[0], expected, rtol=1e-4, atol=1e-9)
    assert relative_error(found.factors(), exact) < 1e-6


def test_power_iteration_in_float32_stays_orthogonal_to_what_it_found():
    """Small triplets are found after large ones whose rounding could swamp them."""
    exact = cast(with_spectrum(torch.logspace(0, -5, 6), 40, 30, 20), torch.float32)
    found = power_iteration(exact, 6)
    assert found.rank == 6
    torch.testing.assert_close(
        found.sigma_GR[0].float(), torch.logspace(0, -5, 6), rtol=0.05, atol=1e-7
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 1e-20])
def test_formed_and_unformed_gradients_are_the_same_map(shape, scale):
    exact = decaying("slow", *shape, groups=2)
    unformed = product(Factors(exact.d_GRO * scale, exact.a_GRI / 1e10))
    formed = unformed.formed()
    q_GIK, p_GOK = torch.randn(2, shape[1], 3).double(), torch.randn(2, shape[2], 3).double()
    p_GOK = torch.linalg.qr(p_GOK).Q
    dense = gradient(exact) * scale / 1e10
    scale_G11 = unformed.scale_G[:, None, None]
    for each in (unformed, formed):
        torch.testing.assert_close(each.times(q_GIK) * scale_G11, dense @ q_GIK)
        torch.testing.assert_close(each.transposed_times(p_GOK) * scale_G11, dense.mT @ p_GOK)
        torch.testing.assert_close(each.energy(), dense.square().sum(dim=(1, 2)))
        rest = dense - p_GOK @ (p_GOK.mT @ dense)
        torch.testing.assert_close(each.without(p_GOK).energy(), rest.square().sum(dim=(1, 2)))
        assert (each.inputs, each.outputs) == shape[1:]


def test_the_gradient_is_formed_only_where_that_saves_work():
    long = product(Factors(torch.randn(1, 4096, 16), torch.randn(1, 4096, 16)))
    wide = product(Factors(torch.randn(1, 8, 400), torch.randn(1, 8, 400)))
    for with_energy in (False, True):
        assert cheapest(long, 16, 2, with_energy=with_energy).d_GNO is None
        assert cheapest(wide, 4, 2, with_energy=with_energy) is wide
    tall = product(Factors(torch.randn(1, 512, 300), torch.randn(1, 512, 300)))
    assert cheapest(tall, 4, 1, with_energy=False) is tall
    assert cheapest(tall, 4, 1, with_energy=True).d_GNO is None
