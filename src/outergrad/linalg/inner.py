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
