"""`nn.LSTM`: `c' = f c + i g` with the gates i, f, g and o, and `h' = o tanh(c')`.

With a projection, `h' = W_hr o tanh(c')`. The input's and the hidden state's part of the gates have
the same delta, so one tensor goes through both taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outergrad.layers.recurrent._sequences import States, Steps
from outergrad.layers.recurrent._walk import (
    Direction,
    Known,
    Recursion,
    from_outside,
    hidden_weight,
    times_sigmoid_slope,
    times_tanh_slope,
    wide,
)


def lstm(one: Direction, x_NI: Tensor, first: States) -> tuple[Tensor, ...]:
    """Computes one direction of an LSTM; implements `Recur`. A projection has a tap, too."""
    known, gates_NM = one.known(x_NI, first), one.gates(x_NI)
    cells = _cells(_add_hidden(gates_NM, known), first[1], known.steps)
    gates_NM = one.tap(one.tap(gates_NM, x_NI, "ih"), known.before_NP, "hh")
    inputs, saved = [x_NI, *first, gates_NM], [hidden_weight(known, gates_NM), *cells[:3]]
    if one.w_PH is not None:  # its product is the known hidden state
        inputs.append(one.tap(known.h.flatten(0, -2).clone(), cells.output_NH, "hr"))
        saved.append(wide(one.w_PH.to(gates_NM.dtype)))
    return Recursion.apply(_walk_back, known, saved, *inputs)


@torch.no_grad()
def _add_hidden(gates_NM: Tensor, known: Known) -> Tensor:
    """Returns the gates before activation, in the memory of the input's part."""
    w_MP = hidden_weight(known, gates_NM)
    return wide(gates_NM).addmm_(wide(known.before_NP), w_MP.t())


class _Cells(NamedTuple):
    """The cells' output `o tanh(c')`, and the slopes (derivatives) that backward needs.

    Attributes:
        gates_NM: derivatives of c' with respect to the gates i, f and g, and of the output to o.
        c_NH: derivative of the output with respect to c'.
        f_NH: derivative of c' with respect to c.
        output_NH: the output before a projection.
    """

    gates_NM: Tensor
    c_NH: Tensor
    f_NH: Tensor
    output_NH: Tensor


@torch.no_grad()
def _cells(gates_NM: Tensor, c_BH: Tensor, steps: Steps) -> _Cells:
    """Computes the cells from the gates before activation, whose memory their slopes overwrite."""
    gates_N4H = gates_NM.unflatten(1, (4, -1))
    gates_N4H[:, :2].sigmoid_()
    i, f, g, o = gates_N4H.unbind(1)
    g.tanh_()
    o.sigmoid_()
    keeps_NH = f.contiguous()
    c = _cell_states(torch.cat([c_BH.to(g.dtype), i * g]), keeps_NH, steps)
    tanh_NH = torch.tanh(c[steps.batch :])
    output_NH, c_slope = o * tanh_NH, torch.empty_like(tanh_NH)
    times_tanh_slope(o, tanh_NH, out=c_slope)
    times_sigmoid_slope(tanh_NH, o, out=o)
    times_sigmoid_slope(steps.before(c), f, out=f)
    i_slope = times_sigmoid_slope(g, i, out=tanh_NH)
    times_tanh_slope(i, g, out=g)
    i.copy_(i_slope)
    return _Cells(gates_NM, c_slope, keeps_NH, output_NH)


def _cell_states(c: Tensor, keeps_NH: Tensor, steps: Steps) -> Tensor:
    """Computes all cell states in place, in a table of the initial states and each step's `i g`."""
    for (keeps,), (after,), (before,) in steps.split((keeps_NH,), (c,)):
        after.addcmul_(keeps, before)
    return c


def _walk_back(
    steps: Steps,
    saved: Sequence[Tensor],
    dh: Tensor | None,
    dh_last: Tensor | None,
    dc_last: Tensor | None,
) -> tuple[Tensor, ...]:
    """Returns the deltas of the initial states, of the gates and, if any, of the projection."""
    w_MP, gates_NM, c_NH, f_NH, *projection = saved
    h, c = from_outside(steps, w_MP, dh, dh_last), from_outside(steps, f_NH, None, dc_last)
    d_NM = torch.empty_like(gates_NM)
    d_N4H, slopes_N4H = (t.unflatten(1, (4, -1)) for t in (d_NM, gates_NM))
    rows = (d_NM, *_cell_and_output(d_N4H), *_cell_and_output(slopes_N4H), c_NH, f_NH)
    for of_row, (dh_after, dc_after, wide_after), (dh_before, dc_before, _) in reversed(
        steps.split(rows, (h, c, c.unsqueeze(1)))
    ):
        d, d_ifg, d_o, ifg, o, in_output, keeps = of_row
        d_output = dh_after @ projection[0] if projection else dh_after
        torch.mul(d_output, o, out=d_o)
        dc_after.addcmul_(d_output, in_output)
        torch.mul(wide_after, ifg, out=d_ifg)
        dc_before.addcmul_(dc_after, keeps)
        dh_before.addmm_(d, w_MP)
    batch = steps.batch
    return h[:batch], c[:batch], d_NM, *((h[batch:],) if projection else ())


def _cell_and_output(gates_N4H: Tensor) -> tuple[Tensor, Tensor]:
    return gates_N4H[:, :3], gates_N4H[:, 3]
