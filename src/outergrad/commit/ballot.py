"""Votes on whether a step counts, and the decision."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import SupportsInt

import torch

from outergrad.core.errors import (
    DriftError,
    ExchangeError,
    Failure,
    RefusedError,
    StepDiscardedError,
)
from outergrad.core.sites import Site, called
from outergrad.core.transport import Comm, Work
from outergrad.messages.checksum import Digest, combined
from outergrad.messages.header import Header
from outergrad.messages.vote import NOTHING, WORDS, Subjects, Verdict, Vote
from outergrad.messages.wire import State
from outergrad.replay.block_message import Blocks


@dataclass(frozen=True)
class Decision:
    """Decision on a step; the same on every site.

    Attributes:
        verdict: the worst one; also REFUSED if what the sites received contradicts itself.
        vote: vote of the first site with this verdict.
        apart: sites that received something else than the majority; all if there is no majority.
        contradicted: whether a site's messages said that it failed, and its vote did not.
        first: first step of the vote, if it is about several.
    """

    verdict: Verdict
    vote: Vote
    apart: tuple[int, ...] = ()
    contradicted: bool = False
    first: int | None = None

    @staticmethod
    def all_good(header: Header) -> Decision:
        """Returns the decision that a step counts."""
        return Decision(Verdict.GOOD, Vote(header.fingerprint, header.step, header.rank))

    @cached_property
    def good(self) -> bool:
        """True if the step counts."""
        return self.verdict == Verdict.GOOD

    @property
    def sites(self) -> tuple[int, ...]:
        """Sites where the reason for the decision arose, as far as the votes tell."""
        if self.apart or self.contradicted:
            return self.apart
        return (self.vote.rank if self.vote.site == NOTHING else self.vote.site,)

    def error(self, subjects: Subjects, blocks: Blocks, sites: Sequence[Site]) -> RuntimeError:
        """Returns the step's error; a StepDiscardedError if training can go on with the next step.

        Args:
            subjects: parameters and buffers that votes can name.
            blocks: blocks of the model.
            sites: all, for their names.
        """
        unrepeated, who = self._unrepeated(subjects, blocks, sites), sites[self.vote.rank]
        if unrepeated is not None:
            return RuntimeError(f"step {self.vote.step} was not applied on any site. {unrepeated}")
        if self.verdict == Verdict.CHANGED:
            about = "" if self.vote.param == NOTHING else repr(subjects.names[self.vote.param])
            return _changed(who, self.vote.step, about)
        if self.verdict == Verdict.OVERWRITTEN:
            return _overwritten(who, self.vote.step, subjects.names[self.vote.param])
        return StepDiscardedError(
            f"{self._why(subjects, sites)}: it was not applied on any site; call "
            f"optimizer.zero_grad() and go on with the next"
        )

    def drift(self, sites: Sequence[Site], now: int | None = None) -> DriftError:
        """Returns the error for different results that sites applied in an optimistic commit.

        Args:
            sites: all, for their names.
            now: step in which this was found, which counts nowhere; None between steps.
        """
        void = "" if now is None else f" Step {now} was not applied on any site."
        return DriftError(
            f"{self._why(Subjects(()), sites)}, which sites have applied: their replicas may "
            f"differ since.{void} Call session.make_equal(optimizer) on every site, or start again "
            f"from the last checkpoint",
            self.sites,
            self.vote.step + 1,
            "",
        )

    def _unrepeated(self, subjects: Subjects, blocks: Blocks, sites: Sequence[Site]) -> str | None:
        """Describes a block whose replay was not like its forward; None for other verdicts."""
        vote = self.vote
        if self.verdict != Verdict.UNREPEATED or vote.param == NOTHING:
            return None
        who, whose = sites[vote.rank].called, sites[vote.site].called
        told = f"{who} computed again what {whose} sent of it and"
        return blocks.unrepeated(subjects.names[vote.param], told)

    @property
    def _steps(self) -> str:
        last = self.vote.step
        return f"step {last}" if self.first is None else f"one of the steps {self.first} to {last}"

    def _why(self, subjects: Subjects, sites: Sequence[Site]) -> str:
        vote, who = self.vote, sites[self.vote.rank].called
        if self.verdict == Verdict.FAILED:
            return f"the backward of {who} raised in step {vote.step}"
        if self.contradicted:
            return f"a site said that it failed in step {vote.step}, and voted for it"
        if len(self.apart) > 1:
            apart = called([sites[rank] for rank in self.apart])
            return f"{apart} received different messages or sums in {self._steps}"
        if self.apart:
            what = "received other messages or sums than the others in"
            return f"{who} {what} {self._steps}"
        if vote.site == NOTHING:
            return f"{who} did not apply step {vote.step}"
        return (
            f"{who} refused a message of {sites[vote.site].called}{subjects.words(vote.param)} "
            f"in step {vote.step}: it is not what should have been sent"
        )


def _overwritten(site: Site, step: int, param: str) -> StepDiscardedError:
    return StepDiscardedError(
        f"{param!r}: the activations or deltas that make its gradient on {site.called} were "
        f"written to or freed after the layer's own backward, before its message started: "
        f"step {step} was not applied on any site. From now on {site.called} keeps copies "
        f"where somebody does so: call optimizer.zero_grad() and go on, or pass og.Dense() for "
        f"this parameter"
    )


def _changed(site: Site, step: int, param: str) -> StepDiscardedError:
    what = f"{param} of the model of {site.called}" if param else f"the model of {site.called}"
    return StepDiscardedError(
        f"{what} was changed after og.distribute(), or somebody else changed its gradient: the "
        f"error of {site.called} says which, and what to do there. Step {step} was not applied on "
        f"any site. If the model was changed, call session.detach(), change it alike, and call "
        f"og.distribute(model, ...) again on every site"
    )


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

    Attributes:
        session: fingerprint of the session of the step.
        step: number of the step that is voted on; the last one if there are several.
        cause: exception because of which this site could not compute something again.
    """

    cause: BaseException | None = None
    _first: int | None = None
    _heard = State.GOOD
    _work: Work | None = None
    _is_cast = False
    _decision: Decision | None = None

    def __init__(self, comm: Comm, header: Header, subjects: Subjects) -> None:
        self._comm, self._subjects = comm, subjects
        self.session, self.step = header.fingerprint, header.step
        self._vote = Vote(header.fingerprint, header.step, header.rank)
        self._sums: list[SupportsInt] = []

    def expect(self, turn: int) -> None:
        """Posts the receives of the others' votes in a turn."""
        self._comm.expect([WORDS] * self._comm.world_size, turn, torch.int64, lane=_LANE)

    def note_sums(self, *digests: SupportsInt) -> None:
        """Adds digests of sums, or of messages of all sites, that this site received."""
        self._sums += digests

    def cover(self, first: int, digest: SupportsInt) -> None:
        """Extends the vote to earlier steps that nobody has voted on.

        Args:
            first: first of these steps.
            digest: digest of what this site received in them.
        """
        self._first = first
        self._sums.append(digest)

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
    def sites(self) -> Sequence[Site]:
        """All sites, for their names."""
        return self._comm.sites

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
        counts = len(self._subjects.names), self._comm.world_size
        pairs = zip(work.wait(), self._comm.sites, strict=True)
        votes = [Vote.parse(part.tolist(), self._vote, site, *counts) for part, site in pairs]
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
