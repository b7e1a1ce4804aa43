"""What the ranks of one site tell each other: how each fares, and how its share travelled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from outergrad.core.errors import ExchangeError
from outergrad.core.reasons import Reason
from outergrad.messages.header import Header, bounded
from outergrad.messages.vote import NOTHING, Verdict


class Fate(IntEnum):
    """What has become of a step on one rank; the worst one counts."""

    GOOD = 0
    FAILED = 1
    """It raised: nothing of the step may be applied."""
    LOST = 2
    """It cannot reach its counterparts at the other sites any more."""


def fate_of(word: int, rank: int) -> Fate:
    """What a rank sent.

    Raises:
        ExchangeError: it is none.
    """
    try:
        return Fate(word)
    except ValueError:
        raise ExchangeError(f"local rank {rank} sent a fate of {word}") from None


@dataclass(frozen=True)
class Report:
    """What a rank tells the others of its site at the end of backward.

    Attributes:
        header: what it has of every parameter and slot.
        fate: of its backward.
        has_autograd_grad: per parameter, whether autograd has a gradient besides captured rows.
    """

    header: Header
    fate: Fate
    has_autograd_grad: tuple[bool, ...]

    def words(self) -> list[int]:
        """Its int64 words."""
        return [*self.header.words(), self.fate, *map(int, self.has_autograd_grad)]

    @staticmethod
    def parse(words: Sequence[int], expected: Header, rank: int) -> Report:
        """Another rank's, checked as `Header.parse` does."""
        start = expected.length
        header = Header.parse(words[:start], expected, rank)
        fate, *has_autograd_grad = words[start:] or [-1]
        if len(has_autograd_grad) != len(expected.used):
            raise ExchangeError(f"site {rank} sent a report of {len(words)} words")
        return Report(header, fate_of(fate, rank), tuple(map(bool, has_autograd_grad)))


@dataclass(frozen=True)
class Ending:
    """What has become of a rank's share between the sites.

    Attributes:
        fate: of it.
        verdict: of all sites on it.
        site: which of them said so first.
        param: index of what this is about among the `Subjects` of the whole model, or NOTHING.
    """

    fate: Fate
    verdict: Verdict
    site: int
    param: int = NOTHING

    def words(self) -> list[int]:
        """Its int64 words."""
        return [self.fate, self.verdict, self.site, self.param]

    @staticmethod
    def parse(words: Sequence[int], rank: int, subjects: int, sites: int) -> Ending:
        """Another rank's.

        Raises:
            ExchangeError: it says what cannot be.
        """
        fate, verdict, site, param = words
        try:
            bounded("a subject of number", param + 1, subjects + 1)
            return Ending(Fate(fate), Verdict(verdict), bounded("site", site, sites), param)
        except ValueError as error:
            raise ExchangeError(f"local rank {rank} says what cannot be: {error}") from None


ENDING_WORDS = 4


def reasons_text(reasons: Sequence[Reason]) -> bytes:
    """How the units of a share travelled, as it is sent."""
    return json.dumps([reason.plain() for reason in reasons]).encode()


def told_reasons(text: bytes, rank: int, units: int) -> list[Reason]:
    """How the units of a rank's share travelled, as it says.

    Raises:
        ExchangeError: it says something else.
    """
    try:
        told = [Reason.of(plain) for plain in json.loads(text)]
    except (ValueError, TypeError, RecursionError):
        told = None
    if told is None or len(told) != units:
        raise ExchangeError(f"local rank {rank} did not say how its share travelled")
    return told
