"""Factors that a backward captures, until they are sent or added to `param.grad`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from outergrad.core.blocks import Block, SentRun
from outergrad.core.model import Model
from outergrad.core.types import Factors, Slot, Source, Unit
from outergrad.linalg.gradients import add_gradients
from outergrad.linalg.outer import stack
from outergrad.messages.header import Header
from outergrad.replay.block_message import Blocks
from outergrad.replay.block_use import Use
from outergrad.step import param_grad

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


NOTHING_LEFT = CarriedOver()


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


Write = Callable[[Slot, Factors, Mapping[str, Tensor]], None]
"""Takes the factors of a slot and the gradients that they make, to be added to `param.grad`."""


class Captured:
    """Factors that a backward captured and that are not used yet.

    Args:
        model: model of the slots.
        used: parameters in which this backward leaves a gradient.
        blocks: blocks that are computed again.
        write: adds settled gradients to `param.grad`; None for a plain addition.
        carried_over: rows of earlier passes, which count as captured.

    Attributes:
        has_autograd_grad: parameters for which autograd has a gradient, besides.
        settled: slots and blocks added to `param.grad` before they could be sent.
        empty: slots and blocks that were requested and had nothing, not even a delta of zeros.
        on_use: called with each use before it is stored.
    """

    def __init__(
        self,
        model: Model,
        used: Set[str],
        blocks: Blocks | None = None,
        write: Write | None = None,
        carried_over: CarriedOver | None = None,
    ) -> None:
        self.model, self.used = model, set(used)
        self._of_slot: dict[Slot, list[Callable[[], Factors]]] = {}
        if carried_over is not None and carried_over.stacked:
            self._of_slot = _known(carried_over.stacked)
            self.used |= carried_over.params
        self._blocks, self._write = Blocks() if blocks is None else blocks, write
        self._uses: list[tuple[Block, Use]] = []
        self.has_autograd_grad: set[str] = set()
        self.settled: set[Source] = set()
        self.empty: set[Source] = set()
        self.on_use: Callable[[Slot, Callable[[], Factors]], None] | None = None

    def add(self, slot: Slot, factors: Callable[[], Factors]) -> None:
        """Stores one use of a slot."""
        if self.on_use is not None:
            self.on_use(slot, factors)
        self._of_slot.setdefault(slot, []).append(factors)

    def add_use(self, block: Block, use: Use) -> None:
        """Stores one use of a block's module."""
        self._uses.append((block, use))
        if all(use.is_nothing for other, use in self._uses if other == block):
            self.empty.add(block)
        else:
            self.empty.discard(block)

    def release(self) -> None:
        """Frees all that was captured: the step is over, though it may be kept."""
        for _, use in self._uses:
            use.release()
        self._uses.clear()
        self._of_slot.clear()

    @property
    def slots(self) -> list[Slot]:
        """Slots with uses."""
        return list(self._of_slot)

    def uses(self, slot: Slot) -> Sequence[Callable[[], Factors]]:
        """Returns the uses of a slot in the order in which they were added."""
        return self._of_slot.get(slot, ())

    def replace(self, slot: Slot, factors: Factors) -> None:
        """Replaces all uses of a slot by these rows."""
        self._of_slot.update(_known({slot: [factors]}))

    def drop(self, slot: Slot) -> None:
        """Forgets the uses of a slot, whose product is in `param.grad`."""
        del self._of_slot[slot]
        self.settled.add(slot)

    def rows(self, slot: Slot, announced: int = 0) -> Factors:
        """Returns the rows of all uses of a slot, with zeros where fewer came than were announced.

        A graph of torch.compile says in forward what it taps, and has no delta of a product that
        none of its outputs depends on.
        """
        uses = self._of_slot.get(slot, ())
        if len(uses) == 1:  # the usual case, without the calls below
            part = uses[0]()
            if slot.lookup or part.d_GRO.shape[1] >= announced:
                return part
        parts = [factors() for factors in uses]
        if not parts:
            self.empty.add(slot)
        missing = announced - sum(part.d_GRO.shape[1] for part in parts)
        if not parts or (missing > 0 and not slot.lookup):
            parts.append(_zeros(slot, missing, self.model.params[slot.weight]))
        return stack(parts)

    @torch.no_grad()
    def take(self) -> dict[Slot, list[Factors]]:
        """Hands over the rows of every use of every slot."""
        calls_of, self._of_slot = self._of_slot, {}
        return {slot: [make() for make in calls] for slot, calls in calls_of.items()}

    def compute(self) -> None:
        """Computes the rows of all uses now, so that errors are raised here."""
        self._of_slot = _known(self.take())

    def settle_all(self, names: Iterable[str]) -> None:
        """Settles these parameters, as `settle` does."""
        if self._uses:
            for name in names:
                self.settle(name)
        elif self._of_slot:
            captured = {name for slot in self._of_slot for name in slot.params}
            for name in names:
                if name in captured:
                    self.settle(name)

    def settle(self, name: str) -> None:
        """Adds the captured products of a parameter to its `grad`, as autograd would have."""
        if not (self._of_slot or self._uses):
            return
        for slot in self.model.slots_of.get(name, ()):
            if slot in self._of_slot:
                self._form(slot, self.rows(slot))
                self.drop(slot)
        for block, use in [pair for pair in self._uses if name in pair[0].params]:
            if name in self._blocks[block].params_of(use):
                if use.is_nothing:
                    use.release()
                else:
                    self._compute_again(block, use)
                self._uses.remove((block, use))
                self.settled.add(block)

    def unsettled(self, header: Header) -> Header:
        """Returns the header with settled slots and blocks as not tapped: `param.grad` has them."""
        pairs = zip(self.model.index, header.uses, strict=True)
        uses = (replace(u, tapped=u.tapped and s not in self.settled) for s, u in pairs)
        return replace(header, uses=tuple(uses))

    def _compute_again(self, block: Block, use: Use) -> None:
        use.read()
        gradients = self._blocks[block].gradients([SentRun([use.as_sent], use.deltas)])
        use.release()
        params = self.model.params
        wanted = {n: g.to(params[n].dtype) for n, g in gradients.items() if n in self.used}
        param_grad.add(params, wanted)  # under autocast they are of another dtype

    def _form(self, slot: Slot, factors: Factors) -> None:
        gradients: dict[str, Tensor] = {}
        add_gradients(gradients, slot, [factors], self.model.params, 1.0)
        wanted = {name: g for name, g in gradients.items() if name in self.used}
        if self._write is None:
            param_grad.add(self.model.params, wanted)
        else:
            self._write(slot, factors, wanted)


def _known(rows: Rows) -> dict[Slot, list[Callable[[], Factors]]]:
    """Wraps rows as uses, as if they were yet to be computed."""
    return {
        slot: [lambda part=part: part for part in parts] for slot, parts in rows.items() if parts
    }


def _zeros(slot: Slot, rows: int, weight: Tensor) -> Factors:
    """Rows without any effect; a lookup needs only one."""
    if slot.lookup:
        ids_R = torch.zeros(1, dtype=torch.int64, device=weight.device)
        return Factors(torch.zeros_like(weight[:1]).unsqueeze(0).detach(), ids_R)
    zeros = weight.new_zeros(slot.groups, rows, slot.outputs + slot.inputs, requires_grad=False)
    return Factors(*zeros.split([slot.outputs, slot.inputs], dim=2))
