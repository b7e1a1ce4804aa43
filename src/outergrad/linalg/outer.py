"""Sums of outer products: gradients from factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outergrad.core.types import Factors, Gradient, Slot

_SMALL = 1 << 14
"""Number of elements up to which products are summed in float64, which costs them nothing: a
plain loop over many rows in float32 would be less exact than the layer's own backward."""


def stack(parts: Sequence[Factors]) -> Factors:
    """Concatenates rows: the outer product of the result is the sum of the parts' products."""
    if len(parts) == 1:
        return parts[0]
    d_GRO = torch.cat([part.d_GRO for part in parts], dim=1)
    if parts[0].a_GRI.dim() == 1:  # ids
        ids_R, d_RO = coalesce(torch.cat([part.a_GRI for part in parts]), d_GRO[0])
        return Factors(d_RO.unsqueeze(0), ids_R)
    return Factors(d_GRO, torch.cat([part.a_GRI for part in parts], dim=1))


def together(gradients: Sequence[Gradient]) -> Gradient:
    """Concatenates gradients along the groups, padded with zeros to one shape."""
    formed_GOI = [g for g in gradients if isinstance(g, Tensor)]
    if formed_GOI:
        return padded(formed_GOI)
    factors = [g for g in gradients if isinstance(g, Factors)]
    return Factors(padded([f.d_GRO for f in factors]), padded([f.a_GRI for f in factors]))


def apart(factors: Factors, slots: Sequence[Slot]) -> list[Factors]:
    """The inverse of `together` for factors: views of each slot's factors."""
    groups = [slot.groups for slot in slots]
    triples = zip(
        slots,
        factors.d_GRO.split_with_sizes(groups),
        factors.a_GRI.split_with_sizes(groups),
        strict=True,
    )
    return [Factors(d[..., : slot.outputs], a[..., : slot.inputs]) for slot, d, a in triples]


def matrices_apart(whole_GOI: Tensor, slots: Sequence[Slot]) -> list[Tensor]:
    """The inverse of `together` for formed gradients: views of each slot's matrix."""
    parts = whole_GOI.split_with_sizes([slot.groups for slot in slots])
    pairs = zip(slots, parts, strict=True)
    return [part[:, : slot.outputs, : slot.inputs] for slot, part in pairs]


def padded(parts: Sequence[Tensor], width: int = 0) -> Tensor:
    """Concatenates tensors along the first dimension, with zeros up to the largest of the others.

    A single tensor that is wide enough is returned unchanged, without a copy.

    Args:
        parts: tensors of three dimensions.
        width: least size of the last dimension.
    """
    first = parts[0]
    if len(parts) == 1 and first.shape[2] >= width:
        return first
    groups, heights, widths = zip(*[part.shape for part in parts], strict=True)
    if min(widths) >= width and min(widths) == max(widths) and min(heights) == max(heights):
        return torch.cat(list(parts))
    whole = first.new_zeros(sum(groups), max(heights), max(width, *widths))
    for part, view in zip(parts, whole.split_with_sizes(groups), strict=True):
        view[:, : part.shape[1], : part.shape[2]].copy_(part)
    return whole


def added(gradient: Gradient, plus: Factors) -> Gradient:
    """Adds an outer product to a gradient, in at least float32."""
    if isinstance(gradient, Tensor):
        return torch.baddbmm(widened(gradient), widened(plus.d_GRO).mT, widened(plus.a_GRI))
    return stack([Factors(widened(d), widened(a)) for d, a, _ in (gradient, plus)])


def formed(gradient: Gradient, plus: Gradient | None = None) -> Tensor:
    """Returns a gradient as a new matrix, (G, O, I), in at least float32, plus another gradient."""
    if isinstance(gradient, Factors):
        whole_GOI = widened(product_of(gradient))
    else:
        whole_GOI = widened(gradient, copy=plus is None)
    if plus is None:
        return whole_GOI
    return whole_GOI + (product_of(plus) if isinstance(plus, Factors) else plus)


def product_of(factors: Factors) -> Tensor:
    """Returns `dᵀ a`, (G, O, I)."""
    return weight_gradient(factors).view(factors.d_GRO.shape[0], -1, factors.a_GRI.shape[2])


def shape_of(gradient: Gradient) -> tuple[int, int, int]:
    """Returns N, I and O; a formed gradient has O rows."""
    if isinstance(gradient, Tensor):
        return gradient.shape[1], gradient.shape[2], gradient.shape[1]
    return gradient.d_GRO.shape[1], gradient.a_GRI.shape[2], gradient.d_GRO.shape[2]


def widened(t: Tensor, *, copy: bool = False) -> Tensor:
    """Converts to at least float32."""
    return t.to(torch.promote_types(t.dtype, torch.float32), copy=copy)


def weight_gradient(factors: Factors, scale: float = 1.0) -> Tensor:
    """Returns `scale * dᵀ a`, shape (G * O, I), in the dtype of the factors."""
    d_GRO, a_GRI = factors.d_GRO, factors.a_GRI
    dtype = d_GRO.dtype
    if d_GRO.shape[0] * d_GRO.shape[2] * a_GRI.shape[2] <= _SMALL:
        d_GRO, a_GRI = d_GRO.double(), a_GRI.double()
    if dtype.itemsize == 2 and d_GRO.dtype == dtype:  # a scaled factor would be rounded
        product_GOI = torch.baddbmm(d_GRO.new_empty(()), d_GRO.mT, a_GRI, beta=0, alpha=scale)
        return product_GOI.flatten(0, 1)
    if scale != 1.0:  # scales the smaller factor, which has fewer elements than the product
        smaller_is_d = d_GRO.shape[2] <= a_GRI.shape[2]
        d_GRO, a_GRI = (d_GRO * scale, a_GRI) if smaller_is_d else (d_GRO, a_GRI * scale)
    if d_GRO.shape[0] == 1:
        return (d_GRO[0].mT @ a_GRI[0]).to(dtype)
    return (d_GRO.mT @ a_GRI).flatten(0, 1).to(dtype)


def bias_gradient(parts: Sequence[Factors], scale: float = 1.0) -> Tensor:
    """Returns `scale *` the sum over parts of their bias gradients, shape (G * O,)."""
    total_GO = sum((_own_bias_gradient(part) for part in parts[1:]), _own_bias_gradient(parts[0]))
    return (total_GO * scale).flatten().to(parts[0].d_GRO.dtype)


def _own_bias_gradient(factors: Factors) -> Tensor:
    if factors.b_GO is not None:
        return factors.b_GO.double()
    return row_sum(factors.d_GRO).double()


def row_sum(d_GRO: Tensor) -> Tensor:
    """Sum over the rows, (G, O): in float64 for few or float64 elements, else in float32.

    PyTorch adds them in a tree, so that a thousand rows cost no digit.
    """
    few = d_GRO.numel() <= _SMALL or d_GRO.dtype == torch.float64
    return d_GRO.sum(dim=1, dtype=torch.float64 if few else torch.float32)


def coalesce(ids_N: Tensor, d_NO: Tensor) -> tuple[Tensor, Tensor]:
    """Sums the rows of equal ids, in at least float32: distinct sorted ids (R,), sums (R, O)."""
    distinct_R, where_N = torch.unique(ids_N, return_inverse=True)
    wide_NO = widened(d_NO)
    sums_RO = wide_NO.new_zeros(len(distinct_R), d_NO.shape[1]).index_add_(0, where_N, wide_NO)
    return distinct_R, sums_RO.to(d_NO.dtype)


def lookup_gradient(parts: Sequence[Factors], vocabulary: int, scale: float = 1.0) -> Tensor:
    """Returns `scale *` the sum of each part's rows at its ids, shape (vocabulary, O).

    Ids are distinct within a part, so the order of additions, and with it every bit of the
    result, is the same on every site, on CUDA too.
    """
    first = parts[0].d_GRO
    gradient = first.new_zeros(vocabulary, first.shape[2])
    if first.dtype.itemsize == 2:
        return gradient.index_copy_(0, *_wide_sums(parts, scale))
    for part in parts:
        gradient.index_add_(0, part.a_GRI, part.d_GRO[0], alpha=scale)
    return gradient


def _wide_sums(parts: Sequence[Factors], scale: float) -> tuple[Tensor, Tensor]:
    """Returns the ids of all parts, and their sums, which are rounded once."""
    ids_R, where_N = torch.unique(torch.cat([p.a_GRI for p in parts]), return_inverse=True)
    sums_RO = widened(parts[0].d_GRO).new_zeros(len(ids_R), parts[0].d_GRO.shape[2])
    for part, where_K in zip(parts, where_N.split([len(p.a_GRI) for p in parts]), strict=True):
        sums_RO.index_add_(0, where_K, widened(part.d_GRO[0]), alpha=scale)
    return ids_R, sums_RO.to(parts[0].d_GRO.dtype)
