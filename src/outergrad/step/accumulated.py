"""What backward passes inside `no_sync` leave for the next shared step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from outergrad.core.model import Model
from outergrad.core.types import Factors, Slot, Unit
from outergrad.step import param_grad

Pays = Callable[[Unit, Sequence[int]], bool]
"""Whether a unit with so many rows per slot (K) should travel as factors."""


@dataclass(frozen=True)
class CarriedOver:
    """What a shared step takes over from the backward passes before it.

    Attributes:
        stacked: rows per slot of units whose `param.grad` they were; it is zero now, so that they
            can be treated as if the step's own backward had captured them.
        formed: number of rows per slot of the other units: only `param.grad` has their product.
    """

    stacked: Mapping[Slot, Sequence[Factors]] = field(default_factory=dict)
    formed: Mapping[Slot, int] = field(default_factory=dict)

    def of(self, model: Model) -> CarriedOver:
        """What concerns a part of the model."""
        stacked = {slot: self.stacked[slot] for slot in model.slots if slot in self.stacked}
        return CarriedOver(stacked, {s: self.formed[s] for s in model.slots if s in self.formed})

    @property
    def params(self) -> set[str]:
        """Parameters of the stacked units."""
        return {name for slot in self.stacked for name in slot.params}

    def announced(self, slot: Slot, rows: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Rows of a slot with those that are stacked, and the dtype of all their deltas."""
        parts = self.stacked.get(slot, ())
        dtypes = [part.d_GRO.dtype for part in parts] + [dtype] * (rows > 0)
        common = reduce(torch.promote_types, dtypes) if dtypes else dtype
        return rows + sum(map(rows_of, parts)), common


class Accumulated:
    """Keeps rows beside the gradients that they made, to travel in the gradients' place.

    A unit's rows are kept only while they are all that is in `param.grad`: from when there was no
    gradient, and until somebody else, autograd itself too, writes one. They are dropped, too, when
    they do not pay or take more memory than the gradients; what is in `param.grad` then counts.

    Args:
        model: what they belong to.
        pays: the local part of the choice between factors and dense.
    """

    def __init__(self, model: Model, pays: Pays) -> None:
        self._model, self._pays = model, pays
        self._unit_of = {slot: unit for unit in model.units for slot in unit.slots}
        self._stacks: dict[Unit, _Stack] = {}
        self._formed: Counter[Slot] = Counter()

    @property
    def numel(self) -> int:
        """Numbers that are kept."""
        return sum(stack.numel for stack in self._stacks.values())

    def clear(self) -> None:
        """Drops all rows."""
        self._stacks.clear()
        self._formed.clear()

    def _before_write(self, slot: Slot, written: Collection[str]) -> None:
        """Checks, before a product is added to these parameters, that rows may be kept."""
        unit = self._unit_of[slot]
        stack = self._stacks.pop(unit, None)
        if stack is not None and not stack.holds(slot.params):
            stack = None
        if stack is None and self._is_fresh(unit):
            stack = _Stack(unit, self._model.params)
            self._formed = self._formed - Counter({s: self._formed[s] for s in unit.slots})
        if stack is not None and set(slot.params) <= set(written):
            self._stacks[unit] = stack

    def write(self, slot: Slot, factors: Factors, gradients: Mapping[str, Tensor]) -> None:
        """Adds gradients to `param.grad`, and keeps the rows that made them if that pays."""
        self._before_write(slot, gradients)
        param_grad.add(self._model.params, gradients)
        self._after_write(slot, factors)

    def _is_fresh(self, unit: Unit) -> bool:
        return all(self._model.params[name].grad is None for name in unit.params)

    def _after_write(self, slot: Slot, factors: Factors) -> None:
        """Keeps the rows of the product that was added, if that still pays."""
        unit = self._unit_of[slot]
        self._formed[slot] += rows_of(factors)
        stack = self._stacks.get(unit)
        if stack is None:
            return
        rows_K = [stack.rows(s) + rows_of(factors) * (s == slot) for s in unit.slots]
        fits = stack.numel + numel_of(factors) <= unit.dense_numel
        if fits and self._pays(unit, rows_K):
            stack.add(slot, factors)
        else:
            del self._stacks[unit]

    def take(self, used: Set[str]) -> CarriedOver:
        """Hands over all that is kept, and empties the gradients that it stands for.

        Args:
            used: parameters that the backward of the shared step leaves a gradient in.
        """
        stacks = [s for unit, s in self._stacks.items() if is_whole(unit, used) and s.intact()]
        for stack in stacks:
            stack.empty_gradients()
        stacked = {slot: parts for stack in stacks for slot, parts in stack.parts.items()}
        formed = {slot: n for slot, n in self._formed.items() if slot not in stacked}
        self.clear()
        return CarriedOver(stacked, formed)


class _Stack:
    """The rows of a unit, and how the gradients were left that they made."""

    def __init__(self, unit: Unit, params: Mapping[str, nn.Parameter]) -> None:
        self.parts: dict[Slot, list[Factors]] = {slot: [] for slot in unit.slots}
        self.numel = 0
        self._params = {name: params[name] for name in unit.params}
        self._seals: dict[str, _Seal] = {}
        self._altered: list[Tensor] = []

    def rows(self, slot: Slot) -> int:
        """How many rows of a slot are kept."""
        return sum(map(rows_of, self.parts[slot]))

    def add(self, slot: Slot, factors: Factors) -> None:
        """Keeps a copy of rows: they may be views of what the user overwrites."""
        self.parts[slot].append(Factors(factors.d_GRO.clone(), factors.a_GRI.clone()))
        self.numel += numel_of(factors)
        self._seals.update({name: _Seal(self._gradient(name)) for name in slot.params})

    def holds(self, names: Collection[str]) -> bool:
        """Whether these gradients are as they were left, as far as can be told at once."""
        return all(self._is_as_left(name) for name in names)

    def intact(self) -> bool:
        """Whether all gradients are as they were left; waits for the device."""
        return self.holds(self._params) and not any(map(bool, self._altered))

    @torch.no_grad()
    def empty_gradients(self) -> None:
        """Sets to zero what the rows will bring again."""
        for p in self._params.values():
            if p.grad is not None:
                p.grad.zero_()

    def _gradient(self, name: str) -> Tensor:
        gradient = self._params[name].grad
        assert gradient is not None
        return gradient

    def _is_as_left(self, name: str) -> bool:
        gradient, seal = self._params[name].grad, self._seals.get(name)
        if gradient is None or seal is None:
            return gradient is None and seal is None
        if not seal.fits(gradient):
            return False
        self._altered.append((_sums(gradient) != seal.sums).any())
        return True


class _Seal:
    """Tells whether a gradient is still as it was.

    Its version does not count what is written through `.data`, by numpy or by
    `GradScaler.unscale_`, so its sums are compared, too, without waiting for the device.
    """

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = TensorWeakRef(gradient)
        self._version, self.sums = gradient._version, _sums(gradient)

    def fits(self, gradient: Tensor) -> bool:
        """Whether it is the same tensor, in the same version."""
        return self._gradient() is gradient and gradient._version == self._version


@torch.no_grad()
def _sums(gradient: Tensor) -> Tensor:
    """Numbers that change with a gradient: its sum, and its norm for when that is zero."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return torch.stack([gradient.sum(dtype=dtype), torch.linalg.vector_norm(gradient, dtype=dtype)])


def is_whole(unit: Unit, used: Set[str]) -> bool:
    """Whether a backward leaves gradients in all parameters of a slot or in none."""
    return all(used >= set(s.params) or used.isdisjoint(s.params) for s in unit.slots)


def rows_of(factors: Factors) -> int:
    """N."""
    return factors.d_GRO.shape[1]


def numel_of(factors: Factors) -> int:
    """Numbers in its deltas and activations."""
    return factors.d_GRO.numel() + factors.a_GRI.numel()
