"""Recurrent layers: all steps in time are one product with each weight of a direction.

PyTorch's own kernel computes the hidden states. Those before every step are then as good as an
input, the gates of all steps follow at once, and only deltas are found step by step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from outergrad._protocols import TapFn
from outergrad._types import Call, Factors, Slot
from outergrad.layers._common import is_plain, join
from outergrad.layers._direction import Direction, parts_of
from outergrad.layers._recursion import (
    ElmanRecursion,
    GRURecursion,
    LSTMRecursion,
    elman_slope,
    gru_slopes,
    lstm_cells,
)
from outergrad.layers._sequences import Sequences, States, closed, opened
from outergrad.layers._steps import TurnedRound
from outergrad.layers.linear import linear_factors


class RecurrentRule(ABC):
    """What the rules of `nn.RNN`, `nn.GRU` and `nn.LSTM` have in common.

    Slots: for every layer and direction the weight of the input, that of the hidden state, and of
    an LSTM that projects it the weight of the projection.
    """

    owns: tuple[str, ...] = ()

    def objection(self, module: nn.RNNBase) -> str | None:
        """Parametrised weights are no leaves."""
        params = [name for slot in self.slots(module, "") for name in slot.params]
        return None if is_plain(module, *params) else "one of its weights is computed from others"

    def slots(self, module: nn.RNNBase, name: str) -> list[Slot]:
        """The weights of every direction, all gates of each together."""
        kinds = ("", "_reverse") if module.bidirectional else ("",)
        suffixes = [f"l{layer}{kind}" for layer in range(module.num_layers) for kind in kinds]
        parts = parts_of(module)
        return [_slot(module, name, part, suffix) for suffix in suffixes for part in parts]

    def forward(
        self, module: nn.RNNBase, tap: TapFn, input: Sequences, hx: Any = None
    ) -> tuple[Any, Any]:
        """As the module's own, layer by layer."""
        x, steps, firsts = opened(module, input, hx)
        one_layer = 2 if module.bidirectional else 1
        lasts: list[States] = []
        for place in range(0, module.num_layers * one_layer, one_layer):
            if place and module.training and module.dropout:
                x = F.dropout(x, module.dropout)
            directions = [Direction(module, tap, place + i, steps) for i in range(one_layer)]
            found = [self._through(one, x, firsts) for one in directions]
            x = torch.cat([y for y, _ in found], dim=1) if module.bidirectional else found[0][0]
            lasts += [last for _, last in found]
        states = tuple(torch.stack(state) for state in zip(*lasts, strict=True))
        return closed(module, input, x, steps, states)

    def _through(self, one: Direction, x_NI: Tensor, firsts: States) -> tuple[Tensor, States]:
        """The hidden state after every row, and the last states of every sequence."""
        first = tuple(state[one.place] for state in firsts)
        if not one.turned_round:
            y_NP, *last = self.recur(one, x_NI, first)
            return y_NP, tuple(last)
        order_N = one.steps.reverse_N
        y_NP, *last = self.recur(one, TurnedRound.apply(x_NI, order_N), first)
        return TurnedRound.apply(y_NP, order_N), tuple(last)

    @abstractmethod
    def recur(self, one: Direction, x_NI: Tensor, first: States) -> tuple[Tensor, ...]:
        """The hidden state after every row, and the last states; every weight is tapped."""

    def rows(
        self, module: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[int]:
        """All steps of all sequences, for every weight."""
        x = args[0] if args else kwargs["input"]
        x = x.data if isinstance(x, PackedSequence) else x
        return [x.numel() // module.input_size] * len(self.slots(module, ""))

    def factors(self, module: nn.RNNBase, slot: int, call: Call) -> Factors:
        """Inputs, hidden states before or after projection, and deltas."""
        return linear_factors(call)


class RNNRule(RecurrentRule):
    """`h' = tanh(W_ih x + b_ih + W_hh h + b_hh)`, or relu."""

    def recur(self, one: Direction, x_NI: Tensor, first: States) -> tuple[Tensor, ...]:
        """The slope follows from h', so the hidden state's part of the gate is not needed."""
        known = one.known(x_NI, first)
        gates = one.tap(one.product(x_NI, "ih"), x_NI, "ih")
        gates = one.tap(gates, known.before_NP, "hh")
        slope = elman_slope(known, relu=one.module.mode == "RNN_RELU")
        return ElmanRecursion.apply(gates, *first, known, slope)


class GRURule(RecurrentRule):
    """`h' = n + z (h - n)` with the gates r, z and n."""

    def recur(self, one: Direction, x_NI: Tensor, first: States) -> tuple[Tensor, ...]:
        """The two parts of the gates have deltas of their own."""
        known = one.known(x_NI, first)
        x_NM = one.tap(one.product(x_NI, "ih"), x_NI, "ih")
        h_NM = one.tap(one.product(known.before_NP, "hh"), known.before_NP, "hh")
        return GRURecursion.apply(x_NM, h_NM, *first, known, gru_slopes(x_NM, h_NM, known))


class LSTMRule(RecurrentRule):
    """`c' = f c + i g`, `h' = o tanh(c')` with the gates i, f, g and o, or its projection."""

    def recur(self, one: Direction, x_NI: Tensor, first: States) -> tuple[Tensor, ...]:
        """Both parts of the gates have the same delta, so one tensor goes through both taps."""
        known = one.known(x_NI, first)
        gates = one.product(x_NI, "ih") + one.product(known.before_NP, "hh")
        gates = one.tap(one.tap(gates, x_NI, "ih"), known.before_NP, "hh")
        cells = lstm_cells(gates, first[1], known)
        projected = None
        if one.w_PH is not None:
            projected = one.tap(known.h_NP.clone(), cells.output_NH, "hr")
        return LSTMRecursion.apply(gates, projected, *first, known, cells, one.w_PH)


def _slot(module: nn.RNNBase, name: str, part: str, suffix: str) -> Slot:
    weight, bias = f"weight_{part}_{suffix}", join(name, f"bias_{part}_{suffix}")
    has_bias = module.bias and part != "hr"
    shape = getattr(module, weight).shape
    return Slot(name, join(name, weight), *shape, bias=bias if has_bias else None)
