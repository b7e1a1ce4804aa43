"""Factors that a backward captures, until they are sent or added to `param.grad`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor

from outergrad.core.blocks import Block, SentRun
from outergrad.core.model import Model
from outergrad.core.types import Factors, Slot, Source
from outergrad.linalg.gradients import add_gradients
from outergrad.linalg.outer import stack
from outergrad.messages.header import Header
from outergrad.replay.block_message import Blocks
from outergrad.replay.block_use import Use
from outergrad.step import param_grad
from outergrad.step.carried_over import CarriedOver, Rows

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
    """

    def __init__(
        self,
        model: Model,
        used: Set[str],
        blocks: Blocks | None = None,
        write: Write | None = None,
        carried_over: CarriedOver | None = None,
    ) -> None:
        before = carried_over or CarriedOver()
        self.model, self.used = model, {*used, *before.params}
        self._blocks, self._write = Blocks() if blocks is None else blocks, write
        self._uses: list[tuple[Block, Use]] = []
        self._of_slot = _known(before.stacked)
        self.has_autograd_grad: set[str] = set()
        self.settled: set[Source] = set()
        self.empty: set[Source] = set()

    def add(self, slot: Slot, factors: Callable[[], Factors]) -> None:
        """Stores one use of a slot."""
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
        parts = [factors() for factors in self._of_slot.get(slot, ())]
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
