"""A site's line to the hub, whose messages survive the end of any stream."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from outergrad._printable import printable
from outergrad.core.errors import ExchangeError, Failure
from outergrad.core.sites import Site
from outergrad.star.arrivals import Arrival, Early
from outergrad.star.frames import (
    ALL,
    AWAY,
    DATA,
    LANES,
    MOST_LANES,
    Frame,
    Hello,
    Kind,
    Place,
    Questions,
    Stream,
    Welcome,
    packed,
    unpacked,
)
from outergrad.star.groups import asked_for
from outergrad.star.news import Snapshot
from outergrad.star.pipe import Pipe
from outergrad.star.window import WINDOW_BYTES, Outgoing, Window, ack_of, cost_of, heard_in

_BATCH_BYTES = 1 << 16
_ACK_BYTES = WINDOW_BYTES // 8
_LONGEST_LANE = len(str(MOST_LANES))
_WAIT_S = 1.0
"""Longest wait, seconds, after which a thread looks again."""


class Line:
    """The state of a process in a run, independent of the network (see `dial.py`).

    Args:
        after: number of the run from which some of its sites go on; 0 to begin anew.
        sites: names of the sites that go on.

    Attributes:
        rank: of this site, once the hub has answered.
        names: of all sites, in rank order, once the hub has answered.
        run: number of the run, once the hub has answered.
        epoch: number of earlier runs that this one continues.
    """

    def __init__(self, after: int = 0, sites: Sequence[str] = ()) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.rank, self.names, self.run, self.epoch = 0, (), 0, 0
        self._after, self._sites = after, tuple(sites)
        self.instance = secrets.token_hex(16)
        self._pipe, self._window = Pipe(), Window()
        self._out = Outgoing(self._pipe, self._window)
        self._numbers: Counter[int] = Counter()
        self._arrivals: defaultdict[tuple[int, int], Arrival] = defaultdict(
            lambda: Arrival(self.named)
        )
        self._early = Early()
        self._letters: dict[int, Callable[[Frame], None]] = {}
        self._questions = Questions()
        self._owed, self._hurried = 0, False
        self._moved_at = 0.0
        self.failure: ExchangeError | None = None
        """Error after which nothing can come any more."""
        self.is_ready = False
        self.invitation: tuple[int, Sequence[str]] | None = None
        """Run that admits this site, and the names of the sites that then take part."""
        self.has_left = False
        self.gone: dict[int, str] = {}
        """Reasons why sites left or are lost, by rank."""
        self.texts: dict[tuple[int, str], str] = {}
        """Texts that sites have left, by rank and name."""
        self._away = frozenset[int]()
        self._down_since: float | None = time.monotonic()
        self._obstacle = ""
        self._waits: tuple[float, float] | None = None

    # -- texts, questions and farewells, outside of collectives ---------------------------------

    def tell(self, kind: Kind, payload: bytes, number: int = 0) -> None:
        """Sends the hub a frame outside of collectives."""
        with self.changed:
            told = Frame(kind, payload, run=self.run, number=number, sender=self.rank)
            self._pipe.push(told)
            self.changed.notify_all()

    def leave_text(self, name: str, text: str) -> None:
        """Leaves a text for all other sites, under a name."""
        with self.changed:
            self.texts[self.rank, name] = text
            self.tell(Kind.TEXT, f"{name}\n{text}".encode())

    def ask(self, kind: Kind, payload: bytes, limit_s: float | None) -> bytes | None:
        """Asks the hub something; returns its answer, or None if there is none in time.

        Args:
            kind: of the question.
            payload: of the question.
            limit_s: timeout, seconds; None to wait until the hub is out of reach for good.
        """
        with self.changed:
            questions = self._questions
            number = questions.begin()
            self.tell(kind, payload, number)
            self.changed.wait_for(lambda: questions.is_answered(number) or self._is_cut, limit_s)
            return questions.end(number)

    def why_unanswered(self, limit_s: float | None, told: str = "the hub has not answered") -> str:
        """Returns why a question has no answer: the failure of this line, or else what is told.

        Args:
            limit_s: timeout of the question, seconds; None without one.
            told: what has not happened in this time.
        """
        if self.failure is not None:
            return str(self.failure)
        return told if limit_s is None else f"{told} within {limit_s:g} s"

    def count(self) -> int:
        """Returns a number that nothing else has that this site writes on the board."""
        with self.changed:
            return self._questions.count()

    def open_group(self, name: str, ranks: Sequence[int], limit_s: float) -> int:
        """Opens a group of sites, all of which have to open it; returns its lane.

        Args:
            name: of the group, the same at all its sites and of no other group of the run.
            ranks: of its sites, ascending.
            limit_s: timeout, seconds.

        Raises:
            ExchangeError: the hub does not answer, or has no lane for it, or other sites have
                opened another group.
        """
        answer = self.ask(Kind.GROUP, asked_for(name, ranks), limit_s)
        if answer is None:
            raise ExchangeError(self.why_unanswered(limit_s), kind=Failure.TRANSPORT)
        if not answer.isdigit() or len(answer) > _LONGEST_LANE or int(answer) >= MOST_LANES:
            told = printable(answer.decode(errors="replace"))
            raise ExchangeError(f"the group {name!r} cannot be opened: {told}")
        return int(answer)

    @property
    def _is_cut(self) -> bool:
        return self.failure is not None and self.failure.kind == Failure.TRANSPORT

    def leave(self) -> None:
        """Tells the others that this site has left, behind everything that it sent before."""
        with self.changed:
            if not self.has_left:
                self.has_left = True
                self._out.end(Frame(Kind.GONE, run=self.run, sender=self.rank))
            self.changed.notify_all()

    def abandon(self) -> None:
        """Drops the messages that have not been sent yet."""
        with self.changed:
            self._out.clear()

    @contextmanager
    def waits_for_others(self, wait_s: float) -> Iterator[None]:
        """Context in which this site waits for other sites, up to `wait_s` seconds."""
        self._waits = time.monotonic(), wait_s
        try:
            yield
        finally:
            self._waits = None

    def wait_for(self, done: Callable[[], bool], wait_s: float) -> bool:
        """Waits until `done()` holds, or nothing can come any more; returns whether it holds."""
        with self.changed:
            self.changed.wait_for(lambda: done() or self.failure is not None, wait_s)
            return done()

    def flush(self, patience_s: float) -> None:
        """Waits until the hub has all that this site sent, as long as something moves.

        Args:
            patience_s: longest time, seconds, in which nothing moves.
        """
        began = time.monotonic()
        with self.changed:
            while self.is_ready and not (self.is_flushed or self.has_failed):
                left = max(began, self._moved_at) + patience_s - time.monotonic()
                if left <= 0:
                    return
                self.changed.wait(min(left, _WAIT_S))

    @property
    def is_flushed(self) -> bool:
        """True if the hub has all that this site sent."""
        return self._out.is_empty

    @property
    def has_failed(self) -> bool:
        """True if nothing can come any more."""
        return self.failure is not None

    # -- for streams -------------------------------------------------------------------------------

    def named(self, sender: int) -> str:
        """Returns the name of a site, or of the hub."""
        if sender == ALL:
            return "the hub"
        return self.names[sender] if sender < len(self.names) else Site(sender).called

    def hello(self) -> bytes:
        """Returns the first message on a stream."""
        with self.changed:
            run = self.run if self.is_ready else 0
            going_on = self._after, self._sites
            return Hello(self.instance, run, self._pipe.heard, *going_on).frame().packed()

    def messages(self, stream: Stream) -> Iterator[bytes]:
        """Yields the messages to send on a stream, until it ends."""
        yield self.hello()
        while (message := self._next(stream)) is not None:
            yield message

    def _next(self, stream: Stream) -> bytes | None:
        def is_due() -> bool:
            has_something = stream.is_welcome and (self._out.is_due or self._owes_ack)
            return stream.is_over or has_something

        with self.changed:
            self.changed.wait_for(is_due)
            if stream.is_over:
                return None
            frames = [ack_of(self._pipe.heard), *self._out.batch(_BATCH_BYTES)]
            self._owed, self._hurried = 0, False
        return packed(frames)

    @property
    def _owes_ack(self) -> bool:
        return self._hurried or self._owed >= _ACK_BYTES

    def take(self, stream: Stream, message: bytes) -> None:
        """Takes a message that came on a stream.

        Raises:
            MalformedError: no hub sends such a message.
        """
        frames = unpacked(message)
        with self.changed:
            for frame in frames:
                self._take(stream, frame)
            self.changed.notify_all()

    def _take(self, stream: Stream, frame: Frame) -> None:
        if frame.kind == Kind.WELCOME:
            self._welcome(stream, Welcome.of(frame))
        elif frame.kind == Kind.ACK:
            self._window.update(frame)
            if self._pipe.acknowledge(heard_in(frame)):
                self._moved_at = time.monotonic()
        elif self._pipe.accept(frame):
            self._owed += cost_of(frame)
            self._hurried = self._hurried or frame.kind not in DATA
            self._hear(frame)

    def _welcome(self, stream: Stream, welcome: Welcome) -> None:
        self.rank, self.names, self.run = welcome.rank, tuple(welcome.names), welcome.run
        self.epoch = welcome.epoch
        self._pipe.resume(welcome.heard)
        stream.is_welcome = True
        self._down_since, self._obstacle = None, ""

    def _hear(self, frame: Frame) -> None:
        if frame.kind == Kind.LETTER:
            if take := self._letters.get(frame.lane):
                take(frame)
        elif frame.kind in DATA:
            arrival = self._arrivals.get((frame.lane, frame.number))
            if (arrival and arrival.is_expected) or self._early.takes(frame):
                self._arrivals[frame.lane, frame.number].take(frame)
        elif frame.kind == Kind.ANSWER:
            self._questions.take(frame)
        elif frame.kind == Kind.INVITED:
            after, sites = json.loads(bytes(frame.payload))
            self.invitation = after, sites
        elif frame.kind == Kind.READY:
            self.is_ready, self._away = True, frozenset()
        elif frame.kind == Kind.GONE:
            self.gone[frame.sender] = printable(_text(frame))
        elif frame.kind == Kind.TEXT:
            name, _, text = _text(frame).partition("\n")
            if (frame.sender, name) == (ALL, AWAY):
                self._away = _ranks_in(text, len(self.names))
            else:
                self.texts[frame.sender, name] = text
        elif frame.kind == Kind.VOID:
            self._void(frame)
        elif frame.kind == Kind.FAULT:
            sites = () if frame.sender == ALL else (frame.sender,)
            self.failure = self.failure or ExchangeError(printable(_text(frame)), sites)

    def _void(self, frame: Frame) -> None:
        """Ends the wait for a sum that a site which is gone adds nothing to."""
        arrival = self._arrivals.get((frame.lane, frame.number))
        if arrival is not None:
            told = f"{self.named(frame.sender)} is gone: {printable(_text(frame))}"
            arrival.fail(_closed(told, [frame.sender]))

    def break_off(self, stream: Stream) -> None:
        """Notes that a stream has ended."""
        with self.changed:
            stream.is_over = True
            self._down_since = self._down_since or time.monotonic()
            self.changed.notify_all()

    # -- for people ------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Returns the state of this line now, for people."""
        with self.changed:
            return Snapshot(
                at=time.monotonic(),
                names=self.names,
                rank=self.rank,
                is_ready=self.is_ready,
                epoch=self.epoch,
                away=self._away,
                gone=dict(self.gone),
                down_since=self._down_since,
                obstacle=self._obstacle,
                waits=self._waits,
            )

    def hinder(self, why: str) -> None:
        """Notes why the hub is not reached, while the line is down."""
        with self.changed:
            if self._down_since is not None:
                self._obstacle = why

    def fail(self, why: str) -> None:
        """Notes that the hub is out of reach for good."""
        with self.changed:
            told = ExchangeError(why, kind=Failure.TRANSPORT)
            self.failure = self.failure or told
            self.changed.notify_all()

    # -- for letters -------------------------------------------------------------------------------

    def take_letters(self, lane: int, take: Callable[[Frame], None] | None) -> None:
        """Gives the parts of letters that come in a lane to a function, which holds the lock.

        Where there is none, they are dropped: nobody has asked for them.

        Args:
            lane: of two sites.
            take: the function; None to drop what comes from now on.

        Raises:
            ExchangeError: the hub has given this lane to other lines of this site before.
        """
        with self.changed:
            if take is None:
                self._letters.pop(lane, None)
                return
            if lane in self._letters:
                raise ExchangeError(f"the hub has opened lane {lane} twice", kind=Failure.TRANSPORT)
            self._letters[lane] = take

    def why_closed(self, sender: int) -> str:
        """Returns why nothing can come of a site any more; "" while something may."""
        with self.changed:
            if sender in self.gone:
                return f"it is gone: {self.gone[sender]}"
            if self.failure is not None:
                return str(self.failure)
            return "this site has left" if self.has_left else ""

    # -- for collectives ---------------------------------------------------------------------------

    def place(self, kind: Kind, lane: int, dtype: int = 0) -> Place:
        """Returns the place of the next collective in a lane."""
        with self.changed:
            self._numbers[lane] += 1
            return Place(kind, lane, self._numbers[lane], dtype)

    def expect(self, place: Place, sizes: Mapping[int, int]) -> Arrival:
        """Prepares to receive the messages of a collective, of `sizes` bytes from each sender."""
        with self.changed:
            arrival = self._arrivals[place.lane, place.number]
            self._early.ask(sizes, arrival.early_bytes())
            arrival.expect(place.kind, sizes)
            return arrival

    def send(self, place: Place, payload: bytes, recipient: int = ALL) -> None:
        """Starts to send a message.

        Args:
            place: of the collective.
            payload: bytes, which must not change any more.
            recipient: rank of a single recipient, if it is not for all.
        """
        with self.changed:
            self._raise_failure()
            head = Frame(
                kind=place.kind,
                lane=place.lane,
                dtype=place.dtype,
                run=self.run,
                number=place.number,
                sender=self.rank,
                recipient=recipient,
            )
            self._out.add(head, payload, grows=place.kind == Kind.GATHER and len(self.names) > 2)
            self.changed.notify_all()

    def wait(
        self, place: Place, arrival: Arrival, patience_s: float, since: Patience | None = None
    ) -> dict[int, np.ndarray]:
        """Waits for all messages of a collective, as long as something moves, and returns them.

        Args:
            place: of the collective.
            arrival: of its messages.
            patience_s: longest time, seconds, in which nothing moves.
            since: the wait so far; None if it begins now.

        Raises:
            ExchangeError: a message will not come.
        """
        began, since = time.monotonic(), since or Patience(arrival)
        with self.changed:
            try:
                while missing := self._missing(place, arrival):
                    left = since.left(self._moved_at, patience_s)
                    if left <= 0:
                        self._raise_timeout(place, missing)
                    self.changed.wait(min(left, _WAIT_S))
            except ExchangeError as error:
                error.waited_s = time.monotonic() - began
                raise
            finally:
                self._arrivals.pop((place.lane, place.number), None)
            return arrival.rooms()

    def is_due(self, place: Place, arrival: Arrival, patience_s: float, since: Patience) -> bool:
        """True if `wait` would end at once, with the messages or with an error."""
        with self.changed:
            try:
                missing = self._missing(place, arrival)
            except ExchangeError:
                return True
            return not missing or since.left(self._moved_at, patience_s) <= 0

    def _missing(self, place: Place, arrival: Arrival) -> set[int]:
        """Returns the senders whose message is not complete; raises if one will not come."""
        if missing := arrival.missing():
            self._raise_failure()
            # The hub voids a group's sum if a site is gone that adds nothing to it.
            self._raise_gone(missing if place.lane < LANES else missing - {ALL})
            self._raise_refused(missing)
        return missing

    def has_come(self, lane: int, number: int, sender: int) -> bool:
        """True if a part of a message has come that this site does not expect yet."""
        with self.changed:
            arrival = self._arrivals.get((lane, number))
            return arrival is not None and arrival.came_from(sender)

    def _raise_gone(self, missing: set[int]) -> None:
        gone = sorted(self.gone if ALL in missing else missing & self.gone.keys())
        if gone:
            told = "; ".join(f"{self.named(site)} is gone: {self.gone[site]}" for site in gone)
            raise _closed(told, gone)

    def _raise_timeout(self, place: Place, missing: set[int]) -> None:
        """Raises an error about the sites that are late, or the hub if this site's line is down."""
        if self._down_since is not None:
            why = self._obstacle or "this site's line to it is down"
            raise ExchangeError(f"the hub is out of reach: {why}", kind=Failure.TRANSPORT)
        sites = self._late_for(place) if ALL in missing else sorted(missing)
        raise ExchangeError(Failure.TIMEOUT.value, sites, kind=Failure.TIMEOUT)

    def _late_for(self, place: Place) -> list[int]:
        """Asks the hub which sites it waits for in a sum; returns none if it does not answer."""
        answer = self.ask(Kind.LATE, f"{place.lane} {place.number}".encode(), _WAIT_S)
        return [rank for rank in map(int, (answer or b"").split()) if rank < len(self.names)]

    def _raise_refused(self, missing: set[int]) -> None:
        if refused := sorted(missing & self._early.refused):
            who = ", ".join(map(self.named, refused))
            raise ExchangeError(f"{who} sent far more than this site has asked for", refused)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.has_left:
            raise ExchangeError("this site has left", kind=Failure.LOCAL)


class Patience:
    """The time since something last moved in a wait, while this site waits.

    Args:
        arrival: of the messages.
    """

    def __init__(self, arrival: Arrival) -> None:
        self._arrival, self._seen, self._at = arrival, arrival.changes, time.monotonic()

    def left(self, moved_at: float, patience_s: float) -> float:
        """Returns the seconds until the wait is too long.

        Args:
            moved_at: when the hub last acknowledged messages of this site: movement, too.
            patience_s: longest time in which nothing moves.
        """
        now = time.monotonic()
        if self._arrival.changes != self._seen:
            self._seen, self._at = self._arrival.changes, now
        return max(self._at, moved_at) + patience_s - now


def _closed(told: str, sites: Sequence[int]) -> ExchangeError:
    return ExchangeError(f"{Failure.CLOSED.value}: {told}", sites, kind=Failure.CLOSED)


def _text(frame: Frame) -> str:
    return bytes(frame.payload).decode(errors="replace")


def _ranks_in(text: str, sites: int) -> frozenset[int]:
    """Reads ranks in a text of the hub; none if it cannot be read."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return frozenset()
    listed = found if isinstance(found, list) else []
    return frozenset(one for one in listed if type(one) is int and 0 <= one < sites)
