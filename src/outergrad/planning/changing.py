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
"""The compressor of a unit in a step: the same on every site."""


class ChangingCompressors(Compressors):
    """Changes compressors at the beginning of steps, and hands on what the old ones have not sent.

    Where the new one cannot take it over, the unit travels dense until all of it has arrived.

    Args:
        units_of: each compressor with the units that it may have.
        choose: says which has which.
    """

    def __init__(
        self, units_of: Sequence[tuple[Compressor, Sequence[Unit]]], choose: Choose
    ) -> None:
        super().__init__(units_of)
        self._choose, self._step = choose, 0
        self._owing: dict[Unit, tuple[ResidualStore, set[str]]] = {}
        """Units that travel dense, who remembers what has to arrive, and of which parameters."""
        self._assign(0)

    def _assign(self, step: int) -> None:
        self._step = step
        self._of = {unit: self._choose(unit, step) for unit in self._of}

    def _order(self, compressors: Iterable[Compressor]) -> tuple[int, ...]:
        """Their places among all, which are the same on every site."""
        order = {id(compressor): k for k, (compressor, _) in enumerate(self._units_of)}
        return tuple(order[id(compressor)] for compressor in compressors)

    @property
    def phases(self) -> list[Hashable]:
        """Who has which units, and what else they decide by."""
        return [
            self._order(self._of.values()),
            tuple(unit in self._owing for unit in self._of),
            *super().phases,
        ]

    def begin(self, step: int, sites: int) -> bool:
        """Goes over to the compressors of a step; whether some unit has another one now."""
        if step == self._step:
            return False
        before = self._of
        self._assign(step)
        changed = [unit for unit, old in before.items() if self._of[unit] is not old]
        for unit in changed:
            if unit not in self._owing and before[unit].remembers(unit):
                self._hand_over(unit, before[unit], sites)
        return bool(changed)

    def _hand_over(self, unit: Unit, old: ResidualStore, sites: int) -> None:
        new = self._of[unit]
        old.decide([slot.place for slot in slots_of(unit)], used=True)
        same_places = {s.place for s in unit.slots} <= {m.place for m in unit.matrices}
        compresses = new.break_even(unit, sites) == float("inf")
        if new.remembers(unit) and same_places and compresses:
            for slot, residual in old.hand_over(unit.matrices).items():
                new.take_over(slot, residual)
        else:
            self._owing[unit] = old, {slot.weight for slot in slots_of(unit)}

    def travels_dense(self, unit: Unit) -> bool:
        """Whether something of a former method has to arrive."""
        return unit in self._owing

    def remembering(self, unit: Unit) -> Sequence[ResidualStore]:
        """Also its former compressor, where something still has to arrive."""
        own, found = self._of[unit], super().remembering(unit)
        old = self._owing[unit][0] if unit in self._owing else own
        return found if old is own else [*found, old]

    def commit(
        self, units: AbstractSet[Unit], *, applied: bool, used: Collection[str] = ()
    ) -> None:
        """Ends a step: what has arrived is owed no more."""
        super().commit(units, applied=applied)
        for unit, (old, names) in list(self._owing.items()) if applied else ():
            arrived = names & set(used)
            old.hand_over([slot for slot in slots_of(unit) if slot.weight in arrived])
            names -= arrived
            if not names:
                del self._owing[unit]

    # -- saved and loaded -----------------------------------------------------------------------

    def states(self) -> list[StateDict]:
        """Behind those of the compressors, the step whose policy holds and what has to arrive."""
        order = {id(store): k for k, store in enumerate(self.stores)}
        owing = {
            unit.params[0]: [order[id(old)], *sorted(names)]
            for unit, (old, names) in self._owing.items()
        }
        return [*super().states(), {"common": {"policy": {"step": self._step}, "owing": owing}}]

    def load(self, inheritances: Sequence[Inheritance]) -> None:
        """As they were after the step in which they were saved."""
        *own, last = inheritances
        super().load(own)
        saved: dict[str, Any] = last.first["common"]
        self._assign(saved["policy"]["step"])
        by_name = {unit.params[0]: unit for unit in self._of}
        self._owing = {
            by_name[name]: (self.stores[k], set(names))
            for name, (k, *names) in saved["owing"].items()
        }
