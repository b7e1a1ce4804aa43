"""Deferred votes: one vote covers many steps, and is counted at the end of the next step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, SupportsInt

from outergrad.commit.ballot import Ballot
from outergrad.commit.participant import CommitParticipant
from outergrad.core.errors import DriftError, ExchangeError
from outergrad.messages.wire import State

_EVERY = 16
"""Steps per vote. One in each would cost small models a tenth of it: it wakes gloo's threads."""


class DeferredVotes:
    """Steps of a session that this site has applied without waiting for votes.

    By the messages of the next step the other sites show that they have made this one, too. The
    votes show that all have received the same in it, and in those before it.

    The last step is kept until then: a site that lacks it may request its result.

    Attributes:
        first: first step since the last vote; None if there is none.
        digest: digest of what this site received in these steps.
    """

    def __init__(self) -> None:
        self._ballot: Ballot | None = None
        self._step: Any = None
        self._decided: int | None = None
        self._left = 0
        self.digest: SupportsInt = 0
        self.first: int | None = None

    @property
    def is_settled(self) -> bool:
        """True if all sites are known to have made the last step."""
        return self._step is None and self._decided is None

    @property
    def are_compared(self) -> bool:
        """True if all sites are known to have received the same in the last step."""
        return self._step is None

    @property
    def are_cast(self) -> bool:
        """True if sites have voted on the last step, which is not settled."""
        return self._ballot is not None and self._ballot.is_cast

    @property
    def are_due(self) -> bool:
        """True if sites vote on the current step, provided that none can refuse it."""
        return self._left == 0

    @property
    def about(self) -> str:
        """Steps since the last vote, in words."""
        if self._decided is not None:
            return f"step {self._decided}"
        assert self._ballot is not None
        last = self._ballot.step
        several = self.first is not None and self.first != last
        return f"the steps {self.first} to {last}" if several else f"step {last}"

    def keep(self, ballot: Ballot, step: object, digest: SupportsInt | None = None) -> None:
        """Keeps a step that was applied, with votes or without.

        Args:
            ballot: ballot on the step.
            step: the step, which others may ask about.
            digest: digest of the ballot, if the caller has it already.
        """
        self._ballot, self._step, self._decided = ballot, step, None
        if ballot.is_cast:
            self._left, self.first, self.digest = _EVERY - 1, None, 0
        else:
            first = ballot.step if self.first is None else self.first
            self.digest = ballot.digest if digest is None else digest
            self._left, self.first = self._left - 1, first

    def note_decided(self, step: int) -> None:
        """Records that all voted for a step; other sites may still wait for a vote on it."""
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
        if self.are_due:
            ballot.note_part()
            with suppress(ExchangeError):  # the next step finds it
                ballot.cast(State.GOOD)
        self.keep(ballot, step, digest)

    def count(self, now: int | None = None) -> DriftError | None:
        """Counts the votes on the last step, which all sites have made; waits for them, if any.

        Args:
            now: number of the current step.

        Returns:
            The error, if the votes are not all good and the same.

        Raises:
            ExchangeError: another site is lost.
        """
        decision = self._ballot.count() if self._ballot is not None and self.are_cast else None
        self.forget()
        return None if decision is None or decision.good else decision.drift(now)

    def compare(self, digests: Mapping[int, int | None]) -> DriftError | None:
        """Returns the error if sites differ in the last step, which all have made but not voted on.

        Args:
            digests: digest of what each site received, where it is known.
        """
        ballot = self._ballot
        self.forget()
        if ballot is None:
            return None
        ballot.note_part()
        decision = ballot.compared(digests)
        return None if decision.good else decision.drift()

    def forget(self) -> None:
        """Drops the last step, because no site will ask about it any more."""
        self._ballot = self._step = self._decided = None

    def restart(self) -> None:
        """Starts anew with sites that are equal, whatever came before."""
        self.forget()
        self._left, self.first, self.digest = 0, None, 0
