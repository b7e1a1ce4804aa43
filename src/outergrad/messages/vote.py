"""Votes: each site's verdict on a step, exchanged to decide whether the step counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from outergrad.core.errors import ExchangeError
from outergrad.core.sites import Site
from outergrad.messages.header import KNOWN, MAGIC, bounded, sum_of_words

NOTHING = -1
WORDS = 9
MEAN_DELTAS = "the mean deltas below a site's own parts"


class Verdict(IntEnum):
    """A site's verdict on a step, from good to worst."""

    GOOD = 0
    """All messages have arrived undamaged."""
    SURPRISED = 1
    """Some site's batch does not fit the plan: the step starts again, with headers."""
    BAD = 2
    """The site's own gradient is not finite."""
    REFUSED = 3
    """The site received a damaged message."""
    FAILED = 4
    """The site's backward raised."""
    UNREPEATED = 5
    """The site's replay of a block gave another output than the sender's forward."""
    CHANGED = 6
    """The site's model is not what the sites agreed on."""
    DIFFERED = 7
    """The previous step, which sites had already applied, was not the same on all of them."""
    OVERWRITTEN = 8
    """Activations or deltas of its gradient were written to or freed before its message started."""


@dataclass(frozen=True)
class Subjects:
    """Possible subjects of votes, in the order of their indices.

    Attributes:
        params: names of parameters, for votes about their gradients.
        buffers: names of buffers.
    """

    params: Sequence[str]
    buffers: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        """Names of all subjects."""
        return [*self.params, *self.buffers, MEAN_DELTAS]

    def words(self, index: int) -> str:
        """Describes a message's content, to follow "a message of site 1"."""
        if index == NOTHING:
            return ""
        name = self.names[index]
        if name == MEAN_DELTAS:
            return f" with {name}"
        kind = "gradient of" if index < len(self.params) else "buffer"
        return f" with the {kind} {name!r}"


@dataclass(frozen=True)
class Vote:
    """One site's vote on a step.

    Attributes:
        fingerprint: as in `Header`.
        step: as in `Header`.
        rank: the sender.
        verdict: the sender's verdict.
        param: index of the vote's subject among its `Subjects`, or NOTHING.
        site: the sender of a refused message, or NOTHING.
        digest: of the messages and sums that this site has received; equal on all sites.
    """

    fingerprint: int
    step: int
    rank: int
    verdict: Verdict = Verdict.GOOD
    param: int = NOTHING
    site: int = NOTHING
    digest: int = 0

    def words(self) -> list[int]:
        """Returns the vote as int64 words; the sender has the same index as in a header."""
        own = [MAGIC, self.fingerprint, self.step, self.rank]
        words = [*own, int(self.verdict), self.param, self.site, self.digest]
        return [*words, sum_of_words(words[KNOWN:])]

    @staticmethod
    def parse(
        words: Sequence[int],
        expected: Vote,
        rank: Site,
        subjects: int = 1 << 31,
        sites: int = 1 << 31,
    ) -> Vote:
        """Parses another site's vote and checks it against this site's own.

        Args:
            words: as received.
            expected: this site's.
            rank: of the other site.
            subjects: number of possible subjects.
            sites: number of sites.

        Raises:
            ExchangeError: it is not a vote on the same step of the same session, or has invalid
                values.
        """
        if len(words) != WORDS:
            raise ExchangeError(f"{rank.called} sent a vote of {len(words)} words")
        *words, total = words
        magic, fingerprint, step, sender, verdict, param, site, digest = words
        ours = MAGIC, expected.fingerprint, expected.step, rank
        if (magic, fingerprint, step, sender) != ours:
            raise ExchangeError(
                f"{rank.called} sent something else than its vote on step {expected.step}; do all "
                f"sites call the same distributed models in the same order?"
            )
        if total != sum_of_words(words[KNOWN:]):
            raise ExchangeError(f"the checksum of the vote of {rank.called} is wrong")
        try:
            bounded("a subject of number", param + 1, subjects + 1)
            bounded("a message of site", site + 1, sites + 1)
            return Vote(fingerprint, step, sender, Verdict(verdict), param, site, digest)
        except ValueError as error:
            raise ExchangeError(f"the vote of {rank.called} says what cannot be: {error}") from None
