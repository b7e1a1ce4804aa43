"""Lines between pairs of sites around a hub, each in a lane of its own."""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch

from outergrad.core.errors import ExchangeError
from outergrad.core.transport import Comm, Letter, Lines
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
from outergrad.messages.raw import content
from outergrad.star.arrivals import room_for
from outergrad.star.frames import Frame, Kind, Place
from outergrad.star.line import Line

if TYPE_CHECKING:
    from outergrad.star.group_seal import GroupSeal
    from outergrad.star.sealing import Seal

_NUMBERS = struct.Struct(f"<{NUMBERS}q")
_CLOSES = {LetterKind.GOODBYE: ENDED, LetterKind.REFUSAL: LEFT_OUT}
_MOST_GREETINGS = 3
"""Messages of an end that has heard nothing yet: a greeting, a goodbye, and one of them again."""
_TELLS = MOST_UNREAD // 2
"""Letters that are read here until the other end is told so by itself, and not beside a letter."""


class _Open:
    """Letters that the hub could read."""

    longer_bytes = 0

    def refuse_long(self, nbytes: int) -> None:
        pass

    def sealed(self, place: Place, payload: bytes, to: int) -> bytes:
        return payload

    def opened(self, place: Place, sender: int, payload: memoryview, to: int) -> memoryview:
        return payload


class _End:
    """This end of the line to one other site.

    No letter goes out before the other end has room for it, and an end has room for `MOST_UNREAD`
    that nobody has read. So this site keeps no more than its session has declared, however slowly
    it reads. The hub keeps a window of the lane at most, whether or not the other site is there.

    What comes to a site that has not opened its end is dropped there. It is a greeting at most,
    since no end has room before it is open; each says it again when it first hears the other.

    Args:
        line: of this process.
        other: rank in the run of the other site.
        among: name of the sites whose session it is, which others of the run do not have.
        number: of the session.
        most_bytes: largest content of a letter.
        seal: keys of this site, if the hub must not read letters.
        patience_s: longest time in which the hub must answer.

    Raises:
        ExchangeError: the hub does not answer, or has no lane left.
    """

    def __init__(
        self,
        line: Line,
        other: int,
        among: str,
        number: int,
        most_bytes: int,
        seal: Seal | None,
        patience_s: float,
    ) -> None:
        self._line, self._other, self._session = line, other, number
        self._most_bytes, ranks = most_bytes, sorted((line.rank, other))
        self._lane = line.open_group(f"{among} lines {number} {ranks}", ranks, patience_s)
        self._seal = _Open() if seal is None else self._sealing(seal)
        self._least_bytes = HEAD_BYTES + self._seal.longer_bytes
        self.letters: deque[tuple[int, np.ndarray]] = deque()
        """Messages with letters that nobody has read yet, each behind its number."""
        self._room, self._here = np.empty(0, np.uint8), 0
        """The message of which parts are coming, and how many of its bytes are here."""
        self._came = self._went = 0
        """Numbers of the last message from the other end, and to it."""
        self._read = self._told = 0
        """Letters that were read here, and of how many of them the other end knows."""
        self._held: deque[Letter] = deque()
        """Letters for which the other end has no room yet."""
        self._unread: deque[int] = deque()
        """Bytes of the letters that the other end has not read."""
        self._sent = 0
        self._has_met = self._is_over = self._has_said_goodbye = False
        self._why = ""
        line.take_letters(self._lane, self._take)
        with line.changed:
            self._say(LetterKind.ARRIVED)

    def _sealing(self, seal: Seal) -> GroupSeal:
        from outergrad.star.group_seal import GroupSeal  # needs a package that others do without

        pairs = seal.secrets_of_group(self._lane, [self._other], b"letters")
        return GroupSeal(pairs, {}, self._line.rank, self._line.named)

    @property
    def why_closed(self) -> str:
        """Why nothing will come any more; "" while something may."""
        return self._why or self._line.why_closed(self._other)

    # -- what goes out ---------------------------------------------------------------------------

    def send(self, letter: Letter) -> None:
        """Starts to send a letter, once there is room for it.

        Raises:
            ValueError: it is too long to be encrypted; whoever makes room for it is not to blame.
        """
        self._seal.refuse_long(HEAD_BYTES + letter.content.nbytes)
        with self._line.changed:
            self._held.append(letter)
            self._write()

    def close(self) -> None:
        """Says goodbye, once, behind all that was sent, and drops what comes."""
        with self._line.changed:
            self._is_over = True
            while self.letters:
                self._read_or_refuse(*self.letters.popleft())
            self._write()
            self._forget()

    def _write(self) -> None:
        """Sends what the other end has room for; callers hold the lock."""
        while self._held and self._has_met and len(self._unread) < MOST_UNREAD:
            letter = self._held.popleft()
            self._unread.append(letter.content.nbytes)
            self._sent += 1
            self._say(LetterKind.LAST if letter.ends else LetterKind.LETTER, letter)
        if self._is_over and not self._held and not self._has_said_goodbye:
            self._has_said_goodbye = True
            self._say(LetterKind.GOODBYE)

    def _say(self, kind: LetterKind, letter: Letter | None = None) -> None:
        letter = letter or nothing()
        self._told = self._read
        head = Head.about(self._session, kind, letter, self._told)
        payload = b"".join((_NUMBERS.pack(*head.numbers), content(letter.content)))
        self._went += 1
        place = Place(Kind.LETTER, self._lane, self._went)
        with suppress(ExchangeError):  # `why_closed` tells that this site's line has failed
            self._line.send(place, self._seal.sealed(place, payload, self._other), self._other)

    # -- what comes in ---------------------------------------------------------------------------

    def next(self, until: float) -> Letter | None:
        """Returns the next letter; None if none has come until then, or none can."""
        with self._line.changed:
            left_s = max(until - time.monotonic(), 0.0)
            self._line.changed.wait_for(lambda: self.letters or self.why_closed, left_s)
            if not self.letters:
                return None
            message = self.letters.popleft()
        return self._read_or_refuse(*message)

    def _read_or_refuse(self, number: int, message: np.ndarray) -> Letter | None:
        """Reads a letter; None, and nothing more is taken, where the other end sent none."""
        try:
            return self._read_one(number, message)
        except ExchangeError as error:
            with self._line.changed:
                self.letters.clear()
                self._refuse(error)
            return None

    def _read_one(self, number: int, message: np.ndarray) -> Letter:
        """Reads a letter, and makes room for another one."""
        head, found = self._opened(number, message)
        letter = head.letter(torch.from_numpy(found))
        with self._line.changed:
            self._read += 1
            self._note_arrived(head)
            held_bytes = sum(self._unread) + sum(one.content.nbytes for one in self._held)
            refuse_held(held_bytes, self._most_bytes)
            if self._read - self._told >= _TELLS:
                self._say(LetterKind.ARRIVED)
        return letter

    def _opened(self, number: int, message: np.ndarray) -> tuple[Head, np.ndarray]:
        """Returns what a message says, decrypted and checked, and the content of its letter."""
        place, rank = Place(Kind.LETTER, self._lane, number), self._line.rank
        clear = self._seal.opened(place, self._other, message.data, rank)
        head = Head.read(_NUMBERS.unpack_from(clear), self._session, self._most_bytes)
        return head, np.frombuffer(clear, np.uint8)[HEAD_BYTES:]

    def _note_arrived(self, head: Head) -> None:
        """Notes how many letters the other end has read, which therefore has room for more."""
        while self._unread and self._sent - len(self._unread) < head.arrived:
            self._unread.popleft()
        self._write()

    def _take(self, frame: Frame) -> None:
        """Takes a part of a message; the line calls it, and holds the lock."""
        if self._why:
            return
        try:
            self._add(frame)
            if self._here == len(self._room):
                message, self._room, self._here = self._room, np.empty(0, np.uint8), 0
                self._hear(message)
        except ExchangeError as error:
            self._refuse(error)

    def _add(self, frame: Frame) -> None:
        """Adds a part to the message that is coming, or begins the next one."""
        if not self._here:
            self._begin(frame)
        expected = self._other, self._came, self._here, len(self._room)
        if (frame.sender, frame.number, frame.offset, frame.total) != expected:
            raise refused("is not the next one")
        self._here += len(frame.payload)
        self._room[frame.offset : self._here] = np.frombuffer(frame.payload, np.uint8)

    def _begin(self, frame: Frame) -> None:
        size = frame.total - self._least_bytes
        if not 0 <= size <= self._most_bytes:
            raise refused(f"is of {size} bytes")
        if size:
            self._refuse_flood()
        if not self._has_met and frame.number > _MOST_GREETINGS:
            raise refused("is not the next one")
        self._room = room_for(frame.total)
        self._came = self._came + 1 if self._has_met else frame.number

    def _refuse_flood(self) -> None:
        if not self._has_met or len(self.letters) == MOST_UNREAD:
            raise refused("has come before there was room for it")

    def _hear(self, message: np.ndarray) -> None:
        """Takes a whole message: a letter, to be read later, or what is said beside letters."""
        if len(message) == self._least_bytes:
            head, _ = self._opened(self._came, message)
            if head.is_letter:
                self._refuse_flood()
            self._meet()
            self._note_arrived(head)
            if head.kind in _CLOSES:
                self._break_off(_CLOSES[head.kind])
            if not head.is_letter:
                return
        if self._is_over:  # nobody else reads it: the other end has its goodbye to say behind it
            self._read_or_refuse(self._came, message)
        else:
            self.letters.append((self._came, message))

    def _meet(self) -> None:
        """Greets the other end again: the first greeting may have come before it was open."""
        if not self._has_met:
            self._has_met = True
            said = LetterKind.GOODBYE if self._has_said_goodbye else LetterKind.ARRIVED
            self._say(said)

    def _refuse(self, error: ExchangeError) -> None:
        """Leaves the other end out, and tells it, so that it does not wait for this one."""
        self._break_off(str(error))
        self._say(LetterKind.REFUSAL)

    def _break_off(self, why: str) -> None:
        """Takes nothing more from the other end, and sends nothing more but a goodbye."""
        self._why, self._room = why, np.empty(0, np.uint8)
        self._held.clear()
        self._unread.clear()
        self._forget()
        self._line.changed.notify_all()

    def _forget(self) -> None:
        """Lets the line drop what still comes, once this end is closed and nothing can come."""
        if self._is_over and self.why_closed:
            self._line.take_letters(self._lane, None)


class StarLines(Lines):
    """Lines to some other sites, which the hub relays, with a window for each pair of sites.

    Args:
        comm: transport of the sites, which counts the bytes.
        line: of this process.
        ranks: of the neighbours in the run, by their ranks in the transport.
        among: name of the sites of the transport, which no others of the run have: the sessions of
            two groups may have the same number.
        number: of the session; both ends of a line give the same.
        most_bytes: largest content of a letter.
        seal: keys of this site, if the hub must not read letters.

    Raises:
        ExchangeError: the hub does not answer, or has no lane left.
    """

    def __init__(
        self,
        comm: Comm,
        line: Line,
        ranks: Mapping[int, int],
        among: str,
        number: int,
        most_bytes: int,
        seal: Seal | None,
    ) -> None:
        self._comm, self._ends = comm, dict[int, _End]()
        about = among, number, most_bytes, seal, comm.patience_s
        for site, rank in ranks.items():
            self._ends[site] = _End(line, rank, *about)

    def send(self, site: int, letter: Letter) -> None:
        """Starts to send a letter; one to a site that is gone is dropped.

        Raises:
            ValueError: the hub must not read it, and it is too long to be encrypted.
        """
        end = self._ends[site]
        if not end.why_closed:
            end.send(letter)
            self._comm.count(sent=HEAD_BYTES + letter.content.nbytes)

    def next(self, site: int, until: float) -> Letter | None:
        """Returns the next letter of a site; None if none has come until then, or none can."""
        letter = self._ends[site].next(until)
        if letter is not None:
            self._comm.count(received=HEAD_BYTES + letter.content.nbytes)
        return letter

    def why_closed(self, site: int) -> str:
        """Returns why a site will never send anything more; "" while it may."""
        end = self._ends[site]
        return "" if end.letters else end.why_closed

    def close(self) -> None:
        """Says goodbye to the other sites, behind all that was sent; does not wait for theirs."""
        for end in self._ends.values():
            end.close()

    def __del__(self) -> None:
        """Says goodbye where a session was collected together with its model."""
        self.close()
