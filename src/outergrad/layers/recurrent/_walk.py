"""What the ways back through the steps of a recurrent layer have in common.

All states are known, so the factor by which each row multiplies its delta is known for all steps
at once (here: its slope). What is left step by step is one product,
`d_before += d_gates W_hh`, and a few elementwise ones.

Large temporary tensors cost more than what is computed in them, so slopes are written where the
gates were: in what the taps return, whose values nobody reads.
"""

from __future__ import annotations

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
    """

    h: Tensor
    last: tuple[Tensor, ...]
    before_NP: Tensor
    w_MP: Tensor
    steps: Steps


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


def outputs(ctx: Any, known: Known, *saved: Tensor) -> tuple[Tensor, ...]:
    """What is known; outputs that nobody uses have no delta."""
    ctx.steps = known.steps
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*saved)
    return known.h, *known.last


def from_outside(steps: Steps, like: Tensor, rows: Tensor | None, last: Tensor | None) -> Tensor:
    """A table of the deltas of states that come from the outputs, (B + N, width of like)."""
    d = like.new_zeros(steps.batch + sum(steps.sizes), like.shape[1])
    if rows is not None:
        d[steps.batch :] = rows.reshape(-1, like.shape[1])
    return d if last is None else d.index_add_(0, steps.last_rows, last.to(d.dtype))
