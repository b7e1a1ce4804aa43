"""What low-rank methods are told."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, cast, get_args

from torch import Tensor

from outergrad.core.coding import Codecs, Wire, drops
from outergrad.core.types import Gradient, Part, Route, Slot
from outergrad.linalg.compress import Solver
from outergrad.methods.common import Settings, require

Reduce = Literal["auto", "gather", "two_way", "all_reduce", "alternate"]
Feedback = Literal["factored", "dense", "auto"] | None

_SMALL = 50_000
"""Elements of a gradient that is formed and remembered in less time than more triplets take."""


_FEEDBACK_RANK = 8
_RANK = 4
_AMOUNT = re.compile(r"([\d.]+) ?([kMG]?)B")
_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, kw_only=True, repr=False)
class LowRankSettings(Settings):
    """As in `RankDAD`, where they are explained."""

    taps: ClassVar[bool] = True
    """Whether factors may be used; otherwise gradients are always formed."""

    rank: int = _RANK
    budget: float | str | None = None
    tolerance: float = 0.0
    solver: Solver = "auto"
    iterations: int | None = None
    reduce: Reduce = "auto"
    error_feedback: Feedback = "factored"
    feedback_rank: int | None = None
    wire: Wire = ()
    vectors: Wire = ()
    min_ratio: float = 1.0
    bucket_bytes: int = 1 << 16
    every: int = 1

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        told = "bytes per step, as '160kB', or a fraction of dense, as 1/64"
        require(self.budget is None or _amount(self.budget) > 0, self, "budget", told)
        alone = self.budget is None or (self.rank == _RANK and not self.tolerance)
        require(alone, self, "budget", "it instead of rank= and tolerance=, not beside them")
        in_triplets = self.budget is None or not self.sums
        require(in_triplets, self, "reduce", "'gather' or 'two_way' with budget=")
        require(0 <= self.tolerance < 1, self, "tolerance", "a number in [0, 1)")
        require(self.solver in get_args(Solver), self, "solver", f"one of {get_args(Solver)}")
        require((self.iterations or 1) >= 1, self, "iterations", "1 or more, or None")
        require(self.reduce in get_args(Reduce), self, "reduce", f"one of {get_args(Reduce)}")
        feedback = (None, *get_args(get_args(Feedback)[0]))
        require(self.error_feedback in feedback, self, "error_feedback", f"one of {feedback}")
        feedback_rank = 1 if self.feedback_rank is None else self.feedback_rank
        require(feedback_rank >= 1, self, "feedback_rank", "1 or more, or None")
        summable = not drops(self.codecs) or not self.sums
        added = f"reduce={self.reduce!r} adds up what is sent"
        require(summable, self, "wire", f"BF16() at most, or another way to reduce: {added}")
        apart = not self.vectors or not self.sums
        require(apart, self, "vectors", f"(), or another way to reduce: {added}")

    def budget_bytes(self, dense: int) -> int:
        """Per step and site.

        Args:
            dense: what a site would send of dense gradients.
        """
        assert self.budget is not None
        amount = _amount(self.budget)
        return int(amount * dense if amount < 1 else amount)

    @property
    def alternates(self) -> bool:
        """Whether a step sends one side of sketches, and the next one the other."""
        return self.reduce == "alternate"

    @property
    def sums(self) -> bool:
        """Whether it is told to add up sketches."""
        return self.alternates or self.reduce == "all_reduce"

    @property
    def way(self) -> Route | None:
        """How low rank is told to travel; None where that is to be chosen."""
        if self.sums:
            return Route.REDUCE
        return None if self.reduce == "auto" else Route(self.reduce)

    @property
    def adapts(self) -> bool:
        """Whether ranks change from step to step."""
        return bool(self.tolerance) or self.budget is not None

    @property
    def codecs(self) -> Codecs:
        """What `wire` has become."""
        return cast(Codecs, self.wire)

    @property
    def vector_codecs(self) -> Codecs:
        """What `vectors` has become."""
        return cast(Codecs, self.vectors)

    @property
    def memory_rank(self) -> int:
        """The rank of what a memory in factors holds."""
        return self.feedback_rank or max(self.rank // 2, _FEEDBACK_RANK)

    @property
    def kept_triplets(self) -> int:
        """How many a memory in factors holds."""
        return self.memory_rank if self.error_feedback == "factored" else 0

    @property
    def keeps_all(self) -> bool:
        """Whether all that is not sent is remembered, as matrices, whatever their size."""
        return self.error_feedback in ("dense", "auto")

    @property
    def packs(self) -> bool:
        """Whether these matrices are kept in few bits."""
        return self.error_feedback == "auto"

    @property
    def keeps_loss(self) -> bool:
        """Whether what encoding loses is remembered: where it is always the same that is lost."""
        return self.error_feedback is not None and drops(self.codecs)

    def keeps_whole(self, part: Part, residual: Gradient | None) -> bool:
        """Whether all of what is not sent is remembered, as a matrix: once so, always so."""
        if self.keeps_all or isinstance(residual, Tensor):
            return True
        return isinstance(part.gradient, Tensor) and self.forms(part.slot)

    def forms(self, slot: Slot) -> bool:
        """Whether to form a gradient, and to remember all of it, is less work than factors are."""
        return self.error_feedback == "factored" and slot.numel <= _SMALL


def _amount(budget: float | str) -> Fraction:
    """Bytes, or if it is less than one a fraction; 0 for what is neither."""
    text = str(budget)
    found = _AMOUNT.fullmatch(text)
    try:
        return Fraction(found[1]) * _PREFIXES[found[2]] if found else Fraction(text)
    except (ValueError, ZeroDivisionError):
        return Fraction(0)
