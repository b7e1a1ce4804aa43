"""One direction of one layer of a recurrent module: states, products and taps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outergrad.core.protocols import TapFn
from outergrad.layers.recurrent._sequences import States
from outergrad.layers.recurrent._steps import Steps
from outergrad.layers.recurrent._walk import Known

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
