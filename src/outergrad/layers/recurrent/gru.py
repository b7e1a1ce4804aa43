"""`nn.GRU`: `h' = n + z (h - n)` with the gates r and z, and `n = tanh(x_n + r h_n)`.

The gate parts x_n and h_n have different deltas: that of h_n is r times that of x_n. So the input's
and the hidden state's part of the gates each have a tap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outergrad.layers.recurrent._sequences import States, Steps
from outergrad.layers.recurrent._walk import (
    Direction,
    Recursion,
    from_outside,
    hidden_weight,
    times_sigmoid_slope,
    times_tanh_slope,
    wide,
)


def gru(one: Direction, x_NI: Tensor, first: States) -> tuple[Tensor, ...]:
    """Computes one direction of a GRU; implements `Recur`."""
    known = one.known(x_NI, first)
    x_NM, h_NM = one.product(x_NI, "ih"), one.product(known.before_NP, "hh")
    slopes = _slopes(wide(x_NM), wide(h_NM), known.before_NP)
    x_NM, h_NM = one.tap(x_NM, x_NI, "ih"), one.tap(h_NM, known.before_NP, "hh")
    saved = hidden_weight(known, h_NM), *slopes
    return Recursion.apply(_walk_back, known, saved, x_NI, *first, x_NM, h_NM)


class _Slopes(NamedTuple):
    """Derivatives of h' with respect to the gates r, z and h_n; to x_n; and to h."""

    h_NM: Tensor
    n_NH: Tensor
    z_NH: Tensor


@torch.no_grad()
def _slopes(x_NM: Tensor, h_NM: Tensor, before_NH: Tensor) -> _Slopes:
    """Computes the slopes from both parts of the gates, in their memory."""
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


def _walk_back(
    steps: Steps, saved: Sequence[Tensor], dh: Tensor | None, dh_last: Tensor | None
) -> tuple[Tensor, ...]:
    """Returns the deltas of the initial states and of both parts of the gates."""
    w_MH, h_NM, n_NH, z_NH = saved
    table, d_NM = from_outside(steps, w_MH, dh, dh_last), torch.empty_like(h_NM)
    d_N3H, h_N3H = (t.unflatten(1, (3, -1)) for t in (d_NM, h_NM))
    rows, tables = (d_NM, d_N3H, h_N3H, z_NH), (table, table.unsqueeze(1))
    for (d, d_3, slope, z), (after, wide_after), (before, _) in reversed(steps.split(rows, tables)):
        torch.mul(wide_after, slope, out=d_3)
        before.addcmul_(after, z).addmm_(d, w_MH)
    x_N3H = d_N3H.clone()
    torch.mul(table[steps.batch :], n_NH, out=x_N3H[:, 2])
    return table[: steps.batch], x_N3H.flatten(1), d_NM
