"""Sites that vote on every step before any of them applies it: what is done without a board.

The library's own functions decide what a site concludes when it has lost another.
"""

from __future__ import annotations

from dataclasses import replace

from outergrad.comm.failure_report import FailureReport, LastStep
from outergrad.commit.lost import Findings, conclude, is_enough, patience_for, standing_of
from outergrad.core.errors import ExchangeError, Failure
from outergrad_lab.checking.failure_mailbox import BRIEFLY_S, LIMIT_S, FailureMailbox
from outergrad_lab.checking.hub import Hub
from outergrad_lab.checking.site import MESSAGES, LeftError, Site, SiteLost
from outergrad_lab.checking.trial import Trial
from outergrad_lab.checking.world import Process, Waiting

_VOTES = 2


class VotingSite(Site):
    """A site that applies a step if all sites voted for it."""

    def __init__(self, process: Process, hub: Hub, trial: Trial) -> None:
        super().__init__(process, trial)
        epoch = hub.epochs[0]
        self.enter(epoch.network, epoch.store, self.name, trial.sites)
        self._ends: dict[int, LastStep] = {}
        self._made = [0] * trial.sessions
        self._turn = 0
        self._voted = False
        self._is_over = False

    def arrive(self) -> Waiting[None]:
        """Is among the sites from the beginning."""
        yield from ()

    def step(self) -> Waiting[None]:
        """Exchanges messages and votes, and applies the step or not."""
        if self._is_over:  # a site was lost after the step before, which counts
            raise SiteLost
        session, self._voted = self._turn % self.trial.sessions, False
        try:
            counts = yield from self._exchange(session)
        except ExchangeError as error:
            counts = yield from self._give_up(error, session)
        self._note_end(session, counts=counts)
        self._turn += 1

    def _exchange(self, session: int) -> Waiting[bool]:
        about = session, self._made[session]
        yield from self.send(MESSAGES, about)
        came = yield from self.receive_all(MESSAGES)
        good = not [o for o in came if self.is_damaged(self.ending.applied, o)]
        began, self._voted = self.world.now, good
        yield from self.send(_VOTES, (*about, good))
        if self.world.now - began > self.patience_s:
            raise ExchangeError("this site stood still", kind=Failure.LOCAL)
        votes = yield from self.receive_all(_VOTES)
        if any(vote[:2] != about for vote in votes.values()):  # type: ignore[index]
            raise ExchangeError("a vote on another step")
        counts = good and all(vote[2] for vote in votes.values())  # type: ignore[index]
        if counts:
            self.apply(self.ending.applied, {self.rank, *came})
        return counts

    def _note_end(self, session: int, *, counts: bool) -> None:
        self._made[session] += 1
        self._ends[session] = LastStep(self._made[session], counts)

    def _give_up(self, error: ExchangeError, session: int) -> Waiting[bool]:
        """Aborts. Returns whether the step counts nevertheless: then the next one raises.

        Raises:
            SiteLost: the step does not count.
        """
        self.note(f"gives up in step {self.ending.applied}: {error}, {error.sites}")
        standing = standing_of(error, self._made[session], session, self._ends)
        standing = replace(standing, voted=self._voted)
        words = self._words(session)
        yield from words.leave(standing.text())
        self.network.close_all(self.rank)
        patience_s = patience_for(standing, self.patience_s)
        final = replace(standing, settled=True).text()
        enough = lambda waited_s: lambda texts: is_enough(standing, texts, waited_s)  # noqa: E731
        texts = yield from words.gather(enough, patience_s, final)
        found = conclude(standing, texts, self.rank, self.trial.sites, self.store.host)
        self._is_over = True
        self._raise_or_count(found)
        return True

    def _raise_or_count(self, found: Findings) -> None:
        self.ending.certain, self.ending.may_differ = found.certain, found.may_differ
        self.ending.lost = found.lost
        if not found.counted:
            raise SiteLost
        self.apply(self.ending.applied, set(range(self.trial.sites)))  # no message was damaged

    def end_after(self, error: Exception) -> Waiting[None]:
        """Leaves a farewell after an error of the user's program."""
        if isinstance(error, LeftError) and not self._is_over:
            yield from self._say_farewell("process", "ValueError: no rows")

    def settle(self) -> Waiting[None]:
        """Ends the session, and leaves a farewell."""
        if not self._is_over:
            yield from self._say_farewell("session")

    def _say_farewell(self, ended: str, why: str = "") -> Waiting[None]:
        for session in range(self.trial.sessions if ended == "session" else 1):
            standing = FailureReport(0, session, ends=self._ends, why=why, ended=ended)
            words = self._words(session, BRIEFLY_S)
            yield from words.leave_at_end(standing.text(), of_process=ended == "process")
        if ended == "process" and self.rank == self.store.host:
            self.network.close_all(self.rank)
            yield from self._words(0, BRIEFLY_S).stay(self.others)

    def _words(self, session: int, limit_s: float = LIMIT_S) -> FailureMailbox:
        return FailureMailbox(self.store, self.process, self.trial.sites, session, limit_s)
