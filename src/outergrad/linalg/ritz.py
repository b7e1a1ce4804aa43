"""Rayleigh-Ritz step: the best decomposition within an orthonormal basis of outputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outergrad.linalg.low_rank import LowRank, truncate
from outergrad.linalg.product import Product
from outergrad.linalg.total import Total


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
