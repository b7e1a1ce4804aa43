"""Rows of several backward passes, until they are sent together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import reduce

import torch

from outergrad.core.model import Model
from outergrad.core.types import Factors, Slot, Unit

Pays = Callable[[Unit, Sequence[int]], bool]
"""True if a unit with these numbers of rows per slot (K) should travel as factors."""
Rows = Mapping[Slot, Sequence[Factors]]


@dataclass(frozen=True)
class CarriedOver:
    """Rows that a synchronised step takes over from the backward passes before it.

    Attributes:
        stacked: rows per slot of units whose `param.grad` was their product. It is zero now, so
            that they can be treated as if the step's own backward had captured them.
        formed: number of rows per slot of the other units, whose product is only in `param.grad`.
    """

    stacked: Rows = field(default_factory=dict)
    formed: Mapping[Slot, int] = field(default_factory=dict)

    def of(self, model: Model) -> CarriedOver:
        """Returns the rows of a part of the model."""
        stacked = {slot: self.stacked[slot] for slot in model.slots if slot in self.stacked}
        return CarriedOver(stacked, {s: self.formed[s] for s in model.slots if s in self.formed})

    @property
    def params(self) -> set[str]:
        """Parameters of the stacked units."""
        return {name for slot in self.stacked for name in slot.params}

    def announced(self, slot: Slot, rows: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Returns the rows of a slot with the stacked ones, and the dtype of all their deltas."""
        parts = self.stacked.get(slot, ())
        dtypes = [part.d_GRO.dtype for part in parts] + [dtype] * (rows > 0)
        common = reduce(torch.promote_types, dtypes) if dtypes else dtype
        return rows + sum(map(rows_of, parts)), common


class RowStore(dict[Slot, list[Factors]]):
    """Copies of rows by slot, kept while they pay and take no more memory than gradients.

    Args:
        pays: decides, for this site alone, whether factors are cheaper than the dense gradient.
    """

    def __init__(self, pays: Pays) -> None:
        super().__init__()
        self._pays = pays

    @property
    def numel(self) -> int:
        """Number of elements that are kept."""
        return sum(numel_of(part) for parts in self.values() for part in parts)

    def affords(self, unit: Unit, new: Rows) -> bool:
        """True if new rows pay, together with those of the unit that are kept."""
        parts = {slot: [*self.get(slot, ()), *new.get(slot, ())] for slot in unit.slots}
        numel = sum(numel_of(factors) for all_ in parts.values() for factors in all_)
        rows_K = [sum(map(rows_of, parts[slot])) for slot in unit.slots]
        return numel <= unit.dense_numel and self._pays(unit, rows_K)

    def add(self, new: Rows) -> None:
        """Stores copies, because rows may be views of what the user overwrites."""
        for slot, parts in new.items():
            if parts:
                copies = [Factors(d.clone(), a.clone()) for d, a, *_ in parts]
                self.setdefault(slot, []).extend(copies)

    def take(self, unit: Unit) -> dict[Slot, list[Factors]]:
        """Hands over the rows of a unit, of the slots that have some."""
        return {slot: self.pop(slot) for slot in unit.slots if slot in self}


def is_whole(unit: Unit, used: Set[str]) -> bool:
    """True if a backward leaves gradients in all parameters of each slot or in none."""
    return all(used >= set(s.params) or used.isdisjoint(s.params) for s in unit.slots)


def rows_of(factors: Factors) -> int:
    """Number of rows (N)."""
    return factors.d_GRO.shape[1]


def numel_of(factors: Factors) -> int:
    """Number of elements in the deltas and activations."""
    return factors.d_GRO.numel() + factors.a_GRI.numel()
