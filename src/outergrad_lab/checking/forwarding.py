"""Sites that apply a step once they have all its messages, and keep these for others.

Each site reports an applied step by a vote, for which nobody waits before the end of the next step,
or implicitly by its messages of the next step (`implying.py`). The step is kept until all sites
have reported it. Where a site is lost, the remaining sites agree (`agreement.py`): if one of them
has applied a step, all others get it. A second program of each site takes part in that even while
the first computes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from outergrad.comm.failure_report import FailureReport
from outergrad.commit.agreement import TROUBLE, Agreement, Outcome
from outergrad.commit.lost import standing_of
from outergrad.core.errors import ExchangeError, Failure
from outergrad_lab.checking.agreement import CALL_S, agreed, farewell_key
from outergrad_lab.checking.network import Network, Store, StoreGoneError
from outergrad_lab.checking.site import MESSAGES, LeftError, Site, SiteLost
from outergrad_lab.checking.trial import Trial
from outergrad_lab.checking.world import FOREVER, Process, Waiting

_AGAIN, _ANSWERS, _VOTES = 1, 2, 3
"""Lanes: requests for a damaged message, messages sent again, and votes on applied steps."""


class ForwardingSite(Site):
    """A site of the retain-and-forward protocol."""

    blames_itself = True

    def __init__(self, process: Process, network: Network, store: Store, trial: Trial) -> None:
        super().__init__(process, network, store, trial)
        self._kept: tuple[int, frozenset[int]] | None = None
        self._frozen, self._sent = False, False
        self._outcome: Outcome | None = None
        network.posted.add(_VOTES)

    def program(self) -> Waiting[None]:
        """Runs the training beside programs that answer requests and watch for aborts."""
        self.process.start(self._answer_requests())
        self.process.start(self._watch())
        yield from super().program()

    # -- the first program ------------------------------------------------------------------------

    def step(self) -> Waiting[None]:
        """Exchanges the messages of a step, and applies it once all are there."""
        step, began = self.ending.applied, self.world.now
        try:
            parts = yield from self._exchange(step)
            yield from self._refuse_if_given_up(began)
        except ExchangeError as error:
            yield from self._end_by(error)
            return
        if self._frozen:
            yield from self._end_by(None)
            return
        self._kept, self._sent = (step, frozenset(parts)), False
        self.apply(step, parts)
        yield from self._tell(step)

    def _tell(self, step: int) -> Waiting[None]:
        """Sends the vote on an applied step."""
        with suppress(ExchangeError):  # the next step finds it closed
            yield from self.send(_VOTES, step)

    def _exchange(self, step: int) -> Waiting[set[int]]:
        if self._frozen:
            raise ExchangeError("the others gave up", kind=Failure.CLOSED)
        self._sent = True
        yield from self.send(MESSAGES, step)
        came = yield from self.receive_all(MESSAGES)
        for other, number in came.items():
            if number != step:
                raise ExchangeError(f"a message of step {number}")
            if self.is_damaged(step, other):
                yield from self._ask_again(other, step)
        yield from self._count(step)
        return {self.rank, *came}

    def _count(self, steps: int) -> Waiting[None]:
        """Receives the votes on the step before; after that nobody needs it any more."""
        if steps == 0:
            return
        votes = yield from self.receive_all(_VOTES)
        if any(step != steps - 1 for step in votes.values()):
            raise ExchangeError("a vote on another step")
        if not self._frozen:
            self._kept = None

    def _ask_again(self, other: int, step: int) -> Waiting[None]:
        self.note(f"asks site {other} again")
        self.network.send(self.rank, other, _AGAIN, step)
        yield from self._receive(_ANSWERS, other)

    def _refuse_if_given_up(self, began: float) -> Waiting[None]:
        """Raises if the others aborted while this site stood still."""
        if self.world.now - began < self.patience_s / 2:
            return
        try:
            look = lambda: TROUBLE in self.store.values  # noqa: E731
            if (yield from self.store.call(self.process, look, CALL_S)):
                raise ExchangeError("the others gave up", kind=Failure.CLOSED)
        except StoreGoneError:
            return

    def settle(self) -> Waiting[None]:
        """Ends once all sites have reported that they applied all steps."""
        steps = self.ending.applied
        try:
            yield from self._hear_of_ends(steps)
        except ExchangeError as error:
            yield from self._end_by(error)
        if self._frozen:
            yield from self._end_by(None)
        self._kept = None
        yield from self._leave_at_end(FailureReport(steps, made=steps, ended="session"))
        if self._frozen:
            yield from self._end_by(None)
        if self.rank == self.store.host:
            yield from self._stay()

    def _stay(self) -> Waiting[None]:
        """Keeps this site's store for the others, who may need it to see that all are done."""
        until, keys = self.world.now + CALL_S, [farewell_key(other) for other in self.others]
        while self.world.now < until and not all(key in self.store.values for key in keys):
            yield until

    def _hear_of_ends(self, steps: int) -> Waiting[None]:
        for other in self.others:
            yield from self._hear_of_end(other, steps)

    def _hear_of_end(self, other: int, steps: int) -> Waiting[None]:
        """Receives a site's vote on the last step, or its farewell if it ended before."""
        try:
            vote = yield from self._receive(_VOTES, other)
        except ExchangeError as error:
            if error.kind != Failure.CLOSED:
                raise
            word = yield from self._word_of(other)
            vote = word.made - 1 if word is not None and word.ended == "session" else None
            if vote is None:
                raise
        if vote != steps - 1:
            raise ExchangeError("a vote on another step")

    def _word_of(self, other: int) -> Waiting[FailureReport | None]:
        """Reads the farewell that another site has left in the store, if any."""
        look = lambda: self.store.values.get(farewell_key(other))  # noqa: E731
        try:
            text = yield from self.store.call(self.process, look, CALL_S)
        except StoreGoneError:
            return None
        return None if text is None else FailureReport.of(text)

    def end_after(self, error: Exception) -> Waiting[None]:
        """Leaves a farewell with the number of steps if the program raised an error."""
        if isinstance(error, LeftError) and not self._frozen:
            made = self.ending.applied
            yield from self._leave_at_end(
                FailureReport(made, made=made, ended="process", why="no rows")
            )

    def _leave_at_end(self, word: FailureReport) -> Waiting[None]:
        """Leaves a farewell, then joins the agreement if others have aborted meanwhile."""
        leave = lambda: self.store.set(farewell_key(self.rank), word.text())  # noqa: E731
        look = lambda: TROUBLE in self.store.values  # noqa: E731
        try:
            yield from self.store.call(self.process, leave, CALL_S)
            trouble = yield from self.store.call(self.process, look, CALL_S)
        except StoreGoneError:
            return
        if trouble and not self._frozen:
            yield from self._agree(None)

    def _end_by(self, error: ExchangeError | None) -> Waiting[None]:
        """Aborts with the state on which all remaining sites agree.

        Raises:
            SiteLost: always.
        """
        if not self._frozen:
            yield from self._agree(error)
        while self._outcome is None:
            yield FOREVER
        found = self._outcome.findings
        self.ending.certain, self.ending.may_differ = found.certain, found.may_differ
        self.ending.lost = found.lost
        if self._outcome.content is not None:
            self.apply(self.ending.applied, set(self._outcome.content))
        raise SiteLost

    # -- both programs ----------------------------------------------------------------------------

    def _agree(self, error: ExchangeError | None) -> Waiting[None]:
        """Agrees with the others; from here on this site applies only what all agree on."""
        self._frozen, made = True, self.ending.applied
        word = FailureReport(made) if error is None else standing_of(error, made)
        waited_s = max(word.waited_s, self.waits_s)
        word = replace(word, made=made, sent=self._sent, waited_s=waited_s)
        self.note(f"gives up: {word}")
        own = self.rank, self.trial.sites, self.store.host, self.patience_s
        clock, closes = lambda: self.world.now, lambda: self.network.close_all(self.rank)
        how = self._kept_of, clock, closes, None, lambda parts: str(sorted(parts))
        agreement = Agreement(*own, word, *how)
        self._outcome = yield from agreed(self.store, self.process, agreement)
        self.process.wake()

    def _kept_of(self, steps: int) -> frozenset[int] | None:
        return self._kept[1] if self._kept is not None and self._kept[0] == steps - 1 else None

    # -- the second program -----------------------------------------------------------------------

    def _watch(self) -> Waiting[None]:
        """Notices that others have aborted, even while this site computes."""
        changes = 0
        while not self._frozen:
            while self.store.changes == changes:
                yield FOREVER
            changes = self.store.changes
            look = lambda: TROUBLE in self.store.values  # noqa: E731
            try:
                trouble = yield from self.store.call(self.process, look, CALL_S)
            except StoreGoneError:
                continue
            if trouble and not self._frozen and not self.ending.done:
                yield from self._agree(None)

    def _answer_requests(self) -> Waiting[None]:
        while True:
            for other in self.others:
                asked = self.network.inbox(self.rank, other, _AGAIN)
                while asked:
                    asked.popleft()
                    if other not in self.network.closed[self.rank]:
                        self.network.send(self.rank, other, _ANSWERS, None)
            yield FOREVER
