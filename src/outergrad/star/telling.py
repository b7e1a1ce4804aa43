"""A site's texts, questions and farewells, which it sends outside of collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable

from outergrad.core.errors import ExchangeError, Failure
from outergrad.star.frames import Frame, Kind
from outergrad.star.outgoing import Outgoing
from outergrad.star.pipe import Pipe
from outergrad.star.questions import Questions


class Telling:
    """The part of a line that sends texts, questions and farewells."""

    changed: threading.Condition
    rank: int
    run: int
    texts: dict[tuple[int, str], str]
    failure: ExchangeError | None
    has_left: bool
    _pipe: Pipe
    _out: Outgoing
    _questions: Questions

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

    def count(self) -> int:
        """Returns a number that nothing else has that this site writes on the board."""
        with self.changed:
            return self._questions.count()

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

    def wait_for(self, done: Callable[[], bool], wait_s: float) -> bool:
        """Waits until `done()` holds, or nothing can come any more; returns whether it holds."""
        with self.changed:
            self.changed.wait_for(lambda: done() or self.failure is not None, wait_s)
            return done()

    @property
    def is_flushed(self) -> bool:
        """True if the hub has all that this site sent."""
        return self._out.is_empty

    @property
    def has_failed(self) -> bool:
        """True if nothing can come any more."""
        return self.failure is not None
