"""A site that goes by the library's own commit machine, in a simulated world.

What it keeps, when it votes, waits, gives up, goes on with fewer sites or lets others join: that is
`outergrad.commit.machine`, and the protocols `agreement`, `digests` and `joining` beside it.
This file performs the actions: it sends, receives, and calls the store. Where a step waits for its
votes, and where not, the trial says.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from outergrad.comm.failure_report import FailureReport
from outergrad.commit.agreement import TROUBLE, Agreement, Outcome
from outergrad.commit.digests import AllHaveMade, Digests
from outergrad.commit.joining import hear_of_coming, is_join_due, joined
from outergrad.commit.lost import standing_of
from outergrad.commit.machine import (
    IS_OVER,
    Action,
    CommitMachine,
    CommitState,
    Event,
    KeptStep,
    must_look,
)
from outergrad.commit.peer_requests import MADE, Question, asked_slot
from outergrad.core.errors import BoardGoneError, ExchangeError, Failure
from outergrad_lab.checking.board import CALL_S, farewell_key, performed
from outergrad_lab.checking.hub import Epoch, History, Hub
from outergrad_lab.checking.network import StoreGoneError
from outergrad_lab.checking.site import MESSAGES, LeftError, Site, SiteLost
from outergrad_lab.checking.trial import Trial
from outergrad_lab.checking.world import FOREVER, Process, Waiting

_AGAIN, _ANSWERS, _VOTES, _HANDOVER = 1, 2, 3, 4
"""Lanes: requests for a damaged message, messages sent again, votes, and the state of training."""
_STAYS_S = 2.0


@dataclass(frozen=True)
class _Result:
    """Result of a step, as another site may get it; without parts it is the decision alone."""

    step: int
    parts: frozenset[int] | None

    def digest(self) -> str:
        """Returns the same text for equal results."""
        return f"{self.step} {None if self.parts is None else sorted(self.parts)}"


@dataclass
class _Joining:
    """The join barrier of a site in one membership; `coming` are the names of those that join."""

    machine: CommitMachine
    coming: tuple[str, ...] = ()

    @property
    def made(self) -> int:
        return self.machine.made

    def come(self) -> int:
        return self.machine.come()

    def set_join(self, told: int, coming: Sequence[str]) -> None:
        self.machine.set_join(told)
        self.coming = tuple(coming)

    def begin(self) -> tuple[Action, ...]:
        return self.machine.begin()


class CommittingSite(Site):
    """A site of the library's protocol.

    Attributes:
        has_members: whether it knows changes of the membership.
        stays: whether it waits, if it holds the store, until the others have read.
    """

    blames_itself = has_members = stays = True

    def __init__(self, process: Process, hub: Hub, trial: Trial) -> None:
        super().__init__(process, trial)
        self._hub, self._votes, self.machine = hub, KeptStep(trial.every), CommitMachine()
        self._history: History = ()

    # -- memberships ------------------------------------------------------------------------------

    def _enter(self, epoch: Epoch) -> None:
        """Begins a run with the sites of an epoch, in which no step is made yet."""
        self.epoch, self.machine = epoch, CommitMachine()
        self._joining = _Joining(self.machine)
        self.outcome: Outcome | None = None
        self._moves = False
        self._votes.restart()
        self._kept: _Result | None = None
        self._digests: Digests | None = None
        self._unread: Digests | None = None
        self._parts, self._asked = frozenset[int](), 0
        rank = self.ending.ranks[epoch.number] = epoch.names.index(self.name)
        self.ending.epoch = epoch.number
        self.enter(epoch.network, epoch.store, rank, len(epoch.names))
        self.network.posted |= {_VOTES, _HANDOVER}
        if self.name not in epoch.coming:
            self._hub.begins(epoch, self.name, self._history)
        self.process.start(self._watch(epoch))
        self.process.start(self._answer_requests(epoch))

    def _move(self) -> Waiting[None]:
        """Goes on with the members that were agreed on; gives what it has to those that come."""
        outcome = self.outcome
        assert outcome is not None
        assert outcome.goes_on is not None
        going_on = outcome.goes_on
        self.ending.left_after[self.epoch.number] = len(self._history)
        epoch = self._hub.go_on(self.epoch, going_on.sites, going_on.coming)
        if self.name not in epoch.names:  # two opinions, which the hub notes
            raise SiteLost
        self._enter(epoch)
        self.note(f"goes on in epoch {self.epoch.number} of {self.epoch.names}")
        if self.epoch.coming:
            yield from self._hand_over()

    def _hand_over(self) -> Waiting[None]:
        try:
            yield from self.send(_HANDOVER, self._history)
            came = yield from self.receive_all(_HANDOVER)
        except ExchangeError as error:
            if self.name in self.epoch.coming:  # `og.distribute` raises there
                yield from self._agree(error)
                raise LeftError from error
            yield from self._end_by(error)
            return
        if self.name in self.epoch.coming:
            self.ending.history = self._history = came[0]  # type: ignore[assignment]
            self.ending.applied = len(self._history)
            self._hub.begins(self.epoch, self.name, self._history)

    def _join(self) -> Waiting[None]:
        """Waits to be admitted, and for what the members have."""
        self._hub.waits(self.name)
        until = self.world.now + self.trial.patient_s
        while not any(self.name in epoch.coming for epoch in self._hub.epochs):
            if self.world.now > until or self.name in self._hub.unreachable:
                raise LeftError  # the others have ended, or are stuck themselves
            yield self.world.now + self.patience_s / 4
        self._enter(next(one for one in self._hub.epochs if self.name in one.coming))
        yield from self._hand_over()

    def arrive(self) -> Waiting[None]:
        """Takes its place among the sites; one that comes later joins the others first."""
        later = self.name - self.trial.sites
        if later < 0:
            self._enter(self._hub.epochs[0])
        else:
            yield from self.process.sleep(self.trial.comes[later])
            yield from self._join()

    # -- one step ---------------------------------------------------------------------------------

    def step(self) -> Waiting[None]:
        """Makes a step, or moves to another membership."""
        try:
            if (yield from self._is_admitting()):
                return
            parts = yield from self._exchange()
        except ExchangeError as error:
            yield from self._end_by(error)
            return
        self._apply(parts)

    def _is_admitting(self) -> Waiting[bool]:
        """Moves between two steps, if others gave up or some join before this step."""
        if self.machine.state in IS_OVER:
            yield from self._end_by(None)
            return True
        if self.trial.min_sites is None:
            return False
        try:
            about = len(self.epoch.names), self.patience_s, lambda: self.world.now
            if not (
                yield from performed(self.store, self.process, is_join_due(self._joining, *about))
            ):
                return False
            yield from self._settle_with_all()
            if Action.PROPOSE not in self.machine.on(Event.JOINS):
                raise ExchangeError("the others gave up", kind=Failure.CLOSED)
        except BoardGoneError as error:
            raise ExchangeError(str(error), kind=Failure.LOCAL) from error
        asking = joined(self.made, self.rank, len(self.epoch.names), self._joining.coming)
        self._conclude((yield from performed(self.store, self.process, asking)))
        assert self.outcome is not None
        if not (self._moves and self.outcome.goes_on and self.outcome.goes_on.coming):
            raise ExchangeError("the others gave up", kind=Failure.CLOSED)
        yield from self._move()
        return True

    def _exchange(self) -> Waiting[set[int]]:
        """Goes through the messages of a step, and makes it; returns whose messages it has."""
        step, began, waits = len(self._history), self.world.now, self._waits_for_votes
        self._parts, self.longest_wait_s = frozenset(), 0.0
        if not waits:
            self._sends()
        yield from self.send(MESSAGES, step)
        came = yield from self.receive_all(MESSAGES)
        for other, number in came.items():
            if number != step:
                raise ExchangeError(f"a message of step {number}")
            if self.is_damaged(step, other):
                yield from self._ask_again(other, step)
        parts = {self.rank, *came}
        self._parts = frozenset(parts)
        yield from self._perform(self._votes.on(Event.ARRIVED))
        if waits:
            self._sends()
            yield from self.send(_VOTES, self.made)
            yield from self._count(self.made)
        yield from self._refuse_if_given_up(began)
        actions, self.longest_wait_s = self.machine.make(), 0.0
        if actions:
            raise ExchangeError("the others gave up", kind=Failure.CLOSED)
        if waits:
            self._kept = _Result(step, None)
            yield from self._perform(self._votes.on(Event.DECIDED))
            return parts
        actions = self._votes.make()
        if Action.KEEP in actions:
            self._kept = _Result(step, self._parts)
        if Action.CAST in actions:
            with suppress(ExchangeError):  # the next step finds it closed
                yield from self.send(_VOTES, self.made - 1)
        return parts

    @property
    def _waits_for_votes(self) -> bool:
        waits = self.trial.waits
        return waits > 0 and len(self._history) % waits == waits - 1

    def _apply(self, parts: set[int]) -> None:
        self._history += ((self.epoch.number, len(self._history)),)
        self.ending.history, self._parts = self._history, frozenset()
        self.apply(self.ending.applied, parts)

    def _sends(self) -> None:
        if self.machine.on(Event.SENDS):
            raise ExchangeError("the others gave up", kind=Failure.CLOSED)

    def _perform(self, actions: Sequence[Action]) -> Waiting[None]:
        """Performs actions on the last step."""
        if Action.COUNT in actions:
            yield from self._count(self.made - 1)
            actions = self._votes.on(Event.COUNTED)
        elif Action.COMPARE in actions:
            yield from self._compare()
            actions = self._votes.on(Event.COMPARED)
        if Action.DROP in actions and self._kept is not None and self._kept.parts is not None:
            self._kept = None  # a decision is remembered until the next one

    def _count(self, about: int) -> Waiting[None]:
        votes = yield from self.receive_all(_VOTES)
        if any(vote != about for vote in votes.values()):
            raise ExchangeError("a vote on another step")

    def _ask_again(self, other: int, step: int) -> Waiting[None]:
        self.note(f"asks site {other} again")
        self.network.send(self.rank, other, _AGAIN, step)
        yield from self.receive(_ANSWERS, other)

    def _refuse_if_given_up(self, began: float) -> Waiting[None]:
        """Raises if the others aborted while this site stood still."""
        if not must_look(self.world.now - began, self.patience_s):
            return
        with suppress(StoreGoneError):
            if (yield from self._is_in_trouble()):
                raise ExchangeError("the others gave up", kind=Failure.CLOSED)

    def _is_in_trouble(self) -> Waiting[bool]:
        look = lambda: TROUBLE in self.store.values  # noqa: E731
        return (yield from self.store.call(self.process, look, CALL_S))

    # -- the end ----------------------------------------------------------------------------------

    def settle(self) -> Waiting[None]:
        """Ends once all sites have made all steps, and says so."""
        try:
            yield from self._settle_with_all(at_end=True)
        except ExchangeError as error:
            yield from self._end_by(error, at_end=True)
        if self.machine.state in IS_OVER:
            yield from self._end_by(None, at_end=True)
        yield from self._leave_at_end(FailureReport(self.made, made=self.made, ended="session"))
        if self.machine.state in IS_OVER:
            yield from self._end_by(None, at_end=True)

    def _settle_with_all(self, *, at_end: bool = False) -> Waiting[None]:
        """Waits until all sites have made the last step, as `outergrad.session.final_barrier`."""
        try:
            yield from self._perform(self._votes.on(Event.SETTLES))
        except ExchangeError as error:
            digests = self._digests_now()
            yield from performed(self.store, self.process, digests.take_farewells())
            if error.kind != Failure.CLOSED or digests.missing:
                raise
            yield from self._perform(self._votes.on(Event.ENDED))
        if not at_end:
            yield from self._perform(self._votes.on(Event.MEETS))

    def _compare(self) -> Waiting[None]:
        """Waits until all have made as many steps, by the library's final barrier."""
        digests, sites = self._digests_now(), len(self.epoch.names)
        clock = lambda: self.world.now  # noqa: E731
        barrier = AllHaveMade(digests, self.rank, sites, self._asked, clock)
        stays_s = self.patience_s if self.stays and self.rank == self.store.host else None
        passed = barrier.passed(2 * self.patience_s, stays_s)
        try:
            yield from performed(self.store, self.process, passed)
        except BoardGoneError:  # its host has ended, or it is slow
            self.ending.compared = not digests.missing
            if digests.missing and self.trial.min_sites is not None:
                raise ExchangeError("nothing can be compared", kind=Failure.LOCAL) from None

    def _digests_now(self) -> Digests:
        if self._digests is None or self._digests.made != self.made:
            self._digests = Digests(self.rank, len(self.epoch.names), self.made, {})
        return self._digests

    def end_after(self, error: Exception) -> Waiting[None]:
        """Leaves a farewell with the number of steps if the program raised an error."""
        if not isinstance(error, LeftError) or not self.ending.ranks:
            return
        if self.machine.state not in IS_OVER:
            about: dict[str, Any] = {"ended": "process", "why": "no rows"}
            yield from self._leave_at_end(FailureReport(self.made, made=self.made, **about))

    def _leave_at_end(self, word: FailureReport) -> Waiting[None]:
        """Leaves a farewell, then joins the agreement if others have aborted meanwhile."""
        leave = lambda: self.store.set(farewell_key(self.rank), word.text())  # noqa: E731
        try:
            yield from self.store.call(self.process, leave, CALL_S)
            trouble = yield from self._is_in_trouble()
        except StoreGoneError:
            return
        if trouble and self.machine.state not in IS_OVER:
            yield from self._agree(None)

    def _end_by(self, error: ExchangeError | None, *, at_end: bool = False) -> Waiting[None]:
        """Aborts with the state on which all remaining sites agree; goes on if some do.

        Raises:
            SiteLost: this site does not go on.
        """
        epoch = self.epoch
        if self.outcome is None:
            yield from self._agree(error)
        while self.outcome is None:
            yield FOREVER, lambda: self.outcome
        self._votes.on(Event.FORGETS)
        found, content = self.outcome.findings, self.outcome.content
        if content is not None:
            self._apply(set(self._parts if content.parts is None else content.parts))
        if self._moves and not at_end and epoch is self.epoch:
            yield from self._move()
            return
        self.ending.certain, self.ending.may_differ = found.certain, found.may_differ
        self.ending.lost = found.lost
        raise SiteLost

    # -- both programs ----------------------------------------------------------------------------

    @property
    def made(self) -> int:
        """Number of steps that this site has made in this epoch."""
        return self.machine.made

    def _agree(self, error: ExchangeError | None) -> Waiting[None]:
        """Agrees with the others; from here on this site applies only what all agree on."""
        epoch, sent = self.epoch, self.machine.state is CommitState.SENT
        if Action.AGREE not in self.machine.on(Event.FAILED):
            return  # the other program does
        word = FailureReport(self.made) if error is None else standing_of(error, self.made)
        waited_s = max(word.waited_s, self.waits_s)
        word = replace(word, made=self.made, sent=sent, waited_s=waited_s)
        self.note(f"gives up: {word}")
        own = self.rank, len(epoch.names), self.store.host, self.patience_s
        network, rank = self.network, self.rank
        clock, closes = lambda: self.world.now, lambda: network.close_all(rank)
        how = self._result, clock, closes, self.trial.min_sites, _Result.digest
        asking = Agreement(*own, word, *how).reach()
        outcome = yield from performed(self.store, self.process, asking)
        self._conclude(outcome)
        self.process.wake()

    def _conclude(self, outcome: Outcome) -> None:
        self.outcome = outcome
        actions = self.machine.on(Event.PARTED if outcome.goes_on is None else Event.AGREED)
        self._moves = Action.MOVE in actions

    def _result(self, made: int) -> _Result | None:
        return self._kept if made == self.made else None

    # -- the other programs ------------------------------------------------------------------------

    def _watch(self, epoch: Epoch) -> Waiting[None]:
        """Hears of trouble, of questions and of sites that come, even while this site computes."""
        changes, waiting = 0, set[int]()
        is_new = lambda seen: epoch.store.changes != seen  # noqa: E731
        while self._is_watching(epoch):
            while epoch.store.changes == changes and not waiting & set(range(self.made + 1)):
                yield self.world.now + 0.05 if waiting else (FOREVER, partial(is_new, changes))
            changes = epoch.store.changes
            with suppress(BoardGoneError, StoreGoneError):
                if (yield from self._is_in_trouble()) and self._is_watching(epoch):
                    yield from self._agree(None)
                if self._is_watching(epoch):
                    yield from self._hear(epoch, waiting)

    def _is_watching(self, epoch: Epoch) -> bool:
        is_open = self.machine.state not in IS_OVER
        return epoch is self.epoch and is_open and not self.ending.done

    def _hear(self, epoch: Epoch, waiting: set[int]) -> Waiting[None]:
        """Answers questions for the step count, and takes part in the join barrier."""
        while (text := epoch.store.values.get(asked_slot(self._asked))) is not None:
            question = Question.of_text(text)
            if question is not None and question.place == MADE and question.by != self.rank:
                waiting.add(question.made)
            self._asked += 1
        for made in [number for number in waiting if number <= self.made]:
            waiting.discard(made)
            if made == self.made:
                self._unread = self._digests_now()
                yield from performed(epoch.store, self.process, self._unread.tell())
        if (unread := self._unread) is not None:  # the store may be gone when this site settles
            yield from performed(epoch.store, self.process, unread.look())
            if not unread.missing:
                yield from performed(epoch.store, self.process, unread.say_read())
            if not unread.missing or unread.made != self.made:
                self._unread = None
        joining, is_here = self._joining, epoch is self.epoch
        if self.trial.min_sites is not None and not joining.coming and is_here:
            heard = hear_of_coming(joining, self.rank, len(epoch.names))
            yield from performed(epoch.store, self.process, heard)

    def _answer_requests(self, epoch: Epoch) -> Waiting[None]:
        network, rank = epoch.network, self.rank
        others = [other for other in range(len(epoch.names)) if other != rank]
        inboxes = [network.inbox(rank, other, _AGAIN) for other in others]
        while epoch is self.epoch:
            for other, asked in zip(others, inboxes, strict=True):
                while asked:
                    asked.popleft()
                    if other not in network.closed[rank]:
                        network.send(rank, other, _ANSWERS, None)
            yield FOREVER, partial(any, inboxes)
