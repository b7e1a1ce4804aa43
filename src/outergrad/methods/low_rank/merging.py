"""Merging of all triplets at an owner, the aggregator of the paper's star; vectors with codecs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from outergrad.core.coding import Codecs, Encoded, Field, decode_all, encode_all, received
from outergrad.core.payload import Arrived, EncodedRows, FactorRows
from outergrad.core.rounds import Merger
from outergrad.core.types import Factors, Gradient, Part, Slot, Unit, bias_slot
from outergrad.linalg.low_rank import LowRank, merge, small_core
from outergrad.linalg.outer import added, formed, product_of, stack
from outergrad.methods.low_rank.budget import Budget
from outergrad.methods.low_rank.memory import (
    Memories,
    Memory,
    compact,
    decoded,
    finite_or_none,
    loss_of,
    residual_of,
    residuals_of,
)
from outergrad.methods.low_rank.settings import LowRankSettings


class RowsAndBias(FactorRows):
    """Rows, with a bias gradient that is encoded; of a vector its row of deltas alone.

    The activation of a vector is one, so it need not travel: half as many tensors in a message.

    Args:
        codecs: Codecs of the bias gradient, which is one row, whatever the groups.
    """

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs

    def fields(
        self, slot: Slot, count: int, dtype: torch.dtype, bias: torch.dtype | None, codecs: Codecs
    ) -> list[Field]:
        """Returns the fields of rows, with the bias gradient as an encoded row."""
        plain = super().fields(slot, count, dtype, None, codecs)
        if slot.vector:
            return plain[:1]
        if bias is None or slot.lookup:
            return plain
        return [*plain, Field((1, slot.groups * slot.outputs), bias, self._codecs)]

    def read(self, tensors: Sequence[Tensor], slot: Slot, count: int) -> Factors:
        """Returns the factors, with the bias gradient divided into its groups."""
        if slot.vector:
            return Factors(tensors[0], _one(tensors[0].dtype, tensors[0].device))
        d_GRO, a_GRI, b_GO = super().read(tensors, slot, count)
        return Factors(d_GRO, a_GRI, None if b_GO is None else b_GO.view(slot.groups, -1))


class Vectors:
    """Payloads and residuals of vectors.

    A vector that autograd formed is a matrix of one column: its row of deltas is the vector, and
    its activation is one. The bias of a layer whose factors are sent travels with these. Both are
    remembered alike, so that a layer may change between the two.
    """

    def __init__(self, settings: LowRankSettings, memories: Memories) -> None:
        self.codecs, self._memories = settings.vector_codecs, memories
        self._remembers = settings.error_feedback is not None

    def fit(self, unit: Unit) -> bool:
        """True if vectors have no codecs, or each bias is one slot's own and among the matrices."""
        matrices = {matrix.place for matrix in unit.matrices}
        biases = [bias_slot(slot).place for slot in unit.slots if slot.bias is not None]
        return not self.codecs or (matrices >= set(biases) and len(biases) == len(set(biases)))

    def split(self, parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
        """Returns the parts of vectors, and the other parts."""
        return [p for p in parts if p.slot.vector], [p for p in parts if not p.slot.vector]

    def compressed(
        self, vectors: Sequence[Part], others: Mapping[Slot, Factors | EncodedRows]
    ) -> dict[Slot, Factors | EncodedRows]:
        """Returns a row of each vector, and the other payloads with each bias gradient as a row.

        All rows include the residual of earlier steps.
        """
        biases = {s: sent.b_GO for s, sent in others.items() if isinstance(sent.b_GO, Tensor)}
        due = {part.slot: formed(part.gradient) for part in vectors}
        if self.codecs:
            due |= {bias_slot(s): _precise(b_GO.reshape(1, -1, 1)) for s, b_GO in biases.items()}
        rows = dict(zip(due, self._written(due), strict=True))
        found = {part.slot: _as_payload(rows[part.slot]) for part in vectors}
        for slot, sent in others.items():
            row = rows.get(bias_slot(slot)) if slot in biases else None
            found[slot] = sent if row is None else sent._replace(b_GO=_as_bias(row))
        return found

    def merged(self, slot: Slot, parts: Sequence[Factors], sites: int) -> Factors:
        """Returns the row of the mean of a vector; this site remembers the loss of its encoding."""
        columns = [part.d_GRO.double().mT @ part.a_GRI.double() for part in parts]
        mean = sum(columns[1:], columns[0]) / sites
        mean = mean.to(_precise(parts[0].d_GRO).dtype)
        return _as_factors(self._merged(slot, mean, sites))

    def with_merged_bias(self, slot: Slot, sent: Factors, sites: int) -> Factors:
        """Returns the payload with the mean of the bias gradients as a row."""
        if sent.b_GO is None or not self.codecs:
            return sent
        mean = _precise(sent.b_GO.reshape(1, -1, 1))
        return sent._replace(b_GO=self._merged(bias_slot(slot), mean, sites)[0])

    def _written(self, due: Mapping[Slot, Tensor]) -> Sequence[Tensor | Encoded]:
        """Returns rows (1, 1, O) of vectors (1, O, 1), all encoded at once if the loss is kept."""
        memories = [self._memories[slot] for slot in due]
        sums = map(_sum, due.values(), residuals_of(memories))
        rows_K = [due_GOI.reshape(1, 1, -1) for due_GOI in sums]
        if not (self._remembers and self.codecs and rows_K):
            return rows_K
        written_K = encode_all(self.codecs, rows_K)
        arrive_K = decode_all(self.codecs, written_K, rows_K)
        lost_K = [(row - arrives).mT for row, arrives in zip(rows_K, arrive_K, strict=True)]
        self._remember(due, memories, lost_K)
        return written_K

    def _merged(self, slot: Slot, mean_GOI: Tensor, sites: int) -> Tensor:
        """Returns a row (1, 1, O), and adds the loss of all sites to the residual of this step."""
        row = mean_GOI.mT.contiguous()
        if self._remembers and self.codecs:
            memory = self._memories.latest(slot)
            lost_GOI = sites * (mean_GOI - received(self.codecs, row).mT)
            self._remember([slot], [memory], [_sum(lost_GOI, residual_of(memory))])
        return row

    def _remember(
        self, slots: Iterable[Slot], memories: Sequence[Memory | None], lost_K: Sequence[Tensor]
    ) -> None:
        """Remembers those of the losses, (1, O, 1), that are finite."""
        sums_K = torch.stack([lost_GOI.sum() for lost_GOI in lost_K]).tolist()
        found: dict[Slot, Memory] = {}
        for slot, memory, lost_GOI, of_all in zip(slots, memories, lost_K, sums_K, strict=True):
            if math.isfinite(of_all):
                start = memory or Memory(lost_GOI.new_zeros(1, 1, 0))
                found[slot] = replace(start, residual=lost_GOI)
        self._memories.update(found)


def _sum(due_GOI: Tensor, kept: Gradient | None) -> Tensor:
    return due_GOI if kept is None else formed(due_GOI, kept)


def _precise(t: Tensor) -> Tensor:
    """Widens to float32 at least: a codec's loss is kept as exactly as the gradient is known."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _as_factors(row: Tensor) -> Factors:
    return Factors(row, row.new_ones(1, 1, 1))


def _as_payload(row: Tensor | Encoded) -> Factors | EncodedRows:
    if isinstance(row, Tensor):
        return _as_factors(row)
    return EncodedRows(row, Encoded(()))  # its activation does not travel


@cache
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the activation of a vector; it is read only."""
    return torch.ones(1, 1, 1, dtype=dtype, device=device)


def _as_bias(row: Tensor | Encoded) -> Tensor | Encoded:
    """Drops the dimension of the groups, of which there is one."""
    return row[0] if isinstance(row, Tensor) else Encoded([t[0] for t in row.written])


class Merging(Merger):
    """Merges triplets at the owner of a layer, and keeps what that discards as its residual.

    All sites lack it, but one remembers it: it counts S times, as the mean divides by S.
    """

    def __init__(
        self,
        settings: LowRankSettings,
        memories: Memories,
        vectors: Vectors,
        budget: Budget | None = None,
    ) -> None:
        self._settings, self._memories, self._vectors = settings, memories, vectors
        self._budget = budget

    def owner(self, slot: Slot) -> int | None:
        """Returns the owner that the budget has set, which changes with the ranks; None without."""
        return None if self._budget is None else self._budget.owner(slot)

    def merged_rows(self, slot: Slot, rows_S: Sequence[int]) -> int:
        """Returns the rank, with a budget that of one site, or the largest possible one."""
        rank = self._settings.rank if self._budget is None else self._budget.rows(slot, 0)
        return min(rank, slot.outputs, slot.inputs, sum(rows_S))

    def merge(self, slot: Slot, parts: Sequence[Arrived], rows: int, sites: int) -> Factors:
        """Returns the leading triplets of the mean, and the mean of the bias gradients."""
        triplets = [part for part in parts if isinstance(part, Factors)]
        if slot.vector:
            return self._vectors.merged(slot, triplets, sites)
        return self._leading(slot, triplets, rows, sites)

    def _leading(self, slot: Slot, parts: Sequence[Factors], rows: int, sites: int) -> Factors:
        found = merge(parts, rows + self._settings.kept_triplets, weights=[1 / sites] * len(parts))
        if self._settings.error_feedback:
            self._remember(slot, parts, found, rows, sites)
        biases = [part.b_GO.double() for part in parts if part.b_GO is not None]
        b_GO = sum(biases[1:], biases[0]) / sites if biases else None
        merged = found.leading(rows).factors(rows, b_GO)
        return self._vectors.with_merged_bias(slot, merged, sites)

    def _remember(
        self, slot: Slot, parts: Sequence[Factors], found: LowRank, rows: int, sites: int
    ) -> None:
        kept = found.leading(rows).factors()
        memory = self._memories.latest(slot) or Memory(compact(kept.a_GRI.mT))
        residual = residual_of(memory)
        if self._settings.keeps_all or isinstance(residual, Tensor):
            whole = self._with_rest_of(parts, kept, residual, sites)
        else:
            whole = self._recompressed(found.rest(rows), kept, residual, sites)
        if whole is not None:
            self._memories[slot] = replace(memory, residual=compact(whole))

    def _with_rest_of(
        self, parts: Sequence[Factors], kept: Factors, residual: Gradient | None, sites: int
    ) -> Tensor | None:
        """Returns the residual plus `sites` times the loss of the mean; None if not finite."""
        dtype = kept.d_GRO.dtype
        if self._settings.keeps_loss:
            kept = decoded(kept, self._settings.codecs)
        sent = stack([Factors(part.d_GRO.to(dtype), part.a_GRI.to(dtype)) for part in parts])
        rest_GOI = product_of(sent) - sites * product_of(kept)
        whole_GOI = formed(rest_GOI, residual)
        return whole_GOI if bool(whole_GOI.isfinite().all()) else None

    def _recompressed(
        self, rest: LowRank, kept: Factors, residual: Factors | None, sites: int
    ) -> Factors | None:
        """Returns the residual plus `sites` times the loss of the mean, as few triplets."""
        missed = rest.factors()
        if self._settings.keeps_loss:
            missed = stack([missed, loss_of(kept, decoded(kept, self._settings.codecs))])
        more = finite_or_none(Factors(missed.d_GRO * sites, missed.a_GRI))
        if more is None or not more.d_GRO.shape[1]:
            return None
        if residual is None and not self._settings.keeps_loss:
            return more
        whole = more if residual is None else added(residual, more)
        return small_core(whole, self._settings.memory_rank).factors()
