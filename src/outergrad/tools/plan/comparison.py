"""Figures of several methods beside dense, as they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outergrad._amounts import short
from outergrad.tools.plan.interval import Interval

DENSE = "dense"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Figures of one method.

    Attributes:
        method: Its name.
        exact: True if its gradient is exact.
        sent_bytes: Payload that a site sends in a step.
        compute_s: Seconds of computation in a step.
        step_s: Seconds of a step on the link.
        learnt: In words, information that it gives to other sites.
    """

    method: str
    exact: bool
    sent_bytes: int
    compute_s: Interval
    step_s: Interval
    learnt: str

    def shown(self) -> Standing:
        """Returns the figures with as many digits as are shown, so that nothing is hidden."""
        return replace(self, compute_s=self.compute_s.outward(), step_s=self.step_s.outward())


@dataclass(frozen=True)
class Comparison:
    """Figures of all methods, dense among them, as a table and sentences show them.

    Both read these figures alone, which are rounded already. So neither can say more than the
    other, or contradict it.

    Attributes:
        alone_s: Seconds of a step without exchange.
        standings: Figures of each method.
    """

    alone_s: Interval
    standings: tuple[Standing, ...]

    @classmethod
    def of(cls, alone_s: Interval, standings: Sequence[Standing]) -> Comparison:
        """Compares measured figures."""
        return cls(alone_s.outward(), tuple(one.shown() for one in standings))

    @property
    def dense(self) -> Standing:
        """Figures of sending whole gradients."""
        return next(one for one in self.standings if one.method == DENSE)

    def speed(self, step_s: Interval) -> Interval:
        """Returns the ratio of dense's seconds to those of a step: times as fast as dense."""
        return self.dense.step_s.over(step_s).outward()

    def fewer(self, standing: Standing) -> float:
        """Returns the ratio of dense's bytes to those of a method."""
        return self.dense.sent_bytes / max(standing.sent_bytes, 1)


def in_ms(seconds: Interval, to: str = "-") -> str:
    """Formats seconds as milliseconds without the unit: 12.3, or 12.3-13.1."""
    return as_range(Interval(1e3 * seconds.low, 1e3 * seconds.high), to)


def as_range(amounts: Interval, to: str = "-") -> str:
    """Formats an interval with three digits; a single number if its bounds look alike."""
    low, high = short(amounts.low), short(amounts.high)
    return low if low == high else f"{low}{to}{high}"
