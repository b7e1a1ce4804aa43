"""Whether a step counts: every site votes, and it counts where all votes are good.

A site that has every vote goes on; one that lost another before it had them cannot know whether
the others did: what they leave behind tells it (`_lost.py`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outergrad._protocols import Comm, Work
from outergrad._types import ExchangeError
from outergrad.comm.checksum import combined
from outergrad.comm.header import Header
from outergrad.comm.vote import NOTHING, WORDS, Verdict, Vote
from outergrad.comm.wire import State

_LANE = 2
"""Apart from the messages: a site that is in another step than the others waits, which is an error
in time, where a message of another length would end gloo's process."""

_SAID_BY = {
    State.GOOD: Verdict.GOOD,
    State.SURPRISED: Verdict.SURPRISED,
    State.BAD: Verdict.BAD,
    State.FAILED: Verdict.FAILED,
}


class StepDiscardedError(RuntimeError):
    """The backward of another site raised, or a message was damaged: the step is void everywhere.

    After `optimizer.zero_grad()` training goes on with the next.
    """


@dataclass(frozen=True)
class Decision:
    """What came of a vote; the same on every site.

    Attributes:
        verdict: the worst one; REFUSED, too, if the sites received different sums.
        vote: of the first site that said so.
    """

    verdict: Verdict
    vote: Vote

    @staticmethod
    def all_good(header: Header) -> Decision:
        """That a step counts."""
        return Decision(Verdict.GOOD, Vote(header.fingerprint, header.step, header.rank))

    @property
    def good(self) -> bool:
        """Whether the step counts."""
        return self.verdict == Verdict.GOOD

    def error(self, params: Sequence[str]) -> StepDiscardedError:
        """Why it does not, of one that can be gone on from.

        Args:
            params: names, in the order in which votes count them.
        """
        vote = self.vote
        about = "" if vote.param == NOTHING else f" with the gradient of {params[vote.param]!r}"
        if self.verdict == Verdict.FAILED:
            why = f"the backward of site {vote.rank} raised in step {vote.step}"
        elif vote.site == NOTHING:
            why = f"site {vote.rank} received other sums than the others in step {vote.step}"
        else:
            why = (
                f"site {vote.rank} refused a message of site {vote.site}{about} in step "
                f"{vote.step}: it is not what should have been sent"
            )
        return StepDiscardedError(
            f"{why}: it was not applied on any site; call optimizer.zero_grad() and go on with the "
            f"next"
        )


class Ballot:
    """This site's vote on one step, and the counting of all.

    Args:
        comm: the transport.
        header: this site's of the step.
        params: names, in the order in which votes count them.
    """

    def __init__(self, comm: Comm, header: Header, params: Sequence[str]) -> None:
        self._comm, self._params = comm, params
        self._vote = Vote(header.fingerprint, header.step, header.rank)
        self._sums: list[Tensor] = []
        self._work: Work | None = None
        self._is_cast = False

    def expect(self) -> None:
        """Gets ready for the others' votes; only of a step that all sites go through to its end."""
        self._comm.expect([WORDS] * self._comm.world_size, torch.int64, lane=_LANE)

    def note_sum(self, digest: Tensor) -> None:
        """A digest of a sum that this site received."""
        self._sums.append(digest)

    def refuse(self, site: int, param: str) -> None:
        """A message of a site, which carried this parameter, was not as it had been sent."""
        self._vote = replace(
            self._vote, verdict=Verdict.REFUSED, param=self._index(param), site=site
        )

    def cast(self, state: State, param: str | None = None) -> None:
        """Starts to exchange the votes.

        Args:
            state: how this site fared.
            param: whose gradient is not finite, if that is so.
        """
        verdict = max(self._vote.verdict, _SAID_BY[state])
        if verdict != self._vote.verdict:
            index = NOTHING if param is None else self._index(param)
            self._vote = replace(self._vote, verdict=verdict, param=index, site=NOTHING)
        good = verdict == Verdict.GOOD
        self._vote = replace(self._vote, digest=self._digest() if good else 0)
        words, began = self._comm.control(self._vote.words()), time.monotonic()
        self._is_cast = True  # if this raises, some site may have it
        self._work = self._comm.all_gather(words, [len(words)] * self._comm.world_size, lane=_LANE)
        if time.monotonic() - began > self._comm.patience_s:
            # It was stopped between: the others' votes may be here, and they gone without its own.
            raise ExchangeError("this site stood still for longer than the others wait")

    def _digest(self) -> int:
        return combined(int(part.item()) for part in self._sums)

    @property
    def is_good(self) -> bool:
        """Whether this site has said, to some other or all, that the step may count."""
        return self._is_cast and self._vote.verdict == Verdict.GOOD

    def count(self) -> Decision:
        """Waits for all votes."""
        assert self._work is not None
        parts = self._work.wait()
        votes = [Vote.parse(part.tolist(), self._vote, rank) for rank, part in enumerate(parts)]
        worst = max(votes, key=lambda vote: vote.verdict)  # the first of these
        odd = _odd(votes)
        if worst.verdict == Verdict.GOOD and odd is not None:
            return Decision(Verdict.REFUSED, odd)
        return Decision(worst.verdict, worst)

    def _index(self, param: str) -> int:
        return list(self._params).index(param)


def _odd(votes: Sequence[Vote]) -> Vote | None:
    """The first whose digest is not that of most."""
    usual = Counter(vote.digest for vote in votes).most_common(1)[0][0]
    return next((vote for vote in votes if vote.digest != usual), None)
