"""Canonical factors: functions of the gradient alone, which reveal nothing beyond it."""

from __future__ import annotations

import torch
from torch import Tensor

from outergrad.core.types import Factors
from outergrad.linalg.power import gaussian_probe

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
