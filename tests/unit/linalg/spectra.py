"""Factors of gradients whose singular values are known."""

from __future__ import annotations

import torch
from torch import Tensor

from outergrad import Factors
from outergrad.core.types import Gradient
from outergrad.linalg.low_rank import core
from outergrad.linalg.outer import stack
from outergrad.linalg.product import cheapest, product

SHAPES = [(24, 80, 60), (60, 40, 50), (300, 48, 64)]
"""(N, I, O): few rows; as many as columns; more than columns, as in a transformer."""

DECAYS = {
    "slow": lambda i: i**-0.5,
    "harmonic": lambda i: 1 / i,
    "fast": lambda i: i**-2.0,
    "geometric": lambda i: 0.8**i,
}


def with_spectrum(
    sigma: Tensor, rows: int, inputs: int, outputs: int, *, groups: int = 1, seed: int = 0
) -> Factors:
    """Float64 factors of N rows whose product has the singular values sigma, (K,) or (G, K)."""
    generator = torch.Generator().manual_seed(seed)

    def basis(width: int) -> Tensor:
        x = torch.randn(groups, width, sigma.shape[-1], generator=generator, dtype=torch.float64)
        return torch.linalg.qr(x).Q

    mix_GNK = basis(rows)
    root_G1K = sigma.double().expand(groups, -1).sqrt()[:, None]
    d_GNO = (mix_GNK * root_G1K) @ basis(outputs).mT
    return Factors(d_GNO, (mix_GNK * root_G1K) @ basis(inputs).mT)


def decaying(kind: str, rows: int, inputs: int, outputs: int, **options: int) -> Factors:
    """A gradient of full rank with singular values that fall as DECAYS says."""
    i = torch.arange(1, min(rows, inputs, outputs) + 1, dtype=torch.float64)
    return with_spectrum(DECAYS[kind](i), rows, inputs, outputs, **options)


def cast(factors: Factors, dtype: torch.dtype) -> Factors:
    return Factors(factors.d_GRO.to(dtype), factors.a_GRI.to(dtype))


def gradient(factors: Factors) -> Tensor:
    """`dᵀ a` in float64."""
    return factors.d_GRO.double().mT @ factors.a_GRI.double()


def relative_error(found: Factors, exact: Factors) -> float:
    """Frobenius norm of the difference relative to that of the exact gradient."""
    expected = gradient(exact)
    return ((gradient(found) - expected).norm() / expected.norm()).item()


def best_error(exact: Factors, rank: int) -> float:
    """The relative error of the best approximation with a rank per group (Eckart and Young)."""
    sigma_GK = torch.linalg.svdvals(gradient(exact))
    return (sigma_GK[:, rank:].norm() / sigma_GK.norm()).item()


def spectrum(gradient: Gradient) -> Tensor:
    """All min(N, I, O) singular values of `dᵀ a`, falling, (G, K), float64.

    Accurate to rounding relative to the largest, as squares (Gram matrices) would not be.
    """
    matrix = product(gradient)
    sigma_GK = torch.linalg.svdvals(core(matrix)[1])
    return sigma_GK.double() * matrix.scale_G[:, None]


def discarded_energy(factors: Factors, approximation: Factors) -> float:
    """`‖dW - dW'‖² / ‖dW‖²` over all groups, for any approximation of a gradient by factors.

    The difference is an outer product itself, of the rows of both, and the norm of an outer
    product needs Gram matrices alone. In float64, since the terms cancel: exact down to a
    relative error of about 1e-7, whatever was done to the approximation on its way.

    Args:
        factors: d_GNO and a_GNI.
        approximation: d_GRO and a_GRI.
    """
    d_GNO, a_GNI = factors.d_GRO.double(), factors.a_GRI.double()
    whole = Factors(d_GNO, a_GNI)
    minus = Factors(-approximation.d_GRO.double(), approximation.a_GRI.double())
    energy = _energy(whole)
    return (_energy(stack([whole, minus])) / torch.where(energy == 0, 1.0, energy)).item()


def _energy(factors: Factors) -> Tensor:
    gradient = cheapest(product(factors), columns=0, sweeps=0, with_energy=True)
    return gradient.energy().sum()
