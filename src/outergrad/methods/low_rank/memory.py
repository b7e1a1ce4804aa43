"""What a site remembers of each slot from step to step: start directions and residual."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor

from outergrad.core.coding import Codecs, decode_all, encode_all, received
from outergrad.core.payload import EncodedRows
from outergrad.core.types import (
    Factors,
    Gradient,
    Inheritance,
    Place,
    Slot,
    StateDict,
    place_name,
)
from outergrad.linalg.outer import stack
from outergrad.linalg.small_core import small_core
from outergrad.methods.low_rank.packed import Packed, packed, unpacked
from outergrad.methods.residuals import ByPlace, inherited_residual, saved_residual


@dataclass(frozen=True)
class Memory:
    """What is remembered of one slot.

    Attributes:
        q_GIR: right singular directions found; left ones, (G, O, R), where `left` says so.
        residual: what was not sent and is added to the gradient of the next step, as factors or
            as a matrix, in few bits or not, if anything.
        columns: R of the next step where the sites choose it together.
        left: whether the next step begins on the left, where both sides take turns.
    """

    q_GIR: Tensor
    residual: Gradient | Packed | None = None
    columns: int | None = None
    left: bool = False


def compacted(memory: Memory) -> Memory:
    """In tensors that are no views of larger ones."""
    return replace(memory, q_GIR=compact(memory.q_GIR), residual=compact(memory.residual))


def _taken_back(now: Memory | None, before: Memory | None) -> Memory | None:
    """Start directions stay: sites have agreed on some of them."""
    if now is None:
        return before
    return replace(now, residual=None if before is None else before.residual)


class Memories(ByPlace[Memory]):
    """By place in the model.

    Args:
        packs: whether matrices of what was not sent are kept in few bits.

    Attributes:
        turn: how many steps were applied: what rounds them differently in each.
    """

    def __init__(self, *, packs: bool = False) -> None:
        super().__init__(compacted, _taken_back)
        self.packs, self.turn = packs, 0

    def __setitem__(self, slot: Slot, memory: Memory) -> None:
        """In few bits at once, so that no step has all of them as they were."""
        self.update({slot: memory})

    def update(self, memories: Mapping[Slot, Memory]) -> None:
        """Several at a time: small ones, whose residuals are matrices, or one."""
        whole = {s: m.residual for s, m in memories.items() if isinstance(m.residual, Tensor)}
        few_bits: dict[Slot, Packed] = {}
        if self.packs and whole:
            few_bits = dict(zip(whole, packed(list(whole.values()), self.turn), strict=True))
        for slot, memory in memories.items():
            kept = replace(memory, residual=few_bits[slot]) if slot in few_bits else memory
            super().__setitem__(slot, kept)

    def commit(self, *, applied: bool) -> None:
        """The step is over."""
        super().commit(applied=applied)
        self.turn += applied

    def load(self, inheritance: Inheritance, start: StateDict) -> None:
        """Goes on; `inherited` says from what."""
        self.replace(inherited(inheritance, start))
        self.turn = inheritance.like["own"].get("turn", 0)


@overload
def compact(t: Tensor) -> Tensor: ...
@overload
def compact(t: Gradient | None) -> Gradient | None: ...
@overload
def compact(t: Gradient | Packed | None) -> Gradient | Packed | None: ...
def compact(t: Gradient | Packed | None) -> Gradient | Packed | None:
    """The same laid out as when it has been saved and loaded: so that products round alike."""
    if isinstance(t, Factors):
        return Factors(compact(t.d_GRO), compact(t.a_GRI))
    if t is None or isinstance(t, Packed):
        return t
    widths = [max(size, 1) for size in t.shape]
    plain = tuple(math.prod(widths[i + 1 :]) for i in range(len(widths)))
    if t.stride() == plain and t.untyped_storage().nbytes() == t.nbytes:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def residual_of(memory: Memory | None) -> Gradient | None:
    """What the last step left, if there was one and it left something."""
    residual = None if memory is None else memory.residual
    return residual.unpacked() if isinstance(residual, Packed) else residual


def residuals_of(memories: Sequence[Memory | None]) -> list[Gradient | None]:
    """The same of several; what is in few bits in one piece is read once."""
    found = [None if memory is None else memory.residual for memory in memories]
    whole = iter(unpacked(residual for residual in found if isinstance(residual, Packed)))
    return [next(whole) if isinstance(residual, Packed) else residual for residual in found]


def finite_or_none(factors: Factors) -> Factors | None:
    """What can be kept: not the remains of a step with infinities."""
    finite = factors.d_GRO.isfinite().all() & factors.a_GRI.isfinite().all()
    return factors if bool(finite) else None


def decoded(sent: Factors, codecs: Codecs) -> Factors:
    """The rows as they arrive."""
    return Factors(received(codecs, sent.d_GRO), received(codecs, sent.a_GRI))


def encoded(sent_K: Sequence[Factors], codecs: Codecs) -> tuple[list[EncodedRows], list[Factors]]:
    """The rows of several slots as they are written, and as they arrive."""
    rows = [t for sent in sent_K for t in (sent.d_GRO, sent.a_GRI)]
    written = encode_all(codecs, rows)
    arriving = decode_all(codecs, written, rows)
    pairs = zip(written[::2], written[1::2], strict=True)
    arrive_K = list(map(Factors, arriving[::2], arriving[1::2]))
    return [EncodedRows(*pair) for pair in pairs], arrive_K


def loss_of(sent: Factors, arrives: Factors) -> Factors:
    """The product of what is sent, without that of what arrives: as factors of 2 R rows.

    As `(D - D') A' + D (A - A')` of deltas D and activations A that arrive as D' and A': nothing
    large cancels in its product.
    """
    of_deltas = Factors(sent.d_GRO - arrives.d_GRO, arrives.a_GRI)
    return stack([of_deltas, Factors(sent.d_GRO, sent.a_GRI - arrives.a_GRI)])


def with_loss(
    residual: Factors | None, sent: Factors, arrives: Factors, rank: int
) -> Factors | None:
    """What is not sent, and what encoding loses of what is, as so many triplets.

    Args:
        residual: of what is not sent.
        sent: the rows before they are encoded.
        arrives: and when they are decoded.
        rank: how many triplets are kept.
    """
    lost = loss_of(sent, arrives)
    if finite_or_none(lost) is None:
        return residual
    kept = small_core(stack([lost] if residual is None else [residual, lost]), rank)
    return kept.factors() if kept.rank else None


def common_state(memories: Memories) -> StateDict:
    """Per place, the same on all sites: columns of the next sketches that adapt, and the side."""
    held = {place_name(place): memory for place, memory in memories.held().items()}
    return {
        "columns": {name: m.columns for name, m in held.items() if m.columns is not None},
        "left": {name: True for name, memory in held.items() if memory.left},
    }


def own_state(memories: Memories) -> StateDict:
    """The turn, and per place, where this site starts from and what it has not sent."""
    held = {place_name(place): _saved(memory) for place, memory in memories.held().items()}
    return {"memories": held, "turn": memories.turn}


def _saved(memory: Memory) -> StateDict:
    memory = compacted(memory)
    return {"start": memory.q_GIR, **saved_residual(compact(residual_of(memory)))}


def inherited(inheritance: Inheritance, start: StateDict) -> dict[Place, Memory]:
    """What a site remembers when it takes over.

    Args:
        inheritance: from whom.
        start: the state to take the start directions from.
    """
    common = inheritance.first["common"]
    columns, left = common["columns"], common.get("left", {})
    starts = start["own"]["memories"]
    old = [state["own"]["memories"] for state in inheritance.residual]
    held: dict[Place, Memory] = {}
    for name in dict.fromkeys(name for memories in (starts, *old) for name in memories):
        parts = [memories[name] for memories in old if name in memories]
        residual = inherited_residual(parts, inheritance.weight)
        q_GIR = starts[name]["start"] if name in starts else parts[0]["start"][..., :0]
        is_left = name in starts and name in left
        held[inheritance.place_of[name]] = Memory(q_GIR, residual, columns.get(name), is_left)
    return held
