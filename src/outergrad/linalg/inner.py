"""Inner products of gradients, formed or factored, from which norms, errors and angles follow."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from outergrad.core.types import Factors, Gradient
from outergrad.linalg.outer import formed, stack, widened

_FEW = 256
"""Number of rows up to which Gram matrices cost little beside the layer's own work."""


def inner(x: Gradient, y: Gradient) -> float:
    """Frobenius inner product of two gradients of one shape, all groups together.

    `<dᵀ a, eᵀ b> = sum((d eᵀ) * (a bᵀ))`, and `<dᵀ a, Y> = sum((d Y) * a)`: no product of factors
    need be formed. Sums use the dtype of the factors, at least float32: relative to the norms of
    both, the result is exact to about 1e-6.

    Args:
        x: d_GRO and a_GRI, or ids as activations, or the gradient itself, (G, O, I); with ids
            the gradient itself is the table's, (1, I, O).
        y: likewise.
    """
    dtype = reduce(torch.promote_types, (*_dtypes(x), *_dtypes(y)), torch.float32)
    if isinstance(x, Tensor):
        if isinstance(y, Tensor):
            return x.to(dtype).flatten().dot(y.to(dtype).flatten()).item()
        x, y = y, x
    if x.a_GRI.dim() == 1:
        return _of_ids(x, y)
    if isinstance(y, Factors) and _is_long(x) and _is_long(y):
        y = formed(y)
    d_GRO, a_GRI = x.d_GRO.to(dtype), x.a_GRI.to(dtype)
    if isinstance(y, Tensor):
        return ((d_GRO @ y.to(dtype)) * a_GRI).sum().item()
    e_GTO, b_GTI = y.d_GRO.to(dtype), y.a_GRI.to(dtype)
    return ((d_GRO @ e_GTO.mT) * (a_GRI @ b_GTI.mT)).sum().item()


def _dtypes(gradient: Gradient) -> list[torch.dtype]:
    tensors = [gradient] if isinstance(gradient, Tensor) else gradient[:2]
    return [t.dtype for t in tensors if t.is_floating_point()]


def _is_long(factors: Factors) -> bool:
    """True if a Gram matrix costs more than the product."""
    rows, outputs, inputs = *factors.d_GRO.shape[1:], factors.a_GRI.shape[2]
    return rows > _FEW and rows * (inputs + outputs) > inputs * outputs


def _of_ids(x: Factors, y: Gradient) -> float:
    """Inner product of gradients of an embedding's table; ids are distinct within each."""
    d_RO = widened(x.d_GRO[0])
    if isinstance(y, Tensor):
        return (d_RO * widened(y)[0, x.a_GRI]).sum().item()
    both = stack([x, Factors(y.d_GRO.to(d_RO.dtype), y.a_GRI)]).d_GRO
    squares = [widened(t).square().sum().item() for t in (both, x.d_GRO, y.d_GRO)]
    return (squares[0] - squares[1] - squares[2]) / 2  # of |x + y|² = |x|² + |y|² + 2 <x, y>


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
