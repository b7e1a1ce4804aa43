"""Residuals of error feedback: kept from step to step, saved, and taken over by other sites."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from typing import Any, Generic, TypeVar

import torch

from outergrad.core.compressor import Compressor
from outergrad.core.types import (
    Factors,
    Gradient,
    Inheritance,
    Place,
    Slot,
    StateDict,
    Unit,
    place_name,
)
from outergrad.linalg.outer import product_of, stack

M = TypeVar("M")

Saved = Mapping[str, Any]
"""Saved memory of one place on one site."""


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

    def put(self, slot: Slot, memory: M | None) -> None:
        """Sets the memory of a slot at once, or removes it; only between two steps."""
        before = self._held.pop(slot.place, None)
        self._before.setdefault(slot.place, before)
        if memory is not None:
            self._held[slot.place] = memory

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


class Remembering(Compressor, Generic[M]):
    """Compressor with error feedback: it has a memory of each slot, part of which is the residual.

    A subclass sets `_memories`, says what of a memory is unsent, how more is added to it and how it
    is saved, and writes `load`.
    """

    _memories: ByPlace[M]

    @abstractmethod
    def _unsent(self, slot: Slot, memory: M) -> Gradient | None:
        """Returns the residual in a memory of the slot."""
        ...

    @abstractmethod
    def _added(self, slot: Slot, residual: Gradient) -> M:
        """Returns the slot's memory with a residual added to its own one."""
        ...

    def _without_unsent(self, memory: M) -> M | None:
        """Returns what stays of a memory whose residual is handed over."""
        return None

    def residual(self, slot: Slot) -> Gradient | None:
        """Returns what error feedback adds to the gradient of the next step; None for nothing."""
        memory = self._memories[slot]
        return None if memory is None else self._unsent(slot, memory)

    def commit(self, *, applied: bool) -> None:
        """Keeps the memories of the step if it is applied, those of before it otherwise."""
        self._memories.commit(applied=applied)

    def keep_before(self, places: Collection[Place]) -> None:
        """Keeps the residuals of before the last committed step until `decide`."""
        self._memories.keep_before(places)

    def decide(self, places: Collection[Place], *, used: bool) -> None:
        """Drops what `keep_before` kept, or restores it if the gradients were not used."""
        self._memories.decide(places, used=used)

    def remembers(self, unit: Unit) -> bool:
        """Returns True: what is not sent is kept for all units."""
        return True

    def hand_over(self, slots: Sequence[Slot]) -> dict[Slot, Gradient]:
        """Returns and forgets the residuals of these slots."""
        found: dict[Slot, Gradient] = {}
        for slot in slots:
            memory, residual = self._memories[slot], self.residual(slot)
            if memory is not None and residual is not None:
                found[slot] = residual
                self._memories.put(slot, self._without_unsent(memory))
        return found

    def take_over(self, slot: Slot, residual: Gradient) -> None:
        """Adds a residual to the slot's own one, if there is one."""
        self._memories.put(slot, self._added(slot, residual))

    def state(self) -> StateDict:
        """Returns the memories of this site, by place."""
        held = self._memories.held().items()
        return {"own": {"memories": {place_name(place): self._saved(m) for place, m in held}}}

    @abstractmethod
    def _saved(self, memory: M) -> StateDict:
        """Returns the state of a memory."""
        ...


def inherited_memories(
    inheritance: Inheritance, inherited: Callable[[Sequence[Saved], float], M | None]
) -> dict[Place, M]:
    """Returns the memories of a site that continues from saved states, by place.

    Args:
        inheritance: Saved states, and what the site takes over of them.
        inherited: Returns the memory of a place from the saved ones of several sites and the factor
            of every residual; None for none.
    """
    old = [state["own"]["memories"] for state in inheritance.residual]
    held: dict[Place, M] = {}
    for name in dict.fromkeys(name for memories in old for name in memories):
        parts = [memories[name] for memories in old if name in memories]
        memory = inherited(parts, inheritance.weight)
        if memory is not None:
            held[inheritance.place_of[name]] = memory
    return held


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
