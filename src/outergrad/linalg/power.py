"""Structured power iterations (rank-dAD, as in its paper): one singular triplet at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from outergrad.core.types import Gradient
from outergrad.linalg.low_rank import LowRank, is_noise
from outergrad.linalg.probe import gaussian_probe
from outergrad.linalg.product import Product, cheapest, product
from outergrad.linalg.ritz import rayleigh_ritz

POWER_ITERATIONS = 20

_CONVERGED = 1e-4
"""Change of a direction below which iterations stop: its square, the error in energy, is beyond
float32."""


def power_iteration(
    gradient: Gradient, rank: int, tolerance: float = 0.0, *, iterations: int = POWER_ITERATIONS
) -> LowRank:
    """Computes the leading singular triplets of `dᵀ a`, each by power iterations with the factors.

    Source: Baker et al., arXiv 2102.09631, the section on rank-dAD. There are two differences. The
    directions already found are removed by projection, `(1 - p pᵀ) dW`, where the paper subtracts
    `sigma² p pᵀ`: equal once converged, but the latter adds errors while it is not (Mackey,
    2008, compares them). And a final Rayleigh-Ritz step corrects the basis.

    Args:
        gradient: d_GNO and a_GNI, or the gradient itself, any floating dtype.
        rank: largest R.
        tolerance: largest relative Frobenius error, if R suffices for it.
        iterations: power iterations per triplet, at most.
    """
    matrix = cheapest(product(gradient), rank, iterations, with_energy=tolerance > 0)
    p_GOK = matrix.a_GNI.new_zeros(len(matrix.scale_G), matrix.outputs, 0)
    unit = matrix.unit
    enough = tolerance**2 * matrix.energy(unit).sum() if tolerance > 0 else None
    largest_G = None
    for _ in range(min(rank, matrix.largest_rank)):
        p_GO1 = _leading_direction(matrix, p_GOK, iterations)
        sigma_G = matrix.transposed_times(p_GO1).norm(dim=(1, 2))
        largest_G = sigma_G if largest_G is None else largest_G
        p_GOK = torch.cat([p_GOK, p_GO1], dim=2)
        if is_noise(sigma_G, largest_G).all():
            break  # the effective rank is reached; this last one will be cut off
        if enough is not None and matrix.without(p_GOK).energy(unit).sum() <= enough:
            break
    return rayleigh_ritz(matrix, p_GOK, rank, tolerance)


def _leading_direction(gradient: Product, p_GOK: Tensor, iterations: int) -> Tensor:
    """The leading left singular vector, (G, O, 1), of the gradient without its part along p."""
    start_I1 = gaussian_probe(gradient.inputs, p_GOK.shape[2] + 1, p_GOK.device)[:, -1:]
    x_GO1 = _deflated(gradient.times(start_I1.to(gradient.a_GNI)), p_GOK)
    for _ in range(iterations):
        previous_GO1 = x_GO1
        x_GO1 = _deflated(gradient.times(gradient.transposed_times(x_GO1)), p_GOK)
        if (x_GO1 - previous_GO1).norm(dim=(1, 2)).max() < _CONVERGED:
            break
    return x_GO1


def _deflated(x_GO1: Tensor, p_GOK: Tensor) -> Tensor:
    """Removes the part along p and normalises; twice, because of rounding."""
    for _ in range(2):
        x_GO1 = normalize(x_GO1 - p_GOK @ (p_GOK.mT @ x_GO1), dim=1)
    return x_GO1
