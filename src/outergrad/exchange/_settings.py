"""What low-rank methods are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from outergrad.linalg.compress import Solver

Reduce = Literal["auto", "gather", "two_way", "all_reduce"]
Feedback = Literal["factored", "dense"] | None
Wire = Literal["fp32", "bf16"]
WIRES: dict[Wire, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


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
