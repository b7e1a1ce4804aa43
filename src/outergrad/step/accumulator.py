"""Gradient accumulation over several backward passes, until a synchronised step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from outergrad.core.model import Model
from outergrad.core.types import Factors, Slot, StateDict, Unit
from outergrad.linalg.gradients import add_gradients
from outergrad.step import param_grad
from outergrad.step.captured import Captured, CarriedOver, Pays, Rows, RowStore, is_whole, rows_of


class GradientWriteGuard:
    """Gradients as they were left in some parameters.

    Args:
        params: the parameters, by name.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.params = params
        self._sealed: dict[str, tuple[TensorWeakRef, int, Tensor]] = {}
        self._altered: list[Tensor] = []

    def seal(self, names: Collection[str]) -> None:
        """Records these gradients as they are now."""
        for name in names:
            gradient = self.params[name].grad
            assert gradient is not None
            self._sealed[name] = TensorWeakRef(gradient), gradient._version, _sums(gradient)

    def hold(self, names: Collection[str]) -> bool:
        """True if these gradients are as recorded, as far as can be told without waiting."""
        return all(self._is_as_left(name) for name in names)

    def intact(self) -> bool:
        """True if all gradients are as recorded; waits for the device."""
        return self.hold(self.params) and not any(map(bool, self._altered))

    def _is_as_left(self, name: str) -> bool:
        """True if the gradient is the same tensor, in the same version.

        The version does not count writes through `.data`, by numpy or by `GradScaler.unscale_`. So
        sums are compared, too, without waiting for the device.
        """
        gradient, seal = self.params[name].grad, self._sealed.get(name)
        if gradient is None or seal is None:
            return gradient is None and seal is None
        left, version, sums = seal
        if left() is not gradient or gradient._version != version:
            return False
        self._altered.append((_sums(gradient) != sums).any())
        return True


@torch.no_grad()
def _sums(gradient: Tensor) -> Tensor:
    """Returns numbers that change with a gradient: its sum, and its norm in case that is zero."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return torch.stack([gradient.sum(dtype=dtype), torch.linalg.vector_norm(gradient, dtype=dtype)])


class Accumulator:
    """Sums of this site's gradients over several backward passes, kept as rows while that pays.

    Passes under `no_sync` leave their gradients in `param.grad`, where the user may read them. A
    unit's rows are kept beside them, to travel in their place, only while they are the whole of
    `param.grad`: from a state without a gradient until anyone else, autograd included, writes one.
    Gradients of methods with `every=k` that are not due yet are kept outside `param.grad`: as rows
    if possible, else formed.

    Args:
        model: the model of the units.
        pays: decides, for this site alone, whether factors are cheaper than the dense gradient.
    """

    def __init__(self, model: Model, pays: Pays) -> None:
        self._model = model
        self._unit_of = {slot: unit for unit in model.units for slot in unit.slots}
        self._beside, self._guards = RowStore(pays), dict[Unit, GradientWriteGuard]()
        self._only_in_grad: Counter[Slot] = Counter()
        self._rows, self._formed = RowStore(pays), dict[str, Tensor]()
        self._counted: Counter[Slot] = Counter()

    @property
    def numel(self) -> int:
        """Number of elements that are kept."""
        formed = sum(t.numel() for t in self._formed.values())
        return self._beside.numel + self._rows.numel + formed

    def clear(self) -> None:
        """Drops everything that is kept."""
        self._clear_beside()
        self._clear_outside()

    def _clear_beside(self) -> None:
        for kept in (self._beside, self._guards, self._only_in_grad):
            kept.clear()

    def _clear_outside(self) -> None:
        for kept in (self._rows, self._formed, self._counted):
            kept.clear()

    # -- beside `param.grad` --------------------------------------------------------------------

    def write(self, slot: Slot, factors: Factors, gradients: Mapping[str, Tensor]) -> None:
        """Adds gradients to `param.grad`, and keeps the rows that made them if that pays."""
        unit = self._unit_of[slot]
        may_keep = self._may_keep(unit, slot, gradients)
        param_grad.add(self._model.params, gradients)
        self._only_in_grad[slot] += rows_of(factors)
        if may_keep and self._beside.affords(unit, {slot: [factors]}):
            self._beside.add({slot: [factors]})
            self._guards[unit].seal(slot.params)
        else:
            self._forget(unit)

    def _may_keep(self, unit: Unit, slot: Slot, written: Collection[str]) -> bool:
        """True if kept rows are the whole gradient of a unit, before a product is added to it."""
        seals = self._guards.get(unit)
        if seals is not None and not seals.hold(slot.params):
            self._forget(unit)
        if unit not in self._guards and self._is_fresh(unit):
            self._guards[unit] = GradientWriteGuard(
                {name: self._model.params[name] for name in unit.params}
            )
            for one in unit.slots:
                self._only_in_grad.pop(one, None)
        return unit in self._guards and set(slot.params) <= set(written)

    def _forget(self, unit: Unit) -> None:
        self._guards.pop(unit, None)
        self._beside.take(unit)

    def _is_fresh(self, unit: Unit) -> bool:
        return all(self._model.params[name].grad is None for name in unit.params)

    def take(self, used: Set[str]) -> CarriedOver:
        """Hands over the rows beside `param.grad`, and zeroes the gradients that they stand for.

        Args:
            used: parameters in which the backward of the synchronised step leaves a gradient.
        """
        stacked: dict[Slot, Sequence[Factors]] = {}
        for unit, seals in self._guards.items():
            if is_whole(unit, used) and seals.intact():
                param_grad.zero(seals.params.values())
                stacked.update({slot: self._beside.get(slot, ()) for slot in unit.slots})
        formed = {slot: n for slot, n in self._only_in_grad.items() if slot not in stacked}
        self._clear_beside()
        return CarriedOver(stacked, formed)

    # -- outside `param.grad` -------------------------------------------------------------------

    @torch.no_grad()
    def keep(self, captured: Captured, carried_over: CarriedOver) -> None:
        """Accumulates what a backward captured, and leaves no gradient in the parameters.

        Args:
            captured: factors that the backward captured, of a part of the model.
            carried_over: rows that passes under `no_sync` left before it.
        """
        part, used, new = captured.model, captured.used, captured.take()
        for unit in part.units:
            rows = {s: [*carried_over.stacked.get(s, ()), *new.get(s, ())] for s in unit.slots}
            tapped = captured.has_autograd_grad.isdisjoint(unit.params)
            fit = tapped and self._rows.affords(unit, rows)
            if fit and self._as_rows(unit, used, carried_over):
                self._rows.add(rows)
                self._drop(unit.params)
            else:
                self._form(rows, unless=set(unit.params) - used - carried_over.params)
                self._form(self._rows.take(unit))
        for name in part.params:
            self._take_gradient(name)
        self._counted.update({slot: carried_over.formed.get(slot, 0) for slot in part.slots})

    @torch.no_grad()
    def release(
        self, part: Model, used: Set[str], carried_over: CarriedOver, *, rows: bool
    ) -> tuple[CarriedOver, set[str]]:
        """Gives back what is kept of a part, as rows of earlier passes or in `param.grad`.

        Args:
            part: part of the model.
            used: parameters of the part in which the backward leaves a gradient.
            carried_over: rows that passes under `no_sync` left before it.
            rows: whether the step can take rows.

        Returns:
            The rows that the step takes over, and the parameters whose `param.grad` was written.
        """
        stacked: dict[Slot, Sequence[Factors]] = {}
        written: set[str] = set()
        for unit in part.units:
            before = {s: carried_over.stacked[s] for s in unit.slots if s in carried_over.stacked}
            held = self._rows.take(unit)
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

    def _as_rows(self, unit: Unit, used: Set[str], carried_over: CarriedOver) -> bool:
        """True if rows are the whole gradient of the unit."""
        in_rows = any(slot in carried_over.stacked for slot in unit.slots)
        fresh = in_rows or self._is_fresh(unit)
        return fresh and is_whole(unit, used) and self._formed.keys().isdisjoint(unit.params)

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
        """Returns copies of what is kept; slots are keyed by their number in the model."""
        index = {slot: str(k) for k, slot in enumerate(self._model.slots)}
        return {
            "formed": {name: t.detach().clone() for name, t in self._formed.items()},
            "rows": {index[slot]: _saved(parts) for slot, parts in self._rows.items()},
            "formed_rows": {index[slot]: n for slot, n in self._counted.items() if n},
        }

    @torch.no_grad()
    def load(self, states: Sequence[StateDict], weight: float) -> None:
        """Restores what sites kept; rows of several sites, or weighted ones, become gradients.

        Args:
            states: saved states of these sites.
            weight: factor by which their gradients are multiplied.
        """
        self._clear_outside()
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
