"""What the ways back through the steps of a recurrent layer have in common.

All states are known, so the factor by which each row multiplies its delta is known for all steps
at once (here: its slope). What is left step by step is one product,
`d_before += d_gates W_hh`, and a few elementwise ones.

Large temporary tensors cost more than what is computed in them, so slopes are written where the
gates were: in what the taps return, whose values nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outergrad.layers.recurrent._steps import Steps
from outergrad.linalg.gradients import vjp

WalkBack = Callable[..., Sequence[Tensor]]
"""From steps, saved tensors and the deltas of h and of the last states."""


class Known(NamedTuple):
    """What PyTorch's kernel has computed for one direction.

    Attributes:
        h: the hidden state after every row, (N, P) or (T, B, P).
        last: per sequence the last hidden state, (B, P), and the last cell state, (B, H).
        before_NP: the hidden state that every row begins with.
        w_MP: the weight of the hidden state.
        steps: where the rows of each step stand.
        again: computes h and last from the rows and the first states, with a graph.
    """

    h: Tensor
    last: tuple[Tensor, ...]
    before_NP: Tensor
    w_MP: Tensor
    steps: Steps
    again: Callable[..., list[Tensor]]


def wide(t: Tensor) -> Tensor:
    """Without the graph, in float32 at least: the same memory if that is its dtype."""
    return t.detach().to(torch.promote_types(t.dtype, torch.float32))


def hidden_weight(known: Known, gates: Tensor) -> Tensor:
    """(M, P), rounded as the products of the gates are under autocast."""
    return wide(known.w_MP.to(gates.dtype))


def times_sigmoid_slope(t: Tensor, s: Tensor, out: Tensor) -> Tensor:
    """`t s (1 - s)` of `s = sigmoid(x)`, in one pass."""
    return torch.ops.aten.sigmoid_backward(t, s, grad_input=out)


def times_tanh_slope(t: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """`t (1 - y y)` of `y = tanh(x)`, in one pass."""
    return torch.ops.aten.tanh_backward(t, y, grad_input=out)


class Recursion(torch.autograd.Function):
    """The states of a direction, as they depend on the first ones and on what the taps return.

    Where a graph is kept, PyTorch's own kernel is differentiated instead: of what the taps
    returned, nothing is asked for then.
    """

    @staticmethod
    def forward(
        ctx: Any, walk_back: WalkBack, known: Known, saved: Sequence[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """What is known.

        Args:
            ctx: as autograd has it.
            walk_back: the deltas of the first states and of what the taps return.
            known: the states.
            saved: what `walk_back` reads.
            *inputs: the rows that the direction read, the first states, and what the taps return.
        """
        device = known.h.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.walk_back, ctx.steps, ctx.again = walk_back, known.steps, known.again
        ctx.read = 1 + len(known.last)
        ctx.set_materialize_grads(False)  # outputs that nobody uses have no delta
        ctx.save_for_backward(*inputs[: ctx.read], *saved)
        return known.h, *known.last

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor | None) -> tuple[Any, ...]:
        """See `forward`."""
        tensors = ctx.saved_tensors  # once: a checkpoint computes them again for each time
        read, saved = tensors[: ctx.read], tensors[ctx.read :]
        if not torch.is_grad_enabled():
            return None, None, None, None, *ctx.walk_back(ctx.steps, saved, *deltas)
        found = _differentiated(ctx, read, deltas)
        others = len(ctx.needs_input_grad) - 3 - len(read)
        return None, None, None, *found, *[None] * others


def _differentiated(
    ctx: Any, read: Sequence[Tensor], deltas: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of what was read, with a graph to the parameters."""
    device, dtype, enabled = ctx.autocast
    seen = [t.view_as(t) for t in read]  # without the hooks of the inputs
    with torch.autocast(device, dtype, enabled=enabled, cache_enabled=False):
        states = ctx.again(*seen)
    return vjp(states, seen, deltas, create_graph=True)


def from_outside(steps: Steps, like: Tensor, rows: Tensor | None, last: Tensor | None) -> Tensor:
    """A table of the deltas of states that come from the outputs, (B + N, width of like)."""
    d = like.new_zeros(steps.batch + sum(steps.sizes), like.shape[1])
    if rows is not None:
        d[steps.batch :] = rows.reshape(-1, like.shape[1])
    return d if last is None else d.index_add_(0, steps.last_rows, last.to(d.dtype))
