"""What a tap returns to autograd where it needs more of a product than the delta of its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outergrad.capture.tap import NO_TASK, WatchedParameter
from outergrad.core.types import Call, Factors, Slot
from outergrad.linalg.gradients import add_gradients


def returned(
    ctx: Any,
    slot: Slot,
    watched: Sequence[WatchedParameter],
    factors_of: Callable[[Call], Factors],
    delta: Tensor,
) -> list[Tensor | None]:
    """What autograd gets for the activations and for each parameter; usually None.

    Args:
        ctx: of the tap, which saved the activations a.
        slot: what was tapped.
        watched: its parameters.
        factors_of: the rows of one use.
        delta: of the product.
    """
    wanted = [is_wanted(ctx.born_in, p) for p in watched]
    keeps_graph = torch.is_grad_enabled() and ctx.needs_input_grad[1]
    if not (keeps_graph or any(wanted)):
        return [None] * (1 + len(watched))
    (a,) = ctx.saved_tensors
    seen = a.view_as(a)  # without the hooks of a
    factors, params = factors_of(Call(seen, delta)), {p.name: p.parameter for p in watched}
    found: dict[str, Tensor] = {}
    if any(wanted):
        add_gradients(found, slot, [factors], params, 1.0)
    of_a = _graph_to_weight(seen, slot, factors, params[slot.weight]) if keeps_graph else None
    return [of_a, *(found[p.name] if w else None for p, w in zip(watched, wanted, strict=True))]


def is_wanted(born_in: int, p: WatchedParameter) -> bool:
    """Whether a gradient is autograd's own.

    One that a custom function asks for in its backward, or of what was tapped in a backward.
    """
    return p.is_returned() or (born_in != NO_TASK and p.accumulates())


def _graph_to_weight(a: Tensor, slot: Slot, factors: Factors, weight: Tensor) -> Tensor | None:
    """Zeros that are added to the gradient of a, and depend on the weight as that does.

    The product was computed with a detached weight, so the gradient of a, `dᵀ W` through the
    rows, has no path to it; with the weight less itself in its place it is zero, and has one. So
    all derivatives are right, of any order.
    """
    whole = weight if slot.weight_rows is None else weight[slice(*slot.weight_rows)]
    w_GOI = whole.reshape(slot.groups, slot.outputs, slot.inputs).to(factors.d_GRO.dtype)
    zeros_GRI = factors.d_GRO @ (w_GOI - w_GOI.detach())
    (of_a,) = torch.autograd.grad((zeros_GRI * factors.a_GRI).sum(), a, create_graph=True)
    return of_a
