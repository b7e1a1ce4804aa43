"""Shared parts of the backward passes through the time steps of recurrent layers.

All states are known, so the local derivative of each row (here: its slope) is computed for all
steps at once. Per step there remain one product, `d_before += d_gates W_hh`, and a few elementwise
ones.

Allocating large temporary tensors costs more than computing in them. So slopes are written into
the memory of the gates, which are the outputs of the taps: nobody reads their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outergrad.core.protocols import TapFn
from outergrad.layers.recurrent._sequences import States, Steps
from outergrad.linalg.gradients import vjp

WalkBack = Callable[..., Sequence[Tensor]]
"""Computes the deltas of the inputs from steps, saved tensors, and deltas of h and last states."""


class Known(NamedTuple):
    """States of one direction, computed by PyTorch's kernel.

    Attributes:
        h: the hidden state after every row, (N, P) or (T, B, P).
        last: per sequence the final hidden state, (B, P), and the final cell state, (B, H).
        before_NP: the hidden state before every row's step.
        w_MP: the weight of the hidden state.
        steps: positions of the rows of each time step.
        again: computes h and last from the rows and the initial states, with a graph.
    """

    h: Tensor
    last: tuple[Tensor, ...]
    before_NP: Tensor
    w_MP: Tensor
    steps: Steps
    again: Callable[..., list[Tensor]]


def wide(t: Tensor) -> Tensor:
    """Returns t detached, in float32 at least; shares t's memory if the dtype stays the same."""
    return t.detach().to(torch.promote_types(t.dtype, torch.float32))


def hidden_weight(known: Known, gates: Tensor) -> Tensor:
    """Returns the hidden state's weight, (M, P), rounded to the gates' dtype under autocast."""
    return wide(known.w_MP.to(gates.dtype))


def times_sigmoid_slope(t: Tensor, s: Tensor, out: Tensor) -> Tensor:
    """Writes `t s (1 - s)` for `s = sigmoid(x)` to out, in one pass."""
    return torch.ops.aten.sigmoid_backward(t, s, grad_input=out)


def times_tanh_slope(t: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """Writes `t (1 - y y)` for `y = tanh(x)` to out, in one pass."""
    return torch.ops.aten.tanh_backward(t, y, grad_input=out)


class Recursion(torch.autograd.Function):
    """The states of a direction as a function of the initial states and the outputs of the taps.

    With create_graph=True, PyTorch's own kernel is differentiated instead, and the outputs of the
    taps get no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, walk_back: WalkBack, known: Known, saved: Sequence[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns the known states.

        Args:
            ctx: autograd's context.
            walk_back: computes the deltas of the initial states and of the outputs of the taps.
            known: the states.
            saved: tensors that `walk_back` reads.
            *inputs: the direction's input rows, the initial states, and the outputs of the taps.
        """
        device = known.h.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.walk_back, ctx.steps, ctx.again = walk_back, known.steps, known.again
        ctx.read = 1 + len(known.last)
        ctx.set_materialize_grads(False)  # an unused output has the delta None
        ctx.save_for_backward(*inputs[: ctx.read], *saved)
        return known.h, *known.last

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # read once: a checkpoint recomputes them per access
        read, saved = tensors[: ctx.read], tensors[ctx.read :]
        if not torch.is_grad_enabled():
            return None, None, None, None, *ctx.walk_back(ctx.steps, saved, *deltas)
        found = _differentiated(ctx, read, deltas)
        others = len(ctx.needs_input_grad) - 3 - len(read)
        return None, None, None, *found, *[None] * others


def _differentiated(
    ctx: Any, read: Sequence[Tensor], deltas: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns the gradients of the rows and initial states, with a graph to the parameters."""
    device, dtype, enabled = ctx.autocast
    seen = [t.view_as(t) for t in read]  # without the hooks of the inputs
    with torch.autocast(device, dtype, enabled=enabled, cache_enabled=False):
        states = ctx.again(*seen)
    return vjp(states, seen, deltas, create_graph=True)


def from_outside(steps: Steps, like: Tensor, rows: Tensor | None, last: Tensor | None) -> Tensor:
    """Returns a table of the states' deltas due to the outputs, (B + N, width of like)."""
    d = like.new_zeros(steps.batch + sum(steps.sizes), like.shape[1])
    if rows is not None:
        d[steps.batch :] = rows.reshape(-1, like.shape[1])
    return d if last is None else d.index_add_(0, steps.last_rows, last.to(d.dtype))


PARTS = ("ih", "hh", "hr")
"""Names of a direction's weights: of the input, of the hidden state, and of its projection."""

_KERNELS: dict[str, Any] = {
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
    "GRU": torch.gru,
    "LSTM": torch.lstm,
}


class Direction:
    """One direction of one layer, in one forward.

    Args:
        module: the module.
        tap: the module's tap.
        place: index of the direction in the module, counted from the first layer.
        steps: positions of the rows of each time step.
    """

    def __init__(self, module: nn.RNNBase, tap: TapFn, place: int, steps: Steps) -> None:
        self.module, self.place, self._tap, self._steps = module, place, tap, steps
        self.turned_round = module.bidirectional and place % 2 == 1
        self._params = [p.detach() for p in module.all_weights[place]]
        self.w_PH = self._params[-1] if module.proj_size else None

    def product(self, x_NI: Tensor, part: str) -> Tensor:
        """Returns the product of one weight with all rows, plus its bias: (N, M)."""
        at = PARTS.index(part)
        return F.linear(x_NI, self._params[at], self._params[at + 2] if self.module.bias else None)

    def gates(self, x_NI: Tensor) -> Tensor:
        """Returns the product of the input, plus both biases: (N, M)."""
        bias = self._params[2] + self._params[3] if self.module.bias else None
        return F.linear(x_NI, self._params[0], bias)

    def tap(self, y_NO: Tensor, a_NI: Tensor, part: str) -> Tensor:
        """Passes a tensor with the delta of a product through the tap of the product's weight."""
        slot = self.place * len(parts_of(self.module)) + PARTS.index(part)
        samples = None if self._steps.packed else self._steps.batch
        return self._tap(y_NO, a_NI, slot, samples=samples, positions_first=True)

    @torch.no_grad()
    def known(self, x_NI: Tensor, first: States) -> Known:
        """Computes the states after every row with PyTorch's kernel, and looks up those before."""
        h, *last = self._run(x_NI, first, self._params)
        before_NP = self._steps.before(torch.cat([first[0], h.flatten(0, -2)]))
        return Known(h, tuple(last), before_NP, self._params[1], self._steps, self.again)

    def again(self, x_NI: Tensor, *first: Tensor) -> list[Tensor]:
        """Computes the states again, with a graph that also leads to the parameters."""
        return self._run(x_NI, first, self.module.all_weights[self.place])

    def _run(self, x_NI: Tensor, first: States, params: Sequence[Tensor]) -> list[Tensor]:
        steps, module, kernel = self._steps, self.module, _KERNELS[self.module.mode]
        states = [state.unsqueeze(0) for state in first]
        hx = states if isinstance(module, nn.LSTM) else states[0]
        options = 1, 0.0, False, False  # layers, dropout, training, bidirectional
        with _without_cudnn(x_NI):
            if steps.packed:
                found = kernel(x_NI, steps.sizes_tensor, hx, params, module.bias, *options)
            else:
                x_TBI = x_NI.unflatten(0, (len(steps.sizes), steps.batch))
                found = kernel(x_TBI, hx, params, module.bias, *options, False)
        h, *last = found
        return [h, *(state.squeeze(0) for state in last)]


def parts_of(module: nn.RNNBase) -> tuple[str, ...]:
    """Returns the names of the weights that each direction of a module has."""
    return PARTS if module.proj_size else PARTS[:2]


def _without_cudnn(x: Tensor) -> AbstractContextManager[None]:
    # cuDNN warns if it is given only some weights of a module, and rounds products to TF32.
    return torch.backends.cudnn.flags(enabled=False) if x.is_cuda else nullcontext()
