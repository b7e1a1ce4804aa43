"""How each site fared in a step: what all sites exchange before any of them lets it count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from outergrad._types import ExchangeError
from outergrad.comm.header import KNOWN, MAGIC, sum_of_words

NOTHING = -1
WORDS = 9


class Verdict(IntEnum):
    """What a site says of a step, from good to worst."""

    GOOD = 0
    """Everything has arrived, as it was sent."""
    SURPRISED = 1
    """Some batch was not what the plan was made for: again, with headers."""
    BAD = 2
    """Its own gradient is not finite."""
    REFUSED = 3
    """A message that reached it was not as it had been sent."""
    FAILED = 4
    """Its backward raised."""


@dataclass(frozen=True)
class Vote:
    """One site's.

    Attributes:
        fingerprint: as in `Header`.
        step: as in `Header`.
        rank: the sender.
        verdict: how it fared.
        param: index of the parameter that this is about, or NOTHING.
        site: whose message was refused, or NOTHING.
        digest: of the sums that this site has received: they must be the same everywhere.
    """

    fingerprint: int
    step: int
    rank: int
    verdict: Verdict = Verdict.GOOD
    param: int = NOTHING
    site: int = NOTHING
    digest: int = 0

    def words(self) -> list[int]:
        """Its int64 words; the sender stands where it stands in a header."""
        own = [MAGIC, self.fingerprint, self.step, self.rank]
        words = [*own, int(self.verdict), self.param, self.site, self.digest]
        return [*words, sum_of_words(words[KNOWN:])]

    @staticmethod
    def parse(words: Sequence[int], expected: Vote, rank: int) -> Vote:
        """Another site's, checked against this site's own.

        Raises:
            ExchangeError: it is not a vote on the same step of the same session.
        """
        *words, total = words
        magic, fingerprint, step, sender, verdict, *about = words
        ours = MAGIC, expected.fingerprint, expected.step, rank
        if (magic, fingerprint, step, sender) != ours:
            raise ExchangeError(
                f"site {rank} sent something else than its vote on step {expected.step}; do all "
                f"sites call the same distributed models in the same order?"
            )
        if total != sum_of_words(words[KNOWN:]):
            raise ExchangeError(f"the checksum of the vote of site {rank} is wrong")
        return Vote(fingerprint, step, sender, Verdict(verdict), *about)
