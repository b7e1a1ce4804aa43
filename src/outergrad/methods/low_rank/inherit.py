"""Memories as saved states, and the memories of a site that takes over from others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from outergrad.core.types import Factors, Gradient, Inheritance, Place, StateDict, place_name
from outergrad.linalg.outer import product_of, stack
from outergrad.methods.low_rank.memory import Memory, compacted

Saved = Mapping[str, Any]
"""What one site remembers of one place."""


def common_state(held: Mapping[Place, Memory]) -> StateDict:
    """Per place, the columns of the next sketches, where they adapt: the same on all sites."""
    adapted = ((place, memory.columns) for place, memory in held.items())
    return {"columns": {place_name(place): n for place, n in adapted if n is not None}}


def own_state(held: Mapping[Place, Memory]) -> StateDict:
    """Per place, where this site starts from and what it has not sent."""
    return {"memories": {place_name(place): _saved(memory) for place, memory in held.items()}}


def _saved(memory: Memory) -> StateDict:
    memory = compacted(memory)
    if memory.residual is None:
        return {"start": memory.q_GIR}
    if isinstance(memory.residual, Tensor):
        return {"start": memory.q_GIR, "unsent": memory.residual}
    d_GRO, a_GRI, _ = memory.residual
    return {"start": memory.q_GIR, "unsent_deltas": d_GRO, "unsent_activations": a_GRI}


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
        residual = _residuals(parts, inheritance.weight)
        q_GIR = starts[name]["start"] if name in starts else parts[0]["start"][..., :0]
        held[inheritance.place_of[name]] = Memory(q_GIR, residual, columns.get(name))
    return held


def _residuals(parts: Sequence[Saved], weight: float) -> Gradient | None:
    """The sum of the residuals of several sites, as factors if all of them are."""
    factors = [_factors(part, weight) for part in parts if "unsent_deltas" in part]
    matrices = [part["unsent"] * weight for part in parts if "unsent" in part]
    if matrices:
        return reduce(torch.add, [*matrices, *map(product_of, factors)])
    return stack(factors) if factors else None


def _factors(part: Saved, weight: float) -> Factors:
    return Factors(part["unsent_deltas"] * weight, part["unsent_activations"])
