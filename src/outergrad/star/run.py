"""One run: the processes that train together, and what the hub does with what they send."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outergrad.star.frames import ALL, Frame, Kind, MalformedError
from outergrad.star.member import Member, relay
from outergrad.star.slots import Slots
from outergrad.star.sums import added
from outergrad.star.window import cost_of

Told = Callable[..., None]
"""Is told what happened: its name, and facts of it."""
_MOST_TEXT = 1 << 15
_MOST_PARTS = 1 << 10
"""Of which not all sites have said yet that they took part."""


class Run:
    """From the first site's coming to the last one's going.

    Whoever calls its methods holds the lock of the hub.

    Args:
        number: counts the runs of the hub.
        names: of the sites, in the order of their ranks.
        tell: hears what happens.
    """

    def __init__(self, number: int, names: Sequence[str], tell: Told) -> None:
        self.number, self.names, self._tell = number, tuple(names), tell
        self.members: dict[int, Member] = {}
        self.is_ready = False
        self._sums: dict[tuple[int, int, int], dict[int, Frame]] = {}
        self._parts: dict[tuple[int, int, int], set[str]] = {}
        self._slots = Slots()

    def join(self, member: Member) -> None:
        """One more."""
        self.members[member.rank] = member
        self._tell("joined", run=self.number, site=member.name)

    def begin_if_all_are_there(self) -> None:
        """Where all lines stand, the sites hear of it: one that is away may be gone for good."""
        stand = [one for one in self.members.values() if one.stream is not None]
        if not self.is_ready and len(stand) == len(self.names):
            self.is_ready = True
            self._tell("began", run=self.number, sites=list(self.names))
            for one in self.members.values():
                one.push(Frame(Kind.READY, run=self.number))

    def is_open_to(self, rank: int) -> bool:
        """Whether a new process of a site may join."""
        return not self.is_ready and rank not in self.members

    def leave(self, member: Member, why: str) -> None:
        """A site has left, or is lost: the others hear of it. Before the begin it may come back."""
        if member.is_gone:
            return
        member.is_gone = True
        self._tell(
            "left" if member.has_left else "lost", run=self.number, site=member.name, why=why
        )
        if not self.is_ready:
            del self.members[member.rank]
            return
        gone = Frame(Kind.GONE, why.encode(), run=self.number, sender=member.rank)
        self._to_others(member, gone, [])

    def take(self, member: Member, frame: Frame) -> None:
        """Does what a frame asks for.

        Raises:
            MalformedError: no site sends that.
        """
        if frame.run != self.number:
            raise MalformedError(f"a frame of run {frame.run} in run {self.number}")
        if frame.sender != member.rank:
            raise MalformedError(f"a frame under the name of {self._name_of(frame.sender)}")
        if frame.kind not in _ACTIONS:
            raise MalformedError(f"a frame of kind {frame.kind.name}")
        _ACTIONS[frame.kind](self, member, frame)

    def _name_of(self, rank: int) -> str:
        return repr(self.names[rank]) if rank < len(self.names) else f"site {rank}"

    def _gather(self, member: Member, frame: Frame) -> None:
        self._to_others(member, frame, [(member, frame.lane, cost_of(frame))])

    def _each(self, member: Member, frame: Frame) -> None:
        to = self.members.get(frame.recipient)
        if to is None or to is member:
            raise MalformedError(f"a frame for site {frame.recipient}")
        relay(frame, _reached([to]), [(member, frame.lane, cost_of(frame))])

    def _sum(self, member: Member, frame: Frame) -> None:
        """Adds up when all are there."""
        place = frame.lane, frame.number, frame.offset
        parts = self._sums.setdefault(place, {})
        if member.rank in parts:
            raise MalformedError("a part of a sum for the second time")
        parts[member.rank] = frame
        if len(parts) < len(self.names):
            return
        del self._sums[place]
        ordered = [parts[rank] for rank in sorted(parts)]
        if len({(part.dtype, part.total, len(part.payload)) for part in ordered}) > 1:
            self._fault(f"the sites do not agree on the length of sum {frame.number}")
            return
        total = added([part.payload for part in ordered], frame.dtype)
        owed = [(self.members[part.sender], part.lane, cost_of(part)) for part in ordered]
        summed = frame._replace(payload=total, sender=ALL, checksum=None)
        relay(summed, _reached(list(self.members.values())), owed)

    def _fault(self, why: str) -> None:
        self._tell("fault", run=self.number, why=why)
        for member in _reached(list(self.members.values())):
            member.push(Frame(Kind.FAULT, why.encode(), run=self.number))

    def _text(self, member: Member, frame: Frame) -> None:
        if len(frame.payload) > _MOST_TEXT:
            raise MalformedError(f"a text of {len(frame.payload)} bytes")
        self._to_others(member, frame, [])

    def _answer(self, member: Member, frame: Frame) -> None:
        answer = self._slots.answer(frame)
        member.answer(Frame(Kind.ANSWER, answer, run=self.number, number=frame.number))

    def _left(self, member: Member, frame: Frame) -> None:
        member.has_left = True
        self.leave(member, "it left")

    def _to_others(self, member: Member, frame: Frame, owed: list) -> None:
        relay(frame, _reached([m for m in self.members.values() if m is not member]), owed)

    def _part(self, member: Member, frame: Frame) -> None:
        """Of some steps: when all sites have said so, they took part in them."""
        steps = _steps_in(frame)
        sites = self._parts.setdefault(steps, set())
        sites.add(member.name)
        if len(sites) == len(self.names):
            del self._parts[steps]
            session, first, last = steps
            about = {"session": session, "first": first, "step": last}
            self._tell("step", run=self.number, **about, sites=sorted(sites))
        elif len(self._parts) > _MOST_PARTS:
            del self._parts[next(iter(self._parts))]


def _steps_in(frame: Frame) -> tuple[int, int, int]:
    try:
        session, first, last = map(int, bytes(frame.payload).split())
    except ValueError:
        raise MalformedError("steps that cannot be read") from None
    return session, first, last


def _reached(members: list[Member]) -> list[Member]:
    """Those whose line may still stand."""
    return [member for member in members if not member.is_gone or member.has_left]


_ACTIONS: dict[Kind, Callable[[Run, Member, Frame], None]] = {
    Kind.GATHER: Run._gather,
    Kind.EACH: Run._each,
    Kind.SUM: Run._sum,
    Kind.TEXT: Run._text,
    Kind.GONE: Run._left,
    Kind.FIRST: Run._answer,
    Kind.PUT: Run._answer,
    Kind.GET: Run._answer,
    Kind.PART: Run._part,
}
