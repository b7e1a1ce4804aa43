"""Whether a step counts: every site votes, and it counts where all votes are good.

Where nobody can refuse a step once all its messages are there, a site applies it then, and counts
the votes on it at the end of the next one (`late_votes.py`). Otherwise it waits for them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outergrad.core.errors import (
    DriftError,
    ExchangeError,
    Failure,
    RefusedError,
    StepDiscardedError,
)
from outergrad.core.transport import Comm, Work
from outergrad.messages.checksum import combined
from outergrad.messages.header import Header
from outergrad.messages.vote import NOTHING, WORDS, Subjects, Verdict, Vote
from outergrad.messages.wire import State
from outergrad.replay.block_message import Blocks

_LANE = 2
"""Apart from the messages: a site that is in another step than the others waits, which is an error
in time, where a message of another length would end gloo's process."""

_SAID_BY = {
    State.GOOD: Verdict.GOOD,
    State.SURPRISED: Verdict.SURPRISED,
    State.BAD: Verdict.BAD,
    State.FAILED: Verdict.FAILED,
}


@dataclass(frozen=True)
class Decision:
    """What came of a vote; the same on every site.

    Attributes:
        verdict: the worst one; REFUSED, too, if what the sites received contradicts itself.
        vote: of the first site that said so.
        apart: sites that received something else than most; all of them if no two of three agree.
        contradicted: whether a site's messages said that it failed, and its vote did not.
    """

    verdict: Verdict
    vote: Vote
    apart: tuple[int, ...] = ()
    contradicted: bool = False

    @staticmethod
    def all_good(header: Header) -> Decision:
        """That a step counts."""
        return Decision(Verdict.GOOD, Vote(header.fingerprint, header.step, header.rank))

    @property
    def good(self) -> bool:
        """Whether the step counts."""
        return self.verdict == Verdict.GOOD

    @property
    def sites(self) -> tuple[int, ...]:
        """Where what was decided arose, as far as the votes tell."""
        if self.apart or self.contradicted:
            return self.apart
        return (self.vote.rank if self.vote.site == NOTHING else self.vote.site,)

    def error(self, subjects: Subjects, blocks: Blocks) -> RuntimeError:
        """Why it does not; a StepDiscardedError where training can go on with the next step.

        Args:
            subjects: what votes can be about.
            blocks: of the model.
        """
        unrepeated = self._unrepeated(subjects, blocks)
        if unrepeated is not None:
            return RuntimeError(f"step {self.vote.step} was not applied on any site. {unrepeated}")
        if self.verdict == Verdict.CHANGED:
            about = "" if self.vote.param == NOTHING else repr(subjects.names[self.vote.param])
            return _changed(self.vote.rank, self.vote.step, about)
        return StepDiscardedError(
            f"{self._why(subjects)}: it was not applied on any site; call optimizer.zero_grad() "
            f"and go on with the next"
        )

    def drift(self, now: int | None = None) -> DriftError:
        """That sites have applied different things in a step that nobody waited for.

        Args:
            now: the step in which it was found out, which counts nowhere; None between steps.
        """
        step, sites = self.vote.step, self.sites
        void = "" if now is None else f" Step {now} was not applied on any site."
        return DriftError(
            f"{self._why(Subjects(()))}, which sites have applied: their replicas may differ since."
            f"{void} Call session.make_equal(optimizer) on every site, or start again from the "
            f"last checkpoint",
            sites,
            step + 1,
            "",
        )

    def _unrepeated(self, subjects: Subjects, blocks: Blocks) -> str | None:
        """What to say of a block of which a replay was not like its forward, if it is that."""
        vote = self.vote
        if self.verdict != Verdict.UNREPEATED or vote.param == NOTHING:
            return None
        told = f"site {vote.rank} computed again what site {vote.site} sent of it and"
        return blocks.unrepeated(subjects.names[vote.param], told)

    def _why(self, subjects: Subjects) -> str:
        vote = self.vote
        if self.verdict == Verdict.FAILED:
            return f"the backward of site {vote.rank} raised in step {vote.step}"
        if self.contradicted:
            return f"a site said that it failed in step {vote.step}, and voted for it"
        if len(self.apart) > 1:
            sites = ", ".join(map(str, self.apart))
            return f"the sites {sites} received different messages or sums in step {vote.step}"
        if self.apart:
            what = "received other messages or sums than the others in step"
            return f"site {vote.rank} {what} {vote.step}"
        if vote.site == NOTHING:
            return f"site {vote.rank} did not apply step {vote.step}"
        return (
            f"site {vote.rank} refused a message of site {vote.site}{subjects.words(vote.param)} "
            f"in step {vote.step}: it is not what should have been sent"
        )


def _changed(site: int, step: int, param: str) -> StepDiscardedError:
    what = f"{param} of the model of site {site}" if param else f"the model of site {site}"
    return StepDiscardedError(
        f"{what} was changed after og.distribute(): step {step} was not applied on any site; call "
        f"session.detach(), change the model alike, and call og.distribute(model, ...) again on "
        f"every site"
    )


class Ballot:
    """This site's vote on one step, and the counting of all.

    Args:
        comm: the transport.
        header: this site's of the step.
        subjects: what it can be about.
    """

    def __init__(self, comm: Comm, header: Header, subjects: Subjects) -> None:
        self._comm, self._subjects = comm, subjects
        self._vote = Vote(header.fingerprint, header.step, header.rank)
        self._sums: list[Tensor | int] = []
        self._heard = State.GOOD
        self._work: Work | None = None
        self._is_cast = False
        self._decision: Decision | None = None
        self.cause: BaseException | None = None
        """Why this site could not compute something again."""

    def expect(self, turn: int) -> None:
        """Posts the receives of the others' votes in a turn."""
        self._comm.expect([WORDS] * self._comm.world_size, turn, torch.int64, lane=_LANE)

    def note_sum(self, digest: Tensor | int) -> None:
        """A digest of a sum, or of messages of all sites, that this site received."""
        self._sums.append(digest)

    def hear(self, state: State) -> None:
        """The worst state that messages of this step told of."""
        self._heard = state

    def refuse(self, error: RefusedError, first: str) -> None:
        """Something of a message was not as it should be, or could not be computed again.

        Args:
            error: what.
            first: the first parameter or buffer of the message.
        """
        verdict = Verdict.UNREPEATED if error.param else Verdict.REFUSED
        index = self._index(error.param or first)
        self._vote = replace(self._vote, verdict=verdict, param=index, site=error.site)
        self.cause = error.__cause__

    def note_change(self, param: str) -> None:
        """The model is not what the sites agreed on: this parameter, or one that is new."""
        index = self._index(param) if param in self._subjects.params else NOTHING
        self._vote = replace(self._vote, verdict=Verdict.CHANGED, param=index)

    def note_drift(self) -> None:
        """The votes on the step before were not all the same."""
        self._vote = replace(self._vote, verdict=Verdict.DIFFERED, param=NOTHING, site=NOTHING)

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
        self._vote = replace(self._vote, digest=combined(map(int, self._sums)) if good else 0)
        words, began = self._comm.control(self._vote.words()), time.monotonic()
        self._is_cast = True  # if this raises, some site may have it
        self._work = self._comm.all_gather(words, [len(words)] * self._comm.world_size, lane=_LANE)
        if time.monotonic() - began > self._comm.patience_s:
            # It was stopped between: the others' votes may be here, and they gone without its own.
            told = "this site stood still for longer than the others wait"
            raise ExchangeError(told, kind=Failure.LOCAL)

    @property
    def is_good(self) -> bool:
        """Whether this site has said, to some other or all, that the step may count."""
        return self._is_cast and self._vote.verdict == Verdict.GOOD

    def count(self) -> Decision:
        """Waits for all votes, the first time.

        Raises:
            ExchangeError: they do not all come.
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
        worst = max(votes, key=lambda vote: vote.verdict)  # the first of these
        apart, contradicted = _apart(votes), self._heard != State.GOOD
        if worst.verdict == Verdict.GOOD and (apart or contradicted):
            first = votes[apart[0] if apart else 0]
            return Decision(Verdict.REFUSED, first, apart, contradicted and not apart)
        return Decision(worst.verdict, worst)

    def _index(self, name: str) -> int:
        return self._subjects.names.index(name)


def _apart(votes: Sequence[Vote]) -> tuple[int, ...]:
    """The sites whose digest is not that of more than half; all, if there is none such."""
    usual, count = Counter(vote.digest for vote in votes).most_common(1)[0]
    most = 2 * count > len(votes)
    return tuple(vote.rank for vote in votes if not (most and vote.digest == usual))
