"""The protocol of what chooses methods while a model trains, and what it tells of its choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from outergrad.core.compressor import Compressor
from outergrad.core.cost import CostModel
from outergrad.core.protocols import Method
from outergrad.core.types import Link, StateDict, Unit

Rows = Mapping[Unit, Sequence[Sequence[int]]]
"""Of every unit the rows of each site (S) and slot (K), as all sites announced them."""


class Outcome(Enum):
    """What came of a trial."""

    FASTER = "faster"
    """It is kept from now on: the lower bound of its gain was above zero."""
    NO_FASTER = "not measurably faster"
    SLOWER = "slower"
    TWICE = "twice as long"
    """A single step of it took at least twice as long."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One way to share the gradients that was tried beside the one that was kept till then.

    Attributes:
        step: shared steps before it was decided.
        methods: as text, of each group of layers.
        seconds: median of its steps, at the slowest site.
        kept_seconds: the same of the way beside which it was tried.
        outcome: what came of it.
    """

    step: int
    methods: tuple[str, ...]
    seconds: float
    kept_seconds: float
    outcome: Outcome


class Chooser(Protocol):
    """Chooses the compressors of units step by step; the state of a policy in one session.

    What it chooses follows from agreed numbers alone, so that all sites choose alike: how long the
    steps took on every site, the rows that all announced, what was measured of link and machines.
    """

    def compressor(self, unit: Unit, step: int) -> Compressor:
        """Of a unit in a shared step, which may be one of the next two but not a later one."""
        ...

    def same(self, step: int, other: int) -> bool:
        """Whether all units have the same compressors in two shared steps."""
        ...

    def settle(self, cost: CostModel, link: Link, flops_per_s: float) -> None:
        """Takes note of what was measured before the first step, the same on all sites."""
        ...

    def ended(self, step: int, seconds: float) -> Sequence[float]:
        """A shared step took so long on this site; returns what the others are to hear, if any."""
        ...

    def hears(self, step: int) -> bool:
        """Whether what all sites said after the step before is taken at the end of this one."""
        ...

    def take(self, step: int, seconds_SN: Sequence[Sequence[float]], rows: Rows) -> Trial | None:
        """Goes by what all sites (S) said of their steps (N); returns what was decided, if so."""
        ...

    def method_of(self, unit: Unit | None) -> Method:
        """The method that a unit has, but in trials; of None, what is in no unit and dense."""
        ...

    def trials_of(self, unit: Unit) -> Sequence[tuple[str, Trial]]:
        """The last trial of each other way, with the method that the unit had in it."""
        ...

    @property
    def kept_seconds(self) -> float | None:
        """Median of the last steps of the way that is kept; None before it is known."""
        ...

    def state(self, step: int) -> StateDict:
        """What it knows after a step, in numbers and lists; `load` takes it back."""
        ...

    def load(self, state: StateDict, step: int, *, same_sites: bool) -> None:
        """Goes on with what was saved after a step."""
        ...
