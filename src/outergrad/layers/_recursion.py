"""The way back through the hidden states of a recurrent layer whose states are all known.

Then the factor by which each row multiplies its delta is known for all steps at once (here: its
slope), and what is left step by step is one product, `d_before += d_gates W_hh`, and a few
elementwise ones. The hidden states come from PyTorch's own kernel.

Letters: N rows of all steps, B sequences, M gates times the hidden width H, P width of the hidden
state (H, or less where it is projected).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from outergrad.layers._steps import Steps

_sigmoid_slope = torch.ops.aten.sigmoid_backward  # a s (1 - s) and a (1 - t t), in one pass each
_tanh_slope = torch.ops.aten.tanh_backward


class Known(NamedTuple):
    """What one direction of a layer has computed.

    Attributes:
        steps: where the rows of each step stand.
        h_NP: the hidden state after every row.
        finals: per sequence the last hidden state, (B, P), and the last cell state, (B, H).
        before_NP: the hidden state that every row begins with.
        w_MP: the weight of the hidden state.
    """

    steps: Steps
    h_NP: Tensor
    finals: tuple[Tensor, ...]
    before_NP: Tensor
    w_MP: Tensor

    def wide(self, gates: Tensor) -> Tensor:
        """In a dtype that rounds neither gates nor states: under autocast they may differ."""
        return gates.detach().to(torch.promote_types(gates.dtype, self.h_NP.dtype))


@torch.no_grad()
def elman_slope(known: Known, *, relu: bool) -> Tensor:
    """Of `h' = f(gates)` from h' itself, (N, H)."""
    h_NH = known.h_NP
    return (h_NH > 0).to(h_NH.dtype) if relu else 1 - h_NH * h_NH


class ElmanRecursion(torch.autograd.Function):
    """`h' = f(gates)`, of slope f'."""

    @staticmethod
    def forward(
        ctx: Any, gates_NH: Tensor, h_BH: Tensor, known: Known, slope_NH: Tensor
    ) -> tuple[Tensor, ...]:
        return _outputs(ctx, known, gates_NH.dtype, slope_NH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_NH: Tensor | None, last_BH: Tensor | None) -> tuple[Any, ...]:
        w_HH, slope_NH = _saved(ctx)
        dh, d_NH = _deltas(ctx.steps, slope_NH, y_NH, last_BH), torch.empty_like(slope_NH)
        for rows, (after,), (before,) in reversed(ctx.steps.split((d_NH, slope_NH), (dh,))):
            d, slope = rows
            torch.mul(after, slope, out=d)
            before.addmm_(d, w_HH)
        return d_NH, dh[: ctx.steps.batch], None, None


class GRUSlopes(NamedTuple):
    """Of the gates r, z and n (as far as the hidden state enters it), of n, and of `h' <- h`."""

    gates_N3H: Tensor
    n_NH: Tensor
    z_NH: Tensor


@torch.no_grad()
def gru_slopes(x_NM: Tensor, h_NM: Tensor, known: Known) -> GRUSlopes:
    """From the gates before activation: the input's part and the hidden state's."""
    (x_r, x_z, x_n), (h_r, h_z, h_n) = (known.wide(t).chunk(3, dim=1) for t in (x_NM, h_NM))
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(torch.addcmul(x_n, r, h_n))
    n_slope = _tanh_slope(1 - z, n)
    parts = [_sigmoid_slope(n_slope * h_n, r), _sigmoid_slope(known.before_NP - n, z), n_slope * r]
    return GRUSlopes(torch.stack(parts, dim=1), n_slope, z)


class GRURecursion(torch.autograd.Function):
    """`h' = n + z (h - n)`, n of `x_n + r h_n`: delta of h_n is r times that of x_n."""

    @staticmethod
    def forward(
        ctx: Any, x_NM: Tensor, h_NM: Tensor, h_BH: Tensor, known: Known, slopes: GRUSlopes
    ) -> tuple[Tensor, ...]:
        return _outputs(ctx, known, h_NM.dtype, *slopes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_NH: Tensor | None, last_BH: Tensor | None) -> tuple[Any, ...]:
        w_MH, gates_N3H, n_NH, z_NH = _saved(ctx)
        steps, d_N3H = ctx.steps, torch.empty_like(gates_N3H)
        dh, rows = _deltas(steps, z_NH, y_NH, last_BH), (d_N3H, d_N3H.flatten(1), gates_N3H, z_NH)
        for (d_3, d, slope, z), (wide, after), (_, before) in reversed(
            steps.split(rows, (dh.unsqueeze(1), dh))
        ):
            torch.mul(wide, slope, out=d_3)
            before.addcmul_(after, z).addmm_(d, w_MH)
        x_N3H = d_N3H.clone()
        torch.mul(dh[steps.batch :], n_NH, out=x_N3H[:, 2])
        return x_N3H.flatten(1), d_N3H.flatten(1), dh[: steps.batch], None, None


class LSTMCells(NamedTuple):
    """The cell, of all rows.

    Attributes:
        output_NH: `o tanh(c')`, what is projected.
        gates_N3H: slopes of the gates i, f and g in c'.
        o_NH: slope of the gate o in the output.
        c_NH: slope of c' in the output.
        f_NH: slope of c in c'.
    """

    output_NH: Tensor
    gates_N3H: Tensor
    o_NH: Tensor
    c_NH: Tensor
    f_NH: Tensor


@torch.no_grad()
def lstm_cells(gates_NM: Tensor, c_BH: Tensor, known: Known) -> LSTMCells:
    """From the gates before activation and the first cell states."""
    steps, (i, f, g, o) = known.steps, known.wide(gates_NM).chunk(4, dim=1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    c = torch.cat([c_BH.to(i.dtype), i * g])
    for (forget,), (after,), (before,) in steps.split((f,), (c,)):
        after.addcmul_(forget, before)
    t = torch.tanh(c[steps.batch :])
    parts = [_sigmoid_slope(g, i), _sigmoid_slope(steps.before(c), f), _tanh_slope(i, g)]
    o_slope, c_slope = _sigmoid_slope(t, o), _tanh_slope(o, t)
    return LSTMCells(o * t, torch.stack(parts, dim=1), o_slope, c_slope, f)


class LSTMRecursion(torch.autograd.Function):
    """`c' = f c + i g`, `h' = o tanh(c')`, or its projection, which is an input of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        gates_NM: Tensor,
        projected_NP: Tensor | None,
        h_BP: Tensor,
        c_BH: Tensor,
        known: Known,
        cells: LSTMCells,
        w_PH: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights = () if w_PH is None else (w_PH.to(gates_NM.dtype),)
        return _outputs(ctx, known, gates_NM.dtype, *cells[1:], *weights)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, y_NP: Tensor | None, last_BP: Tensor | None, last_BH: Tensor | None
    ) -> tuple[Any, ...]:
        w_MP, gates_N3H, o_NH, c_NH, f_NH, *projection = _saved(ctx)
        steps, batch = ctx.steps, ctx.steps.batch
        dh, dc = _deltas(steps, w_MP, y_NP, last_BP), _deltas(steps, o_NH, None, last_BH)
        d_NM = o_NH.new_empty(len(o_NH), len(w_MP))
        d_N4H = d_NM.unflatten(1, (4, -1))
        rows = d_NM, d_N4H[:, :3], d_N4H[:, 3], gates_N3H, o_NH, c_NH, f_NH
        for (d, d_3, d_o, slope, o, c, f), (dh_after, dc_after, wide), (dh_before, dc_before, _) in (
            reversed(steps.split(rows, (dh, dc, dc.unsqueeze(1))))
        ):
            output = dh_after @ projection[0] if projection else dh_after
            dc_after.addcmul_(output, c)
            torch.mul(wide, slope, out=d_3)
            torch.mul(output, o, out=d_o)
            dc_before.addcmul_(dc_after, f)
            dh_before.addmm_(d, w_MP)
        projected = dh[batch:] if projection else None
        return d_NM, projected, dh[:batch], dc[:batch], None, None, None


def _outputs(ctx: Any, known: Known, dtype: torch.dtype, *saved: Tensor) -> tuple[Tensor, ...]:
    """What is known, and for the way back the weight as the gates' dtype rounds it.

    The hidden states are a view of what the kernel made; an in-place operation that follows wants
    a tensor of its own.
    """
    ctx.set_materialize_grads(False)
    ctx.steps = known.steps
    ctx.save_for_backward(known.w_MP.to(dtype), *saved)
    return known.h_NP.clone(), *known.finals


def _saved(ctx: Any) -> list[Tensor]:
    """In the dtype of the slopes, the second of them."""
    dtype = ctx.saved_tensors[1].dtype
    return [t.to(dtype) for t in ctx.saved_tensors]


def _deltas(steps: Steps, like: Tensor, rows: Tensor | None, last: Tensor | None) -> Tensor:
    """A table of what reaches the states from outside: those of the rows and the last ones."""
    d = like.new_zeros(steps.batch + sum(steps.sizes), like.shape[1])
    if rows is not None:
        d[steps.batch :] = rows
    return d if last is None else d.index_add_(0, steps.last_B + steps.batch, last.to(d.dtype))
