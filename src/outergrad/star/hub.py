"""The hub: which sites are there, in which runs, and whose lines stand. It knows of no network."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outergrad.star.frames import Frame, Kind, MalformedError, packed, unpacked
from outergrad.star.member import Member, Stream
from outergrad.star.run import Run, Told

GRACE_S = 0.8
"""How long a site may be away before the others are told that it is lost."""
_BATCH_BYTES = 1 << 18
_LONGEST_INSTANCE = 64


class RefusedError(Exception):
    """A site, or its process, may not take part."""


@dataclass(frozen=True)
class Hello:
    """What a site says first.

    Attributes:
        instance: of its process.
        run: that it is in, 0 if in none.
        heard: number of the last frame that it has.
    """

    instance: str
    run: int = 0
    heard: int = 0

    def frame(self) -> Frame:
        """As it travels."""
        return Frame(Kind.HELLO, json.dumps(vars(self)).encode())

    @staticmethod
    def of(frame: Frame) -> Hello:
        """As it came.

        Raises:
            MalformedError: it is none.
        """
        try:
            told = json.loads(bytes(frame.payload))
            hello = Hello(**told)
        except (ValueError, TypeError, RecursionError):
            raise MalformedError("a greeting that cannot be read") from None
        numbers = (hello.run, hello.heard)
        is_known = isinstance(hello.instance, str) and 0 < len(hello.instance) <= _LONGEST_INSTANCE
        if frame.kind != Kind.HELLO or not is_known:
            raise MalformedError("a stream that does not begin with a greeting")
        if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
            raise MalformedError("a greeting with numbers out of range")
        return hello


@dataclass(frozen=True)
class Welcome:
    """What the hub answers.

    Attributes:
        run: which the site is in.
        rank: of the site.
        names: of all sites.
        heard: number of the last frame that the hub has of it.
        grace_s: how long a site may be away.
    """

    run: int
    rank: int
    names: Sequence[str]
    heard: int
    grace_s: float

    def frame(self) -> Frame:
        """As it travels."""
        return Frame(Kind.WELCOME, json.dumps(vars(self)).encode())

    @staticmethod
    def of(frame: Frame) -> Welcome:
        """As it came."""
        return Welcome(**json.loads(bytes(frame.payload)))


class Hub:
    """Relays between the sites, and adds up.

    Args:
        names: of the sites, in the order of their ranks.
        tell: hears what happens: its name, and facts of it.
        grace_s: how long a site may be away before the others are told that it is lost.
    """

    def __init__(
        self, names: Sequence[str], tell: Told = lambda *_, **__: None, grace_s: float = GRACE_S
    ) -> None:
        self._names, self._tell, self._grace_s = tuple(names), tell, grace_s
        self._lock = threading.RLock()
        self._runs: list[Run] = []
        self._count = 0

    def enter(self, name: str, hello: Hello) -> tuple[Run, Member, Stream]:
        """A stream of a site begins.

        Args:
            name: of its certificate.
            hello: what it says.

        Raises:
            RefusedError: it may not take part.
            MalformedError: it says what cannot be.
        """
        with self._lock:
            if name not in self._names:
                raise RefusedError(f"site {name!r} does not take part in this run")
            run, member = self._known(name, hello) or self._new(name, hello)
            stream, back = Stream(), member.pipe.heard > 0
            if member.stream is not None:
                member.end(member.stream)
            member.begin(stream, hello.heard)
            run.begin_if_all_are_there()
            if back:
                self._tell("back", run=run.number, site=name)
            return run, member, stream

    def _known(self, name: str, hello: Hello) -> tuple[Run, Member] | None:
        """The member that comes back."""
        for run in self._runs:
            for member in run.members.values():
                if (member.name, member.instance) == (name, hello.instance):
                    if member.is_gone and not member.has_left:
                        raise RefusedError(f"{name!r} was away for longer than {self._grace_s:g} s")
                    return run, member
        if hello.run:
            raise RefusedError(f"the hub knows nothing of run {hello.run}: it was started anew")
        return None

    def _new(self, name: str, hello: Hello) -> tuple[Run, Member]:
        """A process that was not there before; another of the same site has ended by that."""
        rank = self._names.index(name)
        for run in list(self._runs):
            if before := run.members.get(rank):
                self._lose(run, before, "another process of the site has begun")
        member = Member(name, rank, hello.instance, self._lock)
        run = next((run for run in self._runs if run.is_open_to(rank)), None) or self._new_run()
        run.join(member)
        return run, member

    def _new_run(self) -> Run:
        self._count += 1
        run = Run(self._count, self._names, self._tell)
        self._runs.append(run)
        return run

    def leave(self, run: Run, member: Member, stream: Stream, refusal: str = "") -> None:
        """A stream ended; the site may come back.

        Args:
            run: which the site is in.
            member: the site.
            stream: this.
            refusal: why the hub ended it, if it did.
        """
        with self._lock:
            if refusal:
                self._tell("refused", run=run.number, site=member.name, why=refusal)
            if member.end(stream, refusal) and not member.is_gone:
                self._tell("away", run=run.number, site=member.name)

    def take(self, run: Run, member: Member, stream: Stream, message: bytes) -> None:
        """What came on a stream.

        Raises:
            MalformedError: no site sends that.
        """
        frames = unpacked(message)
        with self._lock:
            for frame in frames if member.stream is stream else ():
                if member.hear(frame):
                    run.take(member, frame)

    def messages(self, run: Run, member: Member, stream: Stream) -> Iterator[bytes]:
        """What goes out on a stream, until it ends."""
        with self._lock:
            names = list(self._names)
            welcome = Welcome(run.number, member.rank, names, member.pipe.heard, self._grace_s)
        yield welcome.frame().packed()
        while (message := self._next(member, stream)) is not None:
            yield message

    def _next(self, member: Member, stream: Stream) -> bytes | None:
        def is_due() -> bool:
            return member.stream is not stream or member.pipe.has_unsent or member.owes_ack

        with self._lock:
            member.changed.wait_for(is_due)
            if member.stream is not stream:
                return None
            frames = [member.ack(), *member.pipe.batch(_BATCH_BYTES)]
        return packed(frames)

    def watch(self, is_admitted: Callable[[str], bool] = lambda name: True) -> None:
        """Looks after the lines; to be called some times per second.

        Args:
            is_admitted: whether a site may still take part.
        """
        now = time.monotonic()
        with self._lock:
            for run in list(self._runs):
                for member in list(run.members.values()):
                    if member.away_since is not None and now - member.away_since > self._grace_s:
                        self._lose(run, member, f"its line was down for {self._grace_s:g} s")
                    elif member.stream is not None and not is_admitted(member.name):
                        self._lose(run, member, "it was revoked")
            self._runs = [run for run in self._runs if not _is_over(run)]

    def _lose(self, run: Run, member: Member, why: str) -> None:
        """For good."""
        run.leave(member, why)
        member.has_left = False
        if member.stream is not None:
            member.end(member.stream, f"{member.name!r} does not take part any more: {why}")
        member.pipe.clear()


def _is_over(run: Run) -> bool:
    return all(one.is_gone and one.stream is None for one in run.members.values())
