"""A step like the one before it, with all gradients all-reduced, that needs no new plan."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import SupportsInt
from weakref import ref

import torch
from torch import Tensor

from outergrad.buckets.bucket import Bucket, Pending, Result, StepContext
from outergrad.buckets.dense import LARGE, DenseBucket, DensePending
from outergrad.capture.engine import NO_TASK
from outergrad.commit.ballot import Ballot
from outergrad.commit.deferred_votes import DeferredVotes
from outergrad.commit.participant import CommitParticipant, refuse_if_given_up
from outergrad.commit.step_result import StepResult
from outergrad.core.errors import DriftError, ExchangeError
from outergrad.core.memory import holders
from outergrad.core.model import Choice
from outergrad.messages.checksum import combined
from outergrad.messages.header import Header, Join
from outergrad.messages.vote import Subjects
from outergrad.messages.wire import State
from outergrad.record.stats import LayerBook, Since, Stats
from outergrad.step import param_grad
from outergrad.step.groups import MessageSequence
from outergrad.step.receiving import only
from outergrad.step.step import SharedStep


class BucketView:
    """Makes the sums of a bucket the gradients, if the loop leaves gradients as they are.

    Copying a sum into `param.grad` takes a pass over it. It is needed if somebody keeps the
    gradient that autograd formed (`zero_grad(set_to_none=False)`, flat buffers of others). It is
    also needed if the loop changes gradients in place (clipping, unscaling), because a sum is kept
    for a step, for sites that lack it. The first sums are copied, to see what becomes of them.
    Either all sums of a message become gradients, if one is large, or none.
    """

    def __init__(self) -> None:
        self._names: list[str] | None = None
        """Parameters whose sums may become gradients; empty once the loop would notice."""
        self._copies: list[_Copy] | None = None
        self._copied: Mapping[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        """Sums that will become gradients, as tensors of their own in the same memory."""
        self._one: Tensor | None = None
        """A view of that memory, whose version counts the writes to all of it."""
        self._lent: tuple[Tensor, int] | None = None
        """Such a view for the sums that became gradients, with its version then."""

    def prepare(self, params: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> None:
        """Decides which sums become gradients and which are copied, while they are on their way.

        Args:
            params: parameters by name, whose gradients are complete.
            sums: views of a buffer that is not written to as long as somebody holds them.
        """
        if self._names is None:
            self._names = list(sums) if any(t.numel() >= LARGE for t in sums.values()) else []
        elif not self._was_left_alone():
            self._names.clear()
        if not _are_like([(params[name].grad, sums[name]) for name in self._names]):
            self._names.clear()
        if self._names and self._copies is not None:
            self._one = next(iter(sums.values()))
            self._sums, self._copied = {name: t.detach() for name, t in sums.items()}, {}
        else:
            self._sums, self._copied = {}, sums

    def write(self, params: Mapping[str, Tensor]) -> None:
        """Copies the sums that do not become gradients into `param.grad`, once they have come."""
        if self._copied:
            param_grad.overwrite(params, self._copied)
            self._copied = {}

    def lend(self, params: Mapping[str, Tensor]) -> None:
        """Makes sums the gradients where that is possible, once the step counts."""
        self._lent = None
        if self._sums:
            assert self._one is not None
            param_grad.replace(params, self._sums)
            self._lent, self._copies, self._sums = (self._one, self._one._version), [], {}
        else:
            self._copies = [_Copy.of(params[name]) for name in self._names or ()]

    def _was_left_alone(self) -> bool:
        lent = self._lent
        same = lent is None or lent[0]._version == lent[1]
        return same and all(one.was_left_alone() for one in self._copies or ())


def _are_like(pairs: Sequence[tuple[Tensor | None, Tensor]]) -> bool:
    """True if nobody would notice gradients that are other tensors of the same values."""
    for grad, t in pairs:
        if type(grad) is not Tensor or grad.requires_grad or grad.dtype != t.dtype:
            return False
        if grad.stride() != t.stride() or holders(grad) > 1:  # others share its memory
            return False
    return True


@dataclass
class _Copy:
    """A gradient that a sum was copied into, and whose memory may be freed.

    Attributes:
        param: parameter of the gradient.
        grad: weak reference to the gradient.
        counter: empty tensor that shares its version counter.
        version: version at the time.
    """

    param: Tensor
    grad: ref[Tensor]
    counter: Tensor
    version: int

    @staticmethod
    def of(param: Tensor) -> _Copy:
        """Records the current gradient of a parameter."""
        grad = param.grad
        assert grad is not None
        counter = grad.detach()
        counter.data = grad.new_empty(0)  # keeps the version counter, not the memory
        return _Copy(param, ref(grad), counter, grad._version)

    def was_left_alone(self) -> bool:
        """True if it was not changed in place, and is not `param.grad` any more."""
        return self.counter._version == self.version and self.grad() is not self.param.grad


_NEITHER = (combined(()), combined(()))
"""Stand for the digests of buffers and of mean deltas, which a `SharedStep` may have."""


@dataclass(frozen=True)
class Pattern:
    """Common parts of steps that are alike, and in which all gradients are all-reduced.

    Attributes:
        known: predicted headers of all sites, the same object while these are predicted.
        lengths: key of the message lengths, for the message sequence.
        choice: how the units travel.
        buckets: dense buckets of all parameters.
        context: context of the step that the pattern was taken from, used by the next ones, too.
        own: this site's header of that step.
        used: parameters in which a backward leaves a gradient.
        place: index of each parameter's message.
        counts: number of used parameters in each message.
        subjects: parameters and buffers that votes can name.
        rests: whether no layer had anything new to announce.
        lending: for each message, how its sums become gradients.
    """

    known: Sequence[Header]
    lengths: object
    choice: Choice
    buckets: Sequence[DenseBucket]
    context: StepContext
    own: Header
    used: frozenset[str]
    place: dict[str, int]
    counts: Sequence[int]
    subjects: Subjects
    rests: bool
    lending: Sequence[BucketView]

    @staticmethod
    def of(step: SharedStep, known: Sequence[Header], *, rests: bool) -> Pattern | None:
        """Returns the pattern of a step that was applied; None if the next one cannot repeat it.

        Args:
            step: the step.
            known: headers that it had.
            rests: as the attribute.
        """
        context, buckets, choice = step.context, step.buckets, step.choice
        dense = [bucket for bucket in buckets if isinstance(bucket, DenseBucket)]
        if not dense or len(dense) < len(buckets) or choice is None or not _is_plain(step, known):
            return None
        used = list(compress(context.params, context.header.used))
        place = {name: k for k, bucket in enumerate(dense) for name in bucket.dense_params}
        counts = Counter(place[name] for name in used)
        return Pattern(
            known,
            step.lengths,
            choice,
            dense,
            context,
            context.header,
            frozenset(used),
            place,
            [counts[k] for k in range(len(dense))],
            step.subjects,
            rests,
            [BucketView() for _ in dense],
        )


def _is_plain(step: SharedStep, known: Sequence[Header]) -> bool:
    """True if nothing but gradients travelled, by headers that may be the next ones."""
    context = step.context
    if not step.needs_no_votes or step.task == NO_TASK or context.owes() or step.lengths is None:
        return False
    if len(known) != len(context.headers) or known[context.comm.rank].facts != context.header.facts:
        return False
    return all(
        header.alone and header.join == Join.NONE and not any(header.buffers) for header in known
    )


class RepeatedStep:
    """A synchronised step of a pattern, with the messages that a `SharedStep` would send.

    It writes nothing before they show that all sites are in the same step. If anything speaks
    against it, a `SharedStep` takes over what was sent.

    Args:
        pattern: pattern of the last step.
        task: backward that it belongs to.
        number: number of synchronised steps before it.
        participant: commit participant of this site.
        votes: deferred votes of the session, on the steps before.
        turns: message sequence of the transport.

    Attributes:
        context: as in `SharedStep`.
        headers: predicted headers of all sites.
        since: counters of the transport before the step.
        began: start of the step, by the monotonic clock.
        ready: parameters for which the backward has nothing more.
        sent: messages under way, in their order.
        awaited: message that it waits for; None before the first.
        drift: error that sites have applied different results before, if that was found.
        error: exception with which it failed, if any.
        wait_s: seconds that this site waited.
    """

    is_taken = False
    applied = True
    awaited: Bucket | None = None
    drift: DriftError | None = None
    error: ExchangeError | None = None

    def __init__(
        self,
        pattern: Pattern,
        task: int,
        number: int,
        participant: CommitParticipant,
        votes: DeferredVotes,
        turns: MessageSequence,
    ) -> None:
        self.task, self.context = task, pattern.context
        self._pattern, self._participant, self._votes = pattern, participant, votes
        self.headers, self._left = pattern.known, [*pattern.counts]
        self.since = Since(self.context.comm)
        self.ready: list[str] = []
        self.sent: list[tuple[DenseBucket, DensePending]] = []
        self.wait_s = 0.0
        self._waits_since: float | None = None
        self.began = time.monotonic()
        self.context.header = pattern.own.of_step(number)
        self.context.layers, self.context.state, self.context.bad = LayerBook(), State.GOOD, None
        self.context.reading = None
        self.context.without_grad.clear()
        participant.begins(self)
        comm = self.context.comm
        turn, expected = turns.begin(pattern.lengths)
        comm.take_turn(turn)
        for expected_turn in expected:
            for bucket in pattern.buckets:
                bucket.expect(self.context, expected_turn)

    def note_gradient(self, name: str) -> None:
        """Notes nothing: all gradients travel dense."""

    def note_written(self, name: str) -> None:
        """Notes nothing: what a backward wrote itself is in `param.grad`."""

    @property
    def waits_s(self) -> float:
        """Seconds since the current wait of this site began; 0 outside of waits."""
        since = self._waits_since
        return 0.0 if since is None else time.perf_counter() - since

    @property
    def used(self) -> frozenset[str]:
        """Parameters in which its backward leaves a gradient."""
        return self._pattern.used

    def on_ready(self, name: str) -> None:
        """Starts messages in their order, as far as they are ready, but for the last.

        An exchange that fails here is kept as `error`, for the end of the step.
        """
        self.ready.append(name)
        left, k = self._left, self._pattern.place[name]
        left[k] -= 1
        if not left[k] and self.error is None and len(left) > 1:
            try:
                with torch.no_grad():
                    while (sent := len(self.sent)) < len(left) - 1 and not left[sent]:
                        self._start()
            except ExchangeError as error:
                self.error = error

    def _start(self) -> None:
        bucket = self._pattern.buckets[len(self.sent)]
        if len(self.sent) == len(self._left) - 1:
            self._participant.sends()
        self.sent.append((bucket, bucket.start(self.context)))

    def succeeds(self) -> bool:
        """Goes through all messages and makes the gradients the mean; False if that fails."""
        had_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as torch.no_grad(), in one call
        try:
            if self.error is None and self._goes_through():
                self.context.comm.take_turn(0)
                return True
        except ExchangeError as error:
            self.error = error
        except Exception:  # it is raised again in a `SharedStep`, which tells the others
            pass
        finally:
            torch._C._set_grad_enabled(had_grad)
        return False

    def _goes_through(self) -> bool:
        while len(self.sent) < len(self._left):
            self._start()
        ballot = self._prepare()
        sums = self._received()
        if sums is None:
            return False
        self.drift = self._votes.count(self.context.header.step)
        if self.drift is not None:
            return False
        refuse_if_given_up(self.context.comm, self.began)
        params, lendings = self.context.params, self._pattern.lending
        lendings[-1].write(params)
        for lending in lendings:
            lending.lend(params)
        ballot.note_sums(sums)
        ballot.note_sums(_NEITHER)
        self._votes.make(ballot, self, self._participant)
        return True

    def _prepare(self) -> Ballot:
        """Does all that needs none of the messages, while these travel."""
        context = self.context
        int(self._votes.digest)  # computes the digest of the steps before
        for lending, (_, pending) in zip(self._pattern.lending, self.sent, strict=True):
            lending.prepare(context.params, only(pending.sums, context.used))
        return Ballot(context.comm, context.header, self._pattern.subjects)

    def _received(self) -> list[SupportsInt] | None:
        """Returns the messages' digests, with all but the last written; None if one is bad."""
        digests: list[SupportsInt] = []
        for bucket, pending in self.sent:
            result = self._awaited(bucket, pending)
            if result.state != State.GOOD or result.lacks:
                return None
            if digests:
                self._pattern.lending[len(digests) - 1].write(self.context.params)
            assert result.digest is not None
            digests.append(result.digest)
        return digests

    def _awaited(self, bucket: Bucket, pending: Pending) -> Result:
        self.awaited, self._waits_since = bucket, time.perf_counter()
        try:
            return pending.wait()
        finally:
            self.wait_s += self.waits_s
            self._waits_since = None

    def stats(self, step: int) -> Stats:
        """Returns the statistics of this site, as `SharedStep.stats` does."""
        return self.since.stats(step, wait_s=self.wait_s, layers=self.context.layers)

    # -- for sites that lack the step -----------------------------------------------------------

    def brought(self) -> StepResult | None:
        """Returns the result once more; None if a gradient that is a bucket view was changed."""
        means: dict[str, Tensor] = {}
        for _, pending in self.sent:
            part = pending.brought_again()
            if part is None:
                return None
            means |= only(part, self.context.used)
        return StepResult(True, means)

    def message_to(self, site: int, place: int) -> None:
        """Returns None, because sums cannot be sent again."""
