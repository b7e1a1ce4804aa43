"""`nn.RNN`: `h' = f(W_ih x + b_ih + W_hh h + b_hh)`, with tanh or relu for f.

The input's and the hidden state's part of the gate have the same delta, so one tensor goes through
both taps. The slope follows from h' alone: the hidden state's part is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outergrad.layers.recurrent._sequences import States, Steps
from outergrad.layers.recurrent._walk import Direction, Recursion, from_outside, hidden_weight, wide


def rnn(one: Direction, x_NI: Tensor, first: States) -> tuple[Tensor, ...]:
    """Computes one direction of an RNN; implements `Recur`."""
    known, gates_NH = one.known(x_NI, first), one.gates(x_NI)
    slope_NH = wide(gates_NH)
    _slope(wide(known.h), out=slope_NH, relu=one.module.mode == "RNN_RELU")
    gates_NH = one.tap(one.tap(gates_NH, x_NI, "ih"), known.before_NP, "hh")
    saved = hidden_weight(known, gates_NH), slope_NH
    return Recursion.apply(_walk_back, known, saved, x_NI, *first, gates_NH)


@torch.no_grad()
def _slope(h: Tensor, out: Tensor, *, relu: bool) -> None:
    """Writes the derivative of f, computed from the values of f, to out."""
    h_NH = h.reshape(out.shape)
    if relu:
        torch.gt(h_NH, 0, out=out)
    else:
        torch.mul(h_NH, h_NH, out=out).neg_().add_(1)


def _walk_back(
    steps: Steps, saved: Sequence[Tensor], dh: Tensor | None, dh_last: Tensor | None
) -> tuple[Tensor, ...]:
    """Returns the deltas of the initial states and of the gates."""
    w_HH, slope_NH = saved
    table, d_NH = from_outside(steps, w_HH, dh, dh_last), torch.empty_like(slope_NH)
    for (d, slope), (after,), (before,) in reversed(steps.split((d_NH, slope_NH), (table,))):
        torch.mul(after, slope, out=d)
        before.addmm_(d, w_HH)
    return table[: steps.batch], d_NH
