"""Lines between pairs of sites over gloo, on which no site waits for a third one."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from outergrad.comm.work import AN_INSTANT, CLOSING_TAG, failed, transport
from outergrad.core.errors import ExchangeError, Failure
from outergrad.core.sites import Site
from outergrad.core.transport import Letter, Lines
from outergrad.messages.letters import (
    ENDED,
    HEAD_BYTES,
    LEFT_OUT,
    MOST_UNREAD,
    NUMBERS,
    Head,
    LetterKind,
    nothing,
    refuse_held,
    refused,
)

if TYPE_CHECKING:
    from outergrad.comm.torch import TorchComm

_FIRST_TAG, _TAGS = 1 << 29, 1 << 20
"""Tags of lines, below those of turns: one for all letters of a session."""
_FOR_EVER = timedelta(days=3650)
"""gloo closes the connections to *all* sites when a receive times out, so none ever does."""
_AT_EXIT_S = 1.0
"""Seconds that a program which ends waits for goodbyes of others."""
_RUNNING: set[_Line] = set()
"""Lines whose threads run: one that was in C++ while Python ends would abort the process."""


class _Line:
    """One line: a thread receives what comes, and refers to nothing that uses the line.

    Args:
        group: of the sites.
        site: the other end.
        number: of the session.
        tag: of the messages.
        most_bytes: largest content of a letter.
    """

    def __init__(
        self, group: dist.ProcessGroup, site: Site, number: int, tag: int, most_bytes: int
    ) -> None:
        self._group, self.site, self._tag = group, site, tag
        self._number, self._most_bytes = number, most_bytes
        self.came = threading.Condition()
        self.letters: deque[Letter] = deque()
        self.why_closed = ""
        self._is_over = False
        self._heard = self._sent = 0
        self._held: deque[tuple[int, dist.Work, Tensor]] = deque()
        """Numbered letters on their way: gloo loses a message whose tensor is freed before."""
        name = f"outergrad line to {int(site)}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        if not _RUNNING:
            atexit.unregister(_end_all)
            atexit.register(_end_all)
        _RUNNING.add(self)
        self._thread.start()

    def send(self, kind: LetterKind, letter: Letter) -> None:
        """Starts to send a letter."""
        head, content = Head.about(self._number, kind, letter, self._heard), letter.content
        about = torch.tensor(head.numbers)
        self._sent += 1
        for t in (about, content) if head.size else (about,):
            with transport((self.site,)):
                work = self._group.send([t], self.site, self._tag)
            with self.came:
                self._held.append((self._sent, work, t))

    def next(self, until: float) -> Letter | None:
        """Returns the next letter; None if none has come until then, or none can."""
        with self.came:
            while not self.letters and not self.why_closed:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return None
                self.came.wait(left_s)
            if not self.letters:
                return None
            self.came.notify_all()  # there is room for another one
            return self.letters.popleft()

    def close(self) -> None:
        """Says goodbye, once, behind all that was sent."""
        if self._is_over:
            return
        with suppress(ExchangeError):
            self.send(LetterKind.GOODBYE, nothing())
        with self.came:
            self._is_over = True
            self.came.notify_all()

    def ended(self, until: float) -> bool:
        """Waits for the end of the thread; returns whether it has ended."""
        self._thread.join(max(until - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def cut(self) -> None:
        """Closes the connections to all sites, by a receive that times out."""
        with suppress(RuntimeError):
            self._group.recv([torch.empty(1)], self.site, CLOSING_TAG).wait(AN_INSTANT)

    def _run(self) -> None:
        """Listens until the other site's goodbye, then waits until it has this site's."""
        why = ENDED
        try:
            self._listen()
        except (ExchangeError, RuntimeError) as error:
            why = str(error)
            if isinstance(error, ExchangeError) and error.kind == Failure.LOCAL:
                with suppress(ExchangeError):
                    self.send(LetterKind.REFUSAL, nothing())
        with self.came:
            self.why_closed = why
            self.came.notify_all()
            self.came.wait_for(lambda: self._is_over)
        with suppress(RuntimeError):
            for _, work, _ in self._held:
                work.wait(_FOR_EVER)
        _RUNNING.discard(self)

    def _listen(self) -> None:
        while (letter := self._received()) is not None:
            with self.came:
                self.came.wait_for(lambda: self._is_over or len(self.letters) < MOST_UNREAD)
                if not self._is_over:  # else nobody reads any more
                    self.letters.append(letter)
                    self.came.notify_all()

    def _received(self) -> Letter | None:
        """Returns the next letter; None for a goodbye."""
        numbers = self._tensor(NUMBERS, torch.int64).tolist()
        head = Head.read(numbers, self._number, self._most_bytes)
        if head.kind == LetterKind.ARRIVED:  # which gloo's letters say beside all else
            raise refused("is of another session")
        if head.kind == LetterKind.REFUSAL:
            raise ExchangeError(LEFT_OUT, kind=Failure.CLOSED)
        content = self._tensor(head.size, torch.uint8) if head.size else nothing().content
        letter = head.letter(content)
        self._heard += 1
        self._let_go(head.arrived)
        return None if head.kind == LetterKind.GOODBYE else letter

    def _let_go(self, arrived: int) -> None:
        """Frees what has arrived."""
        with self.came:
            while self._held and self._held[0][0] <= arrived:
                self._held.popleft()
            held_bytes = sum(t.nbytes for _, _, t in self._held if t.dtype == torch.uint8)
        refuse_held(held_bytes, self._most_bytes)

    def _tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        t = torch.empty(size, dtype=dtype)
        try:
            self._group.recv([t], self.site, self._tag).wait(_FOR_EVER)
        except RuntimeError as error:
            raise failed(error, (self.site,)) from error
        return t


def _end_all() -> None:
    """Ends all threads when Python ends: by goodbyes, or else by closing their connections."""
    lines, until = list(_RUNNING), time.monotonic() + _AT_EXIT_S
    for line in lines:
        line.close()
    for line in [line for line in lines if not line.ended(until)]:
        line.cut()
    until = time.monotonic() + _AT_EXIT_S
    for line in lines:
        line.ended(until)


class GlooLines(Lines):
    """Lines to some other sites, over gloo's connections of pairs.

    A thread per site receives, so that what a site sends late is there when it is asked for. Where
    a site's process ends, its connection closes, and those of the others stay.

    Args:
        comm: transport of the sites, which counts the bytes.
        sites: the neighbours.
        number: of the session; both ends of a line give the same.
        most_bytes: largest content of a letter.
    """

    def __init__(self, comm: TorchComm, sites: Sequence[int], number: int, most_bytes: int) -> None:
        self._comm, self._is_over = comm, False
        tag = _FIRST_TAG + number % _TAGS
        about = number, tag, most_bytes
        self._lines = {site: _Line(comm.group, comm.sites[site], *about) for site in sites}

    def send(self, site: int, letter: Letter) -> None:
        """Starts to send a letter; one to a site that is gone is dropped."""
        line = self._lines[site]
        if line.why_closed:
            return
        with suppress(ExchangeError):  # its thread finds out why
            line.send(LetterKind.LAST if letter.ends else LetterKind.LETTER, letter)
            self._comm.count(sent=HEAD_BYTES + letter.content.nbytes)

    def next(self, site: int, until: float) -> Letter | None:
        """Returns the next letter of a site; None if none has come until then, or none can."""
        letter = self._lines[site].next(until)
        if letter is not None:
            self._comm.count(received=HEAD_BYTES + letter.content.nbytes)
        return letter

    def why_closed(self, site: int) -> str:
        """Returns why a site will never send anything more; "" while it may."""
        line = self._lines[site]
        with line.came:
            return "" if line.letters else line.why_closed

    def close(self) -> None:
        """Says goodbye to the other sites, behind all that was sent; does not wait for theirs."""
        if self._is_over:
            return
        self._is_over = True
        for line in self._lines.values():
            line.close()

    def __del__(self) -> None:
        """Says goodbye where a session was collected together with its model."""
        self.close()
