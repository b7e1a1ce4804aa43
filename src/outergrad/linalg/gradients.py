"""Gradients of parameters, computed from the payloads of slots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import overload

import torch
from torch import Tensor

from outergrad.core.payload import Arrived, Entries
from outergrad.core.types import Factors, Gradient, Slot
from outergrad.linalg.outer import (
    bias_gradient,
    lookup_gradient,
    product_of,
    stack,
    weight_gradient,
    widened,
)


def add_gradients(
    gradients: dict[str, Tensor],
    slot: Slot,
    parts: Sequence[Arrived],
    params: Mapping[str, Tensor],
    scale: float,
) -> None:
    """Adds a slot's weight and bias gradients, the sum over parts times scale, rounded once."""
    weight = params[slot.weight]
    factors = [part for part in parts if isinstance(part, Factors)]
    if len(factors) < len(parts):
        value = _sum_of(parts, slot.numel, scale).to(weight.dtype)
        add_rows(gradients, slot.weight, slot.weight_rows, value, weight)
        return
    dtype = weight.dtype
    for part in factors:
        if part.d_GRO.dtype != dtype:
            dtype = torch.promote_types(dtype, part.d_GRO.dtype)
    cast = list[Factors]()
    for part in factors:
        d_GRO, a_GRI, b_GO = part
        same = d_GRO.dtype == a_GRI.dtype == dtype and (b_GO is None or b_GO.dtype == dtype)
        cast.append(part if same else _cast(part, dtype))
    if slot.lookup:
        value = lookup_gradient(cast, slot.inputs, scale).to(weight.dtype)
        add_rows(gradients, slot.weight, slot.weight_rows, value, weight)
        return
    value = weight_gradient(stack(cast), scale).to(weight.dtype)
    of_bias = None if slot.bias is None else bias_gradient(cast, scale)
    add_rows(gradients, slot.weight, slot.weight_rows, value, weight)
    if slot.bias is not None and of_bias is not None:
        bias = params[slot.bias]
        add_rows(gradients, slot.bias, slot.bias_rows, of_bias.to(bias.dtype), bias)


def as_gradient(arrived: Arrived) -> Gradient:
    """Expands sparse entries to a tensor; returns other gradients unchanged."""
    return as_tensor(arrived) if isinstance(arrived, Entries) else arrived


def as_tensor(arrived: Arrived) -> Tensor:
    """Returns the gradient as a tensor, (G, O, I)."""
    if isinstance(arrived, Factors):
        return product_of(arrived)
    if isinstance(arrived, Tensor):
        return arrived
    whole = arrived.values_K.new_zeros(math.prod(arrived.shape))
    whole.view(-1, arrived.block)[arrived.places_B] = arrived.values_K.view(-1, arrived.block)
    return whole.view(arrived.shape)


def _sum_of(parts: Sequence[Arrived], numel: int, scale: float) -> Tensor:
    """`scale *` the sum of formed or sparse gradients of `numel` elements, 1-D."""
    first = parts[0].values_K if isinstance(parts[0], Entries) else as_tensor(parts[0])
    whole = widened(first[:0]).new_zeros(numel)
    for part in parts:
        if isinstance(part, Entries):
            values = part.values_K.to(whole.dtype).view(-1, part.block)
            whole.view(-1, part.block).index_add_(0, part.places_B, values, alpha=scale)
        else:
            whole.add_(as_tensor(part).flatten(), alpha=scale)
    return whole


@overload
def scaled(gradient: Tensor, scale: float) -> Tensor: ...
@overload
def scaled(gradient: Gradient, scale: float) -> Gradient: ...
def scaled(gradient: Gradient, scale: float) -> Gradient:
    """Multiplies a gradient; scale 0 gives zeros, also for the NaN of a mean over nothing."""
    if scale == 1.0:
        return gradient
    if isinstance(gradient, Tensor):
        return gradient * scale if scale else torch.zeros_like(gradient)
    b_GO = None if gradient.b_GO is None else scaled(gradient.b_GO, scale)
    return Factors(scaled(gradient.d_GRO, scale), gradient.a_GRI, b_GO)


def _cast(factors: Factors, dtype: torch.dtype) -> Factors:
    a_GRI, b_GO = factors.a_GRI, factors.b_GO
    return Factors(
        factors.d_GRO.to(dtype),
        a_GRI.to(dtype) if a_GRI.is_floating_point() else a_GRI,
        None if b_GO is None else b_GO.to(dtype),
    )


def add_rows(
    gradients: dict[str, Tensor],
    name: str,
    rows: tuple[int, int] | None,
    value: Tensor,
    p: Tensor,
) -> None:
    """Adds to a row range of a parameter's gradient, None for all of it; copies only if it must."""
    whole = rows is None or rows == (0, p.shape[0])
    if whole and name not in gradients:
        gradients[name] = value.view(p.shape)
        return
    if name not in gradients:
        gradients[name] = torch.zeros_like(p, requires_grad=False)
    start, stop = rows or (0, p.shape[0])
    gradients[name][start:stop] += value.view(-1, *p.shape[1:])


def summed(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sums gradients by name, in the order of the parts, so that every site rounds alike."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, gradient in part.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def vjp(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    deltas: Sequence[Tensor | None],
    *,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """Vector-Jacobian product: gradients of the inputs from the deltas of the outputs.

    Args:
        outputs: those without a graph are ignored.
        inputs: those that require no gradient get None.
        deltas: of each output; None where it has none.
        create_graph: see `torch.autograd.grad`.
    """
    pairs = [(y, d) for y, d in zip(outputs, deltas, strict=True) if y.requires_grad]
    pairs = [(y, d) for y, d in pairs if d is not None]
    wanted = [t for t in inputs if t.requires_grad]
    if not (pairs and wanted):
        return [None] * len(inputs)
    ys, ds = zip(*pairs, strict=True)
    options = {"create_graph": create_graph, "allow_unused": True}
    found = iter(torch.autograd.grad(ys, wanted, ds, **options))
    return [next(found) if t.requires_grad else None for t in inputs]
