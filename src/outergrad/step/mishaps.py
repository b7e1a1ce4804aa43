"""Steps that came to nothing: they are told of, and not too many may follow each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch import nn

from outergrad.core.errors import BadStepsError, SiteLostError
from outergrad.events import Mishap
from outergrad.linalg.finite import is_finite
from outergrad.messages.vote import NOTHING, Verdict, Vote
from outergrad.step import param_grad
from outergrad.step.decision import Decision

_DISCARDED = (
    Verdict.REFUSED,
    Verdict.FAILED,
    Verdict.UNREPEATED,
    Verdict.CHANGED,
    Verdict.OVERWRITTEN,
)
_WHAT = {Verdict.BAD: "skipped", **dict.fromkeys(_DISCARDED, "discarded")}


class Mishaps:
    """Counts what went wrong with steps.

    Args:
        params: of the model, in the order in which votes count them.
        rank: this site.
        most_bad: how many steps after each other may be skipped; None if none is.
        tell: is given every event.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        rank: int,
        most_bad: int | None,
        tell: Callable[[Mishap], None],
    ) -> None:
        self._params, self._rank, self._most_bad, self._tell = params, rank, most_bad, tell
        self._bad = 0

    @property
    def skips_bad(self) -> bool:
        """Whether steps are skipped whose gradients are not finite."""
        return self._most_bad is not None

    def decided(self, decision: Decision, names: list[str]) -> None:
        """A step has come to its end.

        Args:
            decision: of all sites.
            names: of its parameters, as its votes count them.

        Raises:
            BadStepsError: on all sites: too many were skipped.
        """
        if decision.verdict != Verdict.BAD:
            self._bad = 0 if decision.good else self._bad
        vote = decision.vote
        layer = "" if vote.param == NOTHING else names[vote.param]
        if decision.verdict in _WHAT:
            self._record(vote.step, _WHAT[decision.verdict], decision.sites, layer)
        if decision.verdict == Verdict.BAD:
            self._skip(vote, layer)

    def counted(self) -> None:
        """A step counts."""
        self._bad = 0

    def alone(self, step: int) -> None:
        """A step of a single site has come to its end; its gradients are taken away if bad.

        Raises:
            BadStepsError: as above.
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
        """The replicas were found to differ."""
        self._record(step, "drifted", sites, layer)

    def lost(self, error: SiteLostError) -> None:
        """A site was lost."""
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
            f"{layer!r} on site {vote.rank} has NaN or infinities; look at that site's data and "
            f"losses, lower the learning rate, or allow more (max_bad_steps={self._most_bad})",
            vote.rank,
            vote.step,
            layer,
        )
