"""Sequences as rows, ordered by time step, as in a `PackedSequence`.

In a batch of equally long sequences every step has the same number of rows. In a packed batch,
longest sequence first, steps become shorter: a step's rows continue the first rows of the step
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """One time step's part of row tensors, and of tables of states after and before the step."""

    rows: tuple[Tensor, ...]
    after: tuple[Tensor, ...]
    before: tuple[Tensor, ...]


class Steps:
    """Positions of the rows of each time step. Letters: B sequences, N rows of all steps.

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
