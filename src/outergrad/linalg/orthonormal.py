"""Orthonormal bases of thin matrices, by matrix products where that is safe."""

from __future__ import annotations

import torch
from torch import Tensor


def orthonormal(y_GWK: Tensor) -> Tensor:
    """Returns orthonormal columns that span those of y, W >= K, also if these are dependent.

    On a CPU, LAPACK's Householder QR of a thin matrix is the fastest; on other devices its many
    small steps are slow.

    Args:
        y_GWK: float32 or float64, finite.
    """
    return _householder(y_GWK) if y_GWK.device.type == "cpu" else cholesky_qr2(y_GWK)


def principal(y_GWK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns left singular vectors (G, W, K) of y, W >= K, and its falling singular values (G, K).

    Rounding a column costs an error relative to that column. So a matrix that will be rounded
    should not have its large parts spread over all columns. NaN stays NaN.
    """
    q_GWK, r_GKK = torch.linalg.qr(y_GWK)
    if not bool(r_GKK.isfinite().all()):
        return q_GWK, r_GKK.diagonal(dim1=-2, dim2=-1)
    u_GKK, sigma_GK, _ = torch.linalg.svd(r_GKK)
    return q_GWK @ u_GKK, sigma_GK


def cholesky_qr2(y_GWK: Tensor) -> Tensor:
    """Orthonormal columns by CholeskyQR2: two matrix products and two tiny factorisations.

    As orthogonal as Householder's QR while the condition number of y is below about 1e3 in
    float32 (Yamamoto, Nakatsukasa, Yanagisawa and Fukaya, 2015). The first pass shows if it is
    larger; then Householder's method is used instead.

    Args:
        y_GWK: float32 or float64, finite.
    """
    once_GWK, regular_G = _cholesky_qr(y_GWK)
    gram_GKK = once_GWK.mT @ once_GWK
    if bool((regular_G & _nearly_identity(gram_GKK)).all()):
        return _divide(once_GWK, torch.linalg.cholesky_ex(gram_GKK).L)
    return _householder(y_GWK)


def _householder(y_GWK: Tensor) -> Tensor:
    """QR with the signs of Cholesky's factor, so that sites on any device get the same columns."""
    q_GWK, r_GKK = torch.linalg.qr(y_GWK)
    downwards_GK = r_GKK.diagonal(dim1=-2, dim2=-1) < 0
    return torch.where(downwards_GK[:, None], -q_GWK, q_GWK)


def _cholesky_qr(y_GWK: Tensor) -> tuple[Tensor, Tensor]:
    """`y L⁻ᵀ` for the Cholesky factor L of `yᵀ y`, and per group True if L exists."""
    lower_GKK, failed_G = torch.linalg.cholesky_ex(y_GWK.mT @ y_GWK)
    return _divide(y_GWK, lower_GKK), failed_G == 0


def _divide(y_GWK: Tensor, lower_GKK: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(lower_GKK.mT, y_GWK, upper=True, left=False)


def _nearly_identity(gram_GKK: Tensor) -> Tensor:
    """True if a second pass reaches full precision: within the paper's 5 / 64; False for NaN."""
    identity_KK = torch.eye(gram_GKK.shape[-1], dtype=gram_GKK.dtype, device=gram_GKK.device)
    return torch.linalg.matrix_norm(gram_GKK - identity_KK) < 0.05
