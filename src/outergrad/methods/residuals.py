"""What a site has not sent of the gradients until now: kept from step to step, saved, handed on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from typing import Any, Generic, TypeVar

import torch

from outergrad.core.types import Factors, Gradient, Place, Slot, StateDict
from outergrad.linalg.outer import product_of, stack

M = TypeVar("M")


class ByPlace(Generic[M]):
    """What is remembered of each slot. A step that is discarded leaves what there was before it.

    So does one that counts, and whose gradients the loop throws away (`keep_before`, `decide`).

    Args:
        compacted: the same in tensors that are no views of larger ones.
        taken_back: what is remembered if, of what is remembered now, all that was not sent is
            again what it was before; by default all is as it was.
    """

    def __init__(
        self,
        compacted: Callable[[M], M],
        taken_back: Callable[[M | None, M | None], M | None] = lambda now, before: before,
    ) -> None:
        self._compacted, self._taken_back = compacted, taken_back
        self._held: dict[Place, M] = {}
        self._next: dict[Place, M] = {}
        self._before: dict[Place, M | None] = {}
        """What the last step that counts has changed, as it was before it."""
        self._tentative: dict[Place, M | None] = {}
        """The same of all steps since the gradients of a place were used."""

    def __getitem__(self, slot: Slot) -> M | None:
        return self._held.get(slot.place)

    def latest(self, slot: Slot) -> M | None:
        """With what this step has changed."""
        return self._next.get(slot.place) or self[slot]

    def __setitem__(self, slot: Slot, memory: M) -> None:
        """May be views of tensors that hold what is remembered of other slots in the same step."""
        self._next[slot.place] = memory

    def held(self) -> Mapping[Place, M]:
        """All of them, as the last step that was applied left them."""
        return self._held

    def replace(self, held: Mapping[Place, M]) -> None:
        """Remembers these, and nothing else."""
        self._held = dict(held)
        for changes in (self._next, self._before, self._tentative):
            changes.clear()

    def put(self, slot: Slot, memory: M) -> None:
        """Between two steps."""
        self._before.setdefault(slot.place, self[slot])
        self._held[slot.place] = memory

    def take_out(self, slots: Sequence[Slot]) -> dict[Slot, M]:
        """Forgets what it remembers of these, and returns it; between two steps."""
        found = {slot: self._held.pop(slot.place) for slot in slots if slot.place in self._held}
        for slot, memory in found.items():
            self._before.setdefault(slot.place, memory)
        return found

    def commit(self, *, applied: bool) -> None:
        """The step is over."""
        if applied:
            self._before = {place: self._held.get(place) for place in self._next}
            for place in self._held.keys() - self._next.keys():  # the others' tensors are new
                self._held[place] = self._compacted(self._held[place])
            self._held |= self._next
        self._next.clear()

    def keep_before(self, places: Collection[Place]) -> None:
        """As `ResidualStore.keep_before`; it costs what was not sent before until `decide`."""
        for place in places:
            if place in self._before:
                self._tentative.setdefault(place, self._before[place])
        self._before = {}

    def decide(self, places: Collection[Place], *, used: bool) -> None:
        """As `ResidualStore.decide`."""
        for place in places:
            if place not in self._tentative:
                continue
            before = self._tentative.pop(place)
            if not used:
                kept = self._taken_back(self._held.pop(place, None), before)
                if kept is not None:
                    self._held[place] = kept


Saved = Mapping[str, Any]
"""What one site remembers of one place."""


def saved_residual(residual: Gradient | None) -> StateDict:
    """Under names that checkpoints show to no other site."""
    if residual is None:
        return {}
    if isinstance(residual, Factors):
        return {"unsent_deltas": residual.d_GRO, "unsent_activations": residual.a_GRI}
    return {"unsent": residual}


def inherited_residual(parts: Sequence[Saved], weight: float) -> Gradient | None:
    """The sum of the residuals of several sites, as factors if all of them are.

    Args:
        parts: of one place.
        weight: how many times they count.
    """
    factors = [_factors(part, weight) for part in parts if "unsent_deltas" in part]
    matrices = [part["unsent"] * weight for part in parts if "unsent" in part]
    if matrices:
        return reduce(torch.add, [*matrices, *map(product_of, factors)])
    return stack(factors) if factors else None


def _factors(part: Saved, weight: float) -> Factors:
    return Factors(part["unsent_deltas"] * weight, part["unsent_activations"])
