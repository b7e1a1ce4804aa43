"""Trials of ways: which one comes next, its result, and the time that trials may take."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from outergrad.core.choosing import Outcome
from outergrad.methods.auto.knowledge import Arm, Knowledge, Purse
from outergrad.methods.auto.usual import (
    GLANCE_STEPS,
    Usual,
    cost_of_change,
    cost_of_turns,
    lower_bound,
    medians,
    paired_gains,
)
from outergrad.methods.auto.ways import Ways

_ENOUGH_GAINS = 80
_SLOWER = 1.2
"""Ratio to the usual time from which a glance drops a way."""
_TWICE = 2.0
_BACK_STEPS = 2
"""Steps behind a glance whose extra cost equals that of its first two steps."""
_LEAST_STAKE = 0.01
"""Share of a step: ways of several methods whose forecast differs by less are not tried."""


class Verdict(NamedTuple):
    """Result of a trial of a way.

    Attributes:
        seconds: Time of its steps, at the slowest site.
        kept_seconds: Time of the steps of the kept way that it was compared with.
        outcome: Outcome of the trial.
    """

    seconds: float
    kept_seconds: float
    outcome: Outcome


class Trials:
    """Trials in one session.

    Args:
        ways: Ways to share the gradients.
        usual: Step times without a trial.
        looking: Share of the time that trials may take.

    Attributes:
        purse: Time that trials may take.
        knowledge: Results of the trials.
    """

    def __init__(self, ways: Ways, usual: Usual, looking: float) -> None:
        self._ways, self._usual = ways, usual
        self.purse, self.knowledge = Purse(looking), Knowledge()
        self._gains: list[float] = []
        self._change_s = 0.0

    # -- the next trial -------------------------------------------------------------------------

    def candidate(self, kept: Arm, step: int) -> Arm | None:
        """Returns the most promising way that may be tried now; None if there is none."""
        usual_s = self._usual.seconds
        if usual_s is None:
            return None
        due = [arm for arm in self._ways.near(kept) if self.knowledge.due(arm, step)]
        promising = [arm for arm in due if self._promises(arm, kept, usual_s)]
        return min(promising, key=self._rank, default=None)

    def _rank(self, arm: Arm) -> tuple[int, bool, float]:
        """Returns the sort key: fewest trials first, then ways of one method, then the forecast."""
        return self.knowledge.times(arm), arm not in self._ways.whole, self._ways.seconds(arm)

    def _promises(self, arm: Arm, kept: Arm, usual_s: float) -> bool:
        """True if a way may save enough to matter, and a glance at it can be afforded."""
        more_s, whole = self._ways.seconds(arm) - self._ways.seconds(kept), arm in self._ways.whole
        matters = whole or abs(more_s) > _LEAST_STAKE * usual_s
        more_s = max(more_s, self.knowledge.took_more_s(arm))
        unlikely = more_s > usual_s
        price_s = GLANCE_STEPS * more_s if unlikely else usual_s
        return matters and self.purse.affords(price_s, usual_s if whole or not unlikely else 0.0)

    # -- the result of a trial -------------------------------------------------------------------

    def after_glance(self, seconds: Sequence[float]) -> Verdict | None:
        """Returns the verdict by its faster step, as one may be interrupted; None to take turns."""
        usual_s = self._usual.seconds
        assert usual_s is not None
        took_s = min(seconds[1:])
        self._change_s = max(0.0, min(seconds[:-1]) - seconds[-1])
        self._spend(sum(seconds) - len(seconds) * usual_s + _BACK_STEPS * self._change_s)
        if max(seconds[1:]) < min(self._usual.last):
            return Verdict(took_s, usual_s, Outcome.FASTER)
        if took_s < _SLOWER * usual_s and self._affords_turns(took_s - usual_s, usual_s):
            self._gains = []
            return None
        outcome = Outcome.TWICE if took_s >= _TWICE * usual_s else Outcome.SLOWER
        return Verdict(took_s, usual_s, outcome)

    def after_turns(self, seconds: Sequence[float]) -> Verdict | None:
        """Returns the verdict over all pairs of steps so far; None if the turns go on."""
        kept_s, other_s = medians(seconds)
        self._change_s = max(0.0, cost_of_change(seconds))
        self._spend(cost_of_turns(other_s - kept_s, self._change_s))
        self._gains += paired_gains(seconds)
        open_still = lower_bound(self._gains) <= 0 < median(self._gains)
        goes_on = open_still and self._affords_turns(other_s - kept_s, kept_s)
        if goes_on and len(self._gains) < _ENOUGH_GAINS:
            return None
        return Verdict(other_s, kept_s, self._outcome())

    def _outcome(self) -> Outcome:
        if lower_bound(self._gains) > 0:
            return Outcome.FASTER
        slower = lower_bound([-gain for gain in self._gains]) > 0
        return Outcome.SLOWER if slower else Outcome.NO_FASTER

    def _affords_turns(self, more_s: float, usual_s: float) -> bool:
        price_s = cost_of_turns(max(more_s, 0.0), self._change_s)
        return self.purse.affords(price_s, usual_s)

    def _spend(self, more_s: float) -> None:
        self.purse.spent_s += max(more_s, 0.0)
