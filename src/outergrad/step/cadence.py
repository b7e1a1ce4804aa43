"""Selection of the parameters that a synchronised backward shares or keeps for a later one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from outergrad.core.model import Model, part_of
from outergrad.core.types import Slot, StateDict
from outergrad.planning.plan import Planner
from outergrad.record.coverage import Coverage
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


class Cadence:
    """Counts synchronised backward passes: a method with `every=k` is due at every k-th.

    Args:
        whole: the whole model.
        every: k of every parameter.
        kept: accumulates gradients that are not due.
    """

    def __init__(self, whole: Share, every: Mapping[str, int], kept: Accumulator) -> None:
        self._kept = kept
        self._whole, self._every = whole, dict(every)
        self._shares = {frozenset(whole.model.params): whole}
        self.always = set(self._every.values()) <= {1}
        self.passes = 0

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
        names = frozenset(name for name, k in self._every.items() if self.passes % k == 0)
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
                if self._every[name] > 1:
                    param_grad.scale([self._whole.model.params[name]], 1 / self._every[name])
        if due_parts.later is not None:
            due_parts.later.finish()

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
        often = {name: f"; every {k} steps" for name, k in self._every.items() if k > 1}
        return Coverage(tuple(replace(v, why=v.why + often.get(v.parameter, "")) for v in lines))

    def state(self) -> StateDict:
        """Returns the number of passes, and what is kept of them."""
        return {"passes": self.passes, **self._kept.state()}

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
        self._shares = {frozenset(self._every): self._whole}  # others predict old headers
        self._kept.load([one["cadence"] for one in mine], weight)
