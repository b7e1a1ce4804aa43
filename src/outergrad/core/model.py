"""The trainable part of a model, the compressors of its units, and their routes in a step."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from outergrad.core.blocks import Block
from outergrad.core.choosing import Chooser
from outergrad.core.compressor import Compressor
from outergrad.core.reasons import Reason
from outergrad.core.residual_store import ResidualStore
from outergrad.core.transform import Projection
from outergrad.core.types import (
    Inheritance,
    Route,
    Slot,
    Source,
    StateDict,
    Unit,
    bias_slot,
    overlapping,
)


@dataclass(frozen=True)
class Model:
    """The trainable part of a model, as all sites agreed on it.

    Attributes:
        params: trainable parameters by full name, in the order of registration.
        slots: every slot, in the order of the model.
        units: the slots, grouped by shared parameters.
        reasons: for every parameter outside the units, the reason why it travels dense.
    """

    params: Mapping[str, nn.Parameter]
    slots: tuple[Slot, ...]
    units: tuple[Unit, ...]
    reasons: Mapping[str, str]

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks that all sites recompute, in the order of the units."""
        return [unit.block for unit in self.units if unit.block is not None]

    @cached_property
    def index(self) -> dict[Source, int]:
        """Index of each captured source in headers: slots first, then blocks."""
        return {source: k for k, source in enumerate((*self.slots, *self.blocks))}

    @cached_property
    def slots_of(self) -> dict[str, list[Slot]]:
        """The slots that contribute to each parameter, by its full name."""
        found: dict[str, list[Slot]] = {}
        for slot in self.slots:
            for name in slot.params:
                found.setdefault(name, []).append(slot)
        return found

    @staticmethod
    def of(
        params: Mapping[str, nn.Parameter],
        slots: Sequence[Slot],
        reasons: Mapping[str, str],
        plain: Sequence[str] = (),
        blocks: Sequence[Block] = (),
        vectors: Collection[str] = (),
    ) -> Model:
        """Builds a model; groups its slots into units.

        Args:
            params: as in `Model`.
            slots: as in `Model`.
            reasons: as in `Model`.
            plain: weights without slots whose formed gradients make up units, too.
            blocks: blocks that all sites recompute; each is a unit.
            vectors: biases whose formed gradients are compressed, too, as matrices of one column.
        """
        units = [_unit(group, params, vectors) for group in _connected(slots)]
        units += [Unit((), (n,), params[n].numel(), (_matrix(n, params[n]),)) for n in plain]
        units += [Unit((), b.params, _numel(b.params, params), block=b) for b in blocks]
        return Model(params, tuple(slots), tuple(units), reasons)


def part_of(model: Model, names: Collection[str]) -> Model:
    """Returns the model restricted to parameters of these names; units must not be divided."""
    return Model(
        {name: p for name, p in model.params.items() if name in names},
        tuple(slot for slot in model.slots if slot.weight in names),
        tuple(unit for unit in model.units if unit.params[0] in names),
        {name: why for name, why in model.reasons.items() if name in names},
    )


def _unit(
    slots: Sequence[Slot], params: Mapping[str, Tensor], vectors: Collection[str] = ()
) -> Unit:
    names = tuple(dict.fromkeys(name for slot in slots for name in slot.params))
    matrices = _matrices(slots, params)
    if matrices:
        weights = {matrix.weight for matrix in matrices}
        biases = [name for name in names if name in vectors and name not in weights]
        matrices += _columns(slots, {name: params[name] for name in biases})
    return Unit(tuple(slots), names, _numel(names, params), matrices)


def _numel(names: Sequence[str], params: Mapping[str, Tensor]) -> int:
    return sum(params[name].numel() for name in names)


def _matrices(slots: Sequence[Slot], params: Mapping[str, Tensor]) -> tuple[Slot, ...]:
    """Slots of the weights' formed gradients; see `Unit.matrices`."""
    weights = {slot.weight: params[slot.weight] for slot in slots}
    if overlapping(slots) or any(slot.lookup for slot in slots):
        return tuple(_matrix(name, p, slots[0].layer) for name, p in weights.items())
    parts = tuple(slot._replace(bias=None, bias_rows=None) for slot in slots)
    covered = sum(part.numel for part in parts)
    return parts if covered == sum(p.numel() for p in weights.values()) else ()


def _columns(slots: Sequence[Slot], biases: Mapping[str, Tensor]) -> tuple[Slot, ...]:
    """Biases as matrices of one column, one per slot; a single one if slots do not divide it."""
    found = list[Slot]()
    for name, p in biases.items():
        parts = list(dict.fromkeys(bias_slot(slot) for slot in slots if slot.bias == name))
        apart = not overlapping(parts) and sum(part.numel for part in parts) == p.numel()
        found += parts if apart else [_matrix(name, p, slots[0].layer)]
    return tuple(found)


def _matrix(name: str, p: Tensor, layer: str = "") -> Slot:
    """Slot of a formed gradient: the first dimension by all others."""
    return Slot(layer, name, p.shape[0], p.numel() // p.shape[0], vector=p.dim() == 1)


def _connected(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Groups of slots that share parameters, directly or through each other."""
    groups: list[list[Slot]] = []
    for slot in slots:
        touching = [g for g in groups if any(set(s.params) & set(slot.params) for s in g)]
        groups = [g for g in groups if g not in touching]
        groups.append([*(s for g in touching for s in g), slot])
    return groups


class Compressors:
    """The compressors of a model, one per method, in an order that is the same on every site.

    Args:
        units_of: each compressor with its units.
        parts: names of the parameters exchanged in each step, where no step covers the whole
            model. All units of a compressor then belong to one part.

    Attributes:
        parts: as above; empty where every step covers the whole model.
        stores: the residual store of each compressor, in order.
    """

    chooser: Chooser | None = None
    """Chooses among the compressors step by step; None where they are fixed."""

    def __init__(
        self,
        units_of: Sequence[tuple[Compressor, Sequence[Unit]]],
        parts: Sequence[frozenset[str]] = (),
    ) -> None:
        self._units_of, self.parts = tuple(units_of), parts
        self.stores: Sequence[ResidualStore] = [compressor for compressor, _ in units_of]
        self._of = {unit: compressor for compressor, units in units_of for unit in units}
        self._ending: tuple[AbstractSet[Unit], Mapping[Unit, Compressor], set[int]] | None = None

    def __getitem__(self, unit: Unit) -> Compressor:
        return self._of[unit]

    def items(self) -> Sequence[tuple[Compressor, Sequence[Unit]]]:
        """Each compressor with its units."""
        return self._units_of

    def _reassign(self, of: Mapping[Unit, Compressor]) -> None:
        self._of = dict(of)

    def known_of(self, unit: Unit, device: torch.device) -> dict[str, Projection]:
        """Returns what is sent of weights of a unit, where all sites know it before the step.

        By full names, of matrices to which a single slot adds, in one group.
        """
        if self.travels_dense(unit):
            return {}
        matrices = {matrix.weight: matrix for matrix in unit.matrices}
        found = {}
        for slot in unit.slots:
            fits = slot.groups == 1 and slot.weight_rows is None
            fits = fits and not (slot.lookup or slot.vector)
            alone = [other.weight for other in unit.slots].count(slot.weight) == 1
            if fits and alone and slot.weight in matrices:
                found[slot.weight] = self[unit].known(unit, matrices[slot.weight], device)
        return {name: sent for name, sent in found.items() if sent is not None}

    def step_of(self, units: Sequence[Unit], model: Model) -> Model:
        """Returns the part of the model exchanged in the steps of one compressor's units."""
        first = units[0].params[0] if units else ""
        names = next((part for part in self.parts if first in part), None)
        return model if names is None else part_of(model, names)

    @property
    def phases(self) -> list[Hashable]:
        """`phase` of each compressor: the state that its decisions depend on."""
        return [compressor.phase for compressor, _ in self._units_of]

    def begin(self, step: int, sites: int) -> bool:
        """Begins a step; True if some unit has another compressor than in the previous step."""
        return False

    def next_of(self, unit: Unit) -> Compressor:
        """Returns the compressor that the unit will have in the next step."""
        return self._of[unit]

    @property
    def counting(self) -> AbstractSet[Unit] | None:
        """Units whose layers must count rows in the next forward; None for all units."""
        return None

    @property
    def ahead(self) -> Hashable:
        """State that `next_of` depends on besides the current step."""
        return None

    def travels_dense(self, unit: Unit) -> bool:
        """True if the unit travels dense regardless of its compressor."""
        return False

    def remembering(self, unit: Unit) -> Sequence[ResidualStore]:
        """Returns the stores that may hold an unsent residual of the unit."""
        own = self._of[unit]
        return [own] if own.remembers(unit) else []

    def memories(self, unit: Unit) -> list[tuple[ResidualStore, Slot]]:
        """Returns the stores and slots to query for the unit's residuals."""
        return [(one, slot) for one in self.remembering(unit) for slot in slots_of(unit)]

    @property
    def owe(self) -> bool:
        """True if any residual is unsent."""
        memories = (pair for unit in self._of for pair in self.memories(unit))
        return any(one.residual(slot) is not None for one, slot in memories)

    def commit(
        self, units: AbstractSet[Unit], *, applied: bool, used: Collection[str] = ()
    ) -> None:
        """Ends a step of some units: their compressors keep its residuals if it was applied.

        Args:
            units: that the step covered.
            applied: whether the step was applied.
            used: parameters that had a gradient on some site.
        """
        if self._ending is None or self._ending[0] is not units or self._ending[1] is not self._of:
            ending = {id(self._of[unit]) for unit in units if unit in self._of}
            self._ending = units, self._of, ending
        for store in self.stores:
            if id(store) in self._ending[2]:
                store.commit(applied=applied)

    def states(self) -> list[StateDict]:
        """Returns each compressor's state between two steps."""
        return [store.state() for store in self.stores]

    def load(self, inheritances: Sequence[Inheritance]) -> None:
        """Restores each compressor from its own saved states."""
        for store, inheritance in zip(self.stores, inheritances, strict=True):
            store.load(inheritance)


def slots_of(unit: Unit) -> list[Slot]:
    """Slots for which a residual may be kept; one per place."""
    return list({slot.place: slot for slot in (*unit.slots, *unit.matrices)}.values())


@dataclass(frozen=True)
class Choice:
    """Decisions that follow from the headers of a step.

    Attributes:
        routes: route of each unit in this step.
        tapped: per unit, whether all sites have its factors.
        tap_next: per unit, whether its layers should capture factors in the next forward.
        sizes: per unit, bytes of its part of a message on the site with the largest; 0 if dense.
        reasons: per unit, the reason for its route, for the coverage table.
    """

    routes: tuple[Route, ...]
    tapped: tuple[bool, ...]
    tap_next: tuple[bool, ...]
    sizes: tuple[int, ...]
    reasons: tuple[Reason, ...] = field(compare=False)
