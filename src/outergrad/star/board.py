"""A site's access to the hub's board, slots that every site of a run can write to and read."""

from __future__ import annotations

import time
from copy import copy

from outergrad.core.errors import BoardGoneError, ExchangeError
from outergrad.core.transport import Board
from outergrad.star.frames import Kind, Place
from outergrad.star.line import Line
from outergrad.star.sealing import Seal
from outergrad.star.slots import asked

AT_EXIT, AT_END = "exit", "end/{}"
"""Names of the farewells that sites leave at the end of their process or of a session."""
_PIECE_BYTES = 1 << 19
"""Bytes in which a large content is written."""
_MOST_PIECES = 1 << 20
_AGAIN_S = 0.05


class StarBoard(Board):
    """A board that asks the hub one question for each slot.

    A question survives the end of a stream, like everything on a line. So it fails only when this
    site has waited for as long as for any message, or the hub is out of reach for good.

    Args:
        line: of this process.
        limit_s: timeout of a question, seconds.
        seal: encrypts contents, if the hub must not read them.
    """

    def __init__(self, line: Line, limit_s: float, seal: Seal | None = None) -> None:
        self._line, self._seal = line, seal
        self._limit_s: float | None = limit_s

    def without_limit(self) -> StarBoard:
        """Returns a board without a limit, for a thread that may wait."""
        board = copy(self)
        board._limit_s = None
        return board

    def first(self, key: str, text: str) -> str:
        """Writes a text into a slot unless it holds one; returns the text that it then holds.

        Tries again while the hub does not accept the text yet: that a site was given up, it accepts
        only when that site has had the time to speak.
        """
        limit_s = self._limit_s
        until = None if limit_s is None else time.monotonic() + limit_s
        while not (found := self._ask(Kind.FIRST, key, text.encode())):
            if until is not None and time.monotonic() > until:
                raise BoardGoneError("the hub does not take a text")
            time.sleep(_AGAIN_S)
        return found.decode(errors="replace")

    def slot(self, key: str) -> str | None:
        """Returns the text that `first` wrote; None if there is none."""
        found = self._ask(Kind.GET, key)
        return found.decode(errors="replace") if found else None

    def put(self, key: str, content: bytes) -> None:
        """Writes a content in pieces to slots of this site's own, and then where these are.

        A slot that is written already keeps its content.
        """
        number = self._line.count()
        if self._seal is not None:
            content = self._seal.sealed(_place(number), asked(key, content))
        pieces = range(0, len(content), _PIECE_BYTES)
        for k, at in enumerate(pieces):
            piece = content[at : at + _PIECE_BYTES]
            self._written(Kind.PUT, _piece(key, self._line.rank, number, k), piece)
        self._written(Kind.PUT, key, f"{self._line.rank} {number} {len(pieces)}".encode())

    def get(self, key: str) -> bytes | None:
        """Returns the content that `put` wrote; None if there is none, or it cannot be read."""
        try:
            rank, number, count = map(int, self._ask(Kind.GET, key).split())
        except ValueError:
            return None
        if not (0 <= rank < len(self._line.names) and 0 <= count <= _MOST_PIECES):
            return None
        pieces = [self._ask(Kind.GET, _piece(key, rank, number, k)) for k in range(count)]
        return self._opened(key, rank, number, b"".join(pieces)) if all(pieces) else None

    def drop(self, key: str) -> None:
        """Frees at the hub what this site has put into a slot."""
        if self._line.ask(Kind.DROP, key.encode(), self._limit_s) is None:
            raise BoardGoneError(self._line.why_unanswered(self._limit_s))

    def farewell(self, site: int, session: int) -> str | None:
        """Returns a site's farewell, of its process or else of the session; None without one."""
        left = self._line.texts
        names = (AT_EXIT, AT_END.format(session))
        return next((left[site, name] for name in names if (site, name) in left), None)

    def is_gone(self, site: int) -> bool:
        """True if the hub says that a site has left or is lost."""
        return site in self._line.gone

    def _opened(self, key: str, rank: int, number: int, content: bytes) -> bytes | None:
        """Decrypts a content; None if another site has encrypted it, or for another key."""
        if self._seal is None:
            return content
        try:
            opened = self._seal.opened(_place(number), rank, memoryview(content), of_all=True)
        except ExchangeError:
            return None
        own = asked(key)
        return opened.removeprefix(own) if opened.startswith(own) else None

    def _written(self, kind: Kind, key: str, content: bytes) -> bytes:
        found = self._ask(kind, key, content)
        if not found:
            raise BoardGoneError("the hub has no room for what sites write on its board")
        return found

    def _ask(self, kind: Kind, key: str, content: bytes = b"") -> bytes:
        answer = self._line.ask(kind, asked(key, content), self._limit_s)
        if answer is None:
            raise BoardGoneError(self._line.why_unanswered(self._limit_s))
        return answer


def _place(number: int) -> Place:
    """Returns the place of a content for a seal; no other content of the site has its number."""
    return Place(Kind.PUT, 0, number)


def _piece(key: str, rank: int, number: int, k: int) -> str:
    return f"{key}/{rank}/{number}/{k}"
