"""The head of a letter from one site to another: what it says is checked before it is believed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from outergrad.core.errors import ExchangeError, Failure
from outergrad.core.transport import Letter
from outergrad.messages.checksum import checksum

NUMBERS = 7
"""Numbers of a head, each an int64."""
HEAD_BYTES = 8 * NUMBERS
MOST_UNREAD = 4
"""Letters that wait to be read at one end; the other one keeps what it sends beyond."""
ENDED = "its session has ended"
"""Why a line is closed whose other end has said goodbye."""
LEFT_OUT = "it has left this site out, and its log says why"
"""Why a line is closed whose other end does not take this end's letters any more."""
_MOST_HELD = 4
"""Largest letters that one end keeps while the other goes on to send its own."""
_END_OF_NUMBERS = 1 << 62
"""Numbers of letters are below this, so that whoever counts on from one stays within int64."""


class LetterKind(IntEnum):
    """The kinds of letters, and of what is said beside them."""

    LETTER = 0
    LAST = 1
    """A letter after which its sender has nothing more to say in the exchange at hand."""
    GOODBYE = 2
    """Nothing: the sender will send nothing more."""
    ARRIVED = 3
    """Nothing: the sender tells how many letters it has, where it has none of its own to send."""
    REFUSAL = 4
    """Nothing: a message of the other end was wrong, and the sender will read no more of them."""


_LETTERS = LetterKind.LETTER, LetterKind.LAST


class Head(NamedTuple):
    """The numbers before the content of a letter.

    Attributes:
        session: number of the session that the letter is of.
        kind: of the letter.
        number: of the letter, its sender's.
        share: of the letter.
        size: of the content, bytes.
        check: checksum of the content.
        arrived: number of letters of the other end that the sender has.
    """

    session: int
    kind: LetterKind
    number: int
    share: float
    size: int
    check: int
    arrived: int

    @staticmethod
    def about(session: int, kind: LetterKind, letter: Letter, arrived: int) -> Head:
        """Returns the head of a letter."""
        size = letter.content.numel()
        check = int(checksum(letter.content)) if size else 0
        return Head(session, kind, letter.number, letter.share, size, check, arrived)

    @property
    def is_letter(self) -> bool:
        """True for the head of a letter, and not of what is said beside letters."""
        return self.kind in _LETTERS

    @property
    def numbers(self) -> list[int]:
        """The head as int64 numbers."""
        bits = struct.unpack("<q", struct.pack("<d", self.share))[0]
        about = self.session, self.kind, self.number, bits, self.size, self.check, self.arrived
        return list(about)

    @staticmethod
    def read(numbers: Sequence[int], session: int, most_bytes: int) -> Head:
        """Reads a head.

        Args:
            numbers: as `numbers` gives them.
            session: number of the only session whose letters may come here.
            most_bytes: largest content of a letter.

        Raises:
            ExchangeError: no site that keeps to the rules sends this; says why.
        """
        of, kind, number, bits, size, check, arrived = numbers
        if of != session or kind not in list(LetterKind):
            raise refused("is of another session")
        if not 0 <= size <= (most_bytes if kind in _LETTERS else 0):
            raise refused(f"is of {size} bytes")
        share = struct.unpack("<d", struct.pack("<q", bits))[0]
        if not (0 <= number < _END_OF_NUMBERS and share >= 0):
            raise refused(f"has the number {number} and the share {share}")
        return Head(of, LetterKind(kind), number, share, size, check, arrived)

    def letter(self, content: Tensor) -> Letter:
        """Returns the letter with this head.

        Raises:
            ExchangeError: the content is not the one that was sent.
        """
        if len(content) != self.size or (self.size and int(checksum(content)) != self.check):
            raise refused("was damaged on its way")
        return Letter(self.number, self.share, content, self.kind == LetterKind.LAST)


def refused(why: str) -> ExchangeError:
    """Returns the error for a message of the other end that is not taken."""
    return ExchangeError(f"its message {why}", kind=Failure.LOCAL)


def refuse_held(held_bytes: int, most_bytes: int) -> None:
    """Checks how much the other end, which sends something, has not got yet: that must not grow.

    Args:
        held_bytes: bytes of letters that this end has sent and has to keep.
        most_bytes: largest content of a letter.

    Raises:
        ExchangeError: it is too much.
    """
    if held_bytes > _MOST_HELD * most_bytes:
        raise ExchangeError(
            f"it answers and says that {held_bytes} bytes of letters have not arrived",
            kind=Failure.LOCAL,
        )


def nothing() -> Letter:
    """Returns what stands behind a head that says all."""
    return Letter(0, 0.0, torch.empty(0, dtype=torch.uint8))
