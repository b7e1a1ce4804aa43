"""What a site tells the hub and the others, beside what collectives send."""

from __future__ import annotations

import threading
from collections.abc import Callable

from outergrad.core.errors import ExchangeError, Failure
from outergrad.star.frames import Frame, Kind
from outergrad.star.outgoing import Outgoing
from outergrad.star.pipe import Pipe
from outergrad.star.questions import Questions


class Telling:
    """The part of a line that texts, questions and farewells go by."""

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
        """Tells the hub something, beside what collectives send."""
        with self.changed:
            told = Frame(kind, payload, run=self.run, number=number, sender=self.rank)
            self._pipe.push(told)
            self.changed.notify_all()

    def leave_text(self, name: str, text: str) -> None:
        """Leaves a text for all others."""
        with self.changed:
            self.texts[self.rank, name] = text
            self.tell(Kind.TEXT, f"{name}\n{text}".encode())

    def ask(self, kind: Kind, payload: bytes, limit_s: float | None) -> bytes | None:
        """Asks the hub something; returns its answer, or None if there is none in time.

        Args:
            kind: of the question.
            payload: of it.
            limit_s: how long to wait; None for as long as the hub may be reached.
        """
        with self.changed:
            questions = self._questions
            number = questions.begin()
            self.tell(kind, payload, number)
            self.changed.wait_for(lambda: questions.is_answered(number) or self._is_cut, limit_s)
            return questions.end(number)

    def count(self) -> int:
        """A number that nothing else has which this site writes on the board."""
        with self.changed:
            return self._questions.count()

    @property
    def _is_cut(self) -> bool:
        return self.failure is not None and self.failure.kind == Failure.TRANSPORT

    def leave(self) -> None:
        """The others hear that this site has gone; what was sent before comes before that."""
        with self.changed:
            if not self.has_left:
                self.has_left = True
                self._out.end(Frame(Kind.GONE, run=self.run, sender=self.rank))
            self.changed.notify_all()

    def abandon(self) -> None:
        """What has not been sent yet is not meant to arrive any more."""
        with self.changed:
            self._out.clear()

    def wait_for(self, done: Callable[[], bool], wait_s: float) -> bool:
        """Until something holds, or nothing can come any more; returns whether it does."""
        with self.changed:
            self.changed.wait_for(lambda: done() or self.failure is not None, wait_s)
            return done()

    @property
    def is_flushed(self) -> bool:
        """Whether the hub has all that this site sent."""
        return self._out.is_empty

    @property
    def has_failed(self) -> bool:
        """Whether the hub cannot be reached."""
        return self.failure is not None
