"""What og.Auto() has found out in one session, and what it tries next."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from outergrad.core.choosing import Chooser, Outcome, Rows, Trial
from outergrad.core.compressor import Compressor
from outergrad.core.cost import CostModel
from outergrad.core.protocols import Method
from outergrad.core.types import Link, StateDict, Unit
from outergrad.methods.auto.gains import slowest_site
from outergrad.methods.auto.groups import grouped
from outergrad.methods.auto.knowledge import Arm, Tried
from outergrad.methods.auto.stretches import FIRST_STEPS, Stretch
from outergrad.methods.auto.trials import Trials, Verdict
from outergrad.methods.auto.usual import Usual
from outergrad.methods.auto.ways import Ways

_SURE_GAIN = 0.2
"""Of a step, by the forecast."""


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
        self._stretch = Stretch(0, (self._kept,) * FIRST_STEPS)
        self._told: list[float] = []
        self._ways, self._usual = Ways(self._groups, self._compressors), Usual()
        self._trials = Trials(self._ways, self._usual, looking)

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
        self._trials.purse.elapsed_s += len(seconds) * median(seconds)
        self._ways.look_at(rows)
        self._trials.knowledge.renamed(self._ways.plain)
        over, verdict = self._stretch, None
        if over.first == 0:
            self._keep(self._first(median(seconds)), step + 2)
        elif over.tried is None:
            self._watch(seconds)
        else:
            judged = self._trials.after_glance if over.is_glance else self._trials.after_turns
            verdict = judged(seconds)
            if verdict is None:
                self._stretch = Stretch.turns(step + 2, self._kept, over.tried)
                return None
        trial = self._decided(step, over.tried, verdict)
        self._stretch = self._next(step)
        return trial

    def _first(self, step_s: float) -> Arm:
        """Dense, unless another way promises to be so much faster that it can hardly be slower."""
        best, dense = self._ways.best(), (0,) * len(self._groups)
        gain_s = self._ways.seconds(dense) - self._ways.seconds(best)
        return best if gain_s > _SURE_GAIN * step_s else dense

    def _keep(self, arm: Arm, since: int) -> None:
        self._trials.knowledge.tried.pop(arm, None)
        self._before, self._kept, self._since = self._kept, arm, since
        self._usual.forget()

    def _watch(self, seconds: Sequence[float]) -> None:
        """Steps without a trial; where they take another time, everything may be tried again.

        At most, the link is to blame.
        """
        more_s = self._usual.note(seconds)
        if more_s is not None:
            self._ways.blame_link(self._kept, more_s)
            self._trials.knowledge.reopen()

    def _decided(self, step: int, arm: Arm | None, verdict: Verdict | None) -> Trial | None:
        """Goes by what came of a trial, if there was one."""
        if arm is None or verdict is None:
            return None
        knowledge, (took_s, kept_s, outcome) = self._trials.knowledge, verdict
        if outcome != Outcome.FASTER:
            return self._told_of(arm, knowledge.note(arm, step + 1, took_s, kept_s, outcome))
        knowledge.note(self._kept, step + 1, kept_s, took_s, Outcome.SLOWER)
        self._keep(arm, step + 2)
        return self._told_of(arm, Tried(step + 1, took_s, kept_s, outcome, 1))

    def _next(self, step: int) -> Stretch:
        """A glance at another way, or steps without a trial."""
        arm = self._trials.candidate(self._kept, step)
        if arm is not None:
            return Stretch.glance(step + 2, arm)
        return Stretch.quiet(step + 2, self._kept, settled=self._usual.seconds is not None)

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
            for arm, tried in self._trials.knowledge.tried.items()
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
        return self._usual.seconds

    def state(self, step: int) -> StateDict:
        """What it keeps, how the last step went, what steps took, and what came of trials."""
        purse, tried = self._trials.purse, self._trials.knowledge.tried.items()
        return {
            "kept": list(self._kept),
            "last": list(self._arm(step)),
            "usual": self._usual.plain(),
            "slowdown": self._ways.slowdown,
            "purse": [purse.elapsed_s, purse.spent_s],
            "tried": [[list(arm), *found.plain()] for arm, found in tried],
        }

    def load(self, state: StateDict, step: int, *, same_sites: bool) -> None:
        """Goes on with it; among other sites, with what was kept alone."""
        self._kept, self._before = tuple(state["kept"]), tuple(state["last"])
        self._since = step + 1
        self._told, trials = [], self._trials
        self._usual.forget()
        trials.knowledge.reopen()
        if same_sites:
            self._usual.load(state["usual"])
            self._ways.slowdown = state["slowdown"]
            trials.purse.elapsed_s, trials.purse.spent_s = state["purse"]
            trials.knowledge.tried = {tuple(arm): Tried.of(plain) for arm, *plain in state["tried"]}
        self._stretch = Stretch.quiet(step + 1, self._kept, settled=False)
