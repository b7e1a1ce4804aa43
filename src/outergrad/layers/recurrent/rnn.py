"""`nn.RNN`: `h' = f(W_ih x + b_ih + W_hh h + b_hh)`, with tanh or relu for f."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outergrad.layers.recurrent._direction import Direction
from outergrad.layers.recurrent._sequences import States
from outergrad.layers.recurrent._walk import (
    Known,
    from_outside,
    hidden_weight,
    once_differentiable,
    outputs,
    wide,
)
from outergrad.layers.recurrent.rule import RecurrentRule


class RNNRule(RecurrentRule):
    """Both parts of the gate have the same delta, so one tensor goes through both taps."""

    def recur(self, one: Direction, x_NI: Tensor, first: States) -> tuple[Tensor, ...]:
        """The slope follows from h' alone: the hidden state's part of the gate is not needed."""
        known, gates_NH = one.known(x_NI, first), one.gates(x_NI)
        slope_NH = wide(gates_NH)
        _slope(wide(known.h), out=slope_NH, relu=one.module.mode == "RNN_RELU")
        gates_NH = one.tap(one.tap(gates_NH, x_NI, "ih"), known.before_NP, "hh")
        return _Recursion.apply(x_NI, *first, gates_NH, known, slope_NH)


@torch.no_grad()
def _slope(h: Tensor, out: Tensor, *, relu: bool) -> None:
    """Of f, from its values."""
    h_NH = h.reshape(out.shape)
    if relu:
        torch.gt(h_NH, 0, out=out)
    else:
        torch.mul(h_NH, h_NH, out=out).neg_().add_(1)


class _Recursion(torch.autograd.Function):
    """The hidden states, as they depend on the gates before f and on the first ones."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, h_BH: Tensor, gates_NH: Tensor, known: Known, slope_NH: Tensor
    ) -> tuple[Tensor, ...]:
        return outputs(ctx, known, (x_NI, h_BH), hidden_weight(known, gates_NH), slope_NH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Any, *deltas: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        w_HH, slope_NH = saved
        dh = from_outside(ctx.steps, w_HH, *deltas)
        d_NH = torch.empty_like(slope_NH)
        for (d, slope), (after,), (before,) in reversed(ctx.steps.split((d_NH, slope_NH), (dh,))):
            torch.mul(after, slope, out=d)
            before.addmm_(d, w_HH)
        return dh[: ctx.steps.batch], d_NH, None, None
