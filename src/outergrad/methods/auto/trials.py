"""Trials of ways: which one comes next, its result, and the time that trials may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import comb, inf
from statistics import median
from typing import Any, NamedTuple

from outergrad.core.choosing import Outcome
from outergrad.methods.auto.ways import Arm, Ways

_AGAIN_STEPS = 128
_MOST_DOUBLINGS = 6
_TWICE_DOUBLINGS = 2
"""Further doublings of the pause before the next trial of a way that took twice as long."""


@dataclass(frozen=True)
class Tried:
    """The last trial of one way.

    Attributes:
        step: Number of shared steps before it was decided.
        seconds: Median of its steps, at the slowest site.
        kept_seconds: Median of the steps of the kept way in the same trial.
        outcome: Outcome of the trial.
        times: Number of trials of the way since all ways were last reopened.
    """

    step: int
    seconds: float
    kept_seconds: float
    outcome: Outcome
    times: int

    @property
    def again(self) -> int:
        """First step in which the way may be tried again; the pause doubles with each trial."""
        doublings = self.times - 1 + _TWICE_DOUBLINGS * (self.outcome == Outcome.TWICE)
        return self.step + _AGAIN_STEPS * 2 ** min(doublings, _MOST_DOUBLINGS)

    def plain(self) -> list[Any]:
        """Returns the trial as JSON holds it."""
        return [self.step, self.seconds, self.kept_seconds, self.outcome.value, self.times]

    @staticmethod
    def of(plain: Any) -> Tried:
        """Rebuilds a trial from a result of `plain`."""
        step, seconds, kept_seconds, outcome, times = plain
        return Tried(step, seconds, kept_seconds, Outcome(outcome), times)


_MORE_BYTES = 0.05
"""Largest share by which trials may add to the bytes that dense would have sent so far."""


@dataclass
class Purse:
    """Time and bytes that trials may take.

    Attributes:
        share: Share of all time.
        advance: Number of steps whose time may be spent in advance.
        elapsed_s: Seconds of all steps.
        spent_s: Seconds by which trials took longer than steps without one.
        sent: Bytes that trials sent beyond those of dense, in steps of dense.
    """

    share: float
    advance: float = 8.0
    elapsed_s: float = 0.0
    spent_s: float = 0.0
    sent: float = 0.0

    def affords(self, seconds: float, step_s: float) -> bool:
        """True if `seconds` may be spent on a trial, where a step takes `step_s`."""
        return self.spent_s + seconds <= self.share * self.elapsed_s + self.advance * step_s

    def affords_bytes(self, more: float, step: int) -> bool:
        """True if `more` may be sent beyond dense on a trial, in steps of dense, after `step`."""
        return not more or self.sent + more <= _MORE_BYTES * step

    def plain(self) -> list[float]:
        """Returns what was spent as JSON holds it."""
        return [self.elapsed_s, self.spent_s, self.sent]

    def load(self, plain: Sequence[float]) -> None:
        """Restores what was spent from a result of `plain`; of older versions without the bytes."""
        self.elapsed_s, self.spent_s, *sent = plain
        self.sent = sent[0] if sent else 0.0


@dataclass
class Knowledge:
    """Knowledge of all ways in one session.

    Attributes:
        tried: Last trial of each way.
    """

    tried: dict[Arm, Tried] = field(default_factory=dict)

    def note(self, arm: Arm, step: int, seconds: float, kept: float, outcome: Outcome) -> Tried:
        """Records the result of a trial."""
        found = Tried(step, seconds, kept, outcome, self.times(arm) + 1)
        self.tried[arm] = found
        return found

    def times(self, arm: Arm) -> int:
        """Returns the number of trials of a way since all ways were last reopened."""
        return self.tried[arm].times if arm in self.tried else 0

    def took_more_s(self, arm: Arm) -> float:
        """Returns the extra seconds per step in the last trial of the way; 0 without one."""
        tried = self.tried.get(arm)
        return 0.0 if tried is None else tried.seconds - tried.kept_seconds

    def due(self, arm: Arm, step: int) -> bool:
        """True if the way may be tried in a step."""
        return arm not in self.tried or self.tried[arm].again <= step

    def reopen(self) -> None:
        """Forgets all trials: step times have changed, so that the results do not hold any more."""
        self.tried.clear()

    def renamed(self, translate: Callable[[Arm], Arm]) -> None:
        """Renames the ways by `translate`, which merges those that have become equal."""
        self.tried = {translate(arm): tried for arm, tried in self.tried.items()}


RISK = 0.01
"""Largest probability that the lower bound is too high."""


def lower_bound(gains: Sequence[float]) -> float:
    """Returns a lower bound of the median gain, whatever the distribution; -inf of too few gains.

    By order statistics: if the median were below the k-th smallest of n, at most k - 1 of n tosses
    of a fair coin would have been heads.
    """
    tosses, below, k = len(gains), 0.0, 0
    while (below := below + comb(tosses, k) / 2**tosses) <= RISK:
        k += 1
    return sorted(gains)[k - 1] if k else -inf


def slowest_site(seconds_SN: Sequence[Sequence[float]]) -> Sequence[float]:
    """Returns the step times (N) of the site (S) whose median is longest."""
    return max(seconds_SN, key=median)


_ABBA = (*[0] * 8, *[1] * 16, *[0] * 8)
_PAIRS = (*((2 + k, 10 + k) for k in range(5)), *((26 + k, 18 + k) for k in range(5)))
"""Pairs of a step of the kept way and one of the other way, each with two steps before it and one
behind it of its own way: a change lengthens the steps around it, most if all others are alike."""
_CHANGED = (8, 9, 24, 25)
"""Two steps behind each change of way, which are planned anew."""


def turns() -> Sequence[int]:
    """Returns the way of each step of a comparison: 0 for the kept way, 1 for the other one."""
    return _ABBA


def paired_gains(seconds_N: Sequence[float]) -> list[float]:
    """Returns the seconds that the other way saves, for each pair in the steps of `turns`."""
    return [seconds_N[kept] - seconds_N[other] for kept, other in _PAIRS]


def medians(seconds_N: Sequence[float]) -> tuple[float, float]:
    """Returns the median seconds of the kept way and of the other one, over the pairs of steps."""
    kept, other = zip(*_PAIRS, strict=True)
    return median(seconds_N[k] for k in kept), median(seconds_N[k] for k in other)


def cost_of_change(seconds_N: Sequence[float]) -> float:
    """Returns by how many seconds a step behind a change is longer, from the steps of `turns`."""
    return median(seconds_N[k] for k in _CHANGED) - sum(medians(seconds_N)) / 2


def cost_of_turns(more_s: float, change_s: float) -> float:
    """Returns by how many seconds `turns` take longer than as many steps of the kept way.

    Args:
        more_s: Seconds by which a step of the other way is longer.
        change_s: Seconds by which a step behind a change is longer.
    """
    return len(_ABBA) / 2 * more_s + len(_CHANGED) * change_s


FIRST_STEPS = 4
"""Steps of the first stretch, which announce their rows and take longer than others."""
QUIET_STEPS = 16
"""Steps without a trial that give the usual time, where it is not known yet."""
SETTLED_STEPS = 64
GLANCE_STEPS = 3
"""Steps of a glance at a new way: two have headers, the last one is as later steps would be."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps.

    Attributes:
        first: Number of the first step.
        arms: Way of each step.
        tried: Way that is tried in these steps, if any.
    """

    first: int
    arms: tuple[Arm, ...]
    tried: Arm | None = None

    @cached_property
    def end(self) -> int:
        """Number of the step behind the last one."""
        return self.first + len(self.arms)

    @property
    def is_glance(self) -> bool:
        """True if the stretch is a glance, the short first part of a trial."""
        return self.tried is not None and len(self.arms) == GLANCE_STEPS

    @staticmethod
    def quiet(first: int, kept: Arm, *, settled: bool) -> Stretch:
        """Returns steps without a trial."""
        return Stretch(first, (kept,) * (SETTLED_STEPS if settled else QUIET_STEPS))

    @staticmethod
    def glance(first: int, arm: Arm) -> Stretch:
        """Returns a glance at a way."""
        return Stretch(first, (arm,) * GLANCE_STEPS, arm)

    @staticmethod
    def turns(first: int, kept: Arm, arm: Arm) -> Stretch:
        """Returns steps in which the kept way and another one take turns."""
        return Stretch(first, tuple(arm if other else kept for other in turns()), arm)


_DRIFT = 1.25
"""Factor by which a median must leave the range of the known ones to count as changed."""
_IN_A_ROW = 2
"""Successive medians that must have changed: one may be a pause of the machine."""
_MOST_LEVELS = 16


class Usual:
    """Usual time of a step of the kept way.

    Attributes:
        seconds: Median of the last stretch without a trial; None before it is known.
        last: Times of the last steps of that stretch, seconds.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.last: Sequence[float] = ()
        self._levels: list[float] = []
        """Medians since all ways were last reopened, which show their natural variation."""
        self._drifted = 0

    def note(self, seconds: Sequence[float]) -> float | None:
        """Records a stretch; returns the change of the step time in seconds, or None."""
        self.last, usual_s = seconds[-QUIET_STEPS:], median(seconds)
        self.seconds = usual_s
        if self._is_another(usual_s):
            self._drifted += 1
        else:
            self._drifted = 0
            self._levels = [*self._levels, usual_s][-_MOST_LEVELS:]
        if self._drifted < _IN_A_ROW:
            return None
        more_s, self._levels, self._drifted = usual_s - median(self._levels), [usual_s], 0
        return more_s

    def _is_another(self, usual_s: float) -> bool:
        if not self._levels:
            return False
        return not min(self._levels) / _DRIFT < usual_s < max(self._levels) * _DRIFT

    def forget(self) -> None:
        """Forgets all times, because another way is kept."""
        self.seconds, self._levels, self._drifted = None, [], 0

    def plain(self) -> list[Any]:
        """Returns the times as JSON holds them."""
        return [self.seconds, list(self._levels)]

    def load(self, plain: Any) -> None:
        """Restores the times from a result of `plain`."""
        self.forget()
        self.seconds, self._levels = plain[0], list(plain[1])


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
        sendable = [arm for arm in due if self._affords_bytes(arm, GLANCE_STEPS, step)]
        promising = [arm for arm in sendable if self._promises(arm, kept, usual_s)]
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

    def after_glance(self, arm: Arm, seconds: Sequence[float], step: int) -> Verdict | None:
        """Returns the verdict by its faster step, as one may be interrupted; None to take turns."""
        self._send(arm, len(seconds))
        usual_s = self._usual.seconds
        assert usual_s is not None
        took_s = min(seconds[1:])
        self._change_s = max(0.0, min(seconds[:-1]) - seconds[-1])
        self._spend(sum(seconds) - len(seconds) * usual_s + _BACK_STEPS * self._change_s)
        if max(seconds[1:]) < min(self._usual.last):
            return Verdict(took_s, usual_s, Outcome.FASTER)
        goes_on = self._affords_turns(arm, took_s - usual_s, usual_s, step)
        if took_s < _SLOWER * usual_s and goes_on:
            self._gains = []
            return None
        outcome = Outcome.TWICE if took_s >= _TWICE * usual_s else Outcome.SLOWER
        return Verdict(took_s, usual_s, outcome)

    def after_turns(self, arm: Arm, seconds: Sequence[float], step: int) -> Verdict | None:
        """Returns the verdict over all pairs of steps so far; None if the turns go on."""
        self._send(arm, sum(turns()))
        kept_s, other_s = medians(seconds)
        self._change_s = max(0.0, cost_of_change(seconds))
        self._spend(cost_of_turns(other_s - kept_s, self._change_s))
        self._gains += paired_gains(seconds)
        open_still = lower_bound(self._gains) <= 0 < median(self._gains)
        goes_on = open_still and self._affords_turns(arm, other_s - kept_s, kept_s, step)
        if goes_on and len(self._gains) < _ENOUGH_GAINS:
            return None
        return Verdict(other_s, kept_s, self._outcome())

    def _outcome(self) -> Outcome:
        if lower_bound(self._gains) > 0:
            return Outcome.FASTER
        slower = lower_bound([-gain for gain in self._gains]) > 0
        return Outcome.SLOWER if slower else Outcome.NO_FASTER

    def _affords_turns(self, arm: Arm, more_s: float, usual_s: float, step: int) -> bool:
        price_s = cost_of_turns(max(more_s, 0.0), self._change_s)
        return self.purse.affords(price_s, usual_s) and self._affords_bytes(arm, sum(turns()), step)

    def _affords_bytes(self, arm: Arm, count: int, step: int) -> bool:
        return self.purse.affords_bytes(count * self._ways.more_bytes(arm), step)

    def _send(self, arm: Arm, count: int) -> None:
        self.purse.sent += count * self._ways.more_bytes(arm)

    def _spend(self, more_s: float) -> None:
        self.purse.spent_s += max(more_s, 0.0)
