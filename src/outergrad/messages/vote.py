"""How each site fared in a step: what all sites exchange before any of them lets it count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from outergrad.core.errors import ExchangeError
from outergrad.messages.header import KNOWN, MAGIC, bounded, sum_of_words

NOTHING = -1
WORDS = 9
MEAN_DELTAS = "the mean deltas below a site's own parts"


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
    UNREPEATED = 5
    """A block that it computed again gave another output than in the sender's forward."""
    CHANGED = 6
    """Its model is not what the sites agreed on."""
    DIFFERED = 7
    """The step before, which sites had applied, was not the same for all of them."""
    OVERWRITTEN = 8
    """What makes its gradient was written to or freed before its message started."""


@dataclass(frozen=True)
class Subjects:
    """What votes can be about, in the order in which they count it.

    Attributes:
        params: names of parameters: about their gradients.
        buffers: names of buffers.
    """

    params: Sequence[str]
    buffers: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        """Of all."""
        return [*self.params, *self.buffers, MEAN_DELTAS]

    def words(self, index: int) -> str:
        """What a message carried, behind "a message of site 1"."""
        if index == NOTHING:
            return ""
        name = self.names[index]
        if name == MEAN_DELTAS:
            return f" with {name}"
        kind = "gradient of" if index < len(self.params) else "buffer"
        return f" with the {kind} {name!r}"


@dataclass(frozen=True)
class Vote:
    """One site's.

    Attributes:
        fingerprint: as in `Header`.
        step: as in `Header`.
        rank: the sender.
        verdict: how it fared.
        param: index of what this is about among its `Subjects`, or NOTHING.
        site: whose message was refused, or NOTHING.
        digest: of the messages and sums that this site has received: the same everywhere.
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
    def parse(
        words: Sequence[int],
        expected: Vote,
        rank: int,
        subjects: int = 1 << 31,
        sites: int = 1 << 31,
    ) -> Vote:
        """Another site's, checked against this site's own.

        Args:
            words: as they came.
            expected: this site's.
            rank: of the other site.
            subjects: how many there are.
            sites: how many there are.

        Raises:
            ExchangeError: it is not a vote on the same step of the same session, or says what
                cannot be.
        """
        if len(words) != WORDS:
            raise ExchangeError(f"site {rank} sent a vote of {len(words)} words")
        *words, total = words
        magic, fingerprint, step, sender, verdict, param, site, digest = words
        ours = MAGIC, expected.fingerprint, expected.step, rank
        if (magic, fingerprint, step, sender) != ours:
            raise ExchangeError(
                f"site {rank} sent something else than its vote on step {expected.step}; do all "
                f"sites call the same distributed models in the same order?"
            )
        if total != sum_of_words(words[KNOWN:]):
            raise ExchangeError(f"the checksum of the vote of site {rank} is wrong")
        try:
            bounded("a subject of number", param + 1, subjects + 1)
            bounded("a message of site", site + 1, sites + 1)
            return Vote(fingerprint, step, sender, Verdict(verdict), param, site, digest)
        except ValueError as error:
            raise ExchangeError(f"the vote of site {rank} says what cannot be: {error}") from None
