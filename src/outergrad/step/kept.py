"""What synchronised backward passes leave for a later exchange, of methods with `every=k`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set

import torch
from torch import Tensor

from outergrad.core.model import Model
from outergrad.core.types import Factors, Slot, StateDict, Unit
from outergrad.linalg.gradients import add_gradients
from outergrad.step import param_grad
from outergrad.step.accumulated import CarriedOver, Pays, is_whole, numel_of, rows_of
from outergrad.step.captured import Captured

Rows = Mapping[Slot, Sequence[Factors]]


class Kept:
    """Sums of this site's gradients, outside `param.grad`: as rows while they pay, else formed.

    Args:
        model: what they belong to.
        pays: the local part of the choice between factors and dense.
    """

    def __init__(self, model: Model, pays: Pays) -> None:
        self._model, self._pays = model, pays
        self._rows: dict[Slot, list[Factors]] = {}
        self._formed: dict[str, Tensor] = {}
        self._counted: Counter[Slot] = Counter()

    @property
    def numel(self) -> int:
        """Numbers that are kept."""
        rows = sum(numel_of(part) for parts in self._rows.values() for part in parts)
        return rows + sum(t.numel() for t in self._formed.values())

    @torch.no_grad()
    def keep(
        self,
        captured: Captured,
        carried_over: CarriedOver,
    ) -> None:
        """Takes in what a backward brought, and leaves no gradient in the parameters.

        Args:
            captured: by the backward, of a part of the model.
            carried_over: what passes in `no_sync` left before it.
        """
        part, used, new = captured.model, captured.used, captured.take()
        for unit in part.units:
            rows = {s: [*carried_over.stacked.get(s, ()), *new.get(s, ())] for s in unit.slots}
            fit = captured.has_autograd_grad.isdisjoint(unit.params) and self._affordable(
                unit, rows
            )
            if fit and self._as_rows(unit, used, carried_over):
                self._add(rows)
                self._drop(unit.params)
            else:
                self._form(rows, unless=set(unit.params) - used - carried_over.params)
                self._form(self._popped(unit))
        for name in part.params:
            self._take_gradient(name)
        self._counted.update({slot: carried_over.formed.get(slot, 0) for slot in part.slots})

    @torch.no_grad()
    def release(
        self, part: Model, used: Set[str], carried_over: CarriedOver, *, rows: bool
    ) -> tuple[CarriedOver, set[str]]:
        """Gives back what is kept of a part, as rows of earlier passes or in `param.grad`.

        Args:
            part: of the model.
            used: its parameters that the backward leaves a gradient in.
            carried_over: what passes in `no_sync` left before it.
            rows: whether the step can take rows.

        Returns:
            What the step takes over, and the parameters that got a gradient.
        """
        stacked: dict[Slot, Sequence[Factors]] = {}
        written: set[str] = set()
        for unit in part.units:
            before = {s: carried_over.stacked[s] for s in unit.slots if s in carried_over.stacked}
            held = self._popped(unit)
            if rows and self._as_rows(unit, used, carried_over):
                both = {s: [*before.get(s, ()), *held.get(s, ())] for s in unit.slots}
                stacked.update({slot: parts for slot, parts in both.items() if before or held})
            else:
                written |= self._form(before) | self._form(held)
        formed = {name: self._formed.pop(name) for name in part.params if name in self._formed}
        param_grad.add(self._model.params, formed)
        counts = Counter({slot: carried_over.formed.get(slot, 0) for slot in part.slots})
        counts.update({slot: self._counted.pop(slot, 0) for slot in part.slots})
        return CarriedOver(stacked, counts), written | formed.keys()

    def clear(self) -> None:
        """Drops all of it."""
        self._rows.clear()
        self._formed.clear()
        self._counted.clear()

    # -- rows or formed -------------------------------------------------------------------------

    def _as_rows(self, unit: Unit, used: Set[str], carried_over: CarriedOver) -> bool:
        """Whether rows are all that there is of the unit."""
        untouched = all(self._model.params[name].grad is None for name in unit.params)
        fresh = untouched or any(slot in carried_over.stacked for slot in unit.slots)
        return fresh and is_whole(unit, used) and self._formed.keys().isdisjoint(unit.params)

    def _affordable(self, unit: Unit, rows: Rows) -> bool:
        """Whether they pay, with those that are kept, and take no more memory than gradients."""
        parts = {slot: [*self._rows.get(slot, ()), *rows[slot]] for slot in unit.slots}
        numel = sum(numel_of(factors) for all_ in parts.values() for factors in all_)
        rows_K = [sum(map(rows_of, parts[slot])) for slot in unit.slots]
        return numel <= unit.dense_numel and self._pays(unit, rows_K)

    def _add(self, rows: Rows) -> None:
        """Keeps copies: rows may be views of what the user overwrites."""
        for slot, parts in rows.items():
            if parts:
                copies = [Factors(d.clone(), a.clone()) for d, a, *_ in parts]
                self._rows.setdefault(slot, []).extend(copies)

    def _popped(self, unit: Unit) -> dict[Slot, list[Factors]]:
        return {slot: self._rows.pop(slot) for slot in unit.slots if slot in self._rows}

    def _form(self, rows: Rows, unless: Collection[str] = ()) -> set[str]:
        """Adds products of rows to `param.grad`; returns the parameters."""
        self._counted.update({slot: sum(map(rows_of, parts)) for slot, parts in rows.items()})
        products = {n: g for n, g in self._products(rows).items() if n not in unless}
        param_grad.add(self._model.params, products)
        return set(products)

    def _products(self, rows: Rows) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for slot, parts in rows.items():
            if parts:
                add_gradients(gradients, slot, parts, self._model.params, 1.0)
        return gradients

    def _drop(self, names: Collection[str]) -> None:
        param_grad.drop(self._model.params[name] for name in names)

    def _take_gradient(self, name: str) -> None:
        gradient = self._model.params[name].grad
        if gradient is not None:
            self._add_formed(name, gradient)
            self._drop([name])

    def _add_formed(self, name: str, gradient: Tensor) -> None:
        if name in self._formed:
            self._formed[name].add_(gradient)
        else:
            self._formed[name] = gradient

    # -- saved and loaded -----------------------------------------------------------------------

    def state(self) -> StateDict:
        """Copies of what is kept; slots by their number in the model."""
        index = {slot: str(k) for k, slot in enumerate(self._model.slots)}
        return {
            "formed": {name: t.detach().clone() for name, t in self._formed.items()},
            "rows": {index[slot]: _saved(parts) for slot, parts in self._rows.items()},
            "formed_rows": {index[slot]: n for slot, n in self._counted.items() if n},
        }

    @torch.no_grad()
    def load(self, states: Sequence[StateDict], weight: float) -> None:
        """Takes over what some sites kept: as it was, or, of several or weighted, formed.

        Args:
            states: of these sites.
            weight: how many times they count.
        """
        self.clear()
        slots, params = self._model.slots, self._model.params
        for state in states:
            rows = {slots[int(k)]: _loaded(v, params) for k, v in state["rows"].items()}
            formed = dict[str, Tensor]()
            if len(states) == 1 and weight == 1:
                self._rows.update(rows)
            else:
                formed = self._products(rows)
            for name, gradient in (*formed.items(), *state["formed"].items()):
                self._add_formed(name, weight * gradient.to(params[name].device))
            self._counted.update({slots[int(k)]: n for k, n in state["formed_rows"].items()})


def _saved(parts: Sequence[Factors]) -> StateDict:
    return {
        str(k): {"deltas": factors.d_GRO.clone(), "activations": factors.a_GRI.clone()}
        for k, factors in enumerate(parts)
    }


def _loaded(saved: StateDict, params: Mapping[str, Tensor]) -> list[Factors]:
    device = next(iter(params.values())).device
    pairs = ((part["deltas"], part["activations"]) for part in saved.values())
    return [Factors(d.to(device, copy=True), a.to(device, copy=True)) for d, a in pairs]
