"""og.Auto(), the policy that chooses methods by measured step times, and its chooser."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import median

from outergrad.core.choosing import Chooser, Outcome, Rows, Trial
from outergrad.core.compressor import Compressor
from outergrad.core.cost import CostModel
from outergrad.core.protocols import Method
from outergrad.core.types import Link, StateDict, Unit
from outergrad.messages.raw import digest
from outergrad.methods.auto.trials import (
    FIRST_STEPS,
    Arm,
    Stretch,
    Trials,
    Tried,
    Usual,
    Verdict,
    slowest_site,
)
from outergrad.methods.auto.ways import Ways
from outergrad.methods.common import is_method
from outergrad.methods.dad import DAD
from outergrad.methods.dense import Dense
from outergrad.methods.per_layer import Local


@dataclass(frozen=True, repr=False)
class Auto:
    """A policy that finds out in training with which method steps are shortest.

    The default of `og.distribute`: choose it where you do not want to choose a method yourself.

    It chooses a method for each kind and size of layers. It tries `og.Dense()` and `og.DAD()`,
    which are exact and show no more of a site than its gradient, and the methods in `among`. A
    forecast from the measured link and machines says which to begin with and which are worth a
    trial. In a trial two of them take turns. The new one is kept only if it is measurably faster at
    the slowest site. All sites choose alike.

    Two runs may choose differently, and then differ in rounding. If a run must repeat to the bit,
    name its method, or pass what an earlier run chose: `og.Auto(frozen=choice)`. With `og.EDAD` in
    `among` nothing is computed again: such layers travel as by `og.DAD`.

    Attributes:
        among: Further methods to try, as those that are not exact: only the user knows whether they
            may be used.
        looking: Share of the training time that trials may add.
        every: k: gradients are shared at every k-th synchronised backward pass only, as in
            `og.Dense`.
        frozen: Method of each parameter by its full name, as `session.choice()` returned it; then
            nothing is tried.
    """

    among: Sequence[Method] = ()
    _: KW_ONLY
    looking: float = 0.01
    every: int = 1
    frozen: Mapping[str, Method] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "among", tuple(self.among))
        for method in [*self.among, *(self.frozen or {}).values()]:
            whole = not is_method(method) or isinstance(method, Local)
            if whole:
                raise TypeError(
                    f"Auto: {method!r} is no method that can be chosen: use og.RankDAD(...), "
                    f"og.PowerSGD(...), og.Sparse(...) or another of gradients"
                )
            if getattr(method, "every", 1) != self.every:
                raise ValueError(
                    f"Auto: {method!r} has another every= than Auto, {self.every}: give all the "
                    f"same"
                )
        if type(self.every) is not int:
            raise TypeError(
                f"Auto: every={self.every!r}: it finds its methods by the time of steps, of which "
                f"there would be few; use a whole number, or name a method"
            )
        if not 0 < self.looking <= 1:
            raise ValueError(f"Auto: looking={self.looking!r}; use a share above 0, as 0.01")

    def __repr__(self) -> str:
        """Returns the same text on every site, because sites compare it."""
        if self.frozen is not None:
            each = sorted((name, repr(method)) for name, method in self.frozen.items())
            counts = Counter(text for _, text in each).items()
            told = ", ".join(f"{count} x {text}" for text, count in sorted(counts))
            return f"Auto(frozen={digest(repr(each).encode()):x}: {told})"
        settings = {"looking": 0.01, "every": 1}
        told = [f"among={list(self.among)!r}"] if self.among else []
        told += [
            f"{name}={getattr(self, name)!r}"
            for name, default in settings.items()
            if getattr(self, name) != default
        ]
        return f"Auto({', '.join(told)})"

    @property
    def methods(self) -> list[Method]:
        """All methods to choose among, without duplicates."""
        found: list[Method] = [Dense(every=self.every), DAD(every=self.every)]
        found += [method for k, method in enumerate(self.among) if method not in self.among[:k]]
        return found[:2] + [method for method in found[2:] if method not in found[:2]]

    def candidates(self, name: str) -> Sequence[Method]:
        """Returns all methods that a parameter may have."""
        return self.methods if self.frozen is None else [self._frozen(self.frozen, name)]

    def method_of(self, name: str, step: int = 0) -> Method:
        """Returns the method of a parameter at the start; later a `chooser` decides."""
        return DAD(every=self.every) if self.frozen is None else self._frozen(self.frozen, name)

    def _frozen(self, frozen: Mapping[str, Method], name: str) -> Method:
        if name not in frozen:
            raise ValueError(
                f"Auto(frozen=...): nothing was chosen for {name!r}: pass what session.choice() "
                f"returned for the same model"
            )
        return frozen[name]

    def chooser(
        self, units: Sequence[Unit], compressor_of: Callable[[Method], Compressor]
    ) -> AutoChooser | None:
        """Returns the chooser of one session; None if `frozen` leaves nothing to choose."""
        if self.frozen is not None:
            return None
        methods = self.methods
        return AutoChooser(units, methods, list(map(compressor_of, methods)), self.looking)


MOST_GROUPS = 4
_GRAIN_BITS = 2
"""Layers may count as similar if one has less than four times the other's elements."""


def grouped(units: Sequence[Unit]) -> list[tuple[Unit, ...]]:
    """Returns few groups of units of similar kind and size, the largest in total size first.

    The last group has all remaining units. Groups depend on the units alone: all sites agree.
    """
    found: defaultdict[tuple[str, int], list[Unit]] = defaultdict(list)
    for unit in units:
        found[_kind(unit), unit.dense_numel.bit_length() // _GRAIN_BITS].append(unit)
    ordered = sorted(found.values(), key=lambda group: -sum(unit.dense_numel for unit in group))
    first, rest = ordered[: MOST_GROUPS - 1], ordered[MOST_GROUPS - 1 :]
    return [tuple(group) for group in [*first, [unit for group in rest for unit in group]] if group]


def _kind(unit: Unit) -> str:
    if not unit.slots:
        return "no layer"
    if any(slot.lookup for slot in unit.slots):
        return "embedding"
    return "convolution" if any(slot.patches for slot in unit.slots) else "matrix"


_SURE_GAIN = 0.2
"""Share of a step that a way must save, by the forecast, to be taken in place of dense without a
trial."""


class AutoChooser(Chooser):
    """Chooses methods for groups of layers by measured step times.

    A way gives every group of layers a method. Steps are divided into stretches. After each stretch
    every site sends the times of its steps; they are received one step later. A choice made from
    them applies from the step after the next one, because layers are tapped in the forward pass
    before.

    Args:
        units: Units of the model.
        methods: Methods to choose among; the first is dense, the second is used at the start.
        compressors: Compressors of the methods.
        looking: Share of the training time that trials may take.
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
        """Stores the measurements that forecasts are made from."""
        self._ways.settle(cost, link, flops_per_s)

    # -- the way of a step ----------------------------------------------------------------------

    def compressor(self, unit: Unit, step: int) -> Compressor:
        """Returns the compressor of a unit in a step."""
        return self._compressors[self._arm(step)[self._group_of[unit]]]

    def same(self, step: int, other: int) -> bool:
        """True if all units have the same compressors in both steps."""
        return self._arm(step) == self._arm(other)

    def _arm(self, step: int) -> Arm:
        if self._stretch.first <= step < self._stretch.end:
            return self._stretch.arms[step - self._stretch.first]
        return self._kept if step >= self._since else self._before

    # -- step times -----------------------------------------------------------------------------

    def ended(self, step: int, seconds: float) -> Sequence[float]:
        """Records the time of a step; returns all times of a stretch in its last step."""
        if not self._stretch.first <= step < self._stretch.end:
            return ()
        self._told.append(seconds)
        return self._told if step == self._stretch.end - 1 else ()

    def hears(self, step: int) -> bool:
        """True in the step after a stretch, in which the times of all sites are received."""
        return step == self._stretch.end

    def take(self, step: int, seconds_SN: Sequence[Sequence[float]], rows: Rows) -> Trial | None:
        """Evaluates a stretch and plans the next one; returns the trial that it decided, if any."""
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
            verdict = judged(over.tried, seconds, step)
            if verdict is None:
                self._stretch = Stretch.turns(step + 2, self._kept, over.tried)
                return None
        trial = self._decided(step, over.tried, verdict)
        self._stretch = self._next(step)
        return trial

    def _first(self, step_s: float) -> Arm:
        """Returns the best way if its forecast gain is too large to be an error, else dense."""
        best, dense = self._ways.best(), (0,) * len(self._groups)
        gain_s = self._ways.seconds(dense) - self._ways.seconds(best)
        return best if gain_s > _SURE_GAIN * step_s else dense

    def _keep(self, arm: Arm, since: int) -> None:
        self._trials.knowledge.tried.pop(arm, None)
        self._before, self._kept, self._since = self._kept, arm, since
        self._usual.forget()

    def _watch(self, seconds: Sequence[float]) -> None:
        """Records steps without a trial; reopens all ways if the step time has changed.

        The whole change is attributed to the link, which is the most that the link can explain.
        """
        more_s = self._usual.note(seconds)
        if more_s is not None:
            self._ways.blame_link(self._kept, more_s)
            self._trials.knowledge.reopen()

    def _decided(self, step: int, arm: Arm | None, verdict: Verdict | None) -> Trial | None:
        if arm is None or verdict is None:
            return None
        knowledge, (took_s, kept_s, outcome) = self._trials.knowledge, verdict
        if outcome != Outcome.FASTER:
            return self._told_of(arm, knowledge.note(arm, step + 1, took_s, kept_s, outcome))
        knowledge.note(self._kept, step + 1, kept_s, took_s, Outcome.SLOWER)
        self._keep(arm, step + 2)
        return self._told_of(arm, Tried(step + 1, took_s, kept_s, outcome, 1))

    def _next(self, step: int) -> Stretch:
        arm = self._trials.candidate(self._kept, step)
        if arm is not None:
            return Stretch.glance(step + 2, arm)
        return Stretch.quiet(step + 2, self._kept, settled=self._usual.seconds is not None)

    # -- report, state of a checkpoint ----------------------------------------------------------

    def method_of(self, unit: Unit | None) -> Method:
        """Returns the method that is kept for a unit; dense for None."""
        if unit is None:
            return self._methods[0]
        return self._methods[self._kept[self._group_of[unit]]]

    def trials_of(self, unit: Unit) -> Sequence[tuple[str, Trial]]:
        """Returns the last trial of each other way in which the unit has another method."""
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
        """Median of the last steps without a trial, seconds; None before it is known."""
        return self._usual.seconds

    def state(self, step: int) -> StateDict:
        """Returns the kept way, the way of the last step, the step times and the trials."""
        tried = self._trials.knowledge.tried.items()
        return {
            "kept": list(self._kept),
            "last": list(self._arm(step)),
            "usual": self._usual.plain(),
            "slowdown": self._ways.slowdown,
            "purse": self._trials.purse.plain(),
            "tried": [[list(arm), *found.plain()] for arm, found in tried],
        }

    def load(self, state: StateDict, step: int, *, same_sites: bool) -> None:
        """Continues from a saved state; at another number of sites only the ways are kept."""
        self._kept, self._before = tuple(state["kept"]), tuple(state["last"])
        self._since = step + 1
        self._told, trials = [], self._trials
        self._usual.forget()
        trials.knowledge.reopen()
        if same_sites:
            self._usual.load(state["usual"])
            self._ways.slowdown = state["slowdown"]
            trials.purse.load(state["purse"])
            trials.knowledge.tried = {tuple(arm): Tried.of(plain) for arm, *plain in state["tried"]}
        self._stretch = Stretch.quiet(step + 1, self._kept, settled=False)
