"""What og.Auto() has found out in one session, and what it tries next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from outergrad.core.choosing import Chooser, Outcome, Rows, Trial
from outergrad.core.compressor import Compressor
from outergrad.core.cost import CostModel
from outergrad.core.protocols import Method
from outergrad.core.types import Link, StateDict, Unit
from outergrad.methods.auto.gains import lower_bound, medians, paired_gains, slowest_site, turns
from outergrad.methods.auto.groups import grouped
from outergrad.methods.auto.knowledge import Arm, Knowledge, Purse, Tried
from outergrad.methods.auto.ways import Ways

_FIRST_STEPS = 4
"""That tell the rows, and are longer than others."""
_QUIET_STEPS = 16
_GLANCE_STEPS = 3
"""Of a new way: two have headers, the last one is as those that would follow."""
_ROUNDS = 4
"""Of both ways in turns, until what they took is looked at."""
_ENOUGH_GAINS = 40
_SLOWER = 1.2
"""What a glance finds so much slower is not worth more."""
_TWICE = 2.0
_DRIFT = 1.25
"""Steps that take so many times as long as they did, or as little, ask everything again."""
_LEAST_STAKE = 0.01
"""What may gain less of a step is not tried, by the forecast, in parts of the model."""


@dataclass(frozen=True)
class _Stretch:
    """Steps that all sites tell each other of when they are over.

    Attributes:
        first: number of the first.
        arms: how the gradients travel in each.
        tried: the way that is tried in them, if one is.
    """

    first: int
    arms: tuple[Arm, ...]
    tried: Arm | None = None

    @property
    def end(self) -> int:
        """The step behind the last."""
        return self.first + len(self.arms)


class AutoChooser(Chooser):
    """Chooses methods for groups of layers by how long steps take.

    The steps go in stretches. What they took is said when one is over, is there one step later,
    and decides what happens two steps later: layers are tapped in the forward before.

    Args:
        units: of the model.
        methods: to choose among; the first is dense, the second is what it begins with.
        compressors: of these.
        looking: share of the time that trials may take.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        methods: Sequence[Method],
        compressors: Sequence[Compressor],
        looking: float,
    ) -> None:
        self._groups = grouped(units)
        self._group_of = {unit: g for g, group in enumerate(self._groups) for unit in group}
        self._methods, self._compressors = tuple(methods), tuple(compressors)
        self._kept = self._before = (1,) * len(self._groups)
        self._since = 0
        self._stretch = _Stretch(0, (self._kept,) * _FIRST_STEPS)
        self._told: list[float] = []
        self._gains: list[float] = []
        self._quiet: Sequence[float] = ()
        self._usual_s: float | None = None
        self._level_s: float | None = None
        self._drifted = 0
        self._purse, self._knowledge = Purse(looking), Knowledge()
        self._ways = Ways(self._groups, self._compressors)

    def settle(self, cost: CostModel, link: Link, flops_per_s: float) -> None:
        """Takes note of what the forecasts go by."""
        self._ways.settle(cost, link, flops_per_s)

    # -- what a step goes by --------------------------------------------------------------------

    def compressor(self, unit: Unit, step: int) -> Compressor:
        """Of a unit in a step."""
        return self._compressors[self._arm(step)[self._group_of[unit]]]

    def same(self, step: int, other: int) -> bool:
        """Whether all units have the same compressors."""
        return self._arm(step) == self._arm(other)

    def _arm(self, step: int) -> Arm:
        if self._stretch.first <= step < self._stretch.end:
            return self._stretch.arms[step - self._stretch.first]
        return self._kept if step >= self._since else self._before

    # -- what steps took ------------------------------------------------------------------------

    def ended(self, step: int, seconds: float) -> Sequence[float]:
        """Takes note of a step; tells of a stretch when it is over."""
        if not self._stretch.first <= step < self._stretch.end:
            return ()
        self._told.append(seconds)
        return self._told if step == self._stretch.end - 1 else ()

    def hears(self, step: int) -> bool:
        """In the step behind a stretch."""
        return step == self._stretch.end

    def take(self, step: int, seconds_SN: Sequence[Sequence[float]], rows: Rows) -> Trial | None:
        """Decides what came of a stretch, and what the next one is."""
        self._told = []
        seconds = slowest_site(seconds_SN)
        self._purse.elapsed_s += len(seconds) * median(seconds)
        self._ways.look_at(rows)
        self._knowledge.renamed(self._ways.plain)
        over, trial, following = self._stretch, None, None
        if over.first == 0:
            self._keep(self._ways.best(), step + 2)
        elif over.tried is None:
            self._watch(seconds)
        else:
            trial, following = self._judge(step, over, over.tried, seconds)
        self._stretch = following or self._next(step)
        return trial

    def _keep(self, arm: Arm, since: int) -> None:
        self._knowledge.tried.pop(arm, None)
        self._before, self._kept, self._since = self._kept, arm, since
        self._usual_s = self._level_s = None
        self._drifted = 0

    def _watch(self, seconds: Sequence[float]) -> None:
        """Steps without a trial say what is usual, and whether that is another time than it was."""
        self._quiet = seconds
        self._usual_s = usual_s = median(seconds)
        if self._level_s is None:
            self._level_s = usual_s
        longer = usual_s / self._level_s
        self._drifted = self._drifted + 1 if not 1 / _DRIFT < longer < _DRIFT else 0
        if self._drifted == 2:
            self._reopen(usual_s, usual_s - self._level_s)

    def _reopen(self, usual_s: float, more_s: float) -> None:
        """Everything may be tried again; at most, the link is to blame."""
        self._ways.blame_link(self._kept, more_s)
        self._level_s, self._drifted = usual_s, 0
        self._knowledge.reopen()

    # -- trials ---------------------------------------------------------------------------------

    def _judge(
        self, step: int, over: _Stretch, arm: Arm, seconds: Sequence[float]
    ) -> tuple[Trial | None, _Stretch | None]:
        """What came of a trial, or how it goes on."""
        usual_s = self._usual_s
        assert usual_s is not None
        if len(seconds) == _GLANCE_STEPS:
            return self._after_glance(step, arm, seconds[1:], usual_s)
        kept_s, other_s = medians(seconds)
        self._spend(over.arms.count(arm), other_s - usual_s)
        self._gains += paired_gains(seconds)
        open_still = lower_bound(self._gains) <= 0 < median(self._gains)
        if open_still and len(self._gains) < _ENOUGH_GAINS:
            return None, self._turns(step, arm)
        return self._trial(step, arm, other_s, kept_s, self._outcome()), None

    def _outcome(self) -> Outcome:
        """What all pairs of steps so far say."""
        if lower_bound(self._gains) > 0:
            return Outcome.FASTER
        slower = lower_bound([-gain for gain in self._gains]) > 0
        return Outcome.SLOWER if slower else Outcome.NO_FASTER

    def _after_glance(
        self, step: int, arm: Arm, seconds: Sequence[float], usual_s: float
    ) -> tuple[Trial | None, _Stretch | None]:
        """By the better of its steps: one may have been interrupted."""
        took_s = min(seconds)
        self._spend(_GLANCE_STEPS, took_s - usual_s)
        if max(seconds) < min(self._quiet):
            return self._trial(step, arm, took_s, usual_s, Outcome.FASTER), None
        price_s = len(turns(_ROUNDS)) / 2 * max(took_s - usual_s, 0.0)
        if took_s < _SLOWER * usual_s and self._purse.affords(price_s, usual_s):
            self._gains = []
            return None, self._turns(step, arm)
        outcome = Outcome.TWICE if took_s >= _TWICE * usual_s else Outcome.SLOWER
        return self._trial(step, arm, took_s, usual_s, outcome), None

    def _spend(self, steps: int, more_s: float) -> None:
        self._purse.spent_s += steps * max(more_s, 0.0)

    def _trial(self, step: int, arm: Arm, took_s: float, kept_s: float, outcome: Outcome) -> Trial:
        if outcome != Outcome.FASTER:
            return self._told_of(arm, self._knowledge.note(arm, step + 1, took_s, kept_s, outcome))
        self._knowledge.note(self._kept, step + 1, kept_s, took_s, Outcome.SLOWER)
        self._keep(arm, step + 2)
        return self._told_of(arm, Tried(step + 1, took_s, kept_s, outcome, 1))

    def _turns(self, step: int, arm: Arm) -> _Stretch:
        arms = tuple(arm if other else self._kept for other in turns(_ROUNDS))
        return _Stretch(step + 2, arms, arm)

    def _next(self, step: int) -> _Stretch:
        """A glance at another way, or steps without a trial."""
        arm = self._candidate(step) if self._usual_s is not None else None
        if arm is None:
            return _Stretch(step + 2, (self._kept,) * _QUIET_STEPS)
        return _Stretch(step + 2, (arm,) * _GLANCE_STEPS, arm)

    def _candidate(self, step: int) -> Arm | None:
        """The most promising way that may be tried now."""
        usual_s = self._usual_s
        assert usual_s is not None
        due = [arm for arm in self._ways.near(self._kept) if self._knowledge.due(arm, step)]
        promising = [arm for arm in due if self._promises(arm, usual_s)]
        mixed = lambda arm: (len(set(arm)) > 1, self._ways.seconds(arm))  # noqa: E731
        return min(promising, key=mixed, default=None)

    def _promises(self, arm: Arm, usual_s: float) -> bool:
        """Whether a way may gain so much that it matters, and a glance at it can be afforded."""
        more_s = self._ways.seconds(arm) - self._ways.seconds(self._kept)
        matters = len(set(arm)) == 1 or abs(more_s) > _LEAST_STAKE * usual_s
        unlikely = more_s > usual_s
        price_s = _GLANCE_STEPS * more_s if unlikely else usual_s
        return matters and self._purse.affords(price_s, 0.0 if unlikely else usual_s)

    # -- what is told and saved -----------------------------------------------------------------

    def method_of(self, unit: Unit | None) -> Method:
        """The method that is kept for a unit; of None, dense."""
        if unit is None:
            return self._methods[0]
        return self._methods[self._kept[self._group_of[unit]]]

    def trials_of(self, unit: Unit) -> Sequence[tuple[str, Trial]]:
        """The last trial of each other way in which the unit had another method."""
        g = self._group_of[unit]
        return [
            (repr(self._methods[arm[g]]), self._told_of(arm, tried))
            for arm, tried in self._knowledge.tried.items()
            if arm[g] != self._kept[g]
        ]

    def _told_of(self, arm: Arm, tried: Tried) -> Trial:
        methods = tuple(repr(self._methods[k]) for k in arm)
        return Trial(
            step=tried.step,
            methods=methods,
            seconds=tried.seconds,
            kept_seconds=tried.kept_seconds,
            outcome=tried.outcome,
        )

    @property
    def kept_seconds(self) -> float | None:
        """Median of the last steps without a trial."""
        return self._usual_s

    def state(self, step: int) -> StateDict:
        """What it keeps, how the last step went, what steps took, and what came of trials."""
        purse, tried = self._purse, self._knowledge.tried.items()
        return {
            "kept": list(self._kept),
            "last": list(self._arm(step)),
            "seconds": [self._usual_s, self._level_s, self._ways.slowdown],
            "purse": [purse.elapsed_s, purse.spent_s],
            "tried": [[list(arm), *found.plain()] for arm, found in tried],
        }

    def load(self, state: StateDict, step: int, *, same_sites: bool) -> None:
        """Goes on with it; among other sites, with what was kept alone."""
        self._kept, self._before = tuple(state["kept"]), tuple(state["last"])
        self._since = step + 1
        self._told, self._gains, self._drifted = [], [], 0
        self._usual_s = self._level_s = None
        self._knowledge.tried = {}
        if same_sites:
            self._usual_s, self._level_s, self._ways.slowdown = state["seconds"]
            self._purse.elapsed_s, self._purse.spent_s = state["purse"]
            tried = state["tried"]
            self._knowledge.tried = {tuple(arm): Tried.of(plain) for arm, *plain in tried}
        self._stretch = _Stretch(step + 1, (self._kept,) * _QUIET_STEPS)
