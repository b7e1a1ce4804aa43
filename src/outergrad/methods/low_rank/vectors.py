"""Vectors through codecs of their own; what these lose is sent later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outergrad.core.coding import Codecs, Field, received
from outergrad.core.payload import EncodedRows, FactorRows
from outergrad.core.types import Factors, Part, Slot, Unit, bias_slot
from outergrad.linalg.outer import formed
from outergrad.methods.low_rank.memory import Memories, Memory, residual_of
from outergrad.methods.low_rank.settings import LowRankSettings


class RowsAndBias(FactorRows):
    """Rows, with the bias gradient along through codecs.

    Args:
        codecs: that it goes through, as one row, whatever the groups.
    """

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs

    def fields(
        self, slot: Slot, count: int, dtype: torch.dtype, bias: torch.dtype | None, codecs: Codecs
    ) -> list[Field]:
        """As of all rows, but for the bias gradient."""
        plain = super().fields(slot, count, dtype, None, codecs)
        if bias is None or slot.lookup:
            return plain
        return [*plain, Field((1, slot.groups * slot.outputs), bias, self._codecs)]

    def read(self, tensors: Sequence[Tensor], slot: Slot, count: int) -> Factors:
        """With the bias gradient in its groups."""
        d_GRO, a_GRI, b_GO = super().read(tensors, slot, count)
        return Factors(d_GRO, a_GRI, None if b_GO is None else b_GO.view(slot.groups, -1))


class Vectors:
    """What is sent of vectors, and remembered.

    A vector that autograd formed is a matrix of one column: its row of deltas is the vector, and
    the activation is one. The bias of a layer that travels in factors goes along with these. Both
    are remembered alike, so that a layer may travel now so and now so.
    """

    def __init__(self, settings: LowRankSettings, memories: Memories) -> None:
        self.codecs, self._memories = settings.vector_codecs, memories
        self._remembers = settings.error_feedback is not None

    def fit(self, unit: Unit) -> bool:
        """Whether each bias of its layers stands alone, and so when autograd has formed it."""
        matrices = {matrix.place for matrix in unit.matrices}
        biases = [bias_slot(slot).place for slot in unit.slots if slot.bias is not None]
        return not self.codecs or (matrices >= set(biases) and len(biases) == len(set(biases)))

    def split(self, parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
        """Those of vectors, and the others."""
        return [p for p in parts if p.slot.vector], [p for p in parts if not p.slot.vector]

    def compressed(self, part: Part) -> Factors:
        """The row of a vector and of what was not sent of it before."""
        return _as_factors(self._row(part.slot, formed(part.gradient), 1.0))

    def with_bias(self, slot: Slot, sent: Factors | EncodedRows) -> Factors | EncodedRows:
        """The same with the bias gradient as a row, and what was not sent of it before."""
        if sent.b_GO is None or not self.codecs:
            return sent
        due_GOI = _precise(sent.b_GO.reshape(1, -1, 1))
        return sent._replace(b_GO=self._row(bias_slot(slot), due_GOI, 1.0)[0])

    def merged(self, slot: Slot, parts: Sequence[Factors], sites: int) -> Factors:
        """The row of the mean of a vector, of which this site remembers what is lost."""
        columns = [part.d_GRO.double().mT @ part.a_GRI.double() for part in parts]
        mean = sum(columns[1:], columns[0]) / sites
        mean = mean.to(_precise(parts[0].d_GRO).dtype)
        return _as_factors(self._row(slot, mean, sites, latest=True))

    def with_merged_bias(self, slot: Slot, sent: Factors, sites: int) -> Factors:
        """The same with the mean of the bias gradients as a row."""
        if sent.b_GO is None or not self.codecs:
            return sent
        mean = _precise(sent.b_GO.reshape(1, -1, 1))
        return sent._replace(b_GO=self._row(bias_slot(slot), mean, sites, latest=True)[0])

    def _row(self, slot: Slot, due_GOI: Tensor, times: float, *, latest: bool = False) -> Tensor:
        """(1, 1, O), and keeps so many times what its codecs lose of it.

        Args:
            slot: of the vector.
            due_GOI: (1, O, 1), in float32 at least.
            times: how many sites miss what is lost.
            latest: whether what this step has left of it stays where it is, and this is added.
        """
        memory = self._memories.latest(slot) if latest else self._memories[slot]
        kept = residual_of(memory)
        if kept is not None and not latest:
            due_GOI = formed(due_GOI, kept)
        row = due_GOI.mT.contiguous()
        if not (self._remembers and self.codecs):
            return row
        lost_GOI = times * (due_GOI - received(self.codecs, row).mT)
        if latest and kept is not None:
            lost_GOI = formed(lost_GOI, kept)
        if math.isfinite(lost_GOI.sum().item()):
            start = memory or Memory(lost_GOI.new_zeros(1, 1, 0))
            self._memories[slot] = replace(start, residual=lost_GOI)
        return row


def _precise(t: Tensor) -> Tensor:
    """In float32 at least: what a codec loses is kept as exactly as the gradient is known."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _as_factors(row: Tensor) -> Factors:
    return Factors(row, row.new_ones(1, 1, 1))
