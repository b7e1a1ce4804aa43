"""Taps: identities in the graph that pass activations and deltas on in backward."""

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
    """Receives a block's deltas."""

    def capture(self, ctx: Any, use: Any, deltas: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Takes the deltas of one use; returns the gradients for the tensors of its tap."""
        ...


class Tap(torch.autograd.Function):
    """The identity on y; in backward, (a, delta) go to the layer in place of a weight gradient.

    If autograd itself needs a gradient of a or of the parameters, backward returns it (`returned`).
    The parameters are inputs so that backward reaches them. y is marked dirty instead of copied, so
    that an in-place operation may follow.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, a: Tensor, layer: Any, slot: int, *params: Tensor) -> Tensor:
        """Saves a, and returns y itself, or a copy if a selective checkpoint may keep y."""
        ctx.save_for_backward(a)
        ctx.set_materialize_grads(False)  # an undefined delta stays None
        ctx.layer, ctx.slot, ctx.born_in = layer, slot, current_task()
        if torch._C._len_torch_dispatch_stack() and keeps_products():
            return y.clone()
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @untraced
    def backward(ctx: Any, *deltas: Tensor | None) -> tuple[Any, ...]:
        """Passes (a, delta) to the layer, and returns the delta."""
        if deltas[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        of_a, *of_params = ctx.layer.capture(ctx, ctx.slot, deltas[0])
        return deltas[0], of_a, None, None, *of_params


class BlockTap(torch.autograd.Function):
    """The identity on the outputs of one use of a block; in backward, their deltas go to the block.

    The parameters are inputs so that backward reaches them. The tensors that the use read are
    inputs in case autograd itself needs their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        block: Capturing,
        use: Any,
        counts: tuple[int, int],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Saves the tensors that the use read, and returns copies of its outputs."""
        outputs, read = counts  # tensors: outputs, then those that were read, then parameters
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[outputs : outputs + read])
        ctx.block, ctx.use, ctx.born_in = block, use, current_task()
        ctx.device = tensors[0].device
        # Copies, because an output may be a view, or saved by what made it.
        return tuple(t.clone() for t in tensors[:outputs])

    @staticmethod
    @untraced
    def backward(ctx: Any, *deltas: Tensor | None) -> tuple[Any, ...]:
        """Passes the deltas of the outputs to the block."""
        found = ctx.use.defined(deltas, ctx.device)
        passed = ctx.block.capture(ctx, ctx.use, found)
        if ctx.use.is_nothing:
            return (None,) * len(ctx.needs_input_grad)
        return None, None, None, *passed


class DeltaTap(torch.autograd.Function):
    """The identity; in backward, another delta replaces the one that arrives."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, instead: Callable[[Any, Tensor], Tensor]) -> Tensor:
        """Returns a copy of y."""
        ctx.instead = instead
        return y.clone()

    @staticmethod
    @untraced
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Any, ...]:
        """Returns the delta that `instead` gives."""
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
    """Returns autograd's gradients of the activations and of each parameter; usually None.

    Args:
        ctx: context of the tap, which saved the activations a.
        slot: the slot of the tapped product.
        watched: the slot's parameters.
        factors_of: computes the rows of one use.
        delta: gradient with respect to the product's output.
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
    """Returns zeros to add to the gradient of a, whose graph leads to the weight.

    The product was computed with a detached weight, so the gradient of a, `dᵀ W` through the rows,
    has no graph to the weight. With `W - W.detach()` in place of W it is zero and has that graph,
    so derivatives of any order are right.
    """
    whole = weight if slot.weight_rows is None else weight[slice(*slot.weight_rows)]
    w_GOI = whole.reshape(slot.groups, slot.outputs, slot.inputs).to(factors.d_GRO.dtype)
    zeros_GRI = factors.d_GRO @ (w_GOI - w_GOI.detach())
    (of_a,) = torch.autograd.grad((zeros_GRI * factors.a_GRI).sum(), a, create_graph=True)
    return of_a
