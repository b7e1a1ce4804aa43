"""Recurrent cells: one step in time, two products, of the input and of the hidden state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outergrad.core.protocols import TapFn
from outergrad.core.types import Call, Factors, Slot
from outergrad.layers._common import is_plain, join
from outergrad.layers.linear import linear_factors, tapped_linear


class CellRule:
    """What the rules of `nn.RNNCell`, `nn.GRUCell` and `nn.LSTMCell` have in common.

    Every use of the cell, so every step in time, adds its rows to the two slots.
    """

    owns: tuple[str, ...] = ()

    def objection(self, module: nn.RNNCellBase) -> str | None:
        """Parametrised weights are no leaves; without inputs there is nothing to flatten."""
        if not module.input_size:
            return "it has no inputs"
        if is_plain(module, "weight_ih", "weight_hh"):
            return None
        return "one of its weights is computed from others"

    def slots(self, module: nn.RNNCellBase, name: str) -> list[Slot]:
        """The weight of the input and that of the hidden state, all gates of each together."""
        return [_slot(module, name, part) for part in ("ih", "hh")]

    def rows(
        self, module: nn.RNNCellBase, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[int]:
        """The rows of the input, for both."""
        x = args[0] if args else kwargs["input"]
        return [x.numel() // max(module.input_size, 1)] * 2

    def factors(self, module: nn.RNNCellBase, slot: int, call: Call) -> Factors:
        """Input or hidden state, and the delta of the gates."""
        return linear_factors(call)


class RNNCellRule(CellRule):
    """`h' = tanh(W_ih x + b_ih + W_hh h + b_hh)`, or relu."""

    def forward(
        self, module: nn.RNNCell, tap: TapFn, input: Tensor, hx: Tensor | None = None
    ) -> Tensor:
        """As the module's own."""
        x_gates, h_gates = _products(module, tap, input, _or_zeros(module, input, hx))
        gates = x_gates + h_gates
        return torch.tanh(gates) if module.nonlinearity == "tanh" else torch.relu(gates)


class GRUCellRule(CellRule):
    """`h' = n + z (h - n)` with the gates r, z and n."""

    def forward(
        self, module: nn.GRUCell, tap: TapFn, input: Tensor, hx: Tensor | None = None
    ) -> Tensor:
        """As the module's own."""
        h = _or_zeros(module, input, hx)
        x_gates, h_gates = _products(module, tap, input, h)
        (x_r, x_z, x_n), (h_r, h_z, h_n) = x_gates.chunk(3, dim=-1), h_gates.chunk(3, dim=-1)
        n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
        return n + torch.sigmoid(x_z + h_z) * (h - n)


class LSTMCellRule(CellRule):
    """`c' = f c + i g`, `h' = o tanh(c')` with the gates i, f, g and o."""

    def forward(
        self,
        module: nn.LSTMCell,
        tap: TapFn,
        input: Tensor,
        hx: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As the module's own."""
        h, c = (_or_zeros(module, input, state) for state in hx or (None, None))
        x_gates, h_gates = _products(module, tap, input, h)
        i, f, g, o = (x_gates + h_gates).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


def _slot(module: nn.RNNCellBase, name: str, part: str) -> Slot:
    weight = getattr(module, f"weight_{part}")
    bias = join(name, f"bias_{part}") if module.bias else None
    return Slot(name, join(name, f"weight_{part}"), *weight.shape, bias=bias)


def _or_zeros(module: nn.RNNCellBase, x: Tensor, hx: Tensor | None) -> Tensor:
    """The state that a cell begins with.

    Raises:
        ValueError: the input is no row and no batch of rows.
        RuntimeError: the state has another number of rows or features.
    """
    name, shape = type(module).__name__, (*x.shape[:-1], module.hidden_size)
    if x.dim() not in (1, 2):
        raise ValueError(f"{name}: the input must be 1-D or 2-D, not {tuple(x.shape)}")
    if hx is not None and hx.shape != shape:
        raise RuntimeError(f"{name}: the state must be {shape}, not {tuple(hx.shape)}")
    return x.new_zeros(shape) if hx is None else hx


def _products(module: nn.RNNCellBase, tap: TapFn, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """All gates, (..., gates x H): the input's part and the hidden state's."""
    return (
        tapped_linear(tap, x, module.weight_ih, module.bias_ih, slot=0),
        tapped_linear(tap, h, module.weight_hh, module.bias_hh, slot=1),
    )
