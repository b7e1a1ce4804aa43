"""Compressors of a model whose methods a `Chooser` picks from the times of steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet

from outergrad.core.choosing import Chooser
from outergrad.core.compressor import Compressor
from outergrad.core.types import Inheritance, StateDict, Unit
from outergrad.planning.changing import ChangingCompressors


class ChosenCompressors(ChangingCompressors):
    """Compressors that a `Chooser` assigns to units; it also knows the assignment of the next step.

    Layers can therefore be captured in forward as the next step needs it.

    Args:
        units_of: each compressor with the units that it may have.
        chooser: returns the compressor of a unit in a step, and has a state of its own.
    """

    def __init__(
        self, units_of: Sequence[tuple[Compressor, Sequence[Unit]]], chooser: Chooser
    ) -> None:
        self.chooser = self._chooser = chooser
        super().__init__(units_of, chooser.compressor)

    def _assign(self, step: int) -> None:
        super()._assign(step)
        self._assigned = self._order(self._of.values())
        self._counting = frozenset(unit for unit, one in self._of.items() if one.uses_rows)

    @property
    def phases(self) -> list[Hashable]:
        """The compressor of each unit, units with unsent residuals, and the compressors' phases."""
        owing = tuple(unit in self._owing for unit in self._of) if self._owing else ()
        return [self._assigned, owing, *(compressor.phase for compressor, _ in self._units_of)]

    def _stays(self, step: int) -> bool:
        return self._chooser.same(step, self._step)

    def next_of(self, unit: Unit) -> Compressor:
        """Returns the compressor of the unit in the next step."""
        return self._choose(unit, self._step + 1)

    @property
    def counting(self) -> AbstractSet[Unit] | None:
        """Units that count rows in the next forward; None (all) near a change or a measurement."""
        same, following = self._chooser.same, self._step + 1
        stays = same(self._step, following) and same(following, following + 1)
        return self._counting if stays and not self._chooser.hears(following) else None

    @property
    def ahead(self) -> Hashable:
        """Assignment of the next step; None if it is the current one."""
        same = self._chooser.same(self._step, self._step + 1)
        return None if same else self._order(map(self.next_of, self._of))

    # -- saved and loaded -----------------------------------------------------------------------

    def states(self) -> list[StateDict]:
        """States of the compressors, with the chooser's state in the last one."""
        *own, last = super().states()
        return [*own, {"common": {**last["common"], "choice": self._chooser.state(self._step)}}]

    def load(self, inheritances: Sequence[Inheritance]) -> None:
        """Restores what `states` returned; with other sites, measured times are forgotten."""
        last = inheritances[-1]
        common = last.first["common"]
        step = common["policy"]["step"]
        self._chooser.load(common["choice"], step, same_sites=last.same_sites)
        super().load(inheritances)
