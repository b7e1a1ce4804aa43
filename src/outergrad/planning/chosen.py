"""Compressors of a model whose methods are chosen by what steps take."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet

from outergrad.core.choosing import Chooser
from outergrad.core.compressor import Compressor
from outergrad.core.types import Inheritance, StateDict, Unit
from outergrad.planning.changing import ChangingCompressors


class ChosenCompressors(ChangingCompressors):
    """Goes by a chooser, which has a state of its own and knows the next step.

    So layers are already captured as the next step wants it.

    Args:
        units_of: each compressor with the units that it may have.
        chooser: says which has which.
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
        """Who has which units, and what else they decide by."""
        owing = tuple(unit in self._owing for unit in self._of) if self._owing else ()
        return [self._assigned, owing, *(compressor.phase for compressor, _ in self._units_of)]

    def begin(self, step: int, sites: int) -> bool:
        """As there; most steps are as the last one."""
        if self._chooser.same(step, self._step):
            self._step = step
            return False
        return super().begin(step, sites)

    def next_of(self, unit: Unit) -> Compressor:
        """What the unit will have in the next step."""
        return self._choose(unit, self._step + 1)

    @property
    def counting(self) -> AbstractSet[Unit] | None:
        """Those whose compressors go by rows; all where others are near, or the chooser asks."""
        same, following = self._chooser.same, self._step + 1
        stays = same(self._step, following) and same(following, following + 1)
        return self._counting if stays and not self._chooser.hears(following) else None

    @property
    def ahead(self) -> Hashable:
        """Who will have which units, if others than now."""
        same = self._chooser.same(self._step, self._step + 1)
        return None if same else self._order(map(self.next_of, self._of))

    # -- saved and loaded -----------------------------------------------------------------------

    def states(self) -> list[StateDict]:
        """With what the chooser knows."""
        *own, last = super().states()
        return [*own, {"common": {**last["common"], "choice": self._chooser.state(self._step)}}]

    def load(self, inheritances: Sequence[Inheritance]) -> None:
        """As they were; among other sites, what steps took is forgotten."""
        last = inheritances[-1]
        common = last.first["common"]
        step = common["policy"]["step"]
        self._chooser.load(common["choice"], step, same_sites=last.same_sites)
        super().load(inheritances)
