"""Settings of low-rank methods."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, cast, get_args

from torch import Tensor

from outergrad.core.coding import Codecs, Wire, drops
from outergrad.core.types import Gradient, Part, Route, Slot
from outergrad.drift.on_drift import OnDrift
from outergrad.linalg.compress import Solver
from outergrad.methods.common import Settings, require

Reduce = Literal["auto", "gather", "two_way", "all_reduce", "alternate"]
Feedback = Literal["factored", "dense", "auto"] | None

_SMALL = 50_000
"""Elements up to which forming and remembering a gradient takes less time than more triplets."""


_FEEDBACK_RANK = 8
_RANK = 4
_SHARE_EVERY = 16
_AMOUNT = re.compile(r"([\d.]+) ?([kMG]?)B")
_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, kw_only=True, repr=False)
class LowRankSettings(Settings):
    """Settings of low-rank methods; `RankDAD` documents them."""

    taps: ClassVar[bool] = True
    """True if factors may be used; otherwise gradients are always formed."""

    rank: int = _RANK
    budget: float | str | None = None
    share_every: int = _SHARE_EVERY
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
    every: int | OnDrift = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        told = "bytes per step, as '160kB', or a fraction of dense, as 1/64"
        require(self.budget is None or _amount(self.budget) > 0, self, "budget", told)
        alone = self.budget is None or (self.rank == _RANK and not self.tolerance)
        require(alone, self, "budget", "it instead of rank= and tolerance=, not beside them")
        require(self.share_every >= 1, self, "share_every", "1 or more steps")
        divides = self.budget is not None or self.share_every == _SHARE_EVERY
        require(divides, self, "share_every", "it with budget= alone")
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
        """Returns the budget in bytes per step and site.

        Args:
            dense: Bytes that a site would send of dense gradients.
        """
        assert self.budget is not None
        amount = _amount(self.budget)
        return int(amount * dense if amount < 1 else amount)

    @property
    def alternates(self) -> bool:
        """True if steps send one side of sketches and the other in turn."""
        return self.reduce == "alternate"

    @property
    def sums(self) -> bool:
        """True if `reduce` asks for sums of sketches."""
        return self.alternates or self.reduce == "all_reduce"

    @property
    def way(self) -> Route | None:
        """Route that `reduce` asks for; None if it has to be chosen."""
        if self.sums:
            return Route.REDUCE
        return None if self.reduce == "auto" else Route(self.reduce)

    @property
    def adapts(self) -> bool:
        """True if ranks change from step to step."""
        return bool(self.tolerance) or self.budget is not None

    @property
    def codecs(self) -> Codecs:
        """Codecs of `wire`, as a tuple."""
        return cast(Codecs, self.wire)

    @property
    def vector_codecs(self) -> Codecs:
        """Codecs of `vectors`, as a tuple."""
        return cast(Codecs, self.vectors)

    @property
    def memory_rank(self) -> int:
        """Rank of a memory in factors."""
        return self.feedback_rank or max(self.rank // 2, _FEEDBACK_RANK)

    @property
    def kept_triplets(self) -> int:
        """Number of triplets that a memory in factors keeps; 0 without one."""
        return self.memory_rank if self.error_feedback == "factored" else 0

    @property
    def keeps_all(self) -> bool:
        """True if all of the unsent part is remembered, as matrices of any size."""
        return self.error_feedback in ("dense", "auto")

    @property
    def packs(self) -> bool:
        """True if these matrices are kept in few bits."""
        return self.error_feedback == "auto"

    @property
    def keeps_loss(self) -> bool:
        """True if the encoding loss is remembered: codecs may drop the same numbers every time."""
        return self.error_feedback is not None and drops(self.codecs)

    def keeps_whole(self, part: Part, residual: Gradient | None) -> bool:
        """True if all of the part's unsent rest is remembered as a matrix; it then always is."""
        if self.keeps_all or isinstance(residual, Tensor):
            return True
        return isinstance(part.gradient, Tensor) and self.forms(part.slot)

    def forms(self, slot: Slot) -> bool:
        """True if forming and remembering a gradient is less work than using its factors."""
        return self.error_feedback == "factored" and slot.numel <= _SMALL


def _amount(budget: float | str) -> Fraction:
    """Returns bytes, or a fraction if less than one; 0 if the budget is neither."""
    text = str(budget)
    found = _AMOUNT.fullmatch(text)
    try:
        return Fraction(found[1]) * _PREFIXES[found[2]] if found else Fraction(text)
    except (ValueError, ZeroDivisionError):
        return Fraction(0)
