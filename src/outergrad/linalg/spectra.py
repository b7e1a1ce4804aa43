"""Singular values of rows and of their products, by small problems, and the numerical rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outergrad.linalg.leading import values_of_rows


def values_of(x_GNW: Tensor) -> Tensor:
    """All singular values of a matrix, falling, (G, min(N, W)), from the smaller Gram matrix.

    In float64: exact to about 1e-8 of the largest; NaN where a number is not finite.

    Args:
        x_GNW: the matrix.
    """
    wide = x_GNW.shape[1] < x_GNW.shape[2]
    x_GNW = x_GNW.double()
    gram_GKK = x_GNW @ x_GNW.mT if wide else x_GNW.mT @ x_GNW
    if not math.isfinite(gram_GKK.sum().item()):  # LAPACK may raise on NaN
        return gram_GKK.new_full(gram_GKK.shape[:2], math.nan)
    return torch.linalg.eigvalsh(gram_GKK).flip(1).clamp(min=0).sqrt()


def values_of_product(d_GNO: Tensor, a_GNI: Tensor) -> Tensor:
    """All singular values of `dᵀ a`, falling, (G, min(N, O, I)).

    Of few rows they are `sqrt(eig(a aᵀ d dᵀ))`, an N × N problem without the product (AutoSpec,
    arXiv 2406.11825). Of many, they are those of the product.

    Args:
        d_GNO: N deltas.
        a_GNI: N activations.
    """
    d_GNO, a_GNI = d_GNO.double(), a_GNI.double()
    rows, most = d_GNO.shape[1], min(d_GNO.shape[2], a_GNI.shape[2])
    if rows > most:
        return values_of(d_GNO.mT @ a_GNI)
    return values_of_rows(d_GNO @ d_GNO.mT, a_GNI @ a_GNI.mT, most)


def numerical_rank(matrix: Tensor, rounded: torch.dtype | None = None) -> int:
    """Number of singular values above `eps max(m, n) σ₁`, the rounding error of the largest.

    Choose it to count directions that are there at all; the effective rank tells how many matter.

    Args:
        matrix: (m, n), or a stack (..., m, n), of which the largest rank is returned.
        rounded: the least exact dtype that its numbers have gone through, which has the eps; None
            for the matrix's own. Under autocast a gradient in float32 was rounded to bfloat16, and
            rounding alone gives it full rank.

    Raises:
        ValueError: it has fewer than two dimensions, or a number that is not finite.
    """
    if matrix.dim() < 2:
        raise ValueError(f"numerical_rank: a tensor of {matrix.dim()} dimensions is no matrix")
    if not bool(matrix.isfinite().all()):
        raise ValueError("numerical_rank: the matrix has a number that is not finite")
    if matrix.numel() == 0:
        return 0
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    sigma = torch.linalg.svdvals(wide)
    eps = torch.finfo(matrix.dtype if rounded is None else rounded).eps
    least = eps * max(matrix.shape[-2:]) * sigma[..., :1]
    return int((sigma > least).sum(dim=-1).max())
