"""What sites of a run have written on the hub's board: slots, each of which is written once.

A slot whose name says whose it is takes nothing from another site. What others may write into it,
and into slots of nobody, has to be true as far as the hub knows: so one site that lies cannot make
others believe different things, nor speak in their names.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from outergrad.comm.standing import Standing
from outergrad.star.frames import Frame, Kind, MalformedError

MOST_BYTES = 1 << 30
"""Of all slots of a run; every site has the same share."""
COMING = "coming"
"""The slot that says who waits to be taken in; as in `step/going_on.py`, which a hub has not."""
_TROUBLE, _GIVEN_UP, _GOING_ON, _COME = b"trouble", "given up", b"going on", b"come"
"""As in `step/agreement.py` and `step/going_on.py`."""
_HEARS_S = 1.0
"""How long a site that is there has to leave its word, before others may write that it was given
up: four times as long as its watcher takes to look."""
_SLOT_BYTES = 1 << 8
"""What a slot costs besides its content."""
_MOST_TEXT, _LONGEST_WHY = 1 << 15, 300
_SEPARATOR = b"\n"
_OWNED = re.compile(
    rb"(?:word|made|read by|made when others came|(?:made|read|step|brought) \d+) (\d{1,5})"
)
_WAY, _THERE = re.compile(rb"way to (\d+)"), b"there"
_ASKED, _ANSWER = re.compile(rb"asked \d+"), re.compile(rb"answer (\d+)")
_PIECE = re.compile(rb"(.*)/(\d{1,5})/\d+/\d+", re.DOTALL)
_HEAD = re.compile(rb"(\d{1,5}) \d+ \d+")


def asked(key: str, content: bytes = b"") -> bytes:
    """The payload of a frame that asks something of a slot."""
    return key.encode() + _SEPARATOR + content


class Sites(Protocol):
    """What the hub knows of the sites of a run, by their ranks."""

    @property
    def names(self) -> Sequence[str]:
        """Of all."""
        ...

    def is_gone(self, rank: int) -> bool:
        """Whether it takes no part any more."""
        ...

    def has_left_text(self, rank: int, text: str) -> bool:
        """Whether it has told all others so."""
        ...


class Slots:
    """Of one run. Whoever calls its methods holds the lock of the hub.

    Args:
        sites: of the run.
        tell: hears what sites have written of each other: its name, and facts of it.
        clock: the time, in seconds.
    """

    def __init__(
        self,
        sites: Sites,
        tell: Callable[..., None] = lambda *_, **__: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sites, self._tell, self._clock = sites, tell, clock
        self._contents: dict[bytes, bytes] = {}
        self._nbytes: Counter[tuple[int, Kind]] = Counter()
        self._troubled_at: float | None = None
        self._offered: set[str] = set()
        self._shut_out: set[tuple[int, int]] = set()

    def offer(self, names: Sequence[str]) -> None:
        """These wait to be taken in: the only slot that is written more than once, by the hub."""
        self._offered.update(names)
        self._contents[COMING.encode()] = " ".join(names).encode()

    def goes_on(self) -> tuple[list[int], list[str]] | None:
        """Which sites go on, and who is new, as one of them has written."""
        text = self._contents.get(_GOING_ON)
        return None if text is None else _going_on(text)[1:]

    def answer(self, frame: Frame, writer: int) -> bytes:
        """Does what a frame asks for.

        Args:
            frame: this.
            writer: rank of the site that asks.

        Returns:
            What stands in the slot then; nothing, if nothing does: a site has no more room, or
            must not write this yet.

        Raises:
            MalformedError: it asks for nothing, or writes what it may not.
        """
        key, separator, content = bytes(frame.payload).partition(_SEPARATOR)
        if not separator or bool(content) == (frame.kind == Kind.GET):
            raise MalformedError("a question that names no slot, or nothing to write into it")
        if frame.kind == Kind.GET:
            return self._contents.get(key, b"")
        if frame.kind == Kind.FIRST and len(content) > _MOST_TEXT:
            raise MalformedError(f"a text of {len(content)} bytes for the board")
        is_due = self._may_write(frame.kind, key, content, writer)
        if key in self._contents:
            return self._contents[key]
        return self._written(frame.kind, key, content, writer) if is_due else b""

    def _written(self, kind: Kind, key: bytes, content: bytes, writer: int) -> bytes:
        """Texts have a quarter of a site's share, so that a long content leaves them room."""
        share = MOST_BYTES // len(self._sites.names)
        most = share // 4 if kind == Kind.FIRST else share - share // 4
        nbytes = self._nbytes[writer, kind] + len(key) + len(content) + _SLOT_BYTES
        if nbytes > most and kind == Kind.FIRST:
            raise MalformedError("more texts for the board than a site has room for")
        if nbytes > most:
            return b""
        self._nbytes[writer, kind], self._contents[key] = nbytes, content
        self._note(key, content, writer)
        return content

    # -- who may write what -----------------------------------------------------------------------

    def _may_write(self, kind: Kind, key: bytes, content: bytes, writer: int) -> bool:
        """Whether this may be written now, or only later.

        Raises:
            MalformedError: never by this site.
        """
        if kind == Kind.PUT:
            key = self._checked_put(key, content, writer)
        if owned := _OWNED.fullmatch(key):
            owner = int(owned[1])
            if owner != writer:
                return self._may_write_of(key, owner, content)
        elif key == _TROUBLE and content != str(writer).encode():
            raise MalformedError("the trouble of another site")
        elif _ASKED.fullmatch(key) and _numbers_in(content).get("by") != writer:
            raise MalformedError("a question in the name of another site")
        elif answer := _ANSWER.fullmatch(key):
            question = self._contents.get(b"asked " + answer[1], b"")
            if _numbers_in(question).get("of") != writer:
                raise MalformedError("an answer that another site was asked for")
        elif (way := _WAY.fullmatch(key)) and content == _THERE:
            if b"step %b %d" % (way[1], writer) not in self._contents:
                raise MalformedError("that a step is on the board, which it has not put there")
        elif key == COMING.encode():
            raise MalformedError("who waits to be taken in, which the hub alone says")
        elif key == _COME and not self._offered.issuperset(
            content.decode("utf-8", "replace").split()
        ):
            raise MalformedError("that sites come which do not wait")
        elif key == _GOING_ON and key not in self._contents:
            return self._may_go_on(content, writer)
        return True

    def _checked_put(self, key: bytes, content: bytes, writer: int) -> bytes:
        """The slot that a part of a content belongs to."""
        whose = piece[2] if (piece := _PIECE.fullmatch(key)) else None
        if piece is None and (head := _HEAD.fullmatch(content)):
            whose = head[1]
        if whose is None or int(whose) != writer:
            raise MalformedError("a content that is not its own")
        return key if piece is None else piece[1]

    def _may_write_of(self, key: bytes, owner: int, content: bytes) -> bool:
        """Into a slot of another site: only that it was given up, or its own farewell."""
        text = _text(content)
        if key != b"word %d" % owner or owner >= len(self._sites.names):
            raise MalformedError(f"a text in the name of {self._named(owner)}")
        if text != _GIVEN_UP:
            if not self._sites.has_left_text(owner, text):
                raise MalformedError(f"a text in the name of {self._named(owner)}")
            return True
        return self._sites.is_gone(owner) or self._has_waited

    def _may_go_on(self, content: bytes, writer: int) -> bool:
        """Not without a site that is as far as the others, and that nobody has missed."""
        made, ranks, coming = _going_on(content)
        if writer not in ranks or max(ranks) >= len(self._sites.names):
            raise MalformedError("that others go on")
        if not self._offered.issuperset(coming):
            raise MalformedError("that sites come which do not wait")
        for rank in set(range(len(self._sites.names))) - set(ranks):
            is_level = self._text(f"made {rank}") == str(made)
            if not self._is_missed(rank) and (is_level or not self._has_waited):
                self._note_shut_out(writer, rank)
                return False
        return True

    def _note_shut_out(self, writer: int, rank: int) -> None:
        """No error: the word of a site may have come just when another had waited long enough."""
        if (writer, rank) not in self._shut_out:
            self._shut_out.add((writer, rank))
            why = f"that it goes on without {self._named(rank)}, which is there"
            self._tell("not taken", site=self._name(writer), why=why)

    def _is_missed(self, rank: int) -> bool:
        """Whether it is gone or was given up, or words of sites say that somebody missed it."""
        own = self._text(f"word {rank}")
        if self._sites.is_gone(rank) or (own is not None and Standing.of(own) is None):
            return True  # its word is that it was given up, or cannot be read
        sites = range(len(self._sites.names))
        words = {site: _facts_in(self._text(f"word {site}") or "") for site in sites}
        if any(words[rank].get(key) for key in ("ended", "why", "timed_out")):
            return True
        missed = [_missed_in(word) for word in words.values()]
        # In a sum nobody knows for whom it waits: then this cannot be told from the words.
        of_nobody = any(
            word.get("timed_out") and not found
            for word, found in zip(words.values(), missed, strict=True)
        )
        return of_nobody or any(rank in found for found in missed)

    @property
    def _has_waited(self) -> bool:
        at = self._troubled_at
        return at is not None and self._clock() - at >= _HEARS_S

    # -- what the log says ------------------------------------------------------------------------

    def _note(self, key: bytes, content: bytes, writer: int) -> None:
        if key == _TROUBLE:
            self._troubled_at = self._clock()
        elif key.startswith(b"word "):
            text, owner = _text(content), int(key.split()[1])
            self._tell_word(owner, text, writer)
        elif key == _GOING_ON:
            _, ranks, coming = _going_on(content)
            sites = [*map(self._name, ranks), *coming]
            self._tell("goes on", by=self._name(writer), sites=sites)

    def _tell_word(self, owner: int, text: str, writer: int) -> None:
        if text == _GIVEN_UP:
            self._tell("given up", site=self._name(owner), by=self._name(writer))
        elif owner == writer:
            word = _facts_in(text)
            ranks = range(len(self._sites.names))
            missed = [self._name(rank) for rank in sorted(_missed_in(word).intersection(ranks))]
            why = str(word.get("why", ""))[:_LONGEST_WHY]
            about = {"made": _numbers_of(word).get("made"), "missed": missed, "why": why}
            self._tell("gives up", site=self._name(owner), **about)

    def _name(self, rank: int) -> str:
        return self._sites.names[rank] if rank < len(self._sites.names) else f"site {rank}"

    def _named(self, rank: int) -> str:
        return repr(self._sites.names[rank]) if rank < len(self._sites.names) else f"site {rank}"

    def _text(self, key: str) -> str | None:
        found = self._contents.get(key.encode())
        return None if found is None else _text(found)


def _going_on(content: bytes) -> tuple[int, list[int], list[str]]:
    """What sites write when they go on: steps, ranks and who is new."""
    try:
        made, ranks, coming = json.loads(content)
        are_numbers = all(type(one) is int and one >= 0 for one in (made, *ranks))
        if are_numbers and ranks and ranks == sorted({*ranks}) and all(map(_is_text, coming)):
            return made, ranks, list(coming)
    except (ValueError, TypeError, RecursionError):
        pass
    raise MalformedError("who goes on, which cannot be read")


def _text(content: bytes) -> str:
    """As sites read it."""
    return content.decode(errors="replace")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _facts_in(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _numbers_in(content: bytes) -> dict[str, int]:
    return _numbers_of(_facts_in(_text(content)))


def _numbers_of(facts: dict[str, Any]) -> dict[str, int]:
    return {key: value for key, value in facts.items() if type(value) is int}


def _missed_in(word: dict[str, Any]) -> set[int]:
    """Whom a site has waited for in vain, or whose connection was closed."""
    lists = [word.get(key) for key in ("silent", "gone")]
    return {one for some in lists if isinstance(some, list) for one in some if type(one) is int}
