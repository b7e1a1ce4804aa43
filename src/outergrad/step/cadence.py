"""Selection of the parameters that a synchronised backward shares or keeps for a later one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from outergrad.core.model import Model, part_of
from outergrad.core.types import Slot, StateDict
from outergrad.drift.on_drift import OnDrift
from outergrad.planning.plan import Planner
from outergrad.record.coverage import Coverage, Travel
from outergrad.step import param_grad
from outergrad.step.accumulator import Accumulator
from outergrad.step.captured import Captured, CarriedOver
from outergrad.step.header_builder import HeaderBuilder
from outergrad.step.unsynced import UnsyncedStep


@dataclass(frozen=True)
class Share:
    """A part of a model that has its own messages, with its units, plans and headers.

    Attributes:
        model: the part.
        planner: planner of its steps.
        header_builder: builder of its headers.
    """

    model: Model
    planner: Planner
    header_builder: HeaderBuilder

    def of(self, names: Collection[str]) -> Share:
        """Returns the part with these parameters."""
        model = part_of(self.model, names)
        return Share(model, self.planner.of(model), self.header_builder.of(model))


@dataclass(frozen=True)
class DueParts:
    """Parts of a model that one synchronised backward shares.

    Attributes:
        due: part that is shared; None if nothing is.
        used: parameters of it in which the backward leaves a gradient.
        released: parameters of it with an accumulated gradient in `param.grad` already.
        carried_over: rows of earlier passes.
        later: keeps the rest for a later pass; None if there is none.
    """

    due: Share | None
    used: set[str]
    released: set[str]
    carried_over: CarriedOver
    later: UnsyncedStep | None

    def shares(self, slots: Sequence[Slot]) -> bool:
        """True if some of these slots are due."""
        if self.due is None or self.later is None:
            return self.due is not None
        return any(s.weight in self.due.model.params for s in slots)


class Agreed(Protocol):
    """Agreement of all sites on whether the data have drifted."""

    @property
    def next_check(self) -> int:
        """Passes from the last exchange to the next check."""
        ...

    def agrees(self) -> bool:
        """Ends a check; True if an exchange is due."""
        ...

    def restart(self) -> None:
        """Begins anew, with an exchange."""
        ...


class Cadence:
    """Counts synchronised backward passes: a method with `every=k` is due at every k-th.

    Args:
        whole: the whole model.
        every: k of every parameter, or the drift on which it is due.
        kept: accumulates gradients that are not due.
        drift: says when data have drifted; None if no parameter waits for that.
    """

    def __init__(
        self,
        whole: Share,
        every: Mapping[str, int | OnDrift],
        kept: Accumulator,
        drift: Agreed | None = None,
    ) -> None:
        self._kept, self._drift = kept, drift
        self._whole, self._every = whole, dict(every)
        self._shares = {frozenset(whole.model.params): whole}
        self.always = set(self._every.values()) <= {1}
        self.passes = 0
        self._since_drift = self._last_stretch = 0
        """Passes since the last exchange on drift, and those from the one before to it."""

    def due_parts(
        self, task: int, used: set[str], carried_over: CarriedOver, *, rows: bool
    ) -> DueParts:
        """Begins a synchronised backward.

        Args:
            task: id of the backward's graph task.
            used: parameters in which it leaves a gradient.
            carried_over: rows that passes under `no_sync` left before it.
            rows: whether what is shared can take rows.
        """
        self.passes += 1
        if self.always:
            return DueParts(self._whole, used, set(), carried_over, None)
        drifted = self._has_drifted()
        due_now = {k: drifted if isinstance(k, OnDrift) else self.passes % k == 0 for k in self._ks}
        names = frozenset(name for name, k in self._every.items() if due_now[k])
        rest, due = self._every.keys() - names, self.share(names) if names else None
        later = self._keeping(task, rest, used, carried_over) if rest else None
        if due is None:
            return DueParts(None, set(), set(), carried_over, later)
        own = used & names
        taken, released = self._kept.release(due.model, own, carried_over.of(due.model), rows=rows)
        return DueParts(due, own, released, taken, later)

    def finish(self, due_parts: DueParts, shared: Collection[str]) -> None:
        """Ends a backward that has succeeded on all sites.

        Args:
            due_parts: what `due_parts` returned for it.
            shared: parameters whose gradient is now the sum over k passes, and is divided by k.
        """
        if not self.always:
            for name in shared:
                if (k := self.passes_of(name)) > 1:
                    param_grad.scale([self._whole.model.params[name]], 1 / k)
        if due_parts.later is not None:
            due_parts.later.finish()

    def passes_of(self, name: str) -> int:
        """Returns the number of passes over which a parameter's last gradient is a mean."""
        k = self._every.get(name, 1)
        return self._last_stretch if isinstance(k, OnDrift) else k

    @property
    def _ks(self) -> set[int | OnDrift]:
        return set(self._every.values())

    def _has_drifted(self) -> bool:
        """Counts a pass, and asks all sites where it is one with a check."""
        if self._drift is None:
            return False
        self._since_drift += 1
        if self._since_drift < self._drift.next_check or not self._drift.agrees():
            return False
        self._last_stretch, self._since_drift = self._since_drift, 0
        self._drift.restart()
        return True

    def share(self, names: frozenset[str]) -> Share:
        """Returns the part with these parameters, which has plans and headers of its own."""
        if names not in self._shares:
            self._shares[names] = self._whole.of(names)
        return self._shares[names]

    def _keeping(
        self, task: int, names: Collection[str], used: set[str], carried_over: CarriedOver
    ) -> UnsyncedStep:
        part = part_of(self._whole.model, names)
        captured, before = Captured(part, used & part.params.keys()), carried_over.of(part)
        return UnsyncedStep(task, captured, at_end=lambda: self._kept.keep(captured, before))

    # -- coverage and saved state ---------------------------------------------------------------

    def noted(self, lines: Coverage) -> Coverage:
        """Adds to each line how often the parameter travels, unless that is every time."""
        often = {name: f"; {_often(k)}" for name, k in self._every.items() if k != 1}
        found = (replace(v, why=v.why + often.get(v.parameter, "")) for v in lines)
        return Coverage(tuple(drift_told(v, self._every.get(v.parameter)) for v in found))

    def state(self) -> StateDict:
        """Returns the number of passes, and what is kept of them."""
        passes = {"passes": self.passes, "since_drift": self._since_drift}
        return {**passes, **self._kept.state()}

    def load(self, state: StateDict | Sequence[StateDict], rank: int, sites: int) -> None:
        """Restores saved states; if there are more or fewer than sites, these share them out.

        In the mean over S' sites, every site's part of a mean over S counts S' / S times.
        """
        if isinstance(state, dict):
            mine, weight = [state], 1.0
        elif len(state) == sites:
            mine, weight = [state[rank]], 1.0
        else:
            mine, weight = list(state[rank::sites]), sites / len(state)
        first = state if isinstance(state, dict) else state[0]
        self.passes = first["cadence"]["passes"]
        self._since_drift = first["cadence"].get("since_drift", 0)
        self._shares = {frozenset(self._every): self._whole}  # others predict old headers
        self._kept.load([one["cadence"] for one in mine], weight)


def drift_told(line: Travel, k: int | OnDrift | None) -> Travel:
    """Adds to a line of a coverage what votes on drift tell the other sites."""
    told = f"{line.reveals}, and when its data drift"
    return replace(line, reveals=told) if isinstance(k, OnDrift) else line


def _often(k: int | OnDrift) -> str:
    return k.often if isinstance(k, OnDrift) else f"every {k} steps"
