"""Exact truncated singular value decomposition of a product through its small core."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outergrad.core.types import Factors, Gradient
from outergrad.linalg.low_rank import LowRank, truncate
from outergrad.linalg.outer import stack, widened
from outergrad.linalg.product import Product, product


def small_core(gradient: Gradient, rank: int, tolerance: float = 0.0) -> LowRank:
    """Computes the best approximation of `dᵀ a` of at most the given rank (Eckart and Young).

    With thin QR factorisations `dᵀ = Q_d R_d` and `aᵀ = Q_a R_a` the gradient is
    `Q_d (R_d R_aᵀ) Q_aᵀ`, so that the decomposition of the N x N core is that of the gradient
    (Bebendorf, Hierarchical Matrices, 2008, chapter 1). A factor with more rows than columns
    is used unchanged: the core is never larger than N, I or O.

    Args:
        gradient: d_GNO and a_GNI, or the gradient itself, any floating dtype.
        rank: largest R.
        tolerance: largest relative Frobenius error, if R suffices for it.
    """
    matrix = product(gradient)
    q_d_GOK, core_GKL, q_a_GIL = core(matrix)
    u_GKM, sigma_GM, vt_GML = torch.linalg.svd(core_GKL, full_matrices=False)
    nothing_G = torch.zeros_like(matrix.scale_G)
    return truncate(
        _lift(q_d_GOK, u_GKM[..., :rank]),
        sigma_GM,
        _lift(q_a_GIL, vt_GML.mT[..., :rank]),
        matrix.scale_G,
        nothing_G,
        rank,
        tolerance,
        matrix.unit,
    )


def merge(
    parts: Sequence[Factors],
    rank: int,
    tolerance: float = 0.0,
    *,
    weights: Sequence[float] | None = None,
) -> LowRank:
    """Computes the best approximation, of at most the given rank, of a weighted sum of gradients.

    The sum has the stacked rows as factors, few enough for an exact decomposition through a
    small core (Bebendorf, Hierarchical Matrices, 2008, chapter 1). In a tree of merges the
    `relative_error` of each node is its own, relative to its own sum.

    Args:
        parts: d_GRO and a_GRI of each site; their ranks may differ.
        rank: largest R.
        tolerance: largest relative Frobenius error, if R suffices for it.
        weights: one per part; None for the mean. In a tree they are the share of sites below.
    """
    if weights is None:
        weights = [1 / len(parts)] * len(parts)
    weighted = [_weighted(part, weight) for part, weight in zip(parts, weights, strict=True)]
    return small_core(stack(weighted), rank, tolerance)


def _weighted(part: Factors, weight: float) -> Factors:
    """In float32 at least: a weight in half precision would cost three digits."""
    return Factors(widened(part.d_GRO) * weight, part.a_GRI)


def core(gradient: Product) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Returns `q_d, core, q_a` with `q_d core q_aᵀ` the gradient; None stands for the identity."""
    if gradient.d_GNO is None:
        return None, gradient.a_GNI, None
    q_d_GOK, r_GKN = _thin_qr(gradient.d_GNO.mT)
    q_a_GIL, r_GLN = _thin_qr(gradient.a_GNI.mT)
    return q_d_GOK, r_GKN @ r_GLN.mT, q_a_GIL


def _thin_qr(x_GWN: Tensor) -> tuple[Tensor | None, Tensor]:
    """`q, r` with `x = q r` and orthonormal columns of q; None for q where it would not be thin."""
    if x_GWN.shape[1] <= x_GWN.shape[2]:
        return None, x_GWN
    return torch.linalg.qr(x_GWN)


def _lift(q_GWK: Tensor | None, x_GKR: Tensor) -> Tensor:
    return x_GKR if q_GWK is None else q_GWK @ x_GKR
