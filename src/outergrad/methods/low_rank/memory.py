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
from outergrad.core.types import Factors, Gradient, Inheritance, Place, StateDict, place_name
from outergrad.linalg.outer import stack
from outergrad.linalg.small_core import small_core
from outergrad.methods.residuals import ByPlace, inherited_residual, saved_residual


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


def compacted(memory: Memory) -> Memory:
    """In tensors that are no views of larger ones."""
    return replace(memory, q_GIR=compact(memory.q_GIR), residual=compact(memory.residual))


class Memories(ByPlace[Memory]):
    """By place in the model."""

    def __init__(self) -> None:
        super().__init__(compacted)


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


def common_state(held: Mapping[Place, Memory]) -> StateDict:
    """Per place, the columns of the next sketches, where they adapt: the same on all sites."""
    adapted = ((place, memory.columns) for place, memory in held.items())
    return {"columns": {place_name(place): n for place, n in adapted if n is not None}}


def own_state(held: Mapping[Place, Memory]) -> StateDict:
    """Per place, where this site starts from and what it has not sent."""
    return {"memories": {place_name(place): _saved(memory) for place, memory in held.items()}}


def _saved(memory: Memory) -> StateDict:
    memory = compacted(memory)
    return {"start": memory.q_GIR, **saved_residual(memory.residual)}


def inherited(inheritance: Inheritance, start: StateDict) -> dict[Place, Memory]:
    """What a site remembers when it takes over.

    Args:
        inheritance: from whom.
        start: the state to take the start directions from.
    """
    columns = inheritance.first["common"]["columns"]
    starts = start["own"]["memories"]
    old = [state["own"]["memories"] for state in inheritance.residual]
    held: dict[Place, Memory] = {}
    for name in dict.fromkeys(name for memories in (starts, *old) for name in memories):
        parts = [memories[name] for memories in old if name in memories]
        residual = inherited_residual(parts, inheritance.weight)
        q_GIR = starts[name]["start"] if name in starts else parts[0]["start"][..., :0]
        held[inheritance.place_of[name]] = Memory(q_GIR, residual, columns.get(name))
    return held
