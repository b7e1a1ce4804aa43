"""What one step leaves for the next, held back until the step has been applied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outergrad._types import Factors, Gradient, Rows, Slot
from outergrad.linalg.outer import weight_gradient

Place = tuple[str, Rows | None]


@dataclass(frozen=True)
class Memory:
    """What is remembered of one slot.

    Attributes:
        q_GIR: right singular directions found: where to start from.
        unsent: what was not sent and is added to the gradient of the next step, as factors or
            as a matrix, if anything.
        columns: R of the next step where the sites choose it together.
    """

    q_GIR: Tensor
    unsent: Gradient | None = None
    columns: int | None = None


class Memories:
    """By place in the model. A step that is discarded leaves what there was before it."""

    def __init__(self) -> None:
        self._held: dict[Place, Memory] = {}
        self._next: dict[Place, Memory] = {}

    def __getitem__(self, slot: Slot) -> Memory | None:
        return self._held.get(slot.place)

    def __setitem__(self, slot: Slot, memory: Memory) -> None:
        self._next[slot.place] = memory

    def settle(self, *, applied: bool) -> None:
        """The step is over."""
        if applied:
            self._held |= self._next
        self._next.clear()


def unsent_of(memory: Memory | None) -> Gradient | None:
    """What the last step left, if there was one and it left something."""
    return None if memory is None else memory.unsent


def formed(gradient: Gradient, unsent: Gradient | None = None) -> Tensor:
    """The gradient as a matrix of its own, (G, O, I), in float32 at least, with what was unsent."""
    whole = gradient if isinstance(gradient, Tensor) else product_of(gradient)
    whole = whole.to(torch.promote_types(whole.dtype, torch.float32))
    if unsent is None:
        return whole
    return whole + (unsent if isinstance(unsent, Tensor) else product_of(unsent))


def product_of(factors: Factors) -> Tensor:
    """`dᵀ a`, (G, O, I)."""
    return weight_gradient(factors).view(factors.d_GRO.shape[0], -1, factors.a_GRI.shape[2])


def finite_or_none(factors: Factors) -> Factors | None:
    """What can be kept: not the remains of a step with infinities."""
    finite = factors.d_GRO.isfinite().all() & factors.a_GRI.isfinite().all()
    return factors if bool(finite) else None
