"""Recurrent cells: a time step with two products, of the input and of the hidden state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outergrad.core.protocols import TapFn
from outergrad.core.types import Slot
from outergrad.layers._common import (
    LinearProducts,
    input_of,
    matrix_slot,
    tapped_linear,
)


def rnn_cell(module: nn.RNNCell, x_gates: Tensor, h_gates: Tensor, h: Tensor) -> Tensor:
    """Returns `h' = tanh(W_ih x + b_ih + W_hh h + b_hh)`, or relu."""
    gates = x_gates + h_gates
    return torch.tanh(gates) if module.nonlinearity == "tanh" else torch.relu(gates)


def gru_cell(module: nn.GRUCell, x_gates: Tensor, h_gates: Tensor, h: Tensor) -> Tensor:
    """Returns `h' = n + z (h - n)` with the gates r, z and n."""
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x_gates.chunk(3, dim=-1), h_gates.chunk(3, dim=-1)
    n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    return n + torch.sigmoid(x_z + h_z) * (h - n)


def lstm_cell(
    module: nn.LSTMCell, x_gates: Tensor, h_gates: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns `h' = o tanh(c')` and `c' = f c + i g` with the gates i, f, g and o."""
    i, f, g, o = (x_gates + h_gates).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


class CellRule(LinearProducts):
    """`nn.RNNCell`, `nn.GRUCell` or `nn.LSTMCell`.

    Every use of the cell, so every time step, adds its rows to the two slots.

    Args:
        step: computes the states after a time step from the module, the input's and the hidden
            state's part of all gates, each (..., gates x H), and the states before.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step

    def objection(self, module: nn.RNNCellBase) -> str | None:
        """Returns an objection to a cell without inputs, which has no rows to flatten."""
        return None if module.input_size else "it has no inputs"

    def slots(self, module: nn.RNNCellBase, name: str) -> list[Slot]:
        """Returns the weight of the input and that of the hidden state, each with all gates."""
        return [matrix_slot(module, name, f"weight_{of}", f"bias_{of}") for of in ("ih", "hh")]

    def forward(self, module: Any, tap: TapFn, input: Tensor, hx: Any = None) -> Any:
        """Computes the module's forward through taps."""
        given = hx or (None, None) if isinstance(module, nn.LSTMCell) else (hx,)
        states = [_or_zeros(module, input, state) for state in given]
        x_gates = tapped_linear(tap, input, module.weight_ih, module.bias_ih, slot=0)
        h_gates = tapped_linear(tap, states[0], module.weight_hh, module.bias_hh, slot=1)
        return self._step(module, x_gates, h_gates, *states)

    def rows(
        self, module: nn.RNNCellBase, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[int]:
        """Returns the rows of the input for both slots."""
        return [input_of(args, kwargs).numel() // max(module.input_size, 1)] * 2


def _or_zeros(module: nn.RNNCellBase, x: Tensor, hx: Tensor | None) -> Tensor:
    """Returns the given initial state, or zeros.

    Raises:
        ValueError: the input is neither a row nor a batch of rows.
        RuntimeError: the state has another number of rows or features.
    """
    name, shape = type(module).__name__, (*x.shape[:-1], module.hidden_size)
    if x.dim() not in (1, 2):
        raise ValueError(f"{name}: the input must be 1-D or 2-D, not {tuple(x.shape)}")
    if hx is not None and hx.shape != shape:
        raise RuntimeError(f"{name}: the state must be {shape}, not {tuple(hx.shape)}")
    return x.new_zeros(shape) if hx is None else hx
