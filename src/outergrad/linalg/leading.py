"""The leading singular values of a gradient, for little work."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outergrad._types import Factors, Gradient
from outergrad.linalg.compress import compress
from outergrad.linalg.outer import widened
from outergrad.linalg.subspace import OVERSAMPLING

_FEW = 64
"""Rows of which Gram matrices and their eigenvalues cost less than an iteration."""

_ROUNDING = 1e-7
"""Of a Gram matrix, relative to its largest entry."""


def leading_values(
    gradient: Gradient, count: int, q_GIK: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Singular values, falling, (G, at most count), and directions to begin with next time.

    Of few rows they are exact down to about 1e-3 of the largest; otherwise from one iteration from
    where the last time ended, which comes from below.

    Args:
        gradient: d_GRO and a_GRI, or the gradient itself, (G, O, I).
        count: how many are wanted.
        q_GIK: what came back the last time, None at the first.
    """
    if isinstance(gradient, Factors) and gradient.d_GRO.shape[1] <= _FEW:
        return _of_few_rows(gradient)[:, :count], None
    found = compress(gradient, count + OVERSAMPLING, q_GIR=q_GIK)
    return found.sigma_GR[:, :count], found.a_GRI.mT.clone()


def _of_few_rows(factors: Factors) -> Tensor:
    """`sqrt(eig(Lᵀ K L))` of the Gram matrices K of deltas and `L Lᵀ` of activations."""
    d_GRO, a_GRI = widened(factors.d_GRO), widened(factors.a_GRI)
    deltas_GRR, activations_GRR = (d_GRO @ d_GRO.mT).double(), (a_GRI @ a_GRI.mT).double()
    most = min(d_GRO.shape[1:] + a_GRI.shape[2:])
    if not math.isfinite(deltas_GRR.sum().item() + activations_GRR.sum().item()):
        return deltas_GRR.new_full((len(d_GRO), most), math.nan)
    shift_G1 = activations_GRR.diagonal(dim1=1, dim2=2).amax(dim=1, keepdim=True) * _ROUNDING
    lower_GRR = torch.linalg.cholesky_ex(activations_GRR + torch.diag_embed(shift_G1)).L
    squares_GR = torch.linalg.eigvalsh(lower_GRR.mT @ deltas_GRR @ lower_GRR)
    return squares_GR.flip(1).clamp(min=0).sqrt()[:, :most]
