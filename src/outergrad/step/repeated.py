"""A step like the one before it, all of whose gradients are summed: nothing is planned anew."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import SupportsInt

import torch
from torch import Tensor

from outergrad.buckets.bucket import Bucket, Pending, Result, StepContext
from outergrad.buckets.dense import DenseBucket, DensePending
from outergrad.capture.engine import NO_TASK
from outergrad.core.errors import DriftError, ExchangeError
from outergrad.core.model import Choice
from outergrad.messages.checksum import combined
from outergrad.messages.header import Header, Join
from outergrad.messages.vote import Subjects
from outergrad.messages.wire import State
from outergrad.record.stats import LayerBook, Since, Stats
from outergrad.step.brought import Brought
from outergrad.step.commit import Ballot
from outergrad.step.late_votes import LateVotes
from outergrad.step.lending import Lending
from outergrad.step.pact import Pact, refuse_if_given_up
from outergrad.step.receiving import only
from outergrad.step.step import SharedStep
from outergrad.step.turns import Turns

_NEITHER = (combined(()), combined(()))
"""In place of the digests of buffers and of mean deltas, which a `SharedStep` may have."""


@dataclass(frozen=True)
class Pattern:
    """What steps have in common that are alike, and of which all gradients are summed.

    Attributes:
        known: the headers that they go by, the same object as long as these are foreseen.
        lengths: of their messages, by which sites take turns.
        choice: how the units travel.
        buckets: the messages.
        context: of the step that it was taken from; the next ones have it, too.
        own: this site's header of that step.
        used: parameters that a backward leaves a gradient in.
        place: of each of them, the number of its message.
        counts: how many of them each message has.
        subjects: what votes can be about.
        rests: whether no layer had been captured that might still come.
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
    lending: Sequence[Lending]

    @staticmethod
    def of(step: SharedStep, known: Sequence[Header], *, rests: bool) -> Pattern | None:
        """What the next step may have in common with one that was applied; None if nothing.

        Args:
            step: that one.
            known: the headers that it went by.
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
            [Lending() for _ in dense],
        )


def _is_plain(step: SharedStep, known: Sequence[Header]) -> bool:
    """Whether nothing but gradients travelled, by headers that may be the next ones."""
    context = step.context
    if not step.needs_no_votes or step.task == NO_TASK or context.owes() or step.lengths is None:
        return False
    if len(known) != len(context.headers) or known[context.comm.rank].facts != context.header.facts:
        return False
    return all(
        header.alone and header.join == Join.NONE and not any(header.buffers) for header in known
    )


class RepeatedStep:
    """A shared step of a pattern: its messages are those that a `SharedStep` would send.

    It writes nothing before they have told that all sites are in the same step. Where something
    speaks against it, a `SharedStep` takes over what was sent.

    Args:
        pattern: of the last step.
        task: the backward that it belongs to.
        number: of synchronised steps before it.
        pact: what this site promises the others.
        votes: of the session, on the steps before.
        turns: of the transport.

    Attributes:
        context: as of a `SharedStep`.
        headers: of all sites, as they were foreseen.
        since: what the transport had counted before it.
        began: when, by the monotonic clock.
        ready: parameters that the backward has nothing more for.
        sent: messages under way, in their order.
        awaited: the one that it waits for; None before the first.
        drift: what is wrong with what sites have applied before, if that was found out.
        error: with which it failed, if it did.
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
        pact: Pact,
        votes: LateVotes,
        turns: Turns,
    ) -> None:
        self.task, self.context = task, pattern.context
        self._pattern, self._pact, self._votes = pattern, pact, votes
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
        pact.begins(self)
        comm = self.context.comm
        turn, expected = turns.begin(pattern.lengths)
        comm.take_turn(turn)
        for expected_turn in expected:
            for bucket in pattern.buckets:
                bucket.expect(self.context, expected_turn)

    @property
    def waits_s(self) -> float:
        """For how long this site has been waiting for what it waits for now."""
        since = self._waits_since
        return 0.0 if since is None else time.perf_counter() - since

    @property
    def used(self) -> frozenset[str]:
        """Parameters that its backward leaves a gradient in."""
        return self._pattern.used

    def on_ready(self, name: str) -> None:
        """Starts messages in their order, as far as they are ready, but for the last.

        What makes that impossible comes again at the end, as an `error`.
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
            self._pact.sends()
        self.sent.append((bucket, bucket.start(self.context)))

    def succeeds(self) -> bool:
        """Goes through all messages, and makes the gradients the mean, if nothing is against it."""
        had_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as torch.no_grad(), in one call
        try:
            if self.error is None and self._goes_through():
                self.context.comm.take_turn(0)
                return True
        except ExchangeError as error:
            self.error = error
        except Exception:  # it comes again, where the others hear of it
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
        self._votes.make(ballot, self, self._pact)
        return True

    def _prepare(self) -> Ballot:
        """What needs none of the messages: there is time while these travel."""
        context = self.context
        int(self._votes.digest)  # of the steps before
        for lending, (_, pending) in zip(self._pattern.lending, self.sent, strict=True):
            lending.prepare(context.params, only(pending.sums, context.used))
        return Ballot(context.comm, context.header, self._pattern.subjects)

    def _received(self) -> list[SupportsInt] | None:
        """Digests of the messages, all of which but the last are written; None if one is bad."""
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
        """What this site did; as of a `SharedStep`."""
        return self.since.stats(step, wait_s=self.wait_s, layers=self.context.layers)

    # -- for sites that lack it -----------------------------------------------------------------

    def brought(self) -> Brought | None:
        """What came of it, again; None if a gradient that was lent has been changed."""
        means: dict[str, Tensor] = {}
        for _, pending in self.sent:
            part = pending.brought_again()
            if part is None:
                return None
            means |= only(part, self.context.used)
        return Brought(True, means)

    def message_to(self, site: int, place: int) -> None:
        """Nothing: sums cannot be sent again."""
