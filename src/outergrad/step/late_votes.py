"""Votes that nobody waits for: one for many steps, counted at the end of the next step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, SupportsInt

from outergrad.core.errors import DriftError, ExchangeError
from outergrad.messages.wire import State
from outergrad.step.commit import Ballot
from outergrad.step.pact import Pact

_EVERY = 16
"""Steps. A vote in each would cost small models a tenth of a step: it wakes threads of gloo's."""


class LateVotes:
    """The steps of a session that this site has applied without waiting for votes.

    That the others have made a step, too, they say by sending the messages of the next one. The
    votes say that all have received the same in it, and in those before it.

    The last step is kept until then: a site that lacks it may ask what it brought.

    Attributes:
        first: of the steps since the last vote; None where there is none.
        digest: of what came in them.
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
        """Whether all sites are known to have made the last step."""
        return self._step is None and self._decided is None

    @property
    def are_compared(self) -> bool:
        """Whether all sites are known to have received the same in the last step."""
        return self._step is None

    @property
    def are_cast(self) -> bool:
        """Whether sites have voted on the last step, which is not settled."""
        return self._ballot is not None and self._ballot.is_cast

    @property
    def are_due(self) -> bool:
        """Whether sites vote on the step that is under way, if nobody can refuse it."""
        return self._left == 0

    @property
    def about(self) -> str:
        """The steps since the last vote, in words."""
        if self._decided is not None:
            return f"step {self._decided}"
        assert self._ballot is not None
        last = self._ballot.step
        several = self.first is not None and self.first != last
        return f"the steps {self.first} to {last}" if several else f"step {last}"

    def keep(self, ballot: Ballot, step: object, digest: SupportsInt | None = None) -> None:
        """A step was applied, with votes or without.

        Args:
            ballot: on it.
            step: what may be asked of it.
            digest: the ballot's, if the caller has it already.
        """
        self._ballot, self._step, self._decided = ballot, step, None
        if ballot.is_cast:
            self._left, self.first, self.digest = _EVERY - 1, None, 0
        else:
            first = ballot.step if self.first is None else self.first
            self.digest = ballot.digest if digest is None else digest
            self._left, self.first = self._left - 1, first

    def note_decided(self, step: int) -> None:
        """All have voted for a step, which counts; others may still wait for a vote on it."""
        self._decided = step

    def make(self, ballot: Ballot, step: Any, pact: Pact) -> None:
        """A step whose messages all were good is made here; the sites vote on it if that is due.

        Raises:
            ExchangeError: it must not be made without the others, who gave up.
        """
        if self.first is not None:
            ballot.cover(self.first, int(self.digest))
        digest = ballot.digest
        pact.makes(ballot.session, step, applied=True, digest=digest)
        if self.are_due:
            ballot.note_part()
            with suppress(ExchangeError):  # the next step finds it
                ballot.cast(State.GOOD)
        self.keep(ballot, step, digest)

    def count(self, now: int | None = None) -> DriftError | None:
        """Waits for the votes, if there are some; all sites have made the last step.

        Args:
            now: the step in which this is done.

        Returns:
            What is wrong, if they are not all the same.

        Raises:
            ExchangeError: another site is lost.
        """
        decision = self._ballot.count() if self._ballot is not None and self.are_cast else None
        self.forget()
        return None if decision is None or decision.good else decision.drift(now)

    def compare(self, digests: Mapping[int, int | None]) -> DriftError | None:
        """All sites have made the last step, on which they have not voted.

        Args:
            digests: of what came to each, where that is known.
        """
        ballot = self._ballot
        self.forget()
        if ballot is None:
            return None
        ballot.note_part()
        decision = ballot.compared(digests)
        return None if decision.good else decision.drift()

    def forget(self) -> None:
        """Nobody will ask for the last step any more."""
        self._ballot = self._step = self._decided = None

    def restart(self) -> None:
        """All sites are equal again, whatever came before."""
        self.forget()
        self._left, self.first, self.digest = 0, None, 0
