"""Every site's own leading triplets, for all others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from outergrad._types import (
    Factors,
    Gradient,
    Inheritance,
    Part,
    Place,
    Slot,
    StateDict,
    place_name,
)
from outergrad.exchange._bundles import Warm, bundles, compress_together
from outergrad.exchange._common import without_silent_ids
from outergrad.exchange._memory import Memories, Memory, compact
from outergrad.exchange._settings import LowRankSettings
from outergrad.linalg.canonical import canonical
from outergrad.linalg.compress import compress
from outergrad.linalg.low_rank import LowRank
from outergrad.linalg.outer import apart, formed, row_sum, shape_of
from outergrad.linalg.subspace import OVERSAMPLING

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

    def compress(self, parts: Sequence[Part]) -> list[Factors]:
        """The leading triplets of each gradient and of what was not sent of it before."""
        found: dict[Slot, Factors] = {}
        usual: list[Warm] = []
        for part in parts:
            warm = self._warm(part)
            if warm is None:
                found[part.slot] = self._alone(part)
            else:
                usual.append(warm)
        for places in bundles(tuple(warm.kind for warm in usual)):
            members = [usual[i] for i in places]
            found.update(self._kept(compress_together(members), [warm.part for warm in members]))
        return [found[part.slot] for part in parts]

    def _warm(self, part: Part) -> Warm | None:
        """The usual: what one iteration from where the last step ended is enough for."""
        settings, memory = self._settings, self._memories[part.slot]
        by_choice = settings.solver != "auto" or settings.iterations or settings.tolerance
        if memory is None or by_choice or isinstance(memory.unsent, Tensor):
            return None
        if settings.error_feedback == "dense" or self._is_exact(part, memory.unsent):
            return None
        if memory.q_GIR.shape[2] < part.rows:
            return None
        columns = min(_columns(part.rows, self._extra), *shape_of(part.gradient))
        return Warm(part, memory.unsent, memory.q_GIR, columns)

    # -- one by one -----------------------------------------------------------------------------

    def _alone(self, part: Part) -> Factors:
        slot, gradient, rows = part
        memory = self._memories[slot]
        unsent = None if memory is None else compact(memory).unsent
        if isinstance(gradient, Factors):
            if slot.lookup:
                return without_silent_ids(gradient)
            if self._is_exact(part, unsent):
                return canonical(gradient, rows, bias=slot.bias is not None)
        if self._settings.error_feedback != "dense" and not isinstance(unsent, Tensor):
            return self._kept(self._found(slot, gradient, rows, unsent), [part])[slot]
        whole_GOI = formed(gradient, unsent)
        found = self._found(slot, whole_GOI, rows)
        kept = found.leading(rows)
        rest_GOI = whole_GOI.baddbmm_(kept.d_GRO.mT, kept.a_GRI, alpha=-1)
        if bool(rest_GOI.isfinite().all()):
            self._memories[slot] = Memory(found.a_GRI.mT, rest_GOI)
        return _with_bias(part, kept.factors(rows))

    def _is_exact(self, part: Part, unsent: Gradient | None) -> bool:
        """Whether so many rows hold everything there is to send."""
        slot, gradient, rows = part
        if isinstance(gradient, Tensor):
            return False
        if slot.lookup:
            return True
        all_rows = min(gradient.d_GRO.shape[1], slot.outputs, slot.inputs)
        return rows >= all_rows and not self._settings.tolerance and unsent is None

    def _found(
        self, slot: Slot, gradient: Gradient, rows: int, unsent: Factors | None = None
    ) -> LowRank:
        """Triplets for this step, for the choice of the next one's rank and for feedback."""
        settings, memory = self._settings, self._memories[slot]
        needed = max(rows, settings.rank) if settings.tolerance else rows
        found = compress(
            gradient,
            _columns(needed, self._extra),
            _ANY_ERROR if settings.tolerance else 0.0,
            solver=settings.solver,
            iterations=settings.iterations,
            q_GIR=None if memory is None else compact(memory).q_GIR,
            plus=unsent,
        )
        if settings.tolerance:
            wanted = found.rank_within(settings.tolerance)
            self._wanted[slot.place] = max(1, min(settings.rank, wanted))
        return found

    # -- both -------------------------------------------------------------------------------------

    @property
    def _extra(self) -> int:
        """Triplets that a memory in factors keeps."""
        return self._settings.feedback_rank if self._settings.error_feedback == "factored" else 0

    def _kept(self, found: LowRank, parts: Sequence[Part]) -> dict[Slot, Factors]:
        """What is sent of the triplets of several slots; all directions are remembered.

        Args:
            found: the groups of all slots behind each other, padded to one shape.
            parts: the slots, as many rows of each.
        """
        rows, slots = parts[0].rows, [part.slot for part in parts]
        sent = apart(found.leading(rows).factors(rows), slots)
        unsent: Sequence[Factors | None] = [None] * len(parts)
        if self._extra and found.rank > rows:
            more = slice(rows, rows + self._extra)
            unsent = apart(Factors(found.d_GRO[:, more].clone(), found.a_GRI[:, more]), slots)
        starts = apart(Factors(found.d_GRO, found.a_GRI), slots)
        finite = _finite(found.sigma_GR, slots)
        for slot, is_finite, start, rest in zip(slots, finite, starts, unsent, strict=True):
            if is_finite:
                self._memories.keep(slot, Memory(start.a_GRI.mT, rest))
        return {p.slot: _with_bias(p, factors) for p, factors in zip(parts, sent, strict=True)}


def _columns(rows: int, extra: int) -> int:
    """Directions to iterate on: for what is sent, for what is kept, and spare ones."""
    return rows + extra + max(OVERSAMPLING, rows // _SPARE_PER_ROW)


def _finite(sigma_GR: Tensor, slots: Sequence[Slot]) -> list[bool]:
    """Of which slots everything is."""
    if math.isfinite(sigma_GR.sum().item()):
        return [True] * len(slots)
    parts = sigma_GR.split([slot.groups for slot in slots])
    return [math.isfinite(part.sum().item()) for part in parts]


def _with_bias(part: Part, sent: Factors) -> Factors:
    """With the bias gradient, where these rows cannot give it and the gradient can."""
    slot, gradient, _ = part
    if slot.bias is None or isinstance(gradient, Tensor):
        return sent
    return sent._replace(b_GO=row_sum(gradient.d_GRO))
