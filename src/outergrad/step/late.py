"""The end of a step: an optimistic commit, or one that waits for all votes."""

from __future__ import annotations

import time

from outergrad.buckets.bucket import Bucket, Pending, Result, StepContext
from outergrad.core.errors import BoardGoneError, DriftError, ExchangeError, Failure
from outergrad.core.transport import Comm
from outergrad.messages.vote import Verdict
from outergrad.messages.wire import State
from outergrad.step import param_grad
from outergrad.step.asking import Question, answer_key, ask
from outergrad.step.brought import Brought
from outergrad.step.buffer_message import BufferMessage
from outergrad.step.buffers import SharedBuffers
from outergrad.step.commit import Ballot
from outergrad.step.decision import Decision
from outergrad.step.joint import JointStep
from outergrad.step.late_votes import LateVotes
from outergrad.step.pact import Pact, refuse_if_given_up
from outergrad.step.receiving import BUFFERS_PLACE, Receiver

_POLL_S = 0.02
Last = tuple[Bucket, Result] | None


class LateStep:
    """Part of a synchronised step that decides whether the step counts.

    Attributes:
        drift: error that sites have applied different results, if that was found.
        is_taken: whether its result came from another site in the end.

    Args:
        comm: the transport.
        pact: commit participant of this site; None if there is no board to agree on.
        votes: deferred votes of the session, on the steps before.
        joint: deltas that are averaged, if any.
    """

    context: StepContext
    _receiver: Receiver
    _ballot: Ballot
    _buckets: list[Bucket]
    _sent: list[tuple[Bucket, Pending]]
    _buffers: BufferMessage | None
    _shared_buffers: SharedBuffers
    drift: DriftError | None = None

    def __init__(
        self, comm: Comm, pact: Pact | None, votes: LateVotes, joint: JointStep | None
    ) -> None:
        self._comm, self._pact, self._votes = comm, pact, votes
        self._averages = joint is not None and joint.averages
        self._began = time.monotonic()
        self.is_taken = self._is_late = False

    @property
    def waits_s(self) -> float:
        """Seconds since the current wait of this site began; 0 outside of waits."""
        return self._receiver.waits_s

    def _may_be_late(self) -> bool:
        """True if no site can refuse the step once all its messages have arrived.

        Then it is committed before the votes, which are counted at the end of the next step. The
        plan decides this, so it is the same on all sites.
        """
        kept = bool(self._buckets) and all(bucket.is_kept for bucket in self._buckets)
        return self._pact is not None and kept and not self._averages

    @property
    def needs_no_votes(self) -> bool:
        """True if it is applied before the votes; known once its messages have arrived."""
        return self._is_late and self.drift is None and self._receiver.may_count

    def _sent_all(self) -> None:
        self._receiver.ask_again = self._ask_again if self._is_late else None

    def _sends_last(self) -> None:
        """Records that the last message goes: a site that has it, too, may apply the step."""
        if self._pact is not None and self._is_late:
            self._pact.sends()

    def _count_before(self) -> None:
        """Counts the votes on the step before, which this site has applied without them."""
        self._receiver.place = "the other sites' votes on the step before"
        with self._receiver.waiting():
            self.drift = self.drift or self._votes.count(self.context.header.step)

    def _applied_at_once(self, last: Last) -> Decision:
        assert self._pact is not None
        refuse_if_given_up(self._comm, self._began)
        if last is not None:
            self._receiver.write(*last)
        self._votes.make(self._ballot, self, self._pact)
        return Decision.all_good(self.context.header)

    def _voted_on(self, last: Last) -> Decision:
        """Votes and waits for all votes; writes the last message while they travel."""
        if self.drift is not None:
            self._ballot.note_drift()
        elif self._pact is not None and self.context.state == State.GOOD:
            self._pact.sends()
        try:
            self._ballot.cast(self.context.state, self.context.bad)
        finally:  # another site may have the vote, and count the step
            if last is not None:
                self._receiver.write(*last)
        self._receiver.place = "the other sites' word that they have everything"
        with self._receiver.waiting():
            decision = self._ballot.count()
        if decision.good:
            self._ballot.note_part()
        if self._pact is not None and decision.verdict != Verdict.SURPRISED:
            refuse_if_given_up(self._comm, self._began)
            own = self.context.header.fingerprint
            self._pact.makes(own, None, applied=decision.good)
            if decision.good:
                self._votes.note_decided(self.context.header.step)
        return decision

    def _raise_drift(self, decision: Decision) -> None:
        """Raises if sites applied different results in the step before or, elsewhere, in this one.

        Raises:
            DriftError: they did.
        """
        if self.drift is not None:
            raise self.drift
        if self._is_late and decision.verdict == Verdict.REFUSED:
            self._votes.keep(self._ballot, self)  # the others find it out in the next step
            self.drift = decision.drift()
            raise self.drift

    # -- damaged messages -----------------------------------------------------------------------

    def _ask_again(self, site: int, place: int, nbytes: int) -> bytes:
        """Requests a message of another site once more.

        Raises:
            ExchangeError: it does not come.
        """
        board, pact, until = self._comm.board, self._pact, time.monotonic() + self._comm.patience_s
        assert board is not None
        assert pact is not None
        question = Question(self._comm.rank, site, pact.made, place)
        try:
            number = ask(board, question, pact.asked)
            while time.monotonic() < until:
                content = board.get(answer_key(number))
                if content is not None and len(content) == nbytes:
                    return content
                time.sleep(_POLL_S)
        except BoardGoneError as error:
            raise ExchangeError(str(error), kind=Failure.LOCAL) from error
        told = f"a message of site {site} was damaged, and it sent none again"
        raise ExchangeError(told, (site,), kind=Failure.TIMEOUT)

    def message_to(self, site: int, place: int) -> bytes | None:
        """Returns the bytes that this site sent in a message; None if they are no longer there."""
        if place == BUFFERS_PLACE:
            gathered = None if self._buffers is None else self._buffers.gathered
        else:
            gathered = self._sent[place][1].gathered if 0 <= place < len(self._sent) else None
        return None if gathered is None else gathered.own.cpu().numpy().tobytes()

    # -- results for sites that lack a step -----------------------------------------------------

    def brought(self) -> Brought:
        """Returns the result of the step once more."""
        self.context.reading = None
        means, additions = {}, {}
        for bucket, pending in self._sent:
            found = self._receiver.effects(bucket, pending.wait())
            means.update(found[0])
            additions.update(found[1])
        buffers = {} if self._buffers is None else self._buffers.values()
        named = {place.name: t for place, t in buffers.items() if t is not None}
        return Brought(True, means, additions, named)

    def take(self, brought: Brought) -> None:
        """Applies the step's result of another site; gradients written here are the same, and stay.

        Raises:
            ValueError: it is of another model.
        """
        self.is_taken = True
        if not (brought.means or brought.additions):  # this site has all but the decision
            return
        params, written = self.context.params, self._receiver.written
        nowhere = (written & self.context.used) - brought.means.keys() - brought.additions.keys()
        param_grad.drop(params[name] for name in nowhere)
        written = written - nowhere
        means = {n: t for n, t in brought.means.items() if n not in written}
        additions = {n: t for n, t in brought.additions.items() if n not in written}
        for name, t in [*means.items(), *additions.items()]:
            if name not in params or params[name].shape != t.shape:
                raise ValueError(f"{name!r} is no parameter of this model, or of another shape")
        param_grad.overwrite(params, means)
        param_grad.add(params, additions)
        self._shared_buffers.take(self._shared_buffers.named(brought.buffers))
        self.context.used = frozenset(written | means.keys() | additions.keys())
        self.context.reading, self._buffers = None, None
