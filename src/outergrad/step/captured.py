"""What a backward captures, and how gradients get into `param.grad`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import torch
from torch import Tensor

from outergrad.core.blocks import Block, SentRun
from outergrad.core.model import Model
from outergrad.core.types import Factors, Slot
from outergrad.linalg.gradients import add_gradients
from outergrad.linalg.outer import stack
from outergrad.replay.block_message import Blocks
from outergrad.replay.block_use import Use
from outergrad.step.accumulated import Accumulated
from outergrad.step.joint import Point


class Captured:
    """The products that this backward captured and nobody used yet.

    Args:
        model: what they belong to.
        used: parameters that this backward leaves a gradient in.
        blocks: what is computed again.
        accumulated: keeps the rows of what is settled, if they may be shared later.
    """

    def __init__(
        self,
        model: Model,
        used: Set[str],
        blocks: Blocks,
        accumulated: Accumulated | None = None,
    ) -> None:
        self._model, self._used, self._accumulated = model, used, accumulated
        self._blocks = blocks
        self._uses: list[tuple[Block, Use]] = []
        self._of_slot: dict[Slot, list[Callable[[], Factors]]] = {}
        self.settled: set[Slot | Block] = set()
        self._touching: dict[str, list[Slot]] = {}
        for slot in model.slots:
            for name in slot.params:
                self._touching.setdefault(name, []).append(slot)

    def add(self, slot: Slot, factors: Callable[[], Factors]) -> None:
        """Keeps one use of a slot."""
        self._of_slot.setdefault(slot, []).append(factors)

    def add_use(self, block: Block, use: Use) -> None:
        """Keeps one use of a block's module."""
        self._uses.append((block, use))

    def release(self) -> None:
        """Lets go of the uses of blocks: the step is over."""
        for _, use in self._uses:
            use.release()
        self._uses.clear()

    def rows(self, slot: Slot, announced: int = 0) -> Factors:
        """The rows of all uses of a slot, of zeros where fewer came than were announced.

        A graph of torch.compile says in forward what it taps, and has no delta of a product that
        none of its outputs depends on.
        """
        parts = [factors() for factors in self._of_slot.get(slot, ())]
        missing = announced - sum(part.d_GRO.shape[1] for part in parts)
        if not parts or (missing > 0 and not slot.lookup):
            parts.append(_zeros(slot, missing, self._model.params[slot.weight]))
        return stack(parts)

    def settle(self, name: str) -> None:
        """Adds what was captured for a parameter to its `grad`, as autograd would have."""
        for slot in self._touching.get(name, ()):
            if slot in self._of_slot:
                self._write(slot, self.rows(slot))
                del self._of_slot[slot]
                self.settled.add(slot)
        for block, use in [pair for pair in self._uses if name in pair[0].params]:
            if name in self._blocks[block].params_of(use):
                self._compute_again(block, use)
                self._uses.remove((block, use))
                self.settled.add(block)

    def _compute_again(self, block: Block, use: Use) -> None:
        gradients = self._blocks[block].gradients([SentRun([use.as_sent], use.deltas)])
        use.release()
        params = self._model.params
        wanted = {n: g.to(params[n].dtype) for n, g in gradients.items() if n in self._used}
        accumulate(self._model, wanted)  # under autocast they are of another dtype

    def _write(self, slot: Slot, factors: Factors) -> None:
        gradients: dict[str, Tensor] = {}
        add_gradients(gradients, slot, [factors], self._model.params, 1.0)
        wanted = {n: gradient for n, gradient in gradients.items() if n in self._used}
        if self._accumulated is not None:
            self._accumulated.before_write(slot, wanted)
        accumulate(self._model, wanted)
        if self._accumulated is not None:
            self._accumulated.after_write(slot, factors)


def _zeros(slot: Slot, rows: int, weight: Tensor) -> Factors:
    """Rows without any effect; of a lookup one is enough."""
    if slot.lookup:
        ids_R = torch.zeros(1, dtype=torch.int64, device=weight.device)
        return Factors(torch.zeros_like(weight[:1]).unsqueeze(0).detach(), ids_R)
    zeros = weight.new_zeros(slot.groups, rows, slot.outputs + slot.inputs, requires_grad=False)
    return Factors(*zeros.split([slot.outputs, slot.inputs], dim=2))


@torch.no_grad()
def accumulate(model: Model, gradients: Mapping[str, Tensor]) -> None:
    """`param.grad += gradient`."""
    for name, gradient in gradients.items():
        p = model.params[name]
        if p.grad is None:
            p.grad = gradient
        else:
            p.grad.add_(gradient)


@torch.no_grad()
def overwrite(model: Model, gradients: Mapping[str, Tensor]) -> None:
    """`param.grad = gradient`, in place where there is one: the gradients are views of buffers."""
    for name, gradient in gradients.items():
        p = model.params[name]
        if p.grad is None:
            p.grad = gradient.clone()
        else:
            p.grad.copy_(gradient)


class LocalStep:
    """A backward whose gradients stay on this site (`no_sync`, or a single site).

    Args:
        task: of the backward.
        model: what it runs through.
        used: parameters that it leaves a gradient in.
        blocks: what is computed again.
        accumulated: keeps its rows for the next shared step; None if there will be none.
    """

    def __init__(
        self,
        task: int,
        model: Model,
        used: set[str],
        blocks: Blocks,
        accumulated: Accumulated | None,
    ) -> None:
        self.task, self.used = task, used
        self._captured = Captured(model, used, blocks, accumulated)

    def on_factors(self, slot: Slot, factors: Callable[[], Factors]) -> None:
        """Keeps a captured product until its parameters are ready."""
        self._captured.add(slot, factors)

    def on_use(self, block: Block, use: Use) -> None:
        """Keeps a use of a block until its parameters are ready."""
        self._captured.add_use(block, use)

    def on_joint(self, point: Point, delta: Tensor) -> Tensor:
        """This site's own."""
        return delta

    def on_gradient(self, name: str) -> None:
        """Nothing: autograd has put it where it belongs."""

    def on_ready(self, name: str) -> None:
        """Adds captured products to the parameter's gradient."""
        self._captured.settle(name)
