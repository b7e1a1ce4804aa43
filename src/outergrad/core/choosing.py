"""The protocol of objects that choose methods during training, and the records of their trials."""

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
"""Per unit, the rows announced by each site (S) for each slot (K)."""


class Outcome(Enum):
    """Result of a trial."""

    FASTER = "faster"
    """The lower bound of its gain was above zero: it is used from now on."""
    NO_FASTER = "not measurably faster"
    SLOWER = "slower"
    TWICE = "twice as long"
    """A single step of it took at least twice as long."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A choice of methods that was timed against the choice in use at that time.

    Attributes:
        step: number of synchronised steps before the decision.
        methods: method of each group of layers, as text.
        seconds: median duration of a step of the trial, at the slowest site.
        kept_seconds: median duration of a step of the choice in use, at the slowest site.
        outcome: result of the comparison.
    """

    step: int
    methods: tuple[str, ...]
    seconds: float
    kept_seconds: float
    outcome: Outcome


class Chooser(Protocol):
    """Chooses the compressors of units step by step; the state of a policy in one session.

    All sites must choose alike. So the choice follows only from numbers that all sites share: step
    durations of every site, announced rows, and the measured link and machines.
    """

    def compressor(self, unit: Unit, step: int) -> Compressor:
        """Returns the compressor of a unit in a synchronised step, at most two steps ahead."""
        ...

    def same(self, step: int, other: int) -> bool:
        """True if all units have the same compressors in two synchronised steps."""
        ...

    def settle(self, cost: CostModel, link: Link, flops_per_s: float) -> None:
        """Stores what was measured before the first step; the arguments are equal on all sites."""
        ...

    def ended(self, step: int, seconds: float) -> Sequence[float]:
        """Records a step's duration on this site; returns numbers to send to the others, if any."""
        ...

    def hears(self, step: int) -> bool:
        """True if the sites' numbers from the previous step are received at the end of this one."""
        ...

    def take(self, step: int, seconds_SN: Sequence[Sequence[float]], rows: Rows) -> Trial | None:
        """Decides from the step durations (N) of all sites (S); returns a finished trial."""
        ...

    def method_of(self, unit: Unit | None) -> Method:
        """Returns the method in use for a unit outside trials; for None the dense method."""
        ...

    def trials_of(self, unit: Unit) -> Sequence[tuple[str, Trial]]:
        """Returns the last trial of each other choice, with the unit's method in that choice."""
        ...

    @property
    def kept_seconds(self) -> float | None:
        """Median duration of the last steps of the choice in use; None while unknown."""
        ...

    def state(self, step: int) -> StateDict:
        """Returns the state after a step as numbers and lists, for `load`."""
        ...

    def load(self, state: StateDict, step: int, *, same_sites: bool) -> None:
        """Restores a state that was saved after a step."""
        ...
