"""The hub's board of a run: slots, each of which is written once.

A slot whose name holds a rank belongs to that site. What other sites write into it, and into slots
without an owner, has to be true as far as the hub knows. So one site that lies cannot make others
believe different things, nor speak in their names.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from outergrad.comm.failure_report import FailureReport
from outergrad.star.frames import Frame, Kind, MalformedError

MOST_BYTES = 1 << 30
"""Most bytes of all slots of a run; every site has the same share."""
COMING = "coming"
"""Slot of the sites that wait for admission: as in `step/going_on.py`, which no hub imports."""
_TROUBLE, _GIVEN_UP, _GOING_ON, _COME = b"trouble", "given up", b"going on", b"come"
"""Slots, and a text, as in `commit/agreement.py` and `step/going_on.py`."""
_HEARS_S = 1.0
"""Seconds that a connected site has to leave its word, before others may write that it was given
up: four intervals of its watcher."""
_SLOT_BYTES = 1 << 8
"""Bytes that a slot costs besides its content."""
_MOST_TEXT, _LONGEST_WHY = 1 << 15, 300
_SEPARATOR = b"\n"
_OWNED = re.compile(
    rb"(?:word|made|read by|made when others came|(?:made|read|step|brought) \d+) (\d{1,5})"
)
_OWNED_IN_QUORUM = re.compile(rb"quorum \d+ \d+ (?:there|change) (\d{1,5}) \d+")
_TAKES_PART = re.compile(rb"(quorum \d+ \d+) takes part (\d+)")
"""Slots of exchanges with a quorum, as in `session/gathering.py`."""
_WAY, _THERE = re.compile(rb"way to (\d+)"), b"there"
_ASKED, _ANSWER = re.compile(rb"asked \d+"), re.compile(rb"answer (\d+)")
_PIECE = re.compile(rb"(.*)/(\d{1,5})/\d+/\d+", re.DOTALL)
_HEAD = re.compile(rb"(\d{1,5}) \d+ \d+")


def asked(key: str, content: bytes = b"") -> bytes:
    """Returns the payload of a frame that reads or writes a slot."""
    return key.encode() + _SEPARATOR + content


class Sites(Protocol):
    """The hub's knowledge of the sites of a run, by rank."""

    @property
    def names(self) -> Sequence[str]:
        """Names of all sites, in rank order."""
        ...

    def is_gone(self, rank: int) -> bool:
        """True if a site no longer takes part."""
        ...

    def has_left_text(self, rank: int, text: str) -> bool:
        """True if a site has left this text for all others."""
        ...


class Slots:
    """The slots of one run; callers hold the lock of the hub.

    Args:
        sites: of the run.
        tell: called when a site writes about a site, with the name of the event and its facts.
        clock: returns the time, seconds.
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
        """Writes the sites that wait for admission: the hub's slot, the only one written again."""
        self._offered.update(names)
        self._contents[COMING.encode()] = " ".join(names).encode()

    def goes_on(self) -> tuple[list[int], list[str]] | None:
        """Returns the ranks of the sites that agreed to go on, and the names of new ones."""
        text = self._contents.get(_GOING_ON)
        return None if text is None else _going_on(text)[1:]

    def answer(self, frame: Frame, writer: int) -> bytes:
        """Reads or writes a slot.

        Args:
            frame: the question.
            writer: rank of the site that asks.

        Returns:
            The content that the slot then has; empty if it has none, because the site has no more
            room, or may not write this yet.

        Raises:
            MalformedError: the frame names no slot, or the site may never write this.
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
        """Writes a slot; texts have a quarter of a site's share, which no long content can fill."""
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

    # -- permission to write ----------------------------------------------------------------------

    def _may_write(self, kind: Kind, key: bytes, content: bytes, writer: int) -> bool:
        """True if a site may write this now, False if only later.

        Raises:
            MalformedError: the site may never write this.
        """
        if kind == Kind.PUT:
            key = self._checked_put(key, content, writer)
        if owned := _OWNED.fullmatch(key) or _OWNED_IN_QUORUM.fullmatch(key):
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
        elif exchange := _TAKES_PART.fullmatch(key):
            self._check_roll(exchange, content)
        elif key == _GOING_ON and key not in self._contents:
            return self._may_go_on(content, writer)
        return True

    def _check_roll(self, exchange: re.Match[bytes], content: bytes) -> None:
        """Raises if a site says of others that they take part in what they have not come to."""
        for rank, words in _facts_in(_text(content)).items():
            there = b"%b there %b %b" % (exchange[1], rank.encode(), exchange[2])
            if self._contents.get(there) != json.dumps(words).encode():
                raise MalformedError("that sites take part which have not said so")

    def drop(self, frame: Frame, writer: int) -> bytes:
        """Frees the content that a site has put into a slot; returns nothing.

        Raises:
            MalformedError: another site has put it there, or nobody.
        """
        key = bytes(frame.payload)
        head = _HEAD.fullmatch(self._contents.get(key, b""))
        if head is None or int(head[1]) != writer:
            raise MalformedError("to drop a content that is not its own")
        _, number, count = map(int, head[0].split())
        for name in (key, *(b"%b/%d/%d/%d" % (key, writer, number, k) for k in range(count))):
            content = self._contents.pop(name, None)
            if content is not None:
                self._nbytes[writer, Kind.PUT] -= len(name) + len(content) + _SLOT_BYTES
        return b""

    def _checked_put(self, key: bytes, content: bytes, writer: int) -> bytes:
        """Returns the slot that a piece of a content belongs to; raises if it is another site's."""
        whose = piece[2] if (piece := _PIECE.fullmatch(key)) else None
        if piece is None and (head := _HEAD.fullmatch(content)):
            whose = head[1]
        if whose is None or int(whose) != writer:
            raise MalformedError("a content that is not its own")
        return key if piece is None else piece[1]

    def _may_write_of(self, key: bytes, owner: int, content: bytes) -> bool:
        """True if others may write this in a site's slot: its farewell, or that it was given up."""
        text = _text(content)
        if key != b"word %d" % owner or owner >= len(self._sites.names):
            raise MalformedError(f"a text in the name of {self._named(owner)}")
        if text != _GIVEN_UP:
            if not self._sites.has_left_text(owner, text):
                raise MalformedError(f"a text in the name of {self._named(owner)}")
            return True
        return self._sites.is_gone(owner) or self._has_waited

    def _may_go_on(self, content: bytes, writer: int) -> bool:
        """True if sites may go on: without a site only if it is missed or, after a wait, behind."""
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
        # No error: the word of a site may come just when another has waited long enough.
        if (writer, rank) not in self._shut_out:
            self._shut_out.add((writer, rank))
            why = f"that it goes on without {self._named(rank)}, which is there"
            self._tell("not taken", site=self._name(writer), why=why)

    def _is_missed(self, rank: int) -> bool:
        """True if a site is gone or given up, or some site's word says that it was missed."""
        own = self._text(f"word {rank}")
        if self._sites.is_gone(rank) or (own is not None and FailureReport.of(own) is None):
            return True  # its word says that it was given up, or cannot be read
        sites = range(len(self._sites.names))
        words = {site: _facts_in(self._text(f"word {site}") or "") for site in sites}
        if any(words[rank].get(key) for key in ("ended", "why", "timed_out")):
            return True
        missed = [_missed_in(word) for word in words.values()]
        # A site that waits for a sum does not know for whom: its word then names no site.
        of_nobody = any(
            word.get("timed_out") and not found
            for word, found in zip(words.values(), missed, strict=True)
        )
        return of_nobody or any(rank in found for found in missed)

    @property
    def _has_waited(self) -> bool:
        at = self._troubled_at
        return at is not None and self._clock() - at >= _HEARS_S

    # -- log --------------------------------------------------------------------------------------

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
        return self._sites.names[rank] if rank < len(self._sites.names) else f"rank {rank}"

    def _named(self, rank: int) -> str:
        return repr(self._sites.names[rank]) if rank < len(self._sites.names) else f"rank {rank}"

    def _text(self, key: str) -> str | None:
        found = self._contents.get(key.encode())
        return None if found is None else _text(found)


def _going_on(content: bytes) -> tuple[int, list[int], list[str]]:
    """Reads the agreement of sites that go on: steps made, ranks, and names of new sites."""
    try:
        made, ranks, coming = json.loads(content)
        are_numbers = all(type(one) is int and one >= 0 for one in (made, *ranks))
        if are_numbers and ranks and ranks == sorted({*ranks}) and all(map(_is_text, coming)):
            return made, ranks, list(coming)
    except (ValueError, TypeError, RecursionError):
        pass
    raise MalformedError("who goes on, which cannot be read")


def _text(content: bytes) -> str:
    """Decodes a content as sites do."""
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
    """Returns the sites that a site waited for in vain, or that closed their connection to it."""
    lists = [word.get(key) for key in ("silent", "gone")]
    return {one for some in lists if isinstance(some, list) for one in some if type(one) is int}
