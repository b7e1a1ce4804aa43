"""The rule of recurrent layers: slots, and the forward over layers and directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from outergrad.core.protocols import TapFn
from outergrad.core.types import Slot
from outergrad.layers._common import LinearProducts, input_of, matrix_slot
from outergrad.layers.recurrent._sequences import (
    Sequences,
    States,
    Steps,
    TurnedRound,
    closed,
    opened,
)
from outergrad.layers.recurrent._walk import Direction, parts_of

Recur = Callable[[Direction, Tensor, States], tuple[Tensor, ...]]
"""Computes one direction from its input rows, (N, I), and initial states. Returns the hidden state
after every row, (N, P) or (T, B, P), and the final states. Every weight is tapped, with rows in the
direction's order."""


class RecurrentRule(LinearProducts):
    """`nn.RNN`, `nn.GRU` or `nn.LSTM`.

    Slots: for every layer and direction the weight of the input, that of the hidden state, and, of
    an LSTM with a projection, that of the projection.

    Args:
        recur: computes one direction of one layer.
    """

    def __init__(self, recur: Recur) -> None:
        self._recur = recur

    def slots(self, module: nn.RNNBase, name: str) -> list[Slot]:
        """Returns the weights of every direction, each with all gates."""
        kinds = ("", "_reverse") if module.bidirectional else ("",)
        suffixes = [f"l{layer}{kind}" for layer in range(module.num_layers) for kind in kinds]
        ends = [f"{part}_{suffix}" for suffix in suffixes for part in parts_of(module)]
        slots = [matrix_slot(module, name, f"weight_{end}", f"bias_{end}") for end in ends]
        return [slot._replace(recomputed=True) for slot in slots]

    def forward(
        self, module: nn.RNNBase, tap: TapFn, input: Sequences, hx: Any = None
    ) -> tuple[Any, Any]:
        """Computes the module's forward through taps, layer by layer."""
        x, steps, firsts = opened(module, input, hx)
        one_layer = 2 if module.bidirectional else 1
        lasts: list[States] = []
        for place in range(0, module.num_layers * one_layer, one_layer):
            if place and module.training and module.dropout:
                x = F.dropout(x, module.dropout)
            directions = [Direction(module, tap, place + i, steps) for i in range(one_layer)]
            found = [self._through(one, x, firsts, steps) for one in directions]
            x = torch.cat([y for y, _ in found], dim=1) if module.bidirectional else found[0][0]
            lasts += [last for _, last in found]
        states = tuple(torch.stack(state) for state in zip(*lasts, strict=True))
        return closed(module, input, x, steps, states)

    def _through(
        self, one: Direction, x_NI: Tensor, firsts: States, steps: Steps
    ) -> tuple[Tensor, States]:
        """Returns the hidden state after every row, (N, P), and every sequence's final states."""
        first = tuple(state[one.place] for state in firsts)
        if not one.turned_round:
            y, *last = self._recur(one, x_NI, first)
            return y.flatten(0, -2), tuple(last)
        order_N = steps.reversed_rows
        y, *last = self._recur(one, TurnedRound.apply(x_NI, order_N), first)
        return TurnedRound.apply(y.flatten(0, -2), order_N), tuple(last)

    def rows(self, module: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Returns the number of steps of all sequences, for every weight."""
        x = input_of(args, kwargs)
        x = x.data if isinstance(x, PackedSequence) else x
        return [x.numel() // module.input_size] * len(self.slots(module, ""))
