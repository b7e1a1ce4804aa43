"""Outer steps that go ahead with a quorum: sites that are late join a later one."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from outergrad.core.errors import BoardGoneError, ExchangeError, Failure
from outergrad.core.sites import Site, called
from outergrad.methods.local_steps import LocalSteps
from outergrad.session.core import Core
from outergrad.session.elastic import Elastic
from outergrad.session.failure import FailureHandler
from outergrad.session.fragments import Fragment
from outergrad.session.gathering import Gathering, Presence, Roll
from outergrad.session.outer_steps import OuterSteps
from outergrad.session.put_changes import PutChanges

_LOG = logging.getLogger("outergrad")
_LOOKS_S = (0.02, 1.0)
"""Least and most seconds between two looks at the board of a site that was late."""


class QuorumSteps:
    """Exchanges of which a site may be left out, around the outer steps of all sites.

    If all sites are there, they exchange as ever. If not, those that are there put their changes on
    the board. A site that was left out moves its weights by what the others applied. So they stay
    as far from the shared ones as its own steps have brought them, and what it owes is in them: the
    next change that it sends has it, once. After it was late a site joins the next exchange as soon
    as another one is there, whatever number of steps it has made, so that it is in time again.

    Args:
        outer: outer steps of all sites.
        trained: the model's parameters, by name.
        fragment: all of them.
        method: says with how many sites an exchange goes ahead, and how long these wait.
        core: the session's.
        failure: aborts the transport if it fails.
        elastic: is asked before the transport is used.
    """

    def __init__(
        self,
        outer: OuterSteps,
        trained: Mapping[str, Tensor],
        fragment: Fragment,
        method: LocalSteps,
        core: Core,
        failure: FailureHandler,
        elastic: Elastic,
    ) -> None:
        self._outer, self._trained, self._fragment = outer, trained, fragment
        self._at, self._reporter, self._method = core.at, core.reporter, method
        self._is_even = core.exchange.weighting.is_even
        self._failure, self._elastic = failure, elastic
        least, most = _LOOKS_S
        self._looks_s = min(max((method.grace or 0.0) / 4, least), most)
        self._loads = -1
        self.restart()

    def restart(self) -> None:
        """Begins to number exchanges anew, in slots that nobody has used: all sites are equal."""
        self._loads += 1
        comm, grace_s = self._at.comm, self._method.grace or 0.0
        least, number = self._method.least(comm.world_size), self._at.number
        about = comm, number, f"quorum {number} {self._loads}", least, grace_s
        self._gathering = Gathering(*about, self._refuse_given_up)
        start = self._outer.start
        self._changes = PutChanges(comm, self._gathering, start, self._refuse_given_up)
        self._number, self._is_late, self._looked_at = 0, False, 0.0

    # -- when sites exchange ----------------------------------------------------------------------

    def stepped(self, holder: str) -> bool:
        """Counts a step of this site's own; returns whether its weights were moved after it.

        Args:
            holder: name of what made the step.
        """
        counter = self._outer.counter
        counter.count(holder)
        self._fragment.differs = True
        if counter.due:
            return self._exchange()
        return self._is_late and self._look()

    def flush(self, *, whole: bool = False) -> None:
        """Exchanges until all sites have shared all, and are equal.

        Raises:
            ValueError: `whole` is True.
        """
        if whole:
            raise ValueError("session.flush(whole=True) does not go with quorum=; leave whole out")
        self._count_samples()
        while not self._meet().ends:
            pass
        self._outer.go_to_start()  # also where what is left is of no sample, and so of no weight
        self._fragment.differs = False
        self._outer.counter.restart()

    def level(self) -> None:
        """Waits until all sites know of the same exchanges, and shares nothing of this site's."""
        while not self._meet(holds=True).ends:
            pass

    def _exchange(self) -> bool:
        """Takes part in an exchange, or learns that the others did not wait for this site."""
        self._count_samples()
        with self._guarded(self._quorum):
            if not self._catch_up():
                self._attend(waits_for_all=False)
        self._outer.counter.restart()
        return True

    def _look(self) -> bool:
        """Joins the exchange that another site has come to; looks for it once in a while."""
        if time.monotonic() - self._looked_at < self._looks_s:
            return False
        self._looked_at = time.monotonic()
        with self._guarded(self._quorum):
            is_open = self._gathering.is_open(self._number)
        return is_open and self._exchange()

    def _meet(self, *, holds: bool = False) -> Roll:
        """Takes part in an exchange behind the last step of this site's loop, for now."""
        with self._guarded("all sites, so that they are equal"):
            self._catch_up()
            return self._attend(waits_for_all=True, holds=holds)

    def _count_samples(self) -> None:
        if self._outer.counter.any_made:
            self._outer.count_samples()

    # -- who takes part ---------------------------------------------------------------------------

    def _catch_up(self) -> bool:
        """Takes over what the others have exchanged without this site; returns if they have."""
        before = self._number
        while (roll := self._gathering.decided(self._number)) is not None:
            self._follow(roll)
        return self._number > before

    def _attend(self, *, waits_for_all: bool, holds: bool = False) -> Roll:
        """Waits for the decision on the next exchange, and follows it.

        Args:
            waits_for_all: as in `Gathering.attend`.
            holds: whether this site keeps its change to itself.
        """
        began, own = time.monotonic(), self._presence(waits_for_all=waits_for_all, holds=holds)
        roll = self._gathering.attend(self._number, own)
        self._follow(roll, holds=holds, waited_s=time.monotonic() - began)
        return roll

    def _presence(self, *, waits_for_all: bool, holds: bool) -> Presence:
        """Returns what this site says of itself: also with nothing to share it counts as one."""
        shares = self._fragment.differs and not holds
        weight = 1 if self._is_even else self._fragment.samples * shares
        return Presence(weight=weight, shares=shares, waits_for_all=waits_for_all)

    def _follow(self, roll: Roll, *, holds: bool = False, waited_s: float = 0.0) -> None:
        """Exchanges with the sites that take part, or applies what they have exchanged.

        Args:
            roll: who takes part.
            holds: whether this site keeps its change to itself.
            waited_s: seconds that it has waited for the decision.
        """
        comm, number = self._at.comm, self._number
        before = comm.sent_bytes, comm.received_bytes
        takes_part = comm.rank in roll.there
        if roll.weight and not roll.of_all:
            self._by_board(roll, keeps=holds or not takes_part)
        self._number, self._is_late = number + 1, not takes_part
        if roll.weight and roll.of_all:  # counted before: if it is void, it is on all sites
            self._together(roll, holds=holds)
        if roll.of_all:
            self._changes.drop_before(number)
        if roll.weight:
            self._note(roll, before, waited_s)

    def _together(self, roll: Roll, *, holds: bool) -> None:
        """Exchanges with all sites, by the method's collectives."""
        with self._keeping(keeps=holds):
            self._outer.send(overlaps=False, weight=roll.there[self._at.comm.rank].weight)
            self._outer.apply()

    @torch.no_grad()
    def _by_board(self, roll: Roll, *, keeps: bool) -> None:
        """Exchanges with some sites; a site that keeps its change applies that of the others."""
        self._outer.refuse_converted()
        own = roll.there.get(self._at.comm.rank)
        if own is not None and own.shares:
            self._changes.put(self._number, self._owed())
        mean = self._changes.mean(self._number, roll)
        with self._keeping(keeps=keeps):
            self._outer.take(mean)

    @contextmanager
    def _keeping(self, *, keeps: bool) -> Iterator[None]:
        """Keeps a change of this site's for later, if it is to: in the exchange it has none."""
        if not keeps:
            yield
            return
        owed, made = self._owed(), dict(self._outer.counter.made)
        before = replace(self._fragment)
        self._outer.go_to_start()
        try:
            yield
        finally:
            self._put_back(owed)
            self._outer.counter.resume(made)
            self._fragment.keep(before)

    @torch.no_grad()
    def _owed(self) -> dict[str, Tensor]:
        """Returns what this site has changed since the exchange that it last took part in."""
        return {name: p - self._trained[name] for name, p in self._outer.start.items()}

    @torch.no_grad()
    def _put_back(self, owed: Mapping[str, Tensor]) -> None:
        """Moves this site's weights to the shared ones, less what it owes."""
        for name, change in owed.items():
            self._trained[name].copy_(self._outer.start[name] - change)

    # -- what is told -----------------------------------------------------------------------------

    def _note(self, roll: Roll, before: tuple[int, int], waited_s: float) -> None:
        """Notes who took part, in the statistics, for recorders, and in the log."""
        sites = self._at.comm.sites
        there = [site for site in sites if site in roll.there]
        late = [site for site in sites if site not in roll.there]
        took_part = tuple(site.called for site in there)
        about = {"by_board": bool(late), "waited_s": waited_s}
        self._at.note_exchange(self._number, took_part, *before, **about)
        late_ones = tuple(site.called for site in late)
        self._reporter.exchange(self._at.stats.step, self._number - 1, took_part, late_ones)
        if late:
            self._log(there, late)

    def _log(self, there: list[Site], late: list[Site]) -> None:
        told = f"{called(there)} went ahead with exchange {self._number - 1}"
        if self._is_late:
            kept = "what it has changed is not lost, and is added to the next one"
            _LOG.warning("%s was late: %s without it; %s", self._at.me.called, told, kept)
        else:
            grace_s = self._method.grace
            _LOG.warning("%s without %s, late by more than %g s", told, called(late), grace_s)

    @property
    def _quorum(self) -> str:
        sites = self._at.comm.world_size
        return f"a quorum of {self._method.least(sites)} of {sites} sites"

    def _refuse_given_up(self) -> None:
        if self._at.group.participant.frozen:
            raise ExchangeError("the other sites gave up", kind=Failure.CLOSED)

    @contextmanager
    def _guarded(self, place: str) -> Iterator[None]:
        """Guards an exchange against sites that do not come and a board that is gone.

        Args:
            place: what this site waits for, in words.

        Raises:
            SiteLostError: they do not come in time.
        """
        self._elastic.require_group()
        with self._failure.guard_between(place):
            try:
                yield
            except BoardGoneError as error:
                raise ExchangeError(str(error), kind=Failure.LOCAL) from error
