"""A gradient transform in one step: what was captured is changed before any of it is sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outergrad.capture.batch import SampledUse
from outergrad.core.transform import (
    GradientTransform,
    Projection,
    SampleRows,
    Samples,
    SiteGradient,
    accumulating,
)
from outergrad.core.types import Factors, Slot, Unit
from outergrad.linalg.full_precision import full_precision
from outergrad.linalg.outer import coalesce
from outergrad.linalg.site_gradient import add_up
from outergrad.step import param_grad
from outergrad.step.captured import Captured
from outergrad.step.passes import Passes


class Transforming:
    """Changes this site's own gradient, each part of it once, also if the step starts again.

    Args:
        transform: the user's transform.
        captured: factors of the backward; the transform's output replaces them.
        leftover: name of a parameter that had a gradient before, which is none of this step's.
        sites: number of sites in this step.
        known: tells what is sent of the weights of a unit; None if the transform does not ask.
        passes: units in the passes of this step, for a transform that needs units; else None.
    """

    def __init__(
        self,
        transform: GradientTransform,
        captured: Captured,
        leftover: str = "",
        sites: int = 1,
        known: Callable[[Unit, torch.device], Mapping[str, Projection]] | None = None,
        passes: Passes | None = None,
    ) -> None:
        self._transform, self._captured, self._leftover = transform, captured, leftover
        self.holds_back = transform.needs_all_layers
        self._params, model = captured.model.params, captured.model
        in_units = {name for unit in model.units for name in unit.params}
        plain = [Unit((), (n,), p.numel()) for n, p in self._params.items() if n not in in_units]
        self._waiting: list[Unit] = [*model.units, *plain]
        self._device = next((p.device for p in self._params.values()), torch.device("cpu"))
        self._sites, self._layers, self._known = sites, len(self._waiting), known
        self._before = _taken(self._params) if accumulating(transform) and not leftover else {}
        self._made: set[str] = set()
        self._samples: Samples | None = None
        self._passes = passes
        if passes is not None and not self._before:  # what there was before was thrown away
            passes.forget()
        # What is sent of a gradient is found from its rows; units may have many samples.
        early = known is None and passes is None
        if early and transform.needs_samples and getattr(transform, "forms", False):
            captured.on_use = self._form

    @torch.no_grad()
    def apply(self, names: Collection[str]) -> None:
        """Changes what belongs to these parameters, unless that was done before in this step.

        Raises:
            RuntimeError: samples cannot be told apart, or a gradient is not of this step alone.
            ValueError: the transform returned something else than agreed.
        """
        due = [u for u in self._waiting if self.holds_back or not set(u.params).isdisjoint(names)]
        if not due:
            return
        refuse_leftover(self._leftover, self._transform)
        self._waiting = [unit for unit in self._waiting if unit not in due]
        for units in [due] if self.holds_back else [[unit] for unit in due]:
            with full_precision(self._device):
                given = self._given(units)
                found = self._transform(given)
            check_transformed(self._transform, given, found)
            self._take(found)
            self._add_before(units)
        if self._passes is not None and self._samples is not None:  # this pass ends the step
            self._passes.forget()

    @torch.no_grad()
    def apply_partly(self) -> None:
        """Changes what a backward adds to later ones, of which the last is shared.

        Raises:
            RuntimeError: samples cannot be told apart.
        """
        part = accumulating(self._transform)
        assert part is not None
        units, used = self._waiting, self._captured.used
        for some in [units] if self.holds_back else [[unit] for unit in units]:
            with full_precision(self._device):
                found = part.partial(self._given(some)).formed
            due = {n: g.to(self._params[n].dtype) for n, g in found.items() if n in used}
            param_grad.add(self._params, due)
        self._captured.release()
        param_grad.add(self._params, self._before)

    def drop_unused(self, used: Collection[str]) -> None:
        """Drops gradients that it made for parameters that no site uses."""
        for name in self._made.difference(used):
            self._params[name].grad = None

    # -- input of the transform -------------------------------------------------------------------

    def _given(self, units: Sequence[Unit]) -> SiteGradient:
        params = {name: self._params[name] for unit in units for name in unit.params}
        rows: dict[Slot, SampleRows] = {}
        samples = 0
        for unit in units:
            if unit.slots and self._in_rows(unit):
                for slot in unit.slots:
                    parts, count = self._rows(slot)
                    rows |= parts
                    samples = max(samples, count)
        in_rows = {name for slot in rows for name in slot.params}
        formed = {name: _gradient(p) for name, p in params.items() if name not in in_rows}
        unit_B = None if self._passes is None else self._unit_of_samples(rows)
        about = {"sent": self._sent(units, rows), "unit_B": unit_B}
        return SiteGradient(rows, formed, params, samples, self._sites, self._layers, **about)

    def _sent(
        self, units: Sequence[Unit], rows: Mapping[Slot, SampleRows]
    ) -> dict[str, Projection] | None:
        """Returns what is sent of weights, as far as it is known; None if it was not asked."""
        if self._known is None:
            return None
        sent: dict[str, Projection] = {}
        for unit in units:
            if unit.slots and unit.slots[0] in rows:
                sent |= self._known(unit, self._params[unit.params[0]].device)
        return sent

    def _in_rows(self, unit: Unit) -> bool:
        """True if rows are the whole gradient of a unit; otherwise all of it is formed now.

        Raises:
            RuntimeError: the samples in it are to be told apart.
        """
        other = next((n for n in unit.params if self._params[n].grad is not None), None)
        if other is None:
            return True
        if self._transform.needs_samples:
            raise RuntimeError(
                f"autograd has a gradient for {other!r} outside of its layer (a penalty, a hook on "
                f"it, a forward that cannot be captured, a gradient of a gradient), of which "
                f"{self._transform!r} cannot tell the samples apart: leave that out, or make the "
                f"parameter og.Local()"
            )
        for name in unit.params:
            self._captured.settle(name)
        self._captured.has_autograd_grad.update(unit.params)
        return False

    def _form(self, slot: Slot, use: Any) -> None:
        """Forms the gradients by sample of a use early, unless slots add up to a parameter."""
        of_params = self._captured.model.slots_of
        others = (other for name in slot.params for other in of_params[name] if other != slot)
        if isinstance(use, SampledUse) and not any(add_up(slot, other) for other in others):
            with full_precision(self._device):
                use.form(slot)

    def _rows(self, slot: Slot) -> tuple[dict[Slot, SampleRows], int]:
        """Returns the rows of all uses, and the number of their samples."""
        if not self._transform.needs_samples:
            return {slot: SampleRows(self._captured.rows(slot))}, 0
        uses = list(self._sampled(slot))
        if not uses:
            factors = self._captured.rows(slot)
            nothing_N = torch.zeros(0, dtype=torch.int64, device=factors.d_GRO.device)
            return {slot: SampleRows(_first(factors, slot, 0), nothing_N)}, 0
        parts: dict[Slot, list[SampleRows]] = {}
        for here, part in (pair for use in uses for pair in use.parts(slot).items()):
            parts.setdefault(here, []).append(part)
        found = {here: _stacked(several, here) for here, several in parts.items()}
        return found, uses[0].samples.total

    def _sampled(self, slot: Slot) -> Iterator[SampledUse]:
        for use in self._captured.uses(slot):
            assert isinstance(use, SampledUse)
            if self._samples is None:
                self._begin(use.samples)
            elif use.samples.forward != self._samples.forward:
                raise RuntimeError(
                    f"{slot.layer!r}: this backward goes through several forwards of the model, "
                    f"whose samples are not the same, and {self._transform!r} has to tell them "
                    f"apart: run one forward, of all samples, per backward"
                )
            yield use

    def _begin(self, samples: Samples) -> None:
        """Notes the samples of this pass, of which its first use tells."""
        if self._passes is not None:
            if samples.units is None:
                raise RuntimeError(
                    f"{self._transform!r} clips all samples of a unit as one, and which sample is "
                    f"of which is not known: call session.units(ids) before each forward of the "
                    f"model, with one id for each of its {samples.total} samples"
                )
            self._passes.add(samples.units)
        self._samples = samples

    def _unit_of_samples(self, rows: Mapping[Slot, SampleRows]) -> Tensor:
        ids = () if self._samples is None else self._samples.units or ()
        numbers: dict[str, int] = {}
        of_sample = [numbers.setdefault(one, len(numbers)) for one in ids]
        device = next((part.factors.d_GRO.device for part in rows.values()), None)
        return torch.tensor(of_sample, dtype=torch.int64, device=device)

    # -- output of the transform ------------------------------------------------------------------

    def _take(self, found: SiteGradient) -> None:
        for slot, part in found.rows.items():
            if slot in self._captured.slots:
                self._captured.replace(slot, _as_sent(part.factors, slot))
        formed_slots = {s for s in self._captured.slots if s.weight in found.formed}
        for slot in formed_slots:
            self._captured.drop(slot)
        for name, gradient in found.formed.items():
            p = self._params[name]
            self._made |= {name} if p.grad is None else set()
            param_grad.put(p, gradient.to(p.dtype))

    def _add_before(self, units: Sequence[Unit]) -> None:
        """Adds what earlier passes have left, which is in the result's units already."""
        for unit in units:
            names = [name for name in unit.params if name in self._before]
            if names:
                for name in unit.params:
                    self._captured.settle(name)
                self._captured.has_autograd_grad.update(unit.params)
                param_grad.add(self._params, {name: self._before[name] for name in names})


def _taken(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the gradients of earlier passes, and removes them."""
    found = {name: p.grad for name, p in params.items() if p.grad is not None}
    for name in found:
        params[name].grad = None
    return found


def leftover(
    transform: GradientTransform | None, params: Mapping[str, Tensor], unshared: Collection[str]
) -> str:
    """Name of a parameter with a gradient of an earlier shared step; empty if there is none."""
    if transform is None:
        return ""
    return next((n for n, p in params.items() if p.grad is not None and n not in unshared), "")


def refuse_leftover(name: str, transform: GradientTransform | None) -> None:
    """Checks that no gradient was left in a parameter when a backward begins.

    Raises:
        RuntimeError: one was, which the transform would change again.
    """
    if transform is not None and name:
        raise RuntimeError(
            f"{name!r} had a gradient before this backward, which {transform!r} would change "
            f"again: call optimizer.zero_grad(set_to_none=True) before each backward that is not "
            f"inside session.no_sync()"
        )


def check_transformed(transform: Any, given: SiteGradient, found: Any) -> None:
    """Checks the return value of a transform.

    Raises:
        ValueError: it has other slots, rows, names or shapes than it may have.
    """
    if not isinstance(found, SiteGradient):
        raise ValueError(f"{transform!r} returned {type(found).__name__}: return a SiteGradient")
    forms = getattr(transform, "forms", False)
    rows_of = {} if forms else {s: part.factors.d_GRO.shape for s, part in given.rows.items()}
    found_of = {slot: part.factors.d_GRO.shape for slot, part in found.rows.items()}
    odd = next((s for s in {**rows_of, **found_of} if rows_of.get(s) != found_of.get(s)), None)
    if odd is not None:
        remedy = "set forms = True" if odd not in found_of else "return as many rows as it has"
        remedy = "with forms = True return transforms.formed(...) of it" if forms else remedy
        raise ValueError(
            f"{transform!r} was given {_told(given, odd)} of {odd.weight!r} and returned "
            f"{_told(found, odd)}: {remedy}"
        )
    shapes = {n: p.shape for n, p in given.params.items() if forms or n in given.formed}
    formed = {name: t.shape for name, t in found.formed.items()}
    name = next((n for n in {**shapes, **formed} if shapes.get(n) != formed.get(n)), None)
    if name is not None:
        raise ValueError(
            f"{transform!r} returned {formed.get(name, 'nothing')} for {name!r}: return a tensor "
            f"of its shape {tuple(given.params[name].shape)}"
            if name in shapes
            else f"{transform!r} returned a formed gradient of {name!r}: set forms = True"
        )


def _told(gradient: SiteGradient, slot: Slot) -> str:
    part = gradient.rows.get(slot)
    return "no rows" if part is None else f"rows {tuple(part.factors.d_GRO.shape)}"


def _gradient(p: Tensor) -> Tensor:
    if p.grad is None:
        return torch.zeros_like(p)
    if p.grad.is_sparse:
        raise RuntimeError("a gradient is sparse: build its layer with sparse=False")
    return p.grad


def _stacked(parts: Sequence[SampleRows], slot: Slot) -> SampleRows:
    if len(parts) == 1:  # as usual, and without a copy
        return parts[0]
    d_GNO = torch.cat([part.factors.d_GRO for part in parts], dim=1)
    a = torch.cat([part.factors.a_GRI for part in parts], dim=0 if slot.lookup else 1)
    samples = [part.samples_N for part in parts if part.samples_N is not None]
    return SampleRows(Factors(d_GNO, a), torch.cat(samples))


def _first(factors: Factors, slot: Slot, rows: int) -> Factors:
    a = factors.a_GRI[:rows] if slot.lookup else factors.a_GRI[:, :rows]
    return Factors(factors.d_GRO[:, :rows], a)


def _as_sent(factors: Factors, slot: Slot) -> Factors:
    """Returns factors as the rules of layers do, with distinct ids."""
    if not slot.lookup:
        return factors
    ids_R, d_RO = coalesce(factors.a_GRI, factors.d_GRO[0])
    return Factors(d_RO.unsqueeze(0), ids_R)
