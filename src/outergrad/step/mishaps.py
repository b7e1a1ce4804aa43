"""Steps that were skipped or discarded: they are reported, and too many in a row raise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from outergrad.commit.ballot import Decision
from outergrad.core.errors import BadStepsError, SiteLostError
from outergrad.core.sites import Site
from outergrad.events import Mishap
from outergrad.linalg.finite import is_finite
from outergrad.messages.vote import NOTHING, Subjects, Verdict, Vote
from outergrad.step import param_grad

_DISCARDED = (
    Verdict.REFUSED,
    Verdict.FAILED,
    Verdict.UNREPEATED,
    Verdict.CHANGED,
    Verdict.OVERWRITTEN,
)
_WHAT = {Verdict.BAD: "skipped", **dict.fromkeys(_DISCARDED, "discarded")}


class Mishaps:
    """Reports failed steps, and counts consecutive skipped ones.

    Args:
        params: parameters of the model, in the order of their indices in votes.
        rank: rank of this site.
        sites: returns all sites, for their names.
        most_bad: how many consecutive steps may be skipped; None if none is.
        tell: is given every event.

    Attributes:
        skips_bad: True if steps are skipped whose gradients are not finite.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        rank: int,
        sites: Callable[[], Sequence[Site]],
        most_bad: int | None,
        tell: Callable[[Mishap], None],
    ) -> None:
        self._params, self._rank, self._most_bad, self._tell = params, rank, most_bad, tell
        self._sites = sites
        self._bad, self.skips_bad = 0, most_bad is not None

    def decided(self, decision: Decision, subjects: Subjects) -> None:
        """Records the decision on a step.

        Args:
            decision: decision of all sites.
            subjects: what votes can be about.

        Raises:
            BadStepsError: on all sites, if too many steps were skipped.
        """
        if decision.verdict != Verdict.BAD:
            self._bad = 0 if decision.good else self._bad
        vote = decision.vote
        layer = "" if vote.param == NOTHING else subjects.names[vote.param]
        if decision.verdict in _WHAT:
            self._record(vote.step, _WHAT[decision.verdict], decision.sites, layer)
        if decision.verdict == Verdict.BAD:
            self._skip(vote, layer)

    def counted(self) -> None:
        """Records that a step counts."""
        self._bad = 0

    def alone(self, step: int) -> None:
        """Records a step of a single site; drops its gradients if they are not finite.

        Raises:
            BadStepsError: too many steps were skipped.
        """
        grads = {name: p.grad for name, p in self._params.items() if p.grad is not None}
        bad = next((name for name, grad in grads.items() if not is_finite(grad)), None)
        if bad is None:
            self._bad = 0
            return
        param_grad.drop(self._params[name] for name in grads)
        self._record(step, "skipped", (self._rank,), bad)
        self._skip(Vote(0, step, self._rank), bad)

    def drifted(self, step: int, sites: tuple[int, ...], layer: str) -> None:
        """Reports that the replicas were found to differ."""
        self._record(step, "drifted", sites, layer)

    def lost(self, error: SiteLostError) -> None:
        """Reports that a site was lost."""
        self._record(error.step, "lost", error.sites, error.place)

    def _record(self, step: int, what: str, sites: tuple[int, ...], layer: str) -> None:
        own = {"rank": self._rank, "step": step, "time": time.time()}
        self._tell(Mishap(**own, what=what, sites=sites, layer=layer))

    def _skip(self, vote: Vote, layer: str) -> None:
        self._bad += 1
        if self._most_bad is None or self._bad <= self._most_bad:
            return
        skipped = f"{self._bad} steps one after the other were" if self._bad > 1 else "a step was"
        raise BadStepsError(
            f"{skipped} skipped on all sites, the last one step {vote.step}: the gradient of "
            f"{layer!r} on {self._sites()[vote.rank].called} has NaN or infinities; look at "
            f"that site's data and losses, lower the learning rate, or allow more "
            f"(max_bad_steps={self._most_bad})",
            vote.rank,
            vote.step,
            layer,
        )
