"""rank-dAD: sites send the leading singular triplets of their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from outergrad._types import Factors, Slot, Unit
from outergrad.exchange._lookup import without_silent_ids
from outergrad.exchange.dad import row_numel, tied_in_use
from outergrad.linalg.canonical import canonical
from outergrad.linalg.compress import Solver, compress
from outergrad.linalg.low_rank import LowRank
from outergrad.linalg.outer import stack

_WIRES = {"fp32": None, "bf16": torch.bfloat16}
_ANY_ERROR = 1e-9
"""Small enough to cut nothing off; above zero, so that the error is computed."""


@dataclass(frozen=True, kw_only=True)
class RankDAD:
    """Sites send the leading singular triplets of each weight gradient (rank-dAD).

    A layer that is fewer bytes exactly, as factors or dense, travels so; biases and what has no
    rule always do. Source: Baker et al., arXiv 2102.09631, the section on rank-dAD.

    Attributes:
        rank: most triplets that a site sends per layer.
        tolerance: largest error that a site may make, relative to the Frobenius norm of its
            gradient, if `rank` triplets suffice for it: then it sends as few as do. What was too
            many or too few in one step is put right in the next, without a message for it.
        solver: how triplets are found; "auto" goes by shape (docs/methods.md).
        iterations: of the iterative solvers; None for their own defaults.
        error_feedback: "factored": what a site does not send in one step, as `rank` further
            triplets, is added to its gradient in the next. None: it is lost.
        wire: "bf16" rounds what is sent to half the bytes; it is computed in float32.
        min_ratio: send a layer at low rank only where that is so many times fewer bytes than
            dense.
        bucket_bytes: payload of one message before the next layer opens another.
    """

    rank: int = 4
    tolerance: float = 0.0
    solver: Solver = "auto"
    iterations: int | None = None
    error_feedback: Literal["factored"] | None = "factored"
    wire: Literal["fp32", "bf16"] = "fp32"
    min_ratio: float = 1.0
    bucket_bytes: int = 1 << 18

    def __post_init__(self) -> None:
        """Checks the settings."""
        _require(self.rank >= 1, self, "rank", "1 or more")
        _require(0 <= self.tolerance < 1, self, "tolerance", "a number in [0, 1)")
        _require(self.solver in get_args(Solver), self, "solver", f"one of {get_args(Solver)}")
        _require((self.iterations or 1) >= 1, self, "iterations", "1 or more, or None")
        _require(self.error_feedback in (None, "factored"), self, "error_feedback", "'factored'")
        _require(self.wire in _WIRES, self, "wire", f"one of {tuple(_WIRES)}")
        _require(self.min_ratio >= 1, self, "min_ratio", "1 or more")
        _require(self.bucket_bytes > 0, self, "bucket_bytes", "a positive number")

    def exchange(self) -> RankDADExchange:
        """A new exchange with these settings."""
        return RankDADExchange(self)


def _require(holds: bool, method: RankDAD, name: str, wanted: str) -> None:
    if not holds:
        raise ValueError(f"RankDAD: {name}={getattr(method, name)!r}; use {wanted}")


@dataclass(frozen=True)
class _Memory:
    """What one step leaves for the next, of one slot.

    Attributes:
        q_GIR: right singular vectors found: where to start from.
        unsent: the triplets that were not sent, if they are to be.
    """

    q_GIR: Tensor
    unsent: Factors | None


class RankDADExchange:
    """Decides by bytes, finds the triplets, and remembers what was not sent."""

    forced = False

    def __init__(self, method: RankDAD) -> None:
        self._method = method
        self.bucket_bytes = method.bucket_bytes
        self.wire = _WIRES[method.wire]
        self._rows: dict[tuple[Slot, int], int] = {}
        self._wanted: dict[Slot, int] = {}
        self._memory: dict[Slot, _Memory] = {}
        self._next: dict[Slot, _Memory] = {}

    def refuse(self, units: Sequence[Unit]) -> None:
        """RankDAD can do every rule."""

    # -- when, and how many rows ----------------------------------------------------------------

    def break_even(self, unit: Unit, sites: int) -> float:
        """Rows per slot from which on dense is fewer bytes: none, where the full rank pays."""
        if sites == 1:
            return 0.0
        if self.pays(unit, [[2**31] * len(unit.slots)] * sites):
            return math.inf
        affordable = 2 * unit.dense_numel / (sites * self._method.min_ratio) - _biases(unit.slots)
        return affordable / sum(row_numel(slot) for slot in unit.slots)

    def pays(self, unit: Unit, rows_SK: Sequence[Sequence[int]]) -> bool:
        """Whether no site sends more than its share of the dense all-reduce would be.

        All-gathered factors cost a site (S - 1) times their size, the ring all-reduce
        2 (S - 1) / S times the gradient. The full rank counts, so that a layer whose rank
        adapts does not change its way of travelling.
        """
        if len(rows_SK) == 1 or tied_in_use(unit, rows_SK):
            return False
        largest = max(self._most_numel(unit, rows_K) for rows_K in rows_SK)
        return largest * len(rows_SK) * self._method.min_ratio < 2 * unit.dense_numel

    def _most_numel(self, unit: Unit, rows_K: Sequence[int]) -> int:
        used = [(slot, rows) for slot, rows in zip(unit.slots, rows_K, strict=True) if rows]
        factors = sum(self._most_rows(slot, rows) * row_numel(slot) for slot, rows in used)
        return factors + _biases([slot for slot, _ in used])

    def _most_rows(self, slot: Slot, rows: int) -> int:
        return rows if slot.lookup else min(rows, slot.outputs, slot.inputs, self._method.rank)

    def sent_rows(self, slot: Slot, rows: int, site: int) -> int:
        """As many triplets as the site wanted in the last step, or as there can be."""
        most = self._most_rows(slot, rows)
        return most if slot.lookup else min(most, self._rows.get((slot, site), most))

    def sends_bias(self, slot: Slot) -> bool:
        """Triplets have no row sums to take it from."""
        return slot.bias is not None

    def wanted_rows(self, slot: Slot) -> int:
        """The rank that the tolerance asks for."""
        return self._wanted.get(slot, self._method.rank)

    def agree(self, slot: Slot, site: int, rows: int) -> None:
        """What the site will send in the next step."""
        self._rows[slot, site] = max(1, min(rows, self._method.rank))

    # -- what is sent ---------------------------------------------------------------------------

    def compress(self, slot: Slot, factors: Factors, rows: int) -> Factors:
        """The leading triplets of the gradient and of what was not sent before."""
        if slot.lookup:
            return without_silent_ids(factors)
        bias = slot.bias is not None
        if self._is_exact(slot, factors, rows):
            return canonical(factors, rows, bias=bias)
        b_GO = factors.d_GRO.double().sum(dim=1) if bias else None
        found = self._found(slot, factors, rows)
        tolerance = self._method.tolerance
        if tolerance:
            self._wanted[slot] = max(1, min(self._method.rank, found.rank_within(tolerance)))
        self._next[slot] = _Memory(found.a_GRI.mT, self._unsent(found, rows))
        return found.leading(rows).factors(rows, b_GO)

    def _is_exact(self, slot: Slot, factors: Factors, rows: int) -> bool:
        """Whether so many rows hold everything there is to send."""
        memory = self._memory.get(slot)
        all_rows = min(factors.d_GRO.shape[1], slot.outputs, slot.inputs)
        nothing_unsent = memory is None or memory.unsent is None
        return rows >= all_rows and nothing_unsent and not self._method.tolerance

    def _found(self, slot: Slot, factors: Factors, rows: int) -> LowRank:
        """Triplets for this step, for the choice of the next one's rank and for feedback."""
        method, memory = self._method, self._memory.get(slot)
        needed = max(rows, method.rank) if method.tolerance else rows
        feedback = method.rank if method.error_feedback else 0
        unsent = memory.unsent if memory else None
        return compress(
            stack([_single(factors), unsent]) if unsent else factors,
            needed + feedback,
            _ANY_ERROR if method.tolerance else 0.0,
            solver=method.solver,
            iterations=method.iterations,
            q_GIR=memory.q_GIR if memory else None,
        )

    def _unsent(self, found: LowRank, rows: int) -> Factors | None:
        if not self._method.error_feedback or found.rank <= rows:
            return None
        return found.rest(rows).factors()

    def settle(self, *, applied: bool) -> None:
        """Keeps what the step left, or, if the step is void, what there was before it."""
        if applied:
            self._memory |= self._next
        self._next.clear()

    def reveals(self, unit: Unit) -> str:
        """What the coverage table says."""
        if all(slot.lookup for slot in unit.slots):
            return "this site's gradient: the ids it looked up and their rows"
        return "this site's gradient, its largest parts"


def _biases(slots: Sequence[Slot]) -> int:
    return sum(slot.groups * slot.outputs for slot in slots if slot.bias is not None)


def _single(factors: Factors) -> Factors:
    """Rows in float32 at least, so that they can be stacked with what was not sent."""
    dtype = torch.promote_types(factors.d_GRO.dtype, torch.float32)
    return Factors(factors.d_GRO.to(dtype), factors.a_GRI.to(dtype))
