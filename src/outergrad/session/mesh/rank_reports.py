"""Reports between the ranks of one site: of each backward, and of how each share travelled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from outergrad.core.errors import ExchangeError
from outergrad.core.reasons import Reason
from outergrad.core.sites import Site
from outergrad.messages.header import Header, bounded
from outergrad.messages.vote import NOTHING, Verdict


class RankStatus(IntEnum):
    """Status of a step on one rank; the worst of a site's ranks decides."""

    GOOD = 0
    FAILED = 1
    """The rank raised: nothing of the step may be applied."""
    LOST = 2
    """The rank cannot reach its counterparts at the other sites any more."""


def fate_of(word: int, rank: int) -> RankStatus:
    """Decodes the status that a rank sent, or raises ExchangeError."""
    try:
        return RankStatus(word)
    except ValueError:
        raise ExchangeError(f"local rank {rank} sent a fate of {word}") from None


@dataclass(frozen=True)
class Report:
    """Report of a rank to the others of its site, at the end of backward.

    Attributes:
        header: what the rank has of every parameter and slot.
        fate: status of its backward.
        has_autograd_grad: per parameter, whether autograd has a gradient besides captured rows.
    """

    header: Header
    fate: RankStatus
    has_autograd_grad: tuple[bool, ...]

    def words(self) -> list[int]:
        """Encodes the report as int64 words."""
        return [*self.header.words(), self.fate, *map(int, self.has_autograd_grad)]

    @staticmethod
    def parse(words: Sequence[int], expected: Header, rank: int) -> Report:
        """Decodes another rank's report; raises as `Header.parse` if it cannot be right."""
        start = expected.length
        header = Header.parse(words[:start], expected, Site(rank))
        fate, *has_autograd_grad = words[start:] or [-1]
        if len(has_autograd_grad) != len(expected.used):
            raise ExchangeError(f"site {rank} sent a report of {len(words)} words")
        return Report(header, fate_of(fate, rank), tuple(map(bool, has_autograd_grad)))


@dataclass(frozen=True)
class RankReport:
    """Report of how a rank's share fared between the sites.

    Attributes:
        fate: status of the share.
        verdict: of all sites on the share.
        site: first site with that verdict.
        param: index of what the verdict is about among the `Subjects` of the whole model, or
            NOTHING.
    """

    fate: RankStatus
    verdict: Verdict
    site: int
    param: int = NOTHING

    def words(self) -> list[int]:
        """Encodes the report as int64 words."""
        return [self.fate, self.verdict, self.site, self.param]

    @staticmethod
    def parse(words: Sequence[int], rank: int, subjects: int, sites: int) -> RankReport:
        """Decodes another rank's report.

        Raises:
            ExchangeError: a word is out of its range.
        """
        fate, verdict, site, param = words
        try:
            bounded("a subject of number", param + 1, subjects + 1)
            return RankReport(
                RankStatus(fate), Verdict(verdict), bounded("site", site, sites), param
            )
        except ValueError as error:
            raise ExchangeError(f"local rank {rank} says what cannot be: {error}") from None


ENDING_WORDS = 4


def reasons_text(reasons: Sequence[Reason]) -> bytes:
    """Encodes, as JSON, how the units of a share travelled."""
    return json.dumps([reason.plain() for reason in reasons]).encode()


def told_reasons(text: bytes, rank: int, units: int) -> list[Reason]:
    """Decodes how the units of a rank's share travelled.

    Raises:
        ExchangeError: the text cannot be read, or is about another number of units.
    """
    try:
        told = [Reason.of(plain) for plain in json.loads(text)]
    except (ValueError, TypeError, RecursionError):
        told = None
    if told is None or len(told) != units:
        raise ExchangeError(f"local rank {rank} did not say how its share travelled")
    return told
