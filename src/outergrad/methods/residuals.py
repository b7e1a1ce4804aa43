"""Residuals of error feedback: kept from step to step, saved, and taken over by other sites."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from typing import Any, Generic, TypeVar

import torch

from outergrad.core.types import Factors, Gradient, Place, Slot, StateDict
from outergrad.linalg.outer import product_of, stack

M = TypeVar("M")


class ByPlace(Generic[M]):
    """Memory of each slot, by place, in which a discarded step leaves no trace.

    A committed step is undone, too, if the training loop throws its gradients away (`keep_before`,
    `decide`).

    Args:
        compacted: Copies a memory into tensors that are not views of larger ones.
        taken_back: Returns the memory to keep, from the present and the previous one, when the
            unsent part of the present one is undone; the previous one by default.
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
        """Previous memories of the places that the last applied step has changed."""
        self._tentative: dict[Place, M | None] = {}
        """Previous memories of places whose later gradients may still be thrown away."""

    def __getitem__(self, slot: Slot) -> M | None:
        return self._held.get(slot.place)

    def latest(self, slot: Slot) -> M | None:
        """Returns the memory of a slot, including what the current step has set."""
        return self._next.get(slot.place) or self[slot]

    def __setitem__(self, slot: Slot, memory: M) -> None:
        """Sets a pending memory, which may be views of tensors shared with other slots."""
        self._next[slot.place] = memory

    def held(self) -> Mapping[Place, M]:
        """Returns all memories, as the last applied step left them."""
        return self._held

    def replace(self, held: Mapping[Place, M]) -> None:
        """Replaces all memories, and forgets the pending and the previous ones."""
        self._held = dict(held)
        for changes in (self._next, self._before, self._tentative):
            changes.clear()

    def put(self, slot: Slot, memory: M) -> None:
        """Sets the memory of a slot at once; only between two steps."""
        self._before.setdefault(slot.place, self[slot])
        self._held[slot.place] = memory

    def take_out(self, slots: Sequence[Slot]) -> dict[Slot, M]:
        """Removes the memories of these slots and returns them; only between two steps."""
        found = {slot: self._held.pop(slot.place) for slot in slots if slot.place in self._held}
        for slot, memory in found.items():
            self._before.setdefault(slot.place, memory)
        return found

    def commit(self, *, applied: bool) -> None:
        """Applies the memories that the step has set, or discards them."""
        if applied:
            self._before = {place: self._held.get(place) for place in self._next}
            # a view that this step does not renew would keep its whole base tensor alive
            for place in self._held.keys() - self._next.keys():
                self._held[place] = self._compacted(self._held[place])
            self._held |= self._next
        self._next.clear()

    def keep_before(self, places: Collection[Place]) -> None:
        """Implements `ResidualStore.keep_before`; previous residuals take memory until `decide`."""
        for place in places:
            if place in self._before:
                self._tentative.setdefault(place, self._before[place])
        self._before = {}

    def decide(self, places: Collection[Place], *, used: bool) -> None:
        """Implements `ResidualStore.decide`."""
        for place in places:
            if place not in self._tentative:
                continue
            before = self._tentative.pop(place)
            if not used:
                kept = self._taken_back(self._held.pop(place, None), before)
                if kept is not None:
                    self._held[place] = kept


Saved = Mapping[str, Any]
"""Saved memory of one place on one site."""


def saved_residual(residual: Gradient | None) -> StateDict:
    """Returns the state of a residual, under names that checkpoints show to no other site."""
    if residual is None:
        return {}
    if isinstance(residual, Factors):
        return {"unsent_deltas": residual.d_GRO, "unsent_activations": residual.a_GRI}
    return {"unsent": residual}


def inherited_residual(parts: Sequence[Saved], weight: float) -> Gradient | None:
    """Returns the weighted sum of several sites' residuals, as factors if all of them are.

    Args:
        parts: Saved memories of one place.
        weight: Factor of every residual.
    """
    factors = [_factors(part, weight) for part in parts if "unsent_deltas" in part]
    matrices = [part["unsent"] * weight for part in parts if "unsent" in part]
    if matrices:
        return reduce(torch.add, [*matrices, *map(product_of, factors)])
    return stack(factors) if factors else None


def _factors(part: Saved, weight: float) -> Factors:
    return Factors(part["unsent_deltas"] * weight, part["unsent_activations"])
