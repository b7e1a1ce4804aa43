"""One direction of one layer of a recurrent module: its products, its taps, its states."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outergrad._protocols import TapFn
from outergrad.layers._recursion import Known
from outergrad.layers._sequences import States
from outergrad.layers._steps import Steps

PARTS = ("ih", "hh", "hr")
"""The weights of a direction: of the input, of the hidden state, and of its projection."""

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
        tap: its tap.
        place: which of the module's directions this is, those of the first layer first.
        steps: where the rows of each step stand.
    """

    def __init__(self, module: nn.RNNBase, tap: TapFn, place: int, steps: Steps) -> None:
        self.module, self._tap, self.place, self.steps = module, tap, place, steps
        self.turned_round = module.bidirectional and place % 2 == 1
        self._params = [p.detach() for p in module.all_weights[place]]
        self.w_PH = self._params[-1] if module.proj_size else None

    def product(self, x_NI: Tensor, part: str) -> Tensor:
        """Of one weight with all rows at once, and its bias."""
        at = PARTS.index(part)
        return F.linear(x_NI, self._params[at], self._params[at + 2] if self.module.bias else None)

    def tap(self, y_NO: Tensor, a_NI: Tensor, part: str) -> Tensor:
        """What has the delta of a product, through the tap of its weight."""
        slot = self.place * len(parts_of(self.module)) + PARTS.index(part)
        return self._tap(y_NO, a_NI, slot)

    @torch.no_grad()
    def known(self, x_NI: Tensor, states: States) -> Known:
        """The states after every row, by PyTorch's own kernel, and those before."""
        h_NP, *finals = self._run(x_NI, states)
        before_NP = self.steps.before(torch.cat([states[0], h_NP]))
        return Known(self.steps, h_NP, tuple(finals), before_NP, self._params[1])

    def _run(self, x_NI: Tensor, states: States) -> list[Tensor]:
        module, steps, first = self.module, self.steps, [state[None] for state in states]
        kernel, hx = _KERNELS[module.mode], first if isinstance(module, nn.LSTM) else first[0]
        options = 1, 0.0, False, False  # layers, dropout, training, bidirectional
        with _without_cudnn(x_NI):
            if steps.packed:
                y, *finals = kernel(x_NI, steps.sizes_T, hx, self._params, module.bias, *options)
            else:
                x_TBI = x_NI.unflatten(0, (len(steps.sizes), steps.batch))
                y, *finals = kernel(x_TBI, hx, self._params, module.bias, *options, False)
        return [y.view(len(x_NI), y.shape[-1]), *(last[0] for last in finals)]


def parts_of(module: nn.RNNBase) -> tuple[str, ...]:
    """The weights that a direction has."""
    return PARTS if module.proj_size else PARTS[:2]


def _without_cudnn(x: Tensor) -> AbstractContextManager[None]:
    """It warns of weights that are not the whole module's, and rounds them in another way."""
    return torch.backends.cudnn.flags(enabled=False) if x.is_cuda else nullcontext()
