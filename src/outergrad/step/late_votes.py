"""Votes that nobody waits for: they are counted at the end of the next step, or when asked for."""

from __future__ import annotations

from typing import Any

from outergrad.core.errors import DriftError
from outergrad.step.commit import Ballot


class LateVotes:
    """The votes on the last step of a session, which this site has applied without them.

    Until all of them are counted, the step is kept: a site that lacks it may ask what it brought.
    """

    def __init__(self) -> None:
        self._ballot: Ballot | None = None
        self._step: Any = None

    @property
    def are_counted(self) -> bool:
        """Whether nothing is left to be counted."""
        return self._ballot is None

    def add(self, ballot: Ballot, step: object) -> None:
        """Votes were cast, on a step that is kept."""
        self._ballot, self._step = ballot, step

    def count(self, now: int | None = None) -> DriftError | None:
        """Waits for the votes, if there are some.

        Args:
            now: the step in which this is done.

        Returns:
            What is wrong, if they are not all the same.

        Raises:
            ExchangeError: another site is lost.
        """
        ballot, self._ballot = self._ballot, None
        if ballot is None:
            return None
        try:
            decision = ballot.count()
        except BaseException:
            self._ballot = ballot
            raise
        self._step = None
        return None if decision.good else decision.drift(now)

    def forget(self) -> None:
        """Nobody will ask any more."""
        self._ballot = self._step = None
