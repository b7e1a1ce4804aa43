"""Every site's own leading triplets, for all others."""

from __future__ import annotations

from torch import Tensor

from outergrad._types import Factors, Gradient, Slot
from outergrad.exchange._common import without_silent_ids
from outergrad.exchange._memory import (
    Memories,
    Memory,
    Place,
    finite_or_none,
    formed,
    unsent_of,
)
from outergrad.exchange._settings import LowRankSettings
from outergrad.linalg.canonical import canonical
from outergrad.linalg.compress import compress
from outergrad.linalg.low_rank import LowRank

_ANY_ERROR = 1e-9
"""Small enough to cut nothing off; above zero, so that the error is computed."""


class Gathered:
    """Finds the triplets and remembers what was not sent."""

    def __init__(self, settings: LowRankSettings, memories: Memories) -> None:
        self._settings, self._memories = settings, memories
        self._rows: dict[tuple[Place, int], int] = {}
        self._wanted: dict[Place, int] = {}

    def sent_rows(self, slot: Slot, most: int, site: int) -> int:
        """As many triplets as the site wanted in the last step, or as there can be."""
        return min(most, self._rows.get((slot.place, site), most))

    def wanted_rows(self, slot: Slot) -> int:
        """The rank that the tolerance asks for."""
        return self._wanted.get(slot.place, self._settings.rank)

    def agree(self, slot: Slot, site: int, rows: int) -> None:
        """What the site will send in the next step."""
        self._rows[slot.place, site] = max(1, min(rows, self._settings.rank))

    def compress(self, slot: Slot, gradient: Gradient, rows: int) -> Factors:
        """The leading triplets of the gradient and of what was not sent before."""
        bias = slot.bias is not None
        unsent = unsent_of(self._memories[slot])
        if isinstance(gradient, Factors):
            if slot.lookup:
                return without_silent_ids(gradient)
            if self._is_exact(slot, gradient, rows) and unsent is None:
                return canonical(gradient, rows, bias=bias)
        if self._settings.error_feedback == "dense" or isinstance(unsent, Tensor):
            found = self._with_dense_memory(slot, formed(gradient, unsent), rows)
        else:
            found = self._with_factored_memory(slot, gradient, unsent, rows)
        b_GO = None
        if bias and isinstance(gradient, Factors):
            b_GO = gradient.d_GRO.double().sum(dim=1)
        return found.factors(rows, b_GO)

    def _is_exact(self, slot: Slot, factors: Factors, rows: int) -> bool:
        """Whether so many rows hold everything there is to send."""
        all_rows = min(factors.d_GRO.shape[1], slot.outputs, slot.inputs)
        return rows >= all_rows and not self._settings.tolerance

    def _with_dense_memory(self, slot: Slot, whole_GOI: Tensor, rows: int) -> LowRank:
        found = self._found(slot, whole_GOI, rows, 0)
        kept = found.leading(rows)
        rest_GOI = whole_GOI.baddbmm(kept.d_GRO.mT, kept.a_GRI, alpha=-1)
        keep = rest_GOI if bool(rest_GOI.isfinite().all()) else None
        self._memories[slot] = Memory(found.a_GRI.mT, keep)
        return kept

    def _with_factored_memory(
        self, slot: Slot, gradient: Gradient, unsent: Factors | None, rows: int
    ) -> LowRank:
        extra = self._settings.feedback_rank if self._settings.error_feedback else 0
        found = self._found(slot, gradient, rows, extra, unsent)
        rest = None
        if extra and found.rank > rows:
            rest = finite_or_none(found.rest(rows).factors())
        self._memories[slot] = Memory(found.a_GRI.mT, rest)
        return found.leading(rows)

    def _found(
        self, slot: Slot, gradient: Gradient, rows: int, extra: int, unsent: Factors | None = None
    ) -> LowRank:
        """Triplets for this step, for the choice of the next one's rank and for feedback."""
        settings, memory = self._settings, self._memories[slot]
        needed = max(rows, settings.rank) if settings.tolerance else rows
        found = compress(
            gradient,
            needed + extra,
            _ANY_ERROR if settings.tolerance else 0.0,
            solver=settings.solver,
            iterations=settings.iterations,
            q_GIR=memory.q_GIR if memory else None,
            plus=unsent,
        )
        if settings.tolerance:
            wanted = found.rank_within(settings.tolerance)
            self._wanted[slot.place] = max(1, min(settings.rank, wanted))
        return found
