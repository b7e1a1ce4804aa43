"""What the ranks of one site tell each other: how each fares, and how its share travelled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from outergrad.comm.torch import TorchComm
from outergrad.comm.words import words_of_all
from outergrad.core.errors import ExchangeError
from outergrad.core.model import Model
from outergrad.core.reasons import Reason
from outergrad.messages.header import Header


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
class ShareOutcome:
    """What has become of a share between the sites.

    Attributes:
        fate: of it.
        used: per parameter of the share, whether some site has a gradient for it.
        tap_next: per unit of the share, whether to tap it in the next forward.
        reasons: per unit, how it travelled; empty if as in the last step.
    """

    fate: Fate
    used: tuple[bool, ...] = ()
    tap_next: tuple[bool, ...] = ()
    reasons: tuple[Reason, ...] = ()

    @property
    def text(self) -> bytes:
        """The reasons, as they are sent."""
        plain = [reason.plain() for reason in self.reasons]
        return json.dumps(plain).encode() if plain else b""

    def numbers(self, share: Model) -> list[int]:
        """All but the reasons themselves, as many of a share as ever."""
        used = self.used or (False,) * len(share.params)
        tap_next = self.tap_next or (False,) * len(share.units)
        return [self.fate, len(self.text), *map(int, (*used, *tap_next))]


def told_fates(comm: TorchComm, fate: Fate) -> list[Fate]:
    """Of every rank of the site."""
    return [fate_of(word, rank) for rank, (word,) in enumerate(words_of_all(comm, [fate]))]


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
