"""One run: the processes that train together, and the hub's processing of their frames."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from outergrad.star.frames import ALL, AWAY, DATA, LANES, Frame, Kind, MalformedError
from outergrad.star.groups import Groups
from outergrad.star.pending_sums import PendingSums, disagreement
from outergrad.star.pipe import Pipe
from outergrad.star.sentences import LEFT, going_on_with
from outergrad.star.slots import Slots
from outergrad.star.sums import added
from outergrad.star.values import Values
from outergrad.star.window import TEXTS, WINDOW_BYTES, Window, cost_of, heard_in

_ACK_BYTES = WINDOW_BYTES // 8
"""Bytes received after which an acknowledgement is sent by itself."""
_MOST_UNHEARD = 64
"""Most answers on their way to a site; each of its threads waits for one."""


class Stream:
    """One stream of a site, which a later one replaces."""

    def __init__(self) -> None:
        self.refusal = ""
        """Reason why the hub ended the stream; empty if it did not."""


class Member:
    """A process of a site in a run; callers hold the lock of the hub.

    Args:
        name: of the site, from its certificate.
        rank: of the site.
        instance: random identifier of the process: another one is another member.
        lock: of the hub.
    """

    def __init__(self, name: str, rank: int, instance: str, lock: threading.RLock) -> None:
        self.name, self.rank, self.instance = name, rank, instance
        self.pipe, self.window = Pipe(), Window()
        self.changed = threading.Condition(lock)
        self.stream: Stream | None = None
        self.away_since: float | None = time.monotonic()
        self.has_left = False
        """True if the site said that it leaves; it may still receive what others left for it."""
        self.is_gone = False
        """True if the others were told that the site is gone, for whatever reason."""
        self._owed, self._hurried = 0, False
        self._unheard = 0
        self._shown, self._is_showing = f"{AWAY}\n[]".encode(), False

    def begin(self, stream: Stream, heard: int) -> None:
        """Begins a new stream in place of the one before; the site has all frames up to `heard`."""
        self.pipe.resume(heard)
        self.stream, self.away_since = stream, None
        self.changed.notify_all()

    def end(self, stream: Stream, refusal: str = "") -> bool:
        """Ends a stream; returns whether it was the current one."""
        stream.refusal = stream.refusal or refusal
        is_current = self.stream is stream
        if is_current:
            self.stream, self.away_since = None, time.monotonic()
        self.changed.notify_all()
        return is_current

    def moves(self, rank: int) -> None:
        """Takes another rank, before the run begins; ends the stream, so that the site is told."""
        self.rank = rank
        if self.stream is not None:
            self.end(self.stream)

    def show(self, text: Frame) -> None:
        """Sends the site a text of the hub, unless it has it; one at a time is on its way."""
        if self.stream is None or self._is_showing or text.payload == self._shown:
            return
        self._shown, self._is_showing = bytes(text.payload), True
        self.pipe.push(text, self._was_shown)
        self.changed.notify_all()

    def _was_shown(self) -> None:
        self._is_showing = False

    def push(self, frame: Frame, taken: Taken | None = None) -> None:
        """Sends the site a frame, whose arrival `taken` counts."""
        self.pipe.push(frame, taken and taken.once)
        self.changed.notify_all()

    def answer(self, frame: Frame) -> None:
        """Sends the site the answer to its question.

        Raises:
            MalformedError: the site goes on to ask without receiving the answers.
        """
        if self._unheard == _MOST_UNHEARD:
            raise MalformedError("more questions than anybody has")
        self._unheard += 1
        self.pipe.push(frame, self._heard_one)
        self.changed.notify_all()

    def _heard_one(self) -> None:
        self._unheard -= 1

    def hear(self, frame: Frame) -> bool:
        """Counts a frame from the site; True if the run has to process the frame."""
        if frame.kind == Kind.ACK:
            self.pipe.acknowledge(heard_in(frame))
            return False
        if not self.pipe.accept(frame):
            return False
        if frame.kind in DATA or frame.kind == Kind.TEXT:
            self.window.send(frame)
        self._owed += cost_of(frame)
        self._hurried = self._hurried or frame.kind not in DATA
        if self.owes_ack:
            self.changed.notify_all()
        return True

    @property
    def owes_ack(self) -> bool:
        """True if an acknowledgement is due to the site."""
        return self._hurried or self._owed >= _ACK_BYTES

    def took(self, lane: int, nbytes: int) -> None:
        """Notes that all recipients have so many bytes that the site sent."""
        self.window.taken[lane] += nbytes
        self._owed += nbytes
        if self.owes_ack:
            self.changed.notify_all()

    def ack(self) -> Frame:
        """Returns an acknowledgement: the last frame received, and how much the site may send."""
        self._owed, self._hurried = 0, False
        return self.window.ack(self.pipe.heard)


class Taken:
    """A count of a frame's arrivals, which opens its senders' windows when all have it."""

    def __init__(self, count: int, owed: list[tuple[Member, int, int]]) -> None:
        self._left, self._owed = count, owed

    def once(self) -> None:
        """Notes that one more recipient has the frame."""
        self._left -= 1
        if self._left == 0:
            for member, lane, nbytes in self._owed:
                member.took(lane, nbytes)


def relay(frame: Frame, to: list[Member], owed: list[tuple[Member, int, int]]) -> None:
    """Sends a frame on; when all have it, those in `owed` may send more (lane and bytes)."""
    taken = Taken(len(to), owed)
    for member in to:
        member.push(frame, taken)
    if not to:
        for member, lane, nbytes in owed:
            member.took(lane, nbytes)


Told = Callable[..., None]
"""Call with the name of an event, and its facts."""
_MOST_TEXT = 1 << 15
_MOST_TEXTS, _MOST_TEXTS_BYTES = 1 << 16, 8 << 20
"""Most texts that a site may leave in a run, and most bytes of those that the others keep."""
_STORE_BYTES = 1 << 28
"""Most bytes of all values in the store of a run; every site may write the same share."""
_MOST_PARTS = 1 << 10
"""Most confirmations of steps by a site that wait for those of other sites."""
_MOST_AT_ONCE, _MOST_ALONE = 1 << 6, 1 << 6
"""Most steps in a confirmation (sites vote on every 16th at least), and most steps of a session
that only the sites left confirm: these may have made one more than all sites have voted on."""
_PART_BYTES, _MOST_NUMBER = 64, 1 << 63


class Run:
    """A run, from its first site's arrival to its last one's end; callers hold the hub's lock.

    Args:
        number: of the run, counted by the hub.
        names: of the sites, in rank order.
        tell: called with each event.
        after: the run from which these sites go on, if they do.

    Attributes:
        epoch: number of earlier runs that this one continues.
        began_at: when its first site came, by the monotonic clock.
    """

    def __init__(
        self, number: int, names: Sequence[str], tell: Told, after: Run | None = None
    ) -> None:
        self.number, self.names, self._tell = number, tuple(names), tell
        self.epoch, self.began_at = 0 if after is None else after.epoch + 1, time.monotonic()
        self._before = (0, ()) if after is None else (after.number, after.names)
        self.members: dict[int, Member] = {}
        self.is_ready = False
        self._lost: set[str] = set()
        self._waiting: list[str] = []
        self._sums, self._groups, self._values = PendingSums(), Groups(0), Values()
        self._parts: dict[tuple[int, int, int], set[str]] = {}
        self._alone: Counter[int] = Counter()
        self._unconfirmed: set[tuple[str, ...]] = set()
        self._slots = Slots(self, self._tell_of_run)
        self._texts: defaultdict[int, set[bytes]] = defaultdict(set)
        self._text_bytes: defaultdict[int, dict[str, int]] = defaultdict(dict)

    def join(self, member: Member, peer: str) -> None:
        """Adds a process, which comes from the address `peer`."""
        self.members[member.rank] = member
        missing = [name for rank, name in enumerate(self.names) if rank not in self.members]
        self._tell("joined", run=self.number, site=member.name, peer=peer, missing=missing)

    def expect(self, names: Sequence[str]) -> None:
        """Waits for these sites from now on, before the run begins."""
        members, self.names = self.members.values(), tuple(names)
        self.members = {names.index(one.name): one for one in members}
        for rank, member in self.members.items():
            member.moves(rank)

    def begin_if_all_are_there(self) -> None:
        """Begins once all sites are connected now: one that is away may be gone for good."""
        stand = [one for one in self.members.values() if one.stream is not None]
        if not self.is_ready and len(stand) == len(self.names):
            self._begin()

    def begin_without_absent(self) -> None:
        """Begins with the sites that have come, and tells them that the others did not come."""
        self._begin()
        for rank, name in enumerate(self.names):
            if rank not in self.members:
                why = "it did not come"
                self._lost.add(name)
                self._tell("lost", run=self.number, site=name, why=why)
                self._to_all(Frame(Kind.GONE, why.encode(), run=self.number, sender=rank))

    def _begin(self) -> None:
        self.is_ready, self._groups = True, Groups(len(self.names))
        sites, (after, before) = list(self.names), self._before
        if after:
            without = [name for name in before if name not in sites]
            back = [name for name in sites if name not in before]
            about = {"after": after, "epoch": self.epoch, "without": without, "back": back}
            self._tell("epoch", run=self.number, sites=sites, **about)
        else:
            self._tell("began", run=self.number, sites=sites)
        self._to_all(Frame(Kind.READY, run=self.number))

    def show_who_is_away(self) -> None:
        """Tells the sites for which others the hub waits, when that has changed."""
        away = [rank for rank in range(len(self.names)) if self._is_away(rank)]
        payload = f"{AWAY}\n{json.dumps(away)}".encode()
        for member in self.members.values():
            member.show(Frame(Kind.TEXT, payload, run=self.number))

    def _is_away(self, rank: int) -> bool:
        member = self.members.get(rank)
        if member is None:
            return not self.is_ready
        return member.stream is None and not member.is_gone

    def note_coming(self, names: Sequence[str]) -> None:
        """Writes the names of sites that wait for admission on the board, if they have changed."""
        lives = [one.name for one in self.members.values() if not one.is_gone]
        waiting = [name for name in names if name not in lives] if lives else []
        if waiting != self._waiting:
            self._waiting = waiting
            self._slots.offer(waiting)

    def is_gone(self, rank: int) -> bool:
        """True if a site no longer takes part."""
        member = self.members.get(rank)
        return self.is_ready and (member is None or member.is_gone)

    def has_left_text(self, rank: int, text: str) -> bool:
        """True if a site has left this text for all others."""
        return _digest(text) in self._texts[rank]

    def goes_on_with(self) -> list[str] | None:
        """Returns the names of the sites that agreed to go on from this run; None if none did."""
        found = self._slots.goes_on()
        return None if found is None else [*(self.names[rank] for rank in found[0]), *found[1]]

    def _tell_of_run(self, what: str, **facts: object) -> None:
        self._tell(what, run=self.number, **facts)

    @property
    def waiting(self) -> list[Member]:
        """Connected members of a first run that has not begun because other sites are missing."""
        if self.is_ready or self.epoch:
            return []
        return [one for one in self.members.values() if one.stream is not None]

    def invite(self, names: Sequence[str], after: Run) -> None:
        """Tells those of these sites that wait here that the sites of another run admit them."""
        about = json.dumps([after.number, list(names)]).encode()
        for member in self.waiting:
            if member.name in names:
                member.push(Frame(Kind.INVITED, about, run=self.number))

    def is_open_to(self, name: str) -> bool:
        """True if a new process of a site may join."""
        if self.is_ready or name not in self.names:
            return False
        return self.names.index(name) not in self.members

    def is_after(self, after: int) -> bool:
        """True if sites of that run go on in this one."""
        return bool(after) and self._before[0] == after

    def continues(self, after: int, names: Sequence[str]) -> bool:
        """True if these sites go on in this run from that one."""
        return self.is_after(after) and self.names == tuple(names)

    def member_of(self, name: str) -> Member | None:
        """Returns the process of a site that takes part, or did; None without one."""
        return next((one for one in self.members.values() if one.name == name), None)

    def leave(self, member: Member, why: str) -> None:
        """Tells the others that a site has left or is lost; before the begin it may come back."""
        if member.is_gone:
            return
        member.is_gone = True
        self._tell(
            "left" if member.has_left else "lost", run=self.number, site=member.name, why=why
        )
        if not self.is_ready:
            del self.members[member.rank]
            return
        if not member.has_left:
            self._lost.add(member.name)
            self._note_parts()
        gone = Frame(Kind.GONE, why.encode(), run=self.number, sender=member.rank)
        relay(gone, self._others(member), [])
        self._void_sums_without(member.rank, why)

    def take(self, member: Member, frame: Frame) -> None:
        """Processes a frame.

        Raises:
            MalformedError: no site sends such a frame.
        """
        if frame.run != self.number:
            raise MalformedError(f"a frame of run {frame.run} in run {self.number}")
        if frame.sender != member.rank:
            raise MalformedError(f"a frame under the name of {self._name_of(frame.sender)}")
        if frame.kind not in _ACTIONS:
            raise MalformedError(f"a frame of kind {frame.kind.name}")
        if not self.is_ready and frame.kind != Kind.GONE:
            raise MalformedError("something for sites that are not there yet")
        _ACTIONS[frame.kind](self, member, frame)

    def _name_of(self, rank: int) -> str:
        return repr(self.names[rank]) if rank < len(self.names) else f"rank {rank}"

    def _gather(self, member: Member, frame: Frame) -> None:
        others = [rank for rank in self._users(member, frame) if rank != member.rank]
        relay(frame, self._reached(others), [(member, frame.lane, cost_of(frame))])

    def _each(self, member: Member, frame: Frame) -> None:
        if frame.recipient == member.rank or frame.recipient not in self._users(member, frame):
            raise MalformedError(f"a frame for {self._name_of(frame.recipient)}")
        to = self._reached([frame.recipient])
        relay(frame, to, [(member, frame.lane, cost_of(frame))])

    def _users(self, member: Member, frame: Frame) -> Sequence[int]:
        """Returns the ranks of the sites that use the lane of a site's frame."""
        users = self._groups.members(frame.lane)
        if member.rank not in users:
            raise MalformedError(f"a frame of lane {frame.lane}, of a group that it is not in")
        return users

    def _sum(self, member: Member, frame: Frame) -> None:
        """Keeps a part of a sum, and sends the sum once all sites' parts have come."""
        users = self._users(member, frame)
        if frame.recipient not in (ALL, *users):
            raise MalformedError(f"a sum for {self._name_of(frame.recipient)}")
        parts = self._sums.take(frame, users)
        if parts is None:
            self._void_if_hopeless(frame, users)
            return
        if differ := disagreement(parts, self.names):
            self._fault_in_sum(*differ)
            return
        total = added([part.payload for part in parts], frame.dtype)
        summed = frame._replace(payload=total, sender=ALL, checksum=None)
        to = users if frame.recipient == ALL else [frame.recipient]
        relay(summed, self._reached(to), self._owed_for(parts))

    def _owed_for(self, parts: Sequence[Frame]) -> list[tuple[Member, int, int]]:
        return [(self.members[part.sender], part.lane, cost_of(part)) for part in parts]

    def _fault_in_sum(self, why: str, ranks: Sequence[int]) -> None:
        """Reports the sites whose part is not like the majority's; all, if there is no majority."""
        self._tell("fault", run=self.number, why=why, sites=[self.names[rank] for rank in ranks])
        sender = ranks[0] if len(ranks) == 1 else ALL
        self._to_all(Frame(Kind.FAULT, why.encode(), run=self.number, sender=sender))

    def _void_if_hopeless(self, frame: Frame, users: Sequence[int]) -> None:
        """Drops a sum of a group if a site of it is gone without its part."""
        if frame.lane < LANES:
            return  # all sites hear of a site that is gone
        for rank in users:
            if self.is_gone(rank) and not self._sums.has(frame, rank):
                self._void_sums_without(rank, "it was gone before")
                return

    def _void_sums_without(self, rank: int, why: str) -> None:
        """Tells all that wait for a sum of a group that a site which is gone adds nothing to it."""
        for parts in self._sums.without(rank, self._groups.members):
            first, owed = parts[0], self._owed_for(parts)
            about = (Kind.VOID, why.encode(), first.lane)
            void = Frame(*about, run=self.number, number=first.number, sender=rank)
            relay(void, self._reached([part.sender for part in parts]), owed)

    def _to_all(self, frame: Frame) -> None:
        for member in self._reached(self.members):
            member.push(frame)

    def _reached(self, ranks: Iterable[int]) -> list[Member]:
        """Returns the members of these ranks that may still be connected."""
        found = (self.members[rank] for rank in ranks if rank in self.members)
        return [member for member in found if not member.is_gone or member.has_left]

    def _text(self, member: Member, frame: Frame) -> None:
        if len(frame.payload) > _MOST_TEXT:
            raise MalformedError(f"a text of {len(frame.payload)} bytes")
        name, _, text = bytes(frame.payload).decode(errors="replace").partition("\n")
        known, sizes = self._texts[member.rank], self._text_bytes[member.rank]
        known.add(_digest(text))
        sizes[name] = cost_of(frame)
        if len(known) > _MOST_TEXTS or sum(sizes.values()) > _MOST_TEXTS_BYTES:
            raise MalformedError("more texts than others keep of a site")
        relay(frame, self._others(member), [(member, TEXTS, cost_of(frame))])

    def _answer(self, member: Member, frame: Frame) -> None:
        answer = self._slots.answer(frame, member.rank)
        member.answer(Frame(Kind.ANSWER, answer, run=self.number, number=frame.number))

    def _drop(self, member: Member, frame: Frame) -> None:
        answer = self._slots.drop(frame, member.rank)
        member.answer(Frame(Kind.ANSWER, answer, run=self.number, number=frame.number))

    def _left(self, member: Member, frame: Frame) -> None:
        member.has_left = True
        others = self.goes_on_with() or []
        self.leave(member, going_on_with(others) if member.name in others else LEFT)

    def _others(self, member: Member) -> list[Member]:
        return self._reached(rank for rank in self.members if rank != member.rank)

    def _group(self, member: Member, frame: Frame) -> None:
        answer = self._groups.answer(bytes(frame.payload), member.rank)
        member.answer(Frame(Kind.ANSWER, answer, run=self.number, number=frame.number))

    def _late(self, member: Member, frame: Frame) -> None:
        try:
            lane, number = map(int, bytes(frame.payload).split())
        except ValueError:
            raise MalformedError("a question about a sum that cannot be read") from None
        late = self._sums.late(lane, number, self._groups.members(lane))
        answer = " ".join(map(str, late)).encode()
        member.answer(Frame(Kind.ANSWER, answer, run=self.number, number=frame.number))

    def _store(self, member: Member, frame: Frame) -> None:
        """Asks the store; an answer may come later, with that to another site's question."""
        share = _STORE_BYTES // len(self.names)
        for asker, number, answer in self._values.answers(frame, member.rank, share):
            told = Frame(Kind.ANSWER, answer, run=self.number, number=number)
            if asker == member.rank:
                member.answer(told)
            for one in self._reached([asker] if asker != member.rank else ()):
                one.push(told)  # it waited: the store bounds how often

    def _part(self, member: Member, frame: Frame) -> None:
        """Notes that a site confirms some steps: it has the messages of all sites in them."""
        steps = _steps_in(frame)
        told = self._parts.setdefault(steps, set())
        told.add(member.name)
        if set(self.names) - told <= self._lost:
            self._note_steps(steps, self._parts.pop(steps))
        if len(self._parts) <= _MOST_PARTS:
            return
        own = [one for one, told in self._parts.items() if member.name in told]
        if len(own) > _MOST_PARTS:
            self._note_unconfirmed(own[0], self._parts.pop(own[0]))

    def _note_parts(self) -> None:
        """Logs the steps that all sites have confirmed that are not lost, and names the others."""
        for steps, told in list(self._parts.items()):
            silent = set(self.names) - told
            if silent <= self._lost:
                del self._parts[steps]
                self._note_steps(steps, told)

    def _note_steps(self, steps: tuple[int, int, int], told: set[str]) -> None:
        """Logs confirmed steps; if some sites are lost, with the names of those that confirmed."""
        session, first, last = steps
        about: dict[str, object] = {"session": session, "first": first, "step": last}
        silent = sorted(set(self.names) - told)
        if silent:
            self._alone[session] += last - first + 1
            if self._alone[session] > _MOST_ALONE:
                self._note_unconfirmed(steps, told)
                return
            about |= {"lost since": silent, "told by": sorted(told)}
        self._tell("step", run=self.number, **about, sites=sorted(self.names))

    def _note_unconfirmed(self, steps: tuple[int, int, int], told: set[str]) -> None:
        """Logs, once for the same sites, that only these have confirmed steps."""
        by = tuple(sorted(told))
        if by not in self._unconfirmed:
            self._unconfirmed.add(by)
            session, first, last = steps
            silent = sorted(set(self.names) - told)
            about = {"session": session, "first": first, "step": last, "silent": silent}
            self._tell("unconfirmed", run=self.number, by=list(by), **about)


def _steps_in(frame: Frame) -> tuple[int, int, int]:
    try:
        if len(frame.payload) > _PART_BYTES:
            raise ValueError
        session, first, last = map(int, bytes(frame.payload).split())
    except ValueError:
        raise MalformedError("steps that cannot be read") from None
    is_number = all(0 <= number < _MOST_NUMBER for number in (session, first, last))
    if not is_number or not first <= last < first + _MOST_AT_ONCE:
        raise MalformedError(f"that it took part in the steps {first} to {last} at once")
    return session, first, last


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


_ACTIONS: dict[Kind, Callable[[Run, Member, Frame], None]] = {
    Kind.GATHER: Run._gather,
    Kind.EACH: Run._each,
    Kind.LETTER: Run._each,
    Kind.SUM: Run._sum,
    Kind.TEXT: Run._text,
    Kind.GONE: Run._left,
    Kind.FIRST: Run._answer,
    Kind.PUT: Run._answer,
    Kind.GET: Run._answer,
    Kind.PART: Run._part,
    Kind.GROUP: Run._group,
    Kind.STORE: Run._store,
    Kind.LATE: Run._late,
    Kind.DROP: Run._drop,
}
