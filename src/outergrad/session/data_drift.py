"""Data drift: what a site has observed, and the votes by which all sites exchange on a drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outergrad.capture.backward_listeners import (
    FailedBackward,
    ignore_backwards,
    listen_to_backwards,
)
from outergrad.capture.optimizer_steps import held, look_at_steps, look_away
from outergrad.core.sites import called
from outergrad.core.transport import Comm
from outergrad.core.types import StateDict
from outergrad.drift.on_drift import OnDrift
from outergrad.session.drift import LANE
from outergrad.session.membership import Membership
from outergrad.session.reporting import Reporter


class Vote(IntEnum):
    """Word of a site at a check."""

    STEADY = 0
    DRIFT = 1
    NOTHING = 2
    """It has no value since the last check."""
    NOT_FINITE = 3
    """It has a value that no detector can judge."""
    RAISED = 4
    """Its detector has raised an error."""


_NUMBERS = 256 // len(Vote)
"""Votes are numbered so far, and again from 0: with the vote in a byte."""


class DataDrift:
    """Finds out together with all sites whether the data of one have drifted.

    Args:
        settings: the user's.
        at: the session's membership.
        reporter: tells recorders of a drift.

    Attributes:
        losses: the losses of backward passes, if they are what the detector listens to.
        exchanges: number of times that a check has led to an exchange.
        drifted: sites whose detectors had seen drift at the last of these, in words; none if it
            came by `most` alone.
    """

    def __init__(self, settings: OnDrift, at: Membership, reporter: Reporter) -> None:
        self._settings, self._at, self._reporter = settings, at, reporter
        self._monitor, self._values = settings.detector.start(), list[Tensor]()
        self._checks = self._votes = 0
        self.exchanges, self.drifted = 0, tuple[str, ...]()
        self.losses = SeenLosses(self._values) if settings.of == "losses" else None

    # -- what this site sees ----------------------------------------------------------------------

    def watch(self, params: Mapping[str, nn.Parameter]) -> None:
        """Begins to see losses, if the detector listens to them.

        Args:
            params: parameters that the user's optimizers hold.
        """
        if self.losses is not None:
            self.losses.watch(params)

    def detach(self) -> None:
        """Ends the watching."""
        if self.losses is not None:
            self.losses.detach()

    def note_loss(self) -> None:
        """Takes the loss of the backward that runs, the first time that it comes to the model."""
        if self.losses is not None:
            self.losses.note()

    def observe(self, values: Any) -> None:
        """Takes values of the user's.

        Raises:
            RuntimeError: the detector listens to losses.
            TypeError: the values are no numbers.
        """
        if self.losses is not None:
            raise RuntimeError(
                "session.observe(): the detector listens to the losses of backward passes: pass "
                "of='observed' to og.OnDrift"
            )
        try:
            found = torch.as_tensor(values).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"session.observe(a {type(values).__name__}): pass a number, or a tensor, array or "
                f"list of numbers"
            ) from error
        self._values.append(found.reshape(-1).to(torch.float64, copy=True))

    # -- what all sites decide --------------------------------------------------------------------

    @property
    def next_check(self) -> int:
        """Steps from the last exchange to the next check."""
        return self._settings.check * (self._checks + 1)

    def agrees(self) -> bool:
        """Ends a check, which all sites do at the same step; True if they are to exchange now.

        Raises:
            ExchangeError: the transport failed.
            RuntimeError: on all sites: one has nothing to judge, or its detector has raised, which
                is the error's cause there; or they are not at the same check.
        """
        self._checks += 1
        most = self._settings.most
        if most is not None and self._checks * self._settings.check >= most:
            self._values.clear()
            return self._decided(())
        votes = self._votes_of_all(*self._vote())
        sites = [self._at.comm.sites[rank] for rank, v in enumerate(votes) if v == Vote.DRIFT]
        return self._decided(tuple(site.called for site in sites)) if sites else False

    def restart(self) -> None:
        """Begins anew: the sites have exchanged, and what is observed now is of other weights."""
        self._monitor, self._checks = self._settings.detector.start(), 0
        self._values.clear()

    def _decided(self, drifted: tuple[str, ...]) -> bool:
        self.exchanges, self.drifted = self.exchanges + 1, drifted
        self._reporter.drift(self._at.stats.step, self._checks, drifted)
        return True

    def _vote(self) -> tuple[Vote, Exception | None]:
        """Returns this site's vote on what it has observed since the last check.

        An error of its detector is returned, too: the others wait for the vote.
        """
        try:
            return self._judged(), None
        except Exception as error:
            return Vote.RAISED, error

    def _judged(self) -> Vote:
        found = [values.to("cpu", torch.float64) for values in self._values]
        self._values.clear()
        values = torch.cat(found) if found else torch.empty(0)
        if not len(values):
            return Vote.NOTHING
        if not values.isfinite().all():
            return Vote.NOT_FINITE
        return Vote.DRIFT if self._monitor.has_drifted(values) else Vote.STEADY

    def _votes_of_all(self, own: Vote, error: Exception | None) -> Sequence[Vote]:
        """Sends this site's vote, a byte, and returns those of all sites.

        Args:
            own: the vote.
            error: of this site's detector, if it has raised.
        """
        comm, number = self._at.comm, self._votes % _NUMBERS
        self._votes += 1
        found = bytes_of_all(comm, number * len(Vote) + own) if comm.world_size > 1 else None
        votes = [own] if found is None else [Vote(byte % len(Vote)) for byte in found]
        for rank, byte in enumerate(found or ()):
            if byte // len(Vote) != number:
                raise RuntimeError(
                    f"OnDrift: {comm.sites[rank].called} is at another check than "
                    f"{self._at.me.called}: every site has to make the same number of steps"
                )
        refused = {Vote.RAISED: _RAISED, Vote.NOTHING: self._nothing, Vote.NOT_FINITE: _NOT_FINITE}
        for vote, told in refused.items():
            sites = [comm.sites[rank] for rank, one in enumerate(votes) if one == vote]
            if sites:
                raise RuntimeError(f"OnDrift: {called(sites)} {told}") from error
        return votes

    @property
    def _nothing(self) -> str:
        if self.losses is not None:
            return (
                "had no backward of one loss, of one number, since the last check: pass "
                "of='observed' to og.OnDrift, and call session.observe(values) in every step"
            )
        return (
            "observed nothing since the last check: call session.observe(values) in every step, "
            "before the optimizer's, and before backward with a method of gradients"
        )

    # -- saved and loaded -------------------------------------------------------------------------

    def state(self) -> StateDict:
        """Returns what the detector has heard, which is the site's own, and counts, alike at all.

        What was heard is the detector's state, and what waits for the next check.
        """
        values = [values.clone() for values in self._values]
        return {
            "heard": {"monitor": self._monitor.state(), "values": values},
            "checks": self._checks,
            "votes": self._votes,
            "exchanges": self.exchanges,
            "drifted": list(self.drifted),
        }

    def load(self, state: StateDict, *, is_own: bool) -> None:
        """Goes on from a saved `state()`.

        Args:
            state: what `state()` returned; None for "heard" begins with a new detector.
            is_own: False if it is of another site, of whose data this one's detector is no judge.
        """
        self.restart()
        heard = state["heard"] if is_own else None
        if heard is not None:
            self._monitor.load(heard["monitor"])
            self._values += [values.clone() for values in heard["values"]]
        self._checks, self._votes = state["checks"], state["votes"]
        self.exchanges, self.drifted = state["exchanges"], tuple(state["drifted"])


_NOT_FINITE = (
    "observed a value that is not finite, which no detector can judge: leave such values out, with "
    "of='observed' and session.observe(values)"
)

_RAISED = "had a detector that raised: the error is the cause of this one there"


def bytes_of_all(comm: Comm, byte: int) -> list[int]:
    """Gathers a byte from every site, in rank order."""
    own = comm.control([byte]).to(torch.uint8)
    return [int(t) for t in comm.all_gather(own, [1] * comm.world_size, lane=LANE).wait()]


class SeenLosses:
    """The losses of backward passes of a model, as autograd is given them.

    Args:
        values: to which they are added.
    """

    def __init__(self, values: list[Tensor]) -> None:
        self._values, self._params = values, dict[str, nn.Parameter]()
        self._pending: Tensor | None = None
        self._thread = get_ident()

    def watch(self, params: Mapping[str, nn.Parameter]) -> None:
        """Begins to look at backward passes of this thread."""
        self._params, self._thread = dict(params), get_ident()
        listen_to_backwards(self)
        look_at_steps(self)

    def detach(self) -> None:
        """Ends the looking."""
        ignore_backwards(self)
        look_away(self)
        self._params = {}

    def on_backward(self, outputs: Sequence[Any]) -> None:
        """Keeps the loss of a backward, which may be of another model."""
        if get_ident() == self._thread:
            losses = [t for t in outputs if isinstance(t, Tensor)]
            is_one = len(losses) == len(outputs) == 1 and losses[0].numel() == 1
            self._pending = losses[0].detach().reshape(1).clone() if is_one else None

    def on_failed_backward(self, failed: FailedBackward) -> None:
        """Keeps the loss of a backward that raised: it was the site's all the same."""

    def note(self) -> None:
        """Takes the loss that is kept: its backward has come to the model."""
        if self._pending is not None:
            self._values.append(self._pending)
            self._pending = None

    def before_applying(self, optimizer: Optimizer) -> None:
        """Does nothing: gradients are not what is looked at."""

    def before_unscaling(self, optimizer: Optimizer) -> None:
        """Refuses a `GradScaler`, by whose scale the losses would be multiplied."""
        own = {id(p) for p in self._params.values()}
        if not own.isdisjoint(held(optimizer)):
            raise RuntimeError(
                "OnDrift: a GradScaler scales the losses of backward passes: pass of='observed' to "
                "og.OnDrift, and call session.observe(loss) before it is scaled"
            )
