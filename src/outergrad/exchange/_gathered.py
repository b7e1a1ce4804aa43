"""Every site's own leading triplets, for all others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outergrad._types import Factors, Gradient, Inheritance, Place, Slot, StateDict, place_name
from outergrad.exchange._common import without_silent_ids
from outergrad.exchange._memory import (
    Memories,
    Memory,
    unsent_of,
    warm_start,
)
from outergrad.exchange._settings import LowRankSettings
from outergrad.linalg.canonical import canonical
from outergrad.linalg.compress import compress
from outergrad.linalg.low_rank import LowRank
from outergrad.linalg.outer import formed, row_sum, shape_of
from outergrad.linalg.product import cheapest, unscaled
from outergrad.linalg.subspace import OVERSAMPLING, warm_iteration
from outergrad.linalg.total import total

_SPARE_PER_ROW = 2
"""A spare direction per so many triplets keeps the error of one iteration within 2 % of the best
(`benchmarks/errors.py`)."""

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

    def common_state(self) -> StateDict:
        """Per place, the rows that every site will send: what all sites know."""
        sent_rows: dict[str, list[int]] = {}
        for (place, _), rows in sorted(self._rows.items(), key=lambda item: item[0][1]):
            sent_rows.setdefault(place_name(place), []).append(rows)
        return {"sent_rows": sent_rows}

    def own_state(self) -> StateDict:
        """Per place, the rows that this site would send."""
        return {"wanted_rows": {place_name(p): rows for p, rows in self._wanted.items()}}

    def load(self, inheritance: Inheritance) -> None:
        """Goes on with the ranks of the sites that this site and the others go on from."""
        place_of, wanted = inheritance.place_of, inheritance.like["own"]["wanted_rows"]
        sent_rows = inheritance.first["common"]["sent_rows"]
        self._wanted = {place_of[name]: rows for name, rows in wanted.items()}
        self._rows = {
            (place_of[name], site): rows[old]
            for name, rows in sent_rows.items()
            for site, old in enumerate(inheritance.predecessors)
        }

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
            b_GO = row_sum(gradient.d_GRO)
        return found.factors(rows, b_GO)

    def _is_exact(self, slot: Slot, factors: Factors, rows: int) -> bool:
        """Whether so many rows hold everything there is to send."""
        all_rows = min(factors.d_GRO.shape[1], slot.outputs, slot.inputs)
        return rows >= all_rows and not self._settings.tolerance

    def _with_dense_memory(self, slot: Slot, whole_GOI: Tensor, rows: int) -> LowRank:
        found = self._found(slot, whole_GOI, rows, 0)
        kept = found.leading(rows)
        rest_GOI = whole_GOI.baddbmm_(kept.d_GRO.mT, kept.a_GRI, alpha=-1)
        keep = rest_GOI if bool(rest_GOI.isfinite().all()) else None
        self._memories[slot] = Memory(found.a_GRI.mT, keep)
        return kept

    def _with_factored_memory(
        self, slot: Slot, gradient: Gradient, unsent: Factors | None, rows: int
    ) -> LowRank:
        extra = self._settings.feedback_rank if self._settings.error_feedback else 0
        found = self._found_warm(slot, gradient, rows, extra, unsent)
        if found is None:
            found = self._found(slot, gradient, rows, extra, unsent)
        kept, spare, rest = found.leading(rows), found.rest(rows + extra), None
        if extra and found.rank > rows and math.isfinite(found.sigma_GR.sum().item()):
            rest = Factors(found.d_GRO[:, rows:][:, :extra], found.a_GRI[:, rows:][:, :extra])
        directions_GRI = torch.cat([kept.a_GRI, spare.a_GRI], dim=1)
        self._memories[slot] = Memory(directions_GRI.mT, rest)
        return kept

    def _found_warm(
        self, slot: Slot, gradient: Gradient, rows: int, extra: int, unsent: Factors | None
    ) -> LowRank | None:
        """The usual step in few operations; None where it is not that."""
        settings, memory = self._settings, self._memories[slot]
        columns = min(_columns(rows, extra), *shape_of(gradient))
        by_choice = settings.solver != "auto" or settings.iterations or settings.tolerance
        if memory is None or by_choice:
            return None
        x_GIK = warm_start(memory)
        if x_GIK is None or x_GIK.shape[2] != columns:
            return None
        main = cheapest(unscaled(gradient), columns, 1, with_energy=False)
        others = () if unsent is None else (unscaled(unsent),)
        return warm_iteration(total(main, *others), x_GIK.to(main.dtype))

    def _found(
        self, slot: Slot, gradient: Gradient, rows: int, extra: int, unsent: Factors | None = None
    ) -> LowRank:
        """Triplets for this step, for the choice of the next one's rank and for feedback."""
        settings, memory = self._settings, self._memories[slot]
        needed = max(rows, settings.rank) if settings.tolerance else rows
        found = compress(
            gradient,
            _columns(needed, extra),
            _ANY_ERROR if settings.tolerance else 0.0,
            solver=settings.solver,
            iterations=settings.iterations,
            q_GIR=warm_start(memory),
            plus=unsent,
        )
        if settings.tolerance:
            wanted = found.rank_within(settings.tolerance)
            self._wanted[slot.place] = max(1, min(settings.rank, wanted))
        return found


def _columns(rows: int, extra: int) -> int:
    """Directions to iterate on: for what is sent, for what is kept, and spare ones."""
    return rows + extra + max(OVERSAMPLING, rows // _SPARE_PER_ROW)
