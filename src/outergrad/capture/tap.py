"""Taps: identities in the graph that hand activations and deltas on in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from outergrad.capture.engine import current_task, is_nested, untraced
from outergrad.capture.parameters import WatchedParameter, is_wanted
from outergrad.capture.untappable import keeps_products
from outergrad.core.types import Call, Factors, Slot
from outergrad.linalg.gradients import add_gradients

_JOINT = (
    "joint=True: the mean of the sites' deltas is neither differentiated (create_graph=True) nor "
    "taken in a backward inside another one (a checkpoint with use_reentrant=True, a custom "
    "function that differentiates): use og.PerLayer(..., joint=False), or leave that out"
)


class Capturing(Protocol):
    """Who is told of a block's deltas."""

    def capture(self, ctx: Any, use: Any, deltas: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Takes the deltas of one use; returns what autograd gets for the tensors of its tap."""
        ...


class Tap(torch.autograd.Function):
    """The identity; keeps a and, in backward, hands (a, delta) on instead of a weight gradient.

    Where autograd itself needs a gradient of a or of the parameters, it gets it (`returned`).
    It takes the parameters as inputs so that backward reaches them, and marks y dirty instead of
    copying it, so that an in-place operation may follow.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, a: Tensor, layer: Any, slot: int, *params: Tensor) -> Tensor:
        """Keeps a, and returns y itself, or a copy where somebody else keeps y."""
        ctx.save_for_backward(a)
        ctx.set_materialize_grads(False)  # a delta that is undefined makes no gradient of zeros
        ctx.layer, ctx.slot, ctx.born_in = layer, slot, current_task()
        if torch._C._len_torch_dispatch_stack() and keeps_products():
            return y.clone()
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @untraced
    def backward(ctx: Any, *deltas: Tensor | None) -> tuple[Any, ...]:
        """Hands (a, delta) to the layer; the delta goes on."""
        if deltas[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        of_a, *of_params = ctx.layer.capture(ctx, ctx.slot, deltas[0])
        return deltas[0], of_a, None, None, *of_params


class BlockTap(torch.autograd.Function):
    """The identity of a use's outputs; in backward hands their deltas on.

    It takes the parameters as inputs so that backward reaches them, and what the use read, for
    where autograd itself needs its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        block: Capturing,
        use: Any,
        counts: tuple[int, int],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Keeps what the use read, and returns copies of its outputs."""
        outputs, read = counts
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[outputs : outputs + read])
        ctx.block, ctx.use, ctx.born_in = block, use, current_task()
        ctx.device = tensors[0].device
        # Copies, because an output may be a view, or saved by what made it.
        return tuple(t.clone() for t in tensors[:outputs])

    @staticmethod
    @untraced
    def backward(ctx: Any, *deltas: Tensor | None) -> tuple[Any, ...]:
        """Hands the deltas of the outputs to the block."""
        found = ctx.use.defined(deltas, ctx.device)
        passed = ctx.block.capture(ctx, ctx.use, found)
        if ctx.use.is_nothing:
            return (None,) * len(ctx.needs_input_grad)
        return None, None, None, *passed


class DeltaTap(torch.autograd.Function):
    """The identity; in backward another delta goes on than the one that arrived."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, instead: Callable[[Any, Tensor], Tensor]) -> Tensor:
        """Returns a copy of y."""
        ctx.instead = instead
        return y.clone()

    @staticmethod
    @untraced
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Any, ...]:
        """Lets `instead` say which delta goes on."""
        if torch.is_grad_enabled() or is_nested():
            raise RuntimeError(_JOINT)
        return ctx.instead(ctx, deltas[0]), None


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
