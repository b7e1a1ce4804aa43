"""The commit of a step: every site votes, and the step counts if all votes are good.

If no site can refuse a step once all its messages are there, a site applies it then (optimistic
commit), and counts the votes at the end of the next one (`late_votes.py`); else it waits for them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import SupportsInt

import torch

from outergrad.core.errors import ExchangeError, Failure, RefusedError
from outergrad.core.transport import Comm, Work
from outergrad.messages.checksum import Digest, combined
from outergrad.messages.header import Header
from outergrad.messages.vote import NOTHING, WORDS, Subjects, Verdict, Vote
from outergrad.messages.wire import State
from outergrad.step.decision import Decision

_LANE = 2
"""Lane of the votes, apart from the messages: a site that is in another step waits, which is an
error in time, where a message of another length would end gloo's process."""

_SAID_BY = {
    State.GOOD: Verdict.GOOD,
    State.SURPRISED: Verdict.SURPRISED,
    State.BAD: Verdict.BAD,
    State.FAILED: Verdict.FAILED,
}


class Ballot:
    """This site's vote on one step, and the count of all votes.

    Args:
        comm: the transport.
        header: this site's header of the step.
        subjects: parameters and buffers that a vote can name.
    """

    def __init__(self, comm: Comm, header: Header, subjects: Subjects) -> None:
        self._comm, self._subjects = comm, subjects
        self._vote = Vote(header.fingerprint, header.step, header.rank)
        self._sums: list[SupportsInt] = []
        self._first: int | None = None
        self._heard = State.GOOD
        self._work: Work | None = None
        self._is_cast = False
        self._decision: Decision | None = None
        self.cause: BaseException | None = None
        """Exception because of which this site could not compute something again."""

    def expect(self, turn: int) -> None:
        """Posts the receives of the others' votes in a turn."""
        self._comm.expect([WORDS] * self._comm.world_size, turn, torch.int64, lane=_LANE)

    def note_sum(self, digest: SupportsInt) -> None:
        """Adds a digest of a sum, or of messages of all sites, that this site received."""
        self._sums.append(digest)

    def note_sums(self, digests: Iterable[SupportsInt]) -> None:
        """Adds several such digests."""
        self._sums.extend(digests)

    def cover(self, first: int, digest: SupportsInt) -> None:
        """Extends the vote to earlier steps that nobody has voted on.

        Args:
            first: first of these steps.
            digest: digest of what this site received in them.
        """
        self._first = first
        self._sums.append(digest)

    @property
    def step(self) -> int:
        """Number of the step that is voted on; the last one if there are several."""
        return self._vote.step

    @property
    def session(self) -> int:
        """Fingerprint of the session of the step."""
        return self._vote.fingerprint

    @property
    def digest(self) -> SupportsInt:
        """Digest of all that this site received so far and that is the same on all sites."""
        sums = tuple(self._sums)
        at_once = {*map(type, sums)} <= {int}
        return combined(sums) if at_once else Digest(partial(combined, sums))

    def hear(self, state: State) -> None:
        """Records the worst state that messages of this step reported."""
        self._heard = state

    def refuse(self, error: RefusedError, first: str) -> None:
        """Votes against the step: a message is not as it should be, or cannot be replayed.

        Args:
            error: the refusal.
            first: first parameter or buffer of the message.
        """
        verdict = Verdict.UNREPEATED if error.param else Verdict.REFUSED
        index = self._index(error.param or first)
        self._vote = replace(self._vote, verdict=verdict, param=index, site=error.site)
        self.cause = error.__cause__

    def note_overwritten(self, param: str) -> None:
        """Votes against the step: what makes this site's gradient of a parameter is lost."""
        index = self._index(param)
        self._vote = replace(self._vote, verdict=Verdict.OVERWRITTEN, param=index)

    def note_change(self, param: str) -> None:
        """Votes against the step: this parameter of the model has changed, or is new."""
        index = self._index(param) if param in self._subjects.params else NOTHING
        self._vote = replace(self._vote, verdict=Verdict.CHANGED, param=index)

    def note_drift(self) -> None:
        """Votes against the step: the votes on the step before were not all the same."""
        self._vote = replace(self._vote, verdict=Verdict.DIFFERED, param=NOTHING, site=NOTHING)

    def cast(self, state: State, param: str | None = None) -> None:
        """Starts the exchange of votes.

        Args:
            state: state of this site.
            param: parameter whose gradient is not finite, if any.

        Raises:
            ExchangeError: this site was suspended meanwhile, for longer than the others wait.
        """
        verdict = max(self._vote.verdict, _SAID_BY[state])
        if verdict != self._vote.verdict:
            index = NOTHING if param is None else self._index(param)
            self._vote = replace(self._vote, verdict=verdict, param=index, site=NOTHING)
        good = verdict == Verdict.GOOD
        self._vote = replace(self._vote, digest=int(self.digest) if good else 0)
        words, began = self._comm.control(self._vote.words()), time.monotonic()
        self._is_cast = True  # before the send: if that raises, some site may have it
        self._work = self._comm.all_gather(words, [len(words)] * self._comm.world_size, lane=_LANE)
        if time.monotonic() - began > self._comm.patience_s:
            # Suspended in the send: the others' votes may be here, but they left without its own.
            told = "this site stood still for longer than the others wait"
            raise ExchangeError(told, kind=Failure.LOCAL)

    def note_part(self) -> None:
        """Tells the transport that the steps that were voted on count."""
        first = self.step if self._first is None else self._first
        self._comm.took_part(self.session, first, self.step)

    @property
    def is_good(self) -> bool:
        """True if this site has sent a good vote, to some other site or all."""
        return self._is_cast and self._vote.verdict == Verdict.GOOD

    @property
    def is_cast(self) -> bool:
        """True if this site has begun to send its vote."""
        return self._is_cast

    def compared(self, digests: Mapping[int, int | None]) -> Decision:
        """Decides by digests what a vote would, if all sites are known to have made the step.

        Args:
            digests: digest of what each site received; None if it is not known.
        """
        own = digests[self._comm.rank]
        apart = _apart([own if d is None else d for _, d in sorted(digests.items())])
        if not apart:
            return Decision(Verdict.GOOD, self._vote)
        first = replace(self._vote, rank=apart[0])
        return Decision(Verdict.REFUSED, first, apart, first=self._first)

    def count(self) -> Decision:
        """Waits for all votes the first time; returns the decision.

        Raises:
            ExchangeError: votes are missing.
        """
        if self._work is None:
            raise ExchangeError("the vote could not be sent", kind=Failure.CLOSED)
        if self._decision is None:
            self._decision = self._counted(self._work)
        return self._decision

    def _counted(self, work: Work) -> Decision:
        parts, counts = work.wait(), (len(self._subjects.names), self._comm.world_size)
        pairs = enumerate(parts)
        votes = [Vote.parse(part.tolist(), self._vote, rank, *counts) for rank, part in pairs]
        worst = max(votes, key=lambda vote: vote.verdict)  # the first of equally bad ones
        apart = _apart([vote.digest for vote in votes])
        contradicted = self._heard != State.GOOD
        if worst.verdict == Verdict.GOOD and (apart or contradicted):
            first = votes[apart[0] if apart else 0]
            contradicted = contradicted and not apart
            return Decision(Verdict.REFUSED, first, apart, contradicted, self._first)
        return Decision(worst.verdict, worst)

    def _index(self, name: str) -> int:
        return self._subjects.names.index(name)


def _apart(digests: Sequence[int | None]) -> tuple[int, ...]:
    """Returns the sites whose digest is not the majority's; all sites if there is no majority."""
    usual, count = Counter(digests).most_common(1)[0]
    most = 2 * count > len(digests)
    return tuple(site for site, d in enumerate(digests) if not (most and d == usual))
