"""`nn.GRU`: `h' = n + z (h - n)` with the gates r and z, and `n = tanh(x_n + r h_n)`."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    times_sigmoid_slope,
    times_tanh_slope,
    wide,
)
from outergrad.layers.recurrent.rule import RecurrentRule


class GRURule(RecurrentRule):
    """The gates' parts x_n and h_n have deltas of their own, that of h_n being r times as large."""

    def recur(self, one: Direction, x_NI: Tensor, first: States) -> tuple[Tensor, ...]:
        """Both parts of the gates, each through its tap."""
        known = one.known(x_NI, first)
        x_NM, h_NM = one.product(x_NI, "ih"), one.product(known.before_NP, "hh")
        slopes = _slopes(wide(x_NM), wide(h_NM), known.before_NP)
        x_NM, h_NM = one.tap(x_NM, x_NI, "ih"), one.tap(h_NM, known.before_NP, "hh")
        return _Recursion.apply(x_NI, *first, x_NM, h_NM, known, slopes)


class _Slopes(NamedTuple):
    """In h': of r, z and h_n; of x_n; of h."""

    h_NM: Tensor
    n_NH: Tensor
    z_NH: Tensor


@torch.no_grad()
def _slopes(x_NM: Tensor, h_NM: Tensor, before_NH: Tensor) -> _Slopes:
    """From both parts of the gates, in whose memory they are computed."""
    x_N3H, h_N3H = (t.unflatten(1, (3, -1)) for t in (x_NM, h_NM))
    x_N3H[:, :2].add_(h_N3H[:, :2]).sigmoid_()
    (r, z, n), (h_r, h_z, h_n) = x_N3H.unbind(1), h_N3H.unbind(1)
    n.addcmul_(r, h_n).tanh_()
    keeps, candidate = z.contiguous(), 1 - z
    times_tanh_slope(candidate, n, out=candidate)
    times_sigmoid_slope(h_n.mul_(candidate), r, out=h_r)
    times_sigmoid_slope(torch.sub(before_NH, n, out=n), z, out=h_z)
    torch.mul(candidate, r, out=h_n)
    return _Slopes(h_NM, candidate, keeps)


class _Recursion(torch.autograd.Function):
    """The hidden states, as they depend on both parts of the gates and on the first ones."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        h_BH: Tensor,
        x_NM: Tensor,
        h_NM: Tensor,
        known: Known,
        slopes: _Slopes,
    ) -> tuple[Tensor, ...]:
        return outputs(ctx, known, (x_NI, h_BH), hidden_weight(known, h_NM), *slopes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Any, *deltas: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        w_MH, h_NM, n_NH, z_NH = saved
        steps, d_NM = ctx.steps, torch.empty_like(h_NM)
        dh = from_outside(steps, w_MH, *deltas)
        d_N3H, h_N3H = (t.unflatten(1, (3, -1)) for t in (d_NM, h_NM))
        rows, tables = (d_NM, d_N3H, h_N3H, z_NH), (dh, dh.unsqueeze(1))
        for (d, d_3, slope, z), (after, wide_after), (before, _) in reversed(
            steps.split(rows, tables)
        ):
            torch.mul(wide_after, slope, out=d_3)
            before.addcmul_(after, z).addmm_(d, w_MH)
        x_N3H = d_N3H.clone()
        torch.mul(dh[steps.batch :], n_NH, out=x_N3H[:, 2])
        return dh[: steps.batch], x_N3H.flatten(1), d_NM, None, None
