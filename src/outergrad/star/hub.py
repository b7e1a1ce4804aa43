"""The hub's runs, sites and streams, independent of the network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from outergrad.star.frames import Hello, Welcome, packed, unpacked
from outergrad.star.run import Member, Run, Stream, Told
from outergrad.star.sentences import going_on_with

GRACE_S = 0.8
"""Seconds that a site may be away before the others are told that it is lost."""
_COMES_S = 4.0
"""Seconds, besides the grace, between the first and the last site that go on together."""
_BATCH_BYTES = 1 << 18


class RefusedError(Exception):
    """A site, or its process, may not take part."""


class Hub:
    """Relays messages between the sites, and sums.

    Args:
        names: of the sites, in rank order.
        tell: called with the name of each event, and its facts.
        grace_s: seconds that a site may be away before the others are told that it is lost.
    """

    def __init__(
        self, names: Sequence[str], tell: Told = lambda *_, **__: None, grace_s: float = GRACE_S
    ) -> None:
        self._names, self._tell, self._grace_s = tuple(names), tell, grace_s
        self._comes_s = grace_s + _COMES_S
        self._lock = threading.RLock()
        self._runs: list[Run] = []
        self._count = 0

    def expect(self, names: Sequence[str]) -> None:
        """Sets the sites of runs that begin from now on, in rank order.

        A run that waits for sites waits for these instead; its members call again, and are told.
        """
        with self._lock:
            if tuple(names) == self._names:
                return
            self._names = tuple(names)
            for run in self._runs:
                if not run.is_ready and not run.epoch:
                    self._change(run, names)

    def _change(self, run: Run, names: Sequence[str]) -> None:
        for member in list(run.members.values()):
            if member.name not in names:
                self._lose(run, member, "it may not take part any more")
        run.expect(names)

    def enter(self, name: str, hello: Hello, peer: str = "") -> tuple[Run, Member, Stream]:
        """Begins a stream of a site.

        Args:
            name: of the site, in its certificate.
            hello: greeting of the site.
            peer: address of the site.

        Raises:
            RefusedError: the site may not take part.
            MalformedError: the greeting says that it has a frame that was never sent.
        """
        with self._lock:
            if name not in self._names:
                sites = ", ".join(self._names)
                raise RefusedError(f"{name!r} does not take part in this run, which is of {sites}")
            run, member = self._known(name, hello) or self._new(name, hello, peer)
            stream, back = Stream(), member.pipe.heard > 0
            if member.stream is not None:
                member.end(member.stream)
            member.begin(stream, hello.heard)
            run.begin_if_all_are_there()
            if back:
                self._tell("back", run=run.number, site=name, peer=peer)
            return run, member, stream

    def _known(self, name: str, hello: Hello) -> tuple[Run, Member] | None:
        """Returns the run and the member of a process that comes back; None for a new process."""
        for run in self._runs:
            for member in run.members.values():
                if (member.name, member.instance) == (name, hello.instance):
                    if member.is_gone and not member.has_left:
                        raise RefusedError(f"{name!r} was away for longer than {self._grace_s:g} s")
                    return run, member
        if hello.run > self._count:
            raise RefusedError(
                f"the hub was started anew, and does not know run {hello.run} of before: start all "
                f"sites again"
            )
        if hello.run:
            raise RefusedError(f"run {hello.run} is over, or the hub was started anew")
        return None

    def _new(self, name: str, hello: Hello, peer: str) -> tuple[Run, Member]:
        """Adds a process that was not there before; another of the same site has ended by that."""
        run = self._run_after(name, hello) if hello.after else self._run_from_the_start(name)
        member = Member(name, run.names.index(name), hello.instance, self._lock)
        run.join(member, peer)
        return run, member

    def _run_from_the_start(self, name: str) -> Run:
        for run in list(self._runs):
            if before := run.member_of(name):
                self._lose(run, before, "another process of the site has begun")
        open_to = (run for run in self._runs if run.is_open_to(name) and not run.epoch)
        return next(open_to, None) or self._new_run(self._names)

    def _run_after(self, name: str, hello: Hello) -> Run:
        """Returns the run in which sites go on by agreement; the site leaves the previous one."""
        for run in self._runs:
            own = run.member_of(name)
            if own is not None and (run.number == hello.after or own in run.waiting):
                own.has_left = True
                run.leave(own, going_on_with(hello.sites))
        for before in (run for run in self._runs if run.number == hello.after):
            if not any(run.is_after(hello.after) for run in self._runs):
                self._check_going_on(name, hello, before)
                for run in self._runs:
                    run.invite(hello.sites, before)
                return self._new_run(hello.sites, before)
        for run in self._runs:
            if run.continues(hello.after, hello.sites) and run.is_open_to(name):
                return run
        raise RefusedError(
            f"the others have gone on without {name!r}, or run {hello.after} is over"
        )

    def _check_going_on(self, name: str, hello: Hello, before: Run) -> None:
        """Raises unless these sites agreed to go on, on the board of the previous run."""
        is_in_both = before.member_of(name) is not None and name in hello.sites
        if not is_in_both or before.goes_on_with() != list(hello.sites):
            raise RefusedError(
                f"{name!r} cannot go on from run {hello.after} with {', '.join(hello.sites)}: the "
                f"sites of that run have not agreed on it"
            )

    def _waiting_names(self) -> list[str]:
        return [member.name for run in self._runs for member in run.waiting]

    def _new_run(self, names: Sequence[str], after: Run | None = None) -> Run:
        self._count += 1
        run = Run(self._count, names, self._tell, after)
        self._runs.append(run)
        return run

    def leave(self, run: Run, member: Member, stream: Stream, refusal: str = "") -> None:
        """Ends a stream, because of `refusal` if the hub ended it; the site may come back."""
        with self._lock:
            if refusal:
                self._tell("refused", run=run.number, site=member.name, why=refusal)
            if member.end(stream, refusal) and not member.is_gone:
                self._tell("away", run=run.number, site=member.name, grace_s=self._grace_s)

    def take(self, run: Run, member: Member, stream: Stream, message: bytes) -> None:
        """Takes a message that came on a stream.

        Raises:
            MalformedError: no site sends such a message.
        """
        frames = unpacked(message)
        with self._lock:
            for frame in frames if member.stream is stream else ():
                if member.hear(frame):
                    run.take(member, frame)

    def messages(self, run: Run, member: Member, stream: Stream) -> Iterator[bytes]:
        """Yields the messages to send on a stream, until it ends."""
        with self._lock:
            own = run.number, member.rank, run.names, member.pipe.heard
            welcome = Welcome(*own, self._grace_s, run.epoch)
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

    def watch(self, why_not: Callable[[Member], str] = lambda member: "") -> None:
        """Checks all runs for lost, waiting and absent sites; to be called several times a second.

        Args:
            why_not: returns why a site may no longer take part; empty if it may.
        """
        now = time.monotonic()
        with self._lock:
            waiting = self._waiting_names()
            for run in list(self._runs):
                if run.is_ready:
                    run.note_coming(waiting)
                if run.epoch and not run.is_ready and now - run.began_at > self._comes_s:
                    run.begin_without_absent()
                for member in list(run.members.values()):
                    if member.away_since is not None and now - member.away_since > self._grace_s:
                        self._lose(run, member, f"its line was down for {self._grace_s:g} s")
                    elif not _has_ended(member) and (why := why_not(member)):
                        self._lose(run, member, why)
                run.show_who_is_away()
            self._runs = [run for run in self._runs if not _is_over(run)]

    def end_all(self, why: str) -> None:
        """Ends all runs because the hub cannot do its work any more, for the reason `why`."""
        with self._lock:
            for run in self._runs:
                for member in list(run.members.values()):
                    run.leave(member, why)
                    if member.stream is not None:
                        member.end(member.stream, why)
                    member.pipe.clear()
            self._runs = []

    def _lose(self, run: Run, member: Member, why: str) -> None:
        run.leave(member, why)
        member.has_left = False
        if member.stream is not None:
            member.end(member.stream, f"{member.name!r} does not take part any more: {why}")
        member.pipe.clear()


def _is_over(run: Run) -> bool:
    return all(map(_has_ended, run.members.values()))


def _has_ended(member: Member) -> bool:
    return member.is_gone and member.stream is None
