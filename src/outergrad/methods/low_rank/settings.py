"""What low-rank methods are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from outergrad.core.coding import Codecs, drops
from outergrad.core.types import Gradient, Part, Slot
from outergrad.linalg.compress import Solver

Reduce = Literal["auto", "gather", "two_way", "all_reduce"]
Feedback = Literal["factored", "dense"] | None

_SMALL = 50_000
"""Elements of a gradient that is formed and remembered in less time than more triplets take."""


@dataclass(frozen=True, kw_only=True)
class LowRankSettings:
    """As in `RankDAD`, where they are explained; without anything left to be chosen.

    Attributes:
        taps: whether factors may be used; otherwise gradients are always formed.
    """

    rank: int
    tolerance: float = 0.0
    solver: Solver = "auto"
    iterations: int | None = None
    reduce: Reduce = "auto"
    error_feedback: Feedback = "factored"
    feedback_rank: int = 8
    wire: Codecs = ()
    min_ratio: float = 1.0
    bucket_bytes: int = 1 << 16
    taps: bool = True

    @property
    def kept_triplets(self) -> int:
        """How many a memory in factors holds."""
        return self.feedback_rank if self.error_feedback == "factored" else 0

    @property
    def keeps_loss(self) -> bool:
        """Whether what encoding loses is remembered: where it is always the same that is lost."""
        return self.error_feedback is not None and drops(self.wire)

    def keeps_whole(self, part: Part, residual: Gradient | None) -> bool:
        """Whether all of what is not sent is remembered, as a matrix: once so, always so."""
        if self.error_feedback == "dense" or isinstance(residual, Tensor):
            return True
        return isinstance(part.gradient, Tensor) and self.forms(part.slot)

    def forms(self, slot: Slot) -> bool:
        """Whether to form a gradient, and to remember all of it, is less work than factors are."""
        return self.error_feedback == "factored" and slot.numel <= _SMALL
