"""What the ways back through the steps of a recurrent layer have in common.

All states are known, so the factor by which each row multiplies its delta is known for all steps
at once (here: its slope). What is left step by step is one product,
`d_before += d_gates W_hh`, and a few elementwise ones.

Large temporary tensors cost more than what is computed in them, so slopes are written where the
gates were: in what the taps return, whose values nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outergrad.layers.recurrent._steps import Steps


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


def outputs(ctx: Any, known: Known, inputs: Sequence[Tensor], *saved: Tensor) -> tuple[Any, ...]:
    """What is known; outputs that nobody uses have no delta.

    Args:
        ctx: of a function of which the inputs are the first arguments.
        known: its outputs.
        inputs: the rows that the direction read, and the first states.
        saved: what `once_differentiable` hands to its backward.
    """
    device = known.h.device.type
    ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    ctx.steps, ctx.again, ctx.inputs = known.steps, known.again, len(inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *saved)
    return known.h, *known.last


def once_differentiable(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A backward without a graph, which is given what was saved besides the inputs.

    Where a graph is kept, PyTorch's own kernel is differentiated instead: of what the taps
    returned, nothing is asked for then.
    """

    @wraps(backward)
    def either(ctx: Any, *deltas: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        inputs, rest = saved[: ctx.inputs], saved[ctx.inputs :]
        if not torch.is_grad_enabled():
            return None, *backward(ctx, rest, *deltas)
        others = len(ctx.needs_input_grad) - len(inputs)
        return *_differentiated(ctx, inputs, deltas), *[None] * others

    return either


def _differentiated(
    ctx: Any, inputs: Sequence[Tensor], deltas: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of the inputs, with a graph to the parameters."""
    device, dtype, enabled = ctx.autocast
    seen = [t.view_as(t) for t in inputs]  # without the hooks of the inputs
    with torch.autocast(device, dtype, enabled=enabled, cache_enabled=False):
        states = ctx.again(*seen)
    pairs = [(y, d) for y, d in zip(states, deltas, strict=True) if d is not None]
    wanted = [t for t in seen if t.requires_grad]
    if not (pairs and wanted):
        return [None] * len(inputs)
    ys, ds = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(ys, wanted, ds, create_graph=True, allow_unused=True))
    return [next(found) if t.requires_grad else None for t in seen]


def from_outside(steps: Steps, like: Tensor, rows: Tensor | None, last: Tensor | None) -> Tensor:
    """A table of the deltas of states that come from the outputs, (B + N, width of like)."""
    d = like.new_zeros(steps.batch + sum(steps.sizes), like.shape[1])
    if rows is not None:
        d[steps.batch :] = rows.reshape(-1, like.shape[1])
    return d if last is None else d.index_add_(0, steps.last_rows, last.to(d.dtype))
