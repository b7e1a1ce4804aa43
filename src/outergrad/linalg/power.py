"""Structured power iterations (rank-dAD, as in its paper), and canonical factors."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from outergrad.core.types import Factors, Gradient
from outergrad.linalg.low_rank import LowRank, is_noise, truncate
from outergrad.linalg.product import Product, Total, cheapest, product


def rayleigh_ritz(gradient: Product | Total, p_GOK: Tensor, rank: int, tolerance: float) -> LowRank:
    """The truncated singular value decomposition of `p pᵀ dW`, a projection of the gradient.

    A projection never exceeds its original, so the error is never above the gradient's norm,
    however poor the basis. A group whose product with the basis is not finite becomes NaN
    throughout. Source: Halko, Martinsson and Tropp, 2011, section 5.1.

    Args:
        gradient: the map; with a tolerance, the energy of its part outside p is computed, too.
        p_GOK: orthonormal (or zero) columns.
        rank: largest R.
        tolerance: largest relative Frobenius error, if R suffices for it.
    """
    z_GIK, scale_G = gradient.transposed_times(p_GOK), gradient.scale_G
    z_GIK, void_G = without_void(z_GIK)
    if void_G is not None:
        scale_G = scale_G.masked_fill(void_G, math.nan)
    q_GIK, r_GKK = torch.linalg.qr(z_GIK)  # faster than an SVD of the tall z itself
    u_GKK, sigma_GK, wt_GKK = torch.linalg.svd(r_GKK, full_matrices=False)
    unit = gradient.unit
    rest_G = gradient.without(p_GOK).energy(unit) if tolerance > 0 else None
    u_GOK, v_GIK = p_GOK @ wt_GKK.mT, q_GIK @ u_GKK
    return truncate(u_GOK, sigma_GK, v_GIK, scale_G, rest_G, rank, tolerance, unit)


def without_void(z_GIK: Tensor) -> tuple[Tensor, Tensor | None]:
    """Replaces groups that are not finite by zeros, because LAPACK may raise on NaN.

    Returns:
        The matrices, and which groups, (G,), were replaced; None if all are finite.
    """
    if math.isfinite(z_GIK.sum().item()):
        return z_GIK, None
    void_G = ~z_GIK.isfinite().all(dim=2).all(dim=1)
    return z_GIK.masked_fill(void_G[:, None, None], 0.0), void_G


_CPU = torch.device("cpu")


def gaussian_probe(width: int, columns: int, device: torch.device = _CPU) -> Tensor:
    """Returns a fixed Gaussian matrix (width, columns), float64.

    NumPy's generator gives the same numbers on every machine, and the leading columns do not
    depend on the number of columns requested.
    """
    return _probe_of_power(width, 1 << max(columns - 1, 0).bit_length(), device)[:, :columns]


@lru_cache(maxsize=64)
def _probe_of_power(width: int, columns: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal((columns, width)).T).to(device)


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


_RANK_TOLERANCE = 1e-10
"""Relative size below which columns of the sketch are rounding noise of float64."""


def canonical(factors: Factors, rows: int, *, bias: bool) -> Factors:
    """Rewrites factors so that they depend on the gradients `dW` and `db` alone.

    With a fixed public probe Ω, `P = orth(dW Ω)` and `Z = Pᵀ dW`: `dW = P Z` exactly as soon as Ω
    has at least rank(dW) columns. Two batches with the same gradient give the same P and Z, hence
    nothing but the gradient can be learnt from them. Sketch: Halko, Martinsson and Tropp, 2011,
    section 4; computed in float64 because a square Gaussian probe may be ill-conditioned.

    Args:
        factors: d_GNO and a_GNI, any floating dtype.
        rows: R >= min(N, O, I) for exactness; columns beyond the rank are zero.
        bias: whether to return the bias gradient, too.

    Returns:
        d_GRO, a_GRI and, with bias, b_GO, in float64: they are rounded once, on the wire.
    """
    d_GNO, a_GNI = factors.d_GRO.double(), factors.a_GRI.double()
    b_GO = d_GNO.sum(dim=1) if bias else None
    if d_GNO.shape[2] <= a_GNI.shape[2]:
        return Factors(*_orthogonal_times_rest(d_GNO, a_GNI, rows), b_GO)
    a_GRI, d_GRO = _orthogonal_times_rest(a_GNI, d_GNO, rows)
    return Factors(d_GRO, a_GRI, b_GO)


def _orthogonal_times_rest(u_GNU: Tensor, v_GNV: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """`p_GRU, z_GRV` with orthonormal (or zero) rows of p and `pᵀ z == uᵀ v`."""
    probe_VR = gaussian_probe(v_GNV.shape[2], rows, v_GNV.device)
    q_GUR, r_GRR = torch.linalg.qr(u_GNU.mT @ (v_GNV @ probe_VR))
    size_GR = r_GRR.diagonal(dim1=-2, dim2=-1)
    # "not small" rather than "large", so that NaN is kept.
    keep_GR = ~(size_GR.abs() <= _RANK_TOLERANCE * size_GR.abs().amax(dim=-1, keepdim=True))
    # The sign of r's diagonal is LAPACK's choice; fixing it makes the factors unique.
    p_GUR = q_GUR * (keep_GR * size_GR.sign()).unsqueeze(-2)
    p_GRU = _pad_rows(p_GUR.mT, rows)
    return p_GRU, (p_GRU @ u_GNU.mT) @ v_GNV


def _pad_rows(p_GRU: Tensor, rows: int) -> Tensor:
    missing = rows - p_GRU.shape[1]
    return p_GRU if missing == 0 else torch.nn.functional.pad(p_GRU, (0, 0, 0, missing))
