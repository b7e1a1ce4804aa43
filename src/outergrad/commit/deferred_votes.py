"""Deferred votes: one vote covers many steps, and is counted at the end of the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, SupportsInt

from outergrad.commit.ballot import Ballot
from outergrad.commit.machine import Action, Event, KeptState, KeptStep
from outergrad.commit.participant import CommitParticipant
from outergrad.core.errors import DriftError, ExchangeError
from outergrad.messages.wire import State

Comparing = Callable[[], Mapping[int, "int | None"]]
"""Waits until all sites have made the last step; returns the digest of what each received in it."""

Waiting = Callable[[], AbstractContextManager[None]]
"""Returns a context in which this site waits for others."""


class DeferredVotes:
    """Steps of a session that this site has applied without waiting for votes.

    By the messages of the next step the other sites show that they have made this one, too. The
    votes show that all have received the same in it, and in those before it.

    The last step is kept until then: a site that lacks it may request its result. The ballot of the
    last step without a vote is kept until its digests are compared, whatever steps come after it.

    Attributes:
        first: first step since the last vote; None if there is none.
        digest: digest of what this site received in these steps.
    """

    def __init__(self) -> None:
        self._machine = KeptStep()
        self._ballot: Ballot | None = None
        self._step: Any = None
        self._decided: int | None = None
        self.digest: SupportsInt = 0
        self.first: int | None = None

    @property
    def is_settled(self) -> bool:
        """True if all sites are known to have made the last step."""
        return self._machine.state is KeptState.SETTLED

    @property
    def are_compared(self) -> bool:
        """True if all sites are known to have received the same in all steps that they applied.

        They are not where a step without a vote came before one of its own vote, or one that did
        not count.
        """
        return self._ballot is None

    @property
    def are_over(self) -> bool:
        """True if there is nothing to settle: all sites have made the last step, and the same."""
        return self.is_settled and self.are_compared

    @property
    def are_due(self) -> bool:
        """True if sites vote on the current step, provided that none can refuse it."""
        return self._machine.left == 0

    @property
    def about(self) -> str:
        """Steps since the last vote, in words."""
        if self._ballot is None:
            return f"step {self._decided}"
        last = self._ballot.step
        several = self.first is not None and self.first != last
        return f"the steps {self.first} to {last}" if several else f"step {last}"

    def keep_apart(self, ballot: Ballot, step: object) -> None:
        """Keeps a step that all have voted on and received differently; the next one finds it."""
        self._machine.vote()
        self._keep(ballot, step)

    def _keep(self, ballot: Ballot, step: object, digest: SupportsInt | None = None) -> None:
        """Keeps a step, about which others may ask; without a digest sites have voted on it."""
        self._ballot, self._step, self._decided = ballot, step, None
        if digest is None:
            self.first, self.digest = None, 0
        else:
            self.first = ballot.step if self.first is None else self.first
            self.digest = digest

    def note_decided(self, step: int) -> None:
        """Records that all voted for a step; other sites may still wait for a vote on it."""
        self._machine.on(Event.DECIDED)
        self._decided = step

    def make(self, ballot: Ballot, step: Any, participant: CommitParticipant) -> None:
        """Commits a step whose messages were all good; the sites vote on it if that is due.

        Raises:
            ExchangeError: it must not be made without the others, which aborted.
        """
        if self.first is not None:
            ballot.cover(self.first, int(self.digest))
        digest = ballot.digest
        participant.makes(ballot.session, step, applied=True, digest=digest)
        is_cast = Action.CAST in self._machine.make()
        self._keep(ballot, step, None if is_cast else digest)
        if is_cast:
            ballot.note_part()
            with suppress(ExchangeError):  # the next step finds it
                ballot.cast(State.GOOD)

    def count(self, now: int | None = None, waiting: Waiting = nullcontext) -> DriftError | None:
        """Counts the votes on the last step, which all sites have made; waits for them, if any.

        Args:
            now: number of the current step.
            waiting: returns a context for the wait.

        Returns:
            The error, if the votes are not all good and the same.

        Raises:
            ExchangeError: another site is lost.
        """
        return self._perform(self._machine.on(Event.ARRIVED), now, waiting=waiting)

    def settle(self, compare: Comparing) -> DriftError | None:
        """Counts the votes on the last step, or compares what sites received in it without votes.

        Args:
            compare: waits until all sites have made the step; returns what each received.

        Returns:
            As `count`.

        Raises:
            ExchangeError: another site is lost, or the votes are.
        """
        # Behind a step with a vote of its own, as behind one without, it is compared on the board.
        late = self.is_settled and not self.are_compared
        event = Event.MEETS if late else Event.SETTLES
        return self._perform(self._machine.on(event), compare=compare)

    def settle_without_votes(self, compare: Comparing) -> DriftError | None:
        """Compares, as `settle`, a step whose voters have ended in order."""
        return self._perform(self._machine.on(Event.ENDED), compare=compare)

    def meet(self, compare: Comparing) -> None:
        """Waits for all sites behind a settled step: some are about to leave the transport."""
        self._perform(self._machine.on(Event.MEETS), compare=compare)

    def forget(self) -> None:
        """Drops the last step: its outcome is agreed."""
        self._perform(self._machine.on(Event.FORGETS))
        self._ballot = None

    def restart(self) -> None:
        """Starts anew with sites that are equal, whatever came before."""
        self._perform(self._machine.restart())
        self._ballot, self.first, self.digest = None, None, 0

    def _perform(
        self,
        actions: Sequence[Action],
        now: int | None = None,
        compare: Comparing | None = None,
        waiting: Waiting = nullcontext,
    ) -> DriftError | None:
        """Performs actions on the last step; returns the error if sites differ in it."""
        drift, compared = None, False
        if Action.COUNT in actions:
            assert self._ballot is not None
            with waiting():
                decision = self._ballot.count()
            drift = None if decision.good else decision.drift(self._ballot.sites, now)
            actions, compared = self._machine.on(Event.COUNTED), True
        elif Action.COMPARE in actions:
            assert compare is not None
            drift = self._compared(compare())
            actions, compared = self._machine.on(Event.COMPARED), True
        if Action.DROP in actions:
            self._step = self._decided = None
            if compared or self.first is None:
                self._ballot = None
        return drift

    def _compared(self, digests: Mapping[int, int | None]) -> DriftError | None:
        """Returns the error if sites differ in the last step, which all have made.

        Args:
            digests: digest of what each site received, where it is known.
        """
        if self._ballot is None:
            return None
        self._ballot.note_part()
        decision = self._ballot.compared(digests)
        return None if decision.good else decision.drift(self._ballot.sites)
