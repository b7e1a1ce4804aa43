"""What the rules of recurrent layers have in common: slots, layers, directions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from outergrad.core.protocols import TapFn
from outergrad.core.types import Call, Factors, Slot
from outergrad.layers._common import is_plain, join
from outergrad.layers.linear import linear_factors
from outergrad.layers.recurrent._direction import Direction, parts_of
from outergrad.layers.recurrent._sequences import Sequences, States, closed, opened
from outergrad.layers.recurrent._steps import Steps, TurnedRound


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
            found = [self._through(one, x, firsts, steps) for one in directions]
            x = torch.cat([y for y, _ in found], dim=1) if module.bidirectional else found[0][0]
            lasts += [last for _, last in found]
        states = tuple(torch.stack(state) for state in zip(*lasts, strict=True))
        return closed(module, input, x, steps, states)

    def _through(
        self, one: Direction, x_NI: Tensor, firsts: States, steps: Steps
    ) -> tuple[Tensor, States]:
        """The hidden state after every row, (N, P), and the last states of every sequence."""
        first = tuple(state[one.place] for state in firsts)
        if not one.turned_round:
            y, *last = self.recur(one, x_NI, first)
            return y.flatten(0, -2), tuple(last)
        order_N = steps.reversed_rows
        y, *last = self.recur(one, TurnedRound.apply(x_NI, order_N), first)
        return TurnedRound.apply(y.flatten(0, -2), order_N), tuple(last)

    @abstractmethod
    def recur(self, one: Direction, x_NI: Tensor, first: States) -> tuple[Tensor, ...]:
        """The hidden state after every row, (N, P) or (T, B, P), and the last states.

        Every weight is tapped, with rows in the order of `one`.
        """

    def rows(self, module: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """All steps of all sequences, for every weight."""
        x = args[0] if args else kwargs["input"]
        x = x.data if isinstance(x, PackedSequence) else x
        return [x.numel() // module.input_size] * len(self.slots(module, ""))

    def factors(self, module: nn.RNNBase, slot: int, call: Call) -> Factors:
        """Inputs, hidden states before or after projection, and deltas."""
        return linear_factors(call)


def _slot(module: nn.RNNBase, name: str, part: str, suffix: str) -> Slot:
    weight, bias = f"weight_{part}_{suffix}", join(name, f"bias_{part}_{suffix}")
    has_bias = module.bias and part != "hr"
    shape = getattr(module, weight).shape
    return Slot(name, join(name, weight), *shape, bias=bias if has_bias else None)
