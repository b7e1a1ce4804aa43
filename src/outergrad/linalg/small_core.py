"""Exact truncated singular value decomposition of a product through its small core."""

from __future__ import annotations

import torch
from torch import Tensor

from outergrad.core.types import Gradient
from outergrad.linalg.low_rank import LowRank, truncate
from outergrad.linalg.product import Product, product


def small_core(gradient: Gradient, rank: int, tolerance: float = 0.0) -> LowRank:
    """The best approximation of `dᵀ a` of at most the given rank (Eckart and Young).

    With thin QR factorisations `dᵀ = Q_d R_d` and `aᵀ = Q_a R_a` the gradient is
    `Q_d (R_d R_aᵀ) Q_aᵀ`, so that the decomposition of the N x N core is that of the gradient
    (Bebendorf, Hierarchical Matrices, 2008, chapter 1). A factor with more rows than columns
    is left as it is: the core is never larger than N, I or O.

    Args:
        gradient: d_GNO and a_GNI, or the gradient itself, any floating dtype.
        rank: largest R.
        tolerance: largest relative Frobenius error, if R suffices for it.
    """
    matrix = product(gradient)
    q_d_GOK, core_GKL, q_a_GIL = _core(matrix)
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
    )


def spectrum(gradient: Gradient) -> Tensor:
    """All min(N, I, O) singular values of `dᵀ a`, falling, (G, K), float64.

    Accurate to rounding relative to the largest, as squares (Gram matrices) would not be.
    """
    matrix = product(gradient)
    sigma_GK = torch.linalg.svdvals(_core(matrix)[1])
    return sigma_GK.double() * matrix.scale_G[:, None]


def _core(gradient: Product) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """`q_d, core, q_a` with `q_d core q_aᵀ` the gradient and None for the identity."""
    if gradient.d_GNO is None:
        return None, gradient.a_GNI, None
    q_d_GOK, r_GKN = _thin_qr(gradient.d_GNO.mT)
    q_a_GIL, r_GLN = _thin_qr(gradient.a_GNI.mT)
    return q_d_GOK, r_GKN @ r_GLN.mT, q_a_GIL


def _thin_qr(x_GWN: Tensor) -> tuple[Tensor | None, Tensor]:
    """`q, r` with `x = q r` and orthonormal columns of q; no q where it would not be thin."""
    if x_GWN.shape[1] <= x_GWN.shape[2]:
        return None, x_GWN
    return torch.linalg.qr(x_GWN)


def _lift(q_GWK: Tensor | None, x_GKR: Tensor) -> Tensor:
    return x_GKR if q_GWK is None else q_GWK @ x_GKR
