"""Conversion of a recurrent layer's sequences and states to rows, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


class Step(NamedTuple):
    """One time step's part of row tensors, and of tables of states after and before the step."""

    rows: tuple[Tensor, ...]
    after: tuple[Tensor, ...]
    before: tuple[Tensor, ...]


class Steps:
    """Positions of the rows of each time step. Letters: B sequences, N rows of all steps.

    Rows are ordered by time step, as in a `PackedSequence`. In a batch of equally long sequences
    every step has the same number of rows. In a packed batch, longest sequence first, steps become
    shorter: a step's rows continue the first rows of the step before.

    States are stored in tables of B + N rows: the initial states, then those after every step.

    Attributes:
        sizes: number of rows of each step.
        batch: B, the number of rows of the first step.
        packed: True if the input was a `PackedSequence`.
    """

    def __init__(
        self, sizes: Sequence[int], batch: int, device: torch.device, *, packed: bool = False
    ) -> None:
        self.sizes, self.batch, self.packed, self._device = list(sizes), batch, packed, device
        self._ragged = any(size != batch for size in self.sizes)

    @cached_property
    def sizes_tensor(self) -> Tensor:
        """`sizes` as a tensor on the CPU, as PyTorch's kernels require."""
        return torch.tensor(self.sizes, dtype=torch.int64)

    @cached_property
    def last_rows(self) -> Tensor:
        """Row indices in a table of the final state of every sequence."""
        place = self._start[self._lengths - 1] + torch.arange(self.batch)
        return (self.batch + place).to(self._device)

    @cached_property
    def reversed_rows(self) -> Tensor:
        """Row indices that reverse every sequence in time; the step sizes stay the same."""
        step_N = self._lengths[self._place_of_row] - 1 - self._step_of_row
        return (self._start[step_N] + self._place_of_row).to(self._device)

    def before(self, table: Tensor) -> Tensor:
        """Returns the state before each row's step, (N, H)."""
        if self._ragged:
            return table.index_select(0, self._before_rows)
        return table[: sum(self.sizes)]

    def split(self, rows: Sequence[Tensor], tables: Sequence[Tensor]) -> list[Step]:
        """Returns views of each step's part, in the order of time."""
        rows_T = zip(*(t.split(self.sizes) for t in rows), strict=True)
        first, *after_T = zip(*(t.split([self.batch, *self.sizes]) for t in tables), strict=True)
        before_T = [first, *after_T[:-1]]
        if self._ragged:
            sized = zip(before_T, self.sizes, strict=True)
            before_T = [tuple(t[:size] for t in before) for before, size in sized]
        return [Step(*parts) for parts in zip(rows_T, after_T, before_T, strict=True)]

    @cached_property
    def _before_rows(self) -> Tensor:
        start = torch.cat([torch.zeros(1, dtype=torch.int64), self._start + self.batch])
        return (start[self._step_of_row] + self._place_of_row).to(self._device)

    @cached_property
    def _start(self) -> Tensor:
        return self.sizes_tensor.cumsum(0) - self.sizes_tensor

    @cached_property
    def _step_of_row(self) -> Tensor:
        return torch.arange(len(self.sizes)).repeat_interleave(self.sizes_tensor)

    @cached_property
    def _place_of_row(self) -> Tensor:
        return torch.arange(sum(self.sizes)) - self._start[self._step_of_row]

    @cached_property
    def _lengths(self) -> Tensor:
        return (self.sizes_tensor[:, None] > torch.arange(self.batch)).sum(0)


class TurnedRound(torch.autograd.Function):
    """Reorders rows by an index that is its own inverse, so backward only reorders, too."""

    @staticmethod
    def forward(ctx: Any, rows_N: Tensor, index_N: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        return rows_N.index_select(0, index_N)

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Tensor, None]:
        (index_N,) = ctx.saved_tensors
        return deltas[0].index_select(0, index_N), None


Sequences = Tensor | PackedSequence
States = tuple[Tensor, ...]
"""The hidden states and, of an LSTM, the cell states: (directions of all layers, B, width)."""


class Opened(NamedTuple):
    """The input as rows, (N, I), the positions of their time steps, and the initial states."""

    x_NI: Tensor
    steps: Steps
    states: States


def opened(module: nn.RNNBase, input: Sequences, hx: Any) -> Opened:
    """Converts the module's arguments to rows and initial states.

    Raises:
        ValueError: the input has another dtype or number of dimensions.
        RuntimeError: the input or a state has another size.
    """
    if isinstance(input, PackedSequence):
        return _opened_packed(module, input, hx)
    batch_dim, x, states = 0 if module.batch_first else 1, input, _states(hx)
    _check_dimensions(module, x, states)
    if x.dim() == 2:
        x, states = x.unsqueeze(batch_dim), tuple(state.unsqueeze(1) for state in states)
    states = states or _zeros(module, x, x.shape[batch_dim])
    module.check_forward_args(x, _hidden(module, states), None)
    x_TBI = x.transpose(0, 1) if module.batch_first else x
    time, batch = x_TBI.shape[:2]
    return Opened(x_TBI.flatten(0, 1), Steps([batch] * time, batch, x.device), states)


def closed(
    module: nn.RNNBase, input: Sequences, y_NP: Tensor, steps: Steps, states: States
) -> tuple[Any, Any]:
    """Returns the output and the final states, in the form of the input."""
    if isinstance(input, PackedSequence):
        hidden = module.permute_hidden(_hidden(module, states), input.unsorted_indices)
        return input._replace(data=y_NP), hidden
    y_TBP = y_NP.unflatten(0, (len(steps.sizes), steps.batch))
    y = y_TBP.transpose(0, 1) if module.batch_first else y_TBP
    if input.dim() == 3:
        return y, _hidden(module, states)
    squeezed = tuple(state.squeeze(1) for state in states)
    return y.squeeze(0 if module.batch_first else 1), _hidden(module, squeezed)


def _opened_packed(module: nn.RNNBase, input: PackedSequence, hx: Any) -> Opened:
    x_NI, batch = input.data, int(input.batch_sizes[0])
    if hx is None:
        hidden = _hidden(module, _zeros(module, x_NI, batch))
    else:
        hidden = module.permute_hidden(hx, input.sorted_indices)
    module.check_forward_args(x_NI, hidden, input.batch_sizes)
    steps = Steps(input.batch_sizes.tolist(), batch, x_NI.device, packed=True)
    return Opened(x_NI, steps, _states(hidden))


def _check_dimensions(module: nn.RNNBase, x: Tensor, states: States) -> None:
    name = type(module).__name__
    if x.dim() not in (2, 3):
        raise ValueError(f"{name}: the input must be 2-D or 3-D, not {tuple(x.shape)}")
    for state in states:
        if state.dim() != x.dim():
            raise RuntimeError(
                f"{name}: the states of a {x.dim()}-D input must be {x.dim()}-D, "
                f"not {tuple(state.shape)}"
            )


def _states(hx: Any) -> States:
    if hx is None:
        return ()
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


def _hidden(module: nn.RNNBase, states: States) -> Any:
    """Returns the states in the form that the module takes and returns."""
    return states if isinstance(module, nn.LSTM) else states[0]


def _zeros(module: nn.RNNBase, x: Tensor, batch: int) -> States:
    directions = module.num_layers * (2 if module.bidirectional else 1)
    widths = [module.proj_size or module.hidden_size, module.hidden_size]
    used = widths if isinstance(module, nn.LSTM) else widths[:1]
    return tuple(x.new_zeros(directions, batch, width) for width in used)
