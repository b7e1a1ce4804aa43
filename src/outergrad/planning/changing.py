"""Compressors of a model whose methods change while it trains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from outergrad.core.compressor import Compressor
from outergrad.core.model import Compressors, slots_of
from outergrad.core.residual_store import ResidualStore
from outergrad.core.types import Inheritance, StateDict, Unit

Choose = Callable[[Unit, int], Compressor]
"""Returns the compressor of a unit in a step; every site must choose the same."""


class ChangingCompressors(Compressors):
    """Compressors that change at the start of steps and hand their residuals to their successors.

    If the new one cannot take a residual over, the unit travels dense until it has all been sent.

    Args:
        units_of: each compressor with the units that it may have.
        choose: returns the compressor of a unit in a step.
    """

    def __init__(
        self, units_of: Sequence[tuple[Compressor, Sequence[Unit]]], choose: Choose
    ) -> None:
        super().__init__(units_of)
        self._choose, self._step = choose, 0
        self._owing: dict[Unit, tuple[ResidualStore, set[str]]] = {}
        """Units that travel dense: the former store, and weights whose residual it has not sent."""
        self._assign(0)

    def _assign(self, step: int) -> None:
        self._step = step
        self._reassign({unit: self._choose(unit, step) for unit in self._of})

    def _order(self, compressors: Iterable[Compressor]) -> tuple[int, ...]:
        order = {id(compressor): k for k, (compressor, _) in enumerate(self._units_of)}
        return tuple(order[id(compressor)] for compressor in compressors)

    @property
    def phases(self) -> list[Hashable]:
        """The compressor of each unit, units with unsent residuals, and the compressors' phases."""
        return [
            self._order(self._of.values()),
            tuple(unit in self._owing for unit in self._of),
            *super().phases,
        ]

    def begin(self, step: int, sites: int) -> bool:
        """Assigns the compressors of a step; returns True if some unit has another one now."""
        if self._stays(step):
            self._step = step
            return False
        before = self._of
        self._assign(step)
        changed = [unit for unit, old in before.items() if self._of[unit] is not old]
        for unit in changed:
            if unit not in self._owing and before[unit].remembers(unit):
                self._hand_over(unit, before[unit], sites)
        return bool(changed)

    def _stays(self, step: int) -> bool:
        """True if a step has the compressors of the last one."""
        return step == self._step

    def _hand_over(self, unit: Unit, old: ResidualStore, sites: int) -> None:
        new = self._of[unit]
        # A residual that moves to another store can no longer be taken back.
        old.decide([slot.place for slot in slots_of(unit)], used=True)
        same_places = {s.place for s in unit.slots} <= {m.place for m in unit.matrices}
        compresses = new.break_even(unit, sites) == float("inf")
        if new.remembers(unit) and same_places and compresses:
            for slot, residual in old.hand_over(unit.matrices).items():
                new.take_over(slot, residual)
        else:
            self._owing[unit] = old, {slot.weight for slot in slots_of(unit)}

    def travels_dense(self, unit: Unit) -> bool:
        """True if a residual of a former compressor has still to be sent."""
        return unit in self._owing

    def remembering(self, unit: Unit) -> Sequence[ResidualStore]:
        """Stores that may hold a residual of the unit, including that of a former compressor."""
        own, found = self._of[unit], super().remembering(unit)
        old = self._owing[unit][0] if unit in self._owing else own
        return found if old is own else [*found, old]

    def commit(
        self, units: AbstractSet[Unit], *, applied: bool, used: Collection[str] = ()
    ) -> None:
        """Ends a step; if applied, former compressors forget the residuals that it sent."""
        super().commit(units, applied=applied)
        for unit, (old, names) in list(self._owing.items()) if applied else ():
            arrived = names & set(used)
            old.hand_over([slot for slot in slots_of(unit) if slot.weight in arrived])
            names -= arrived
            if not names:
                del self._owing[unit]

    # -- saved and loaded -----------------------------------------------------------------------

    def states(self) -> list[StateDict]:
        """States of the compressors, then the step of the assignment and the unsent residuals."""
        order = {id(store): k for k, store in enumerate(self.stores)}
        owing = {
            unit.params[0]: [order[id(old)], *sorted(names)]
            for unit, (old, names) in self._owing.items()
        }
        return [*super().states(), {"common": {"policy": {"step": self._step}, "owing": owing}}]

    def load(self, inheritances: Sequence[Inheritance]) -> None:
        """Restores what `states` returned after a step."""
        *own, last = inheritances
        super().load(own)
        saved: dict[str, Any] = last.first["common"]
        self._assign(saved["policy"]["step"])
        by_name = {unit.params[0]: unit for unit in self._of}
        self._owing = {
            by_name[name]: (self.stores[k], set(names))
            for name, (k, *names) in saved["owing"].items()
        }
