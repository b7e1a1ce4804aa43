"""Sparse gradients: few entries of a tensor with their places, and sums of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Sparse(NamedTuple):
    """A gradient of which all other entries are zero.

    Attributes:
        values_K: (K,), any floating dtype.
        indices_K: their places in the flattened gradient, int64, sorted and distinct.
        shape: of the gradient.
    """

    values_K: Tensor
    indices_K: Tensor
    shape: torch.Size


def picked(gradient: Tensor, indices_K: Tensor) -> Sparse:
    """The entries of a gradient at places of its flattened form."""
    return Sparse(gradient.flatten()[indices_K], indices_K, gradient.shape)


def dense(sparse: Sparse) -> Tensor:
    """The gradient itself, of the values' dtype."""
    return add_(sparse.values_K.new_zeros(sparse.shape), sparse)


def add_(out: Tensor, sparse: Sparse, scale: float = 1.0) -> Tensor:
    """Adds so many times a sparse gradient to a tensor in place, without making it dense.

    The product is rounded to the dtype of `out` once, before it is added.

    Args:
        out: of the gradient's shape, any floating dtype and strides.
        sparse: the gradient.
        scale: of it; 0 adds nothing, whatever its values.

    Raises:
        ValueError: the shapes differ.
    """
    if out.shape != sparse.shape:
        raise ValueError(f"a gradient of shape {tuple(sparse.shape)} for {tuple(out.shape)}")
    if not scale:
        return out
    wide = torch.promote_types(_wide(sparse.values_K.dtype), out.dtype)
    values_K = (sparse.values_K.to(wide) * scale).to(out.dtype)
    if out.is_contiguous():
        out.view(-1).index_add_(0, sparse.indices_K, values_K)
        return out
    places = torch.unravel_index(sparse.indices_K, out.shape)
    return out.index_put_(places, values_K, accumulate=True)


def merged(parts: Sequence[Sparse]) -> Sparse:
    """The sum of sparse gradients of one shape, at the union of their places.

    Each entry is summed in the order of the parts, from zero, in at least float32: the same bits
    wherever the same parts are merged in the same order. The values stay in that dtype.

    Raises:
        ValueError: there are none, or their shapes differ.
    """
    shapes = {part.shape for part in parts}
    if len(shapes) != 1:
        found = " and ".join(sorted(str(tuple(shape)) for shape in shapes)) or "nothing"
        raise ValueError(f"cannot add up gradients of {found}; give some of one shape")
    dtype = torch.float32
    for part in parts:
        dtype = torch.promote_types(dtype, part.values_K.dtype)
    union_U = torch.cat([part.indices_K for part in parts]).unique()
    total_U = torch.zeros(len(union_U), dtype=dtype, device=union_U.device)
    for part in parts:
        total_U.index_add_(0, torch.searchsorted(union_U, part.indices_K), part.values_K.to(dtype))
    return Sparse(total_U, union_U, shapes.pop())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def accumulated(
    velocity: Tensor, unsent: Tensor, gradient: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Momentum correction: what a site keeps of what it has not sent, with a step's gradient.

    `u = m u + g` and `v = v + u`: momentum is applied before entries are left out, so that an
    entry that is sent late arrives with the momentum that it would have had. v is what entries are
    selected from and what is sent. Source: Lin, Han, Mao, Wang and Dally, "Deep Gradient
    Compression", ICLR 2018, arXiv 1712.01887, momentum correction.

    Args:
        velocity: u of the step before, of the gradient's shape.
        unsent: v of the step before, likewise.
        gradient: g, of this step.
        momentum: m, in [0, 1); with 0 this is error feedback alone.

    Returns:
        u and v, new tensors of the dtypes that theirs have.
    """
    velocity = (velocity * momentum).add_(gradient)
    return velocity, unsent + velocity.to(unsent.dtype)


def masked(velocity: Tensor, unsent: Tensor, indices_K: Tensor) -> tuple[Tensor, Tensor]:
    """U and v without the entries that have been sent, new tensors.

    Without it stale momentum would carry on in a direction that has been taken already. Source:
    as for `accumulated`, momentum factor masking.
    """
    return _without(velocity, indices_K), _without(unsent, indices_K)


def _without(t: Tensor, indices_K: Tensor) -> Tensor:
    return t.flatten().index_fill(0, indices_K, 0).view(t.shape)
