"""Which exchange a unit belongs to, and what concerns all exchanges of a model."""

from __future__ import annotations

from collections.abc import Sequence

from outergrad.core.protocols import Exchange
from outergrad.core.types import Inheritance, StateDict, Unit


class Exchanges:
    """The exchanges of a model, one per method, in an order that is the same on every site.

    Args:
        units_of: each exchange with its units.
    """

    def __init__(self, units_of: Sequence[tuple[Exchange, Sequence[Unit]]]) -> None:
        self._units_of = tuple(units_of)
        self._of = {unit: exchange for exchange, units in units_of for unit in units}

    def __getitem__(self, unit: Unit) -> Exchange:
        return self._of[unit]

    def items(self) -> Sequence[tuple[Exchange, Sequence[Unit]]]:
        """Each exchange with its units."""
        return self._units_of

    def commit(self, *, applied: bool) -> None:
        """The step is over, for all of them."""
        for exchange, _ in self._units_of:
            exchange.commit(applied=applied)

    def states(self) -> list[StateDict]:
        """What each remembers between two steps."""
        return [exchange.state() for exchange, _ in self._units_of]

    def load(self, inheritances: Sequence[Inheritance]) -> None:
        """Each goes on from its own part of what was saved."""
        for (exchange, _), inheritance in zip(self._units_of, inheritances, strict=True):
            exchange.load(inheritance)
