"""Overlap between the gradient directions of one site and those of the others."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST = 1e-10
"""Relative size below which an eigenvalue of a Gram matrix counts as zero: 1e-5 of a singular
value, above the rounding errors of float32."""


def shared_directions(own_GRI: Tensor, others_GTI: Tensor) -> tuple[float, float]:
    """Sum of the squared cosines of the principal angles between two row spaces.

    With U an orthonormal basis of the rows of `own` and V one of those of `others`, it is
    `|U Vᵀ|²`, over all groups: the number of the rank(U) directions that lie in the span of the
    others. It does not depend on the lengths of rows. A direction counts if its singular value is
    above 1e-5 of the largest. Of random directions the share is rank(V) / I on average.

    Source: Björck and Golub, Numerical methods for computing angles between linear subspaces, 1973.

    Args:
        own_GRI: R rows.
        others_GTI: T rows, of all other sites.

    Returns:
        The sum, and rank(U); NaN where a row is not finite.
    """
    rows = own_GRI.shape[1]
    whole_GNI = torch.cat([own_GRI, others_GTI.to(own_GRI.dtype)], dim=1).double()
    gram_GNN = whole_GNI @ whole_GNI.mT
    if not bool(gram_GNN.isfinite().all()):  # LAPACK may raise on NaN
        return float("nan"), float("nan")
    u_GRR, rank = _basis(gram_GNN[:, :rows, :rows])
    v_GTT, _ = _basis(gram_GNN[:, rows:, rows:])
    cosines_GRT = u_GRR.mT @ gram_GNN[:, :rows, rows:] @ v_GTT
    squares, count = torch.stack([cosines_GRT.square().sum(), rank.double()]).tolist()
    return min(squares, count), count


def _basis(gram_GNN: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients that make rows with this Gram matrix orthonormal, (G, N, N), and the total rank.

    Columns beyond the rank are zero.
    """
    if not gram_GNN.shape[1]:
        return gram_GNN, gram_GNN.new_zeros(())
    energy_GN, v_GNN = torch.linalg.eigh(gram_GNN)
    is_there_GN = energy_GN > _SMALLEST * energy_GN[:, -1:]
    scale_GN = torch.where(is_there_GN, energy_GN, torch.inf).rsqrt()
    return v_GNN * scale_GN[:, None], is_there_GN.sum()
