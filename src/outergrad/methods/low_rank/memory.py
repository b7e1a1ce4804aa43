"""What one step leaves for the next, held back until the step has been applied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor

from outergrad.core.types import Factors, Gradient, Place, Slot


@dataclass(frozen=True)
class Memory:
    """What is remembered of one slot.

    Attributes:
        q_GIR: right singular directions found.
        residual: what was not sent and is added to the gradient of the next step, as factors or
            as a matrix, if anything.
        columns: R of the next step where the sites choose it together.
    """

    q_GIR: Tensor
    residual: Gradient | None = None
    columns: int | None = None


class Memories:
    """By place in the model. A step that is discarded leaves what there was before it."""

    def __init__(self) -> None:
        self._held: dict[Place, Memory] = {}
        self._next: dict[Place, Memory] = {}

    def __getitem__(self, slot: Slot) -> Memory | None:
        return self._held.get(slot.place)

    def latest(self, slot: Slot) -> Memory | None:
        """With what this step has changed."""
        return self._next.get(slot.place) or self[slot]

    def __setitem__(self, slot: Slot, memory: Memory) -> None:
        """May be views of tensors that hold what is remembered of other slots in the same step."""
        self._next[slot.place] = memory

    def held(self) -> Mapping[Place, Memory]:
        """All of them, as the last step that was applied left them."""
        return self._held

    def replace(self, held: Mapping[Place, Memory]) -> None:
        """Remembers these, and nothing else."""
        self._held = dict(held)
        self._next.clear()

    def commit(self, *, applied: bool) -> None:
        """The step is over."""
        if applied:
            for place in self._held.keys() - self._next.keys():  # the others' tensors are new
                self._held[place] = compacted(self._held[place])
            self._held |= self._next
        self._next.clear()


def compacted(memory: Memory) -> Memory:
    """In tensors that are no views of larger ones."""
    return replace(memory, q_GIR=compact(memory.q_GIR), residual=compact(memory.residual))


@overload
def compact(t: Tensor) -> Tensor: ...
@overload
def compact(t: Gradient | None) -> Gradient | None: ...
def compact(t: Gradient | None) -> Gradient | None:
    """The same laid out as when it has been saved and loaded: so that products round alike."""
    if isinstance(t, Factors):
        return Factors(compact(t.d_GRO), compact(t.a_GRI))
    if t is None:
        return None
    widths = [max(size, 1) for size in t.shape]
    plain = tuple(math.prod(widths[i + 1 :]) for i in range(len(widths)))
    if t.stride() == plain and t.untyped_storage().nbytes() == t.nbytes:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def residual_of(memory: Memory | None) -> Gradient | None:
    """What the last step left, if there was one and it left something."""
    return None if memory is None else memory.residual


def finite_or_none(factors: Factors) -> Factors | None:
    """What can be kept: not the remains of a step with infinities."""
    finite = factors.d_GRO.isfinite().all() & factors.a_GRI.isfinite().all()
    return factors if bool(finite) else None
