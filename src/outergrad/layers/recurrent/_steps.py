"""Sequences as rows, one step in time after the other, as `PackedSequence` has them.

A batch of equally long sequences is the case in which every step has as many rows. In a packed
one, longest sequence first, steps become shorter: a step's rows continue the first rows of the
step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """One step's part of some rows, and of some tables of states after and before the step."""

    rows: tuple[Tensor, ...]
    after: tuple[Tensor, ...]
    before: tuple[Tensor, ...]


class Steps:
    """Where the rows of each step stand. Letters: B sequences, N rows of all steps.

    States are kept in tables of B + N rows: the first ones, then those after every step.

    Attributes:
        sizes: the rows of each step.
        batch: B, those of the first.
        packed: whether they came as a `PackedSequence`.
    """

    def __init__(
        self, sizes: Sequence[int], batch: int, device: torch.device, *, packed: bool = False
    ) -> None:
        self.sizes, self.batch, self.packed, self._device = list(sizes), batch, packed, device
        self._ragged = any(size != batch for size in self.sizes)

    @cached_property
    def sizes_tensor(self) -> Tensor:
        """The same as a tensor on the CPU, which is where PyTorch wants them."""
        return torch.tensor(self.sizes, dtype=torch.int64)

    @cached_property
    def last_rows(self) -> Tensor:
        """Where in a table the last state of every sequence stands."""
        place = self._start[self._lengths - 1] + torch.arange(self.batch)
        return (self.batch + place).to(self._device)

    @cached_property
    def reversed_rows(self) -> Tensor:
        """The rows with every sequence turned round: steps of the same sizes."""
        step_N = self._lengths[self._place_of_row] - 1 - self._step_of_row
        return (self._start[step_N] + self._place_of_row).to(self._device)

    def before(self, table: Tensor) -> Tensor:
        """The state that each row begins its step with, (N, H)."""
        if self._ragged:
            return table.index_select(0, self._before_rows)
        return table[: sum(self.sizes)]

    def split(self, rows: Sequence[Tensor], tables: Sequence[Tensor]) -> list[Step]:
        """Views of each step's part, the first step first."""
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
    """Rows in another order, `index` being its own inverse: so is its gradient, without sums."""

    @staticmethod
    def forward(ctx: Any, rows_N: Tensor, index_N: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        return rows_N.index_select(0, index_N)

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Tensor, None]:
        (index_N,) = ctx.saved_tensors
        return deltas[0].index_select(0, index_N), None
