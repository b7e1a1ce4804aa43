"""What low-rank methods are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outergrad._types import Gradient, Part, Slot
from outergrad.linalg.compress import Solver

Reduce = Literal["auto", "gather", "two_way", "all_reduce"]
Feedback = Literal["factored", "dense"] | None
Wire = Literal["fp32", "bf16"]
WIRES: dict[Wire, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


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
    wire: Wire = "fp32"
    min_ratio: float = 1.0
    bucket_bytes: int = 1 << 16
    taps: bool = True

    @property
    def kept_triplets(self) -> int:
        """How many a memory in factors holds."""
        return self.feedback_rank if self.error_feedback == "factored" else 0

    def keeps_whole(self, part: Part, unsent: Gradient | None) -> bool:
        """Whether all of what is not sent is remembered, as a matrix: once so, always so."""
        if self.error_feedback == "dense" or isinstance(unsent, Tensor):
            return True
        return isinstance(part.gradient, Tensor) and self.forms(part.slot)

    def forms(self, slot: Slot) -> bool:
        """Whether to form a gradient, and to remember all of it, is less work than factors are."""
        return self.error_feedback == "factored" and slot.numel <= _SMALL
