"""Join barrier: all sites in training agree on the step before which new sites join.

Each site reports how many steps it has made, and begins none but the next until all have reported.
The new sites join after one step more than the greatest count: no site has begun more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from outergrad.core.errors import BoardGoneError, ExchangeError, Failure
from outergrad.core.transport import Comm
from outergrad.step.agreement import Outcome
from outergrad.step.going_on import GOING_ON, GoesOn
from outergrad.step.lost import Findings

_POLL_S = 0.02


class Turning:
    """Part of a commit participant that is about sites that join.

    Attributes:
        opens: opens the transport of the sites that go on, once that is agreed.
        coming: names of the sites that are going to join.
    """

    made: int
    frozen: bool
    _lock: threading.RLock
    _ended: threading.Event
    _outcome: Outcome | None

    def __init__(self) -> None:
        self.opens: Callable[[], Comm] | None = None
        self.coming: Sequence[str] = ()
        self._pauses_at: int | None = None
        self._turns_at: int | None = None

    @property
    def goes_on(self) -> GoesOn | None:
        """Sites that go on without the others, or with more; None if none do."""
        return None if self._outcome is None else self._outcome.goes_on

    def _begin_to_go_on(self, comm: Comm) -> None:
        """Begins at once, also while the loop computes, because the others wait."""
        if (found := self.goes_on) is not None:
            self.opens = comm.go_on(found.sites, found.coming)

    def _refuse_frozen(self) -> None:
        if self.frozen:
            raise ExchangeError("the other sites gave up", kind=Failure.CLOSED)

    def pauses(self) -> int:
        """Pauses after the next step until the join step is agreed.

        Returns:
            Number of steps made at the first call.
        """
        with self._lock:
            if self._pauses_at is None:
                self._pauses_at = self.made + 1
            return self._pauses_at - 1

    def turns(self, made: int, coming: Sequence[str]) -> None:
        """Sets the join step: these sites join after `made` steps."""
        with self._lock:
            self._turns_at, self.coming = made, tuple(coming)

    def is_turn(self, comm: Comm) -> bool:
        """True if no step must begin before other sites join; waits until that is known.

        Raises:
            ExchangeError: it does not become known: a site is gone, or late.
        """
        board, until = comm.board, time.monotonic() + comm.patience_s
        while self._is_paused and board is not None:
            gone = list(filter(board.is_gone, range(comm.world_size)))
            if gone and board.slot(GOING_ON) is None:  # else they have gone on with the new sites
                raise ExchangeError(Failure.CLOSED.value, gone, kind=Failure.CLOSED)
            if time.monotonic() > until:
                told = "the sites do not agree on when others take part"
                raise ExchangeError(told, kind=Failure.LOCAL)
            time.sleep(_POLL_S)
        return self._turns_at is not None and self.made >= self._turns_at and not self.frozen

    @property
    def _is_paused(self) -> bool:
        with self._lock:
            unknown = self._pauses_at is not None and self._turns_at is None
            return unknown and self.made >= (self._pauses_at or 0) and not self.frozen

    def turn(self, comm: Comm) -> None:
        """Goes on with more sites, once all have made the same steps.

        Raises:
            ExchangeError: it cannot, or the others go on in another way.
        """
        with self._lock:
            self._refuse_frozen()
            self.frozen = True
        board, everybody = comm.board, range(comm.world_size)
        assert board is not None
        try:
            text = board.first(GOING_ON, GoesOn.proposed(self.made, everybody, self.coming))
            goes_on = GoesOn.of(text, comm.rank, self.made)
            self._outcome = Outcome(Findings(()), goes_on=goes_on)
            self._begin_to_go_on(comm)
        except BoardGoneError as error:
            self._outcome = Outcome(Findings((), doubt=str(error)))
        finally:
            self._ended.set()
        if self.opens is None or not (self.goes_on and self.goes_on.coming):
            self._refuse_frozen()
