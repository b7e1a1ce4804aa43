"""rank-dAD: sites send the leading singular triplets of their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from outergrad.core.coding import Wire, drops, stacked
from outergrad.linalg.compress import Solver
from outergrad.methods.common import brief, require, settle_wire
from outergrad.methods.low_rank.exchange import LowRankExchange
from outergrad.methods.low_rank.settings import Feedback, LowRankSettings, Reduce

_FEEDBACK_RANK = 8


@dataclass(frozen=True, kw_only=True)
class RankDAD:
    """Sites send the leading singular triplets of each weight gradient (rank-dAD).

    A layer that is fewer bytes exactly, as factors or dense, travels so; biases and other vectors
    always do. Weights without a rule travel at low rank, too: triplets of the formed gradient.
    Source: Baker et al., arXiv 2102.09631, the section on rank-dAD.

    Attributes:
        rank: most triplets that a site sends per layer.
        tolerance: largest error that a site may make, relative to the Frobenius norm of its
            gradient, if `rank` triplets suffice for it: then it sends as few as do. What was too
            many or too few in one step is put right in the next, without a message for it.
        solver: how triplets are found where they are gathered; "auto" goes by shape
            (docs/methods.md).
        iterations: of the iterative solvers; None for their own defaults.
        reduce: "gather": every site's triplets go to every site, in one round; bytes grow with
            the sites. "all_reduce": one step of subspace iteration on the mean gradient, from
            where the last step ended; two rounds, bytes independent of the number of sites.
            "two_way": each layer has an owner that merges the triplets of all sites into `rank`
            of their mean and sends these back; two rounds, bytes independent of the number of
            sites, and a latency that is, too. "auto": gathers between two sites; among more it
            measures the link when the model is distributed and takes the fastest.
        error_feedback: what a site does not send in one step is added to its gradient in the
            next. "factored": its `feedback_rank` leading triplets, in a memory of a few rows, or
            all of it where the matrix is small. "dense": all of it, in a memory of the size of the
            model. None: it is lost.
        feedback_rank: triplets that "factored" keeps; None for half of `rank`, and 8 at least.
        wire: codecs of `og.wire` that triplets go through: fewer bytes, at a loss, which error
            feedback sends later where it is more than rounding. Sums ("all_reduce") can be sent
            as `og.wire.BF16()` alone; "auto" does not choose them for other codecs. Rows of
            embeddings that are sent by id have no memory: with error feedback they are rounded at
            most.
        min_ratio: send a layer at low rank only where that is so many times fewer bytes than
            dense.
        bucket_bytes: payload of one message before the next layer opens another: small, because
            triplets are, and what is sent early need not be waited for.
        every: share at every so many-th synchronised backward; between these the gradients are
            summed up on each site, and what is shared is their mean (docs/methods.md).
    """

    rank: int = 4
    tolerance: float = 0.0
    solver: Solver = "auto"
    iterations: int | None = None
    reduce: Reduce = "auto"
    error_feedback: Feedback = "factored"
    feedback_rank: int | None = None
    wire: Wire = ()
    min_ratio: float = 1.0
    bucket_bytes: int = 1 << 16
    every: int = 1

    def __post_init__(self) -> None:
        """Checks the settings."""
        require(self.rank >= 1, self, "rank", "1 or more")
        require(0 <= self.tolerance < 1, self, "tolerance", "a number in [0, 1)")
        require(self.solver in get_args(Solver), self, "solver", f"one of {get_args(Solver)}")
        require((self.iterations or 1) >= 1, self, "iterations", "1 or more, or None")
        require(self.reduce in get_args(Reduce), self, "reduce", f"one of {get_args(Reduce)}")
        feedback = (None, "factored", "dense")
        require(self.error_feedback in feedback, self, "error_feedback", f"one of {feedback}")
        feedback_rank = 1 if self.feedback_rank is None else self.feedback_rank
        require(feedback_rank >= 1, self, "feedback_rank", "1 or more, or None")
        settle_wire(self)
        summable = not drops(stacked(self.wire)) or self.reduce != "all_reduce"
        added = "reduce='all_reduce' adds up what is sent"
        require(summable, self, "wire", f"BF16() at most, or another way to reduce: {added}")
        require(self.min_ratio >= 1, self, "min_ratio", "1 or more")
        require(self.bucket_bytes > 0, self, "bucket_bytes", "a positive number")
        require(self.every >= 1, self, "every", "1 or more")

    def __repr__(self) -> str:
        """With the settings that are not the default."""
        return brief(self)

    def exchange(self) -> LowRankExchange:
        """A new exchange with these settings."""
        feedback_rank = self.feedback_rank or max(self.rank // 2, _FEEDBACK_RANK)
        chosen = {"feedback_rank": feedback_rank, "wire": stacked(self.wire)}
        settings = {name: value for name, value in vars(self).items() if name != "every"}
        return LowRankExchange(LowRankSettings(**{**settings, **chosen}))
