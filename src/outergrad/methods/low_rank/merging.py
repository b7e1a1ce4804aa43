"""Merging of all sites' triplets at an owner: the aggregator of the paper's star."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from outergrad.core.types import Factors, Gradient, Slot
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
)
from outergrad.methods.low_rank.settings import LowRankSettings
from outergrad.methods.low_rank.vectors import Vectors


class Merging:
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

    def merge(self, slot: Slot, parts: Sequence[Factors], rows: int, sites: int) -> Factors:
        """Returns the leading triplets of the mean, and the mean of the bias gradients."""
        if slot.vector:
            return self._vectors.merged(slot, parts, sites)
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
