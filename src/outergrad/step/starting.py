"""The plan of a step's messages, and their start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from outergrad.buckets.bucket import Bucket
from outergrad.core.errors import ExchangeError, OverwrittenError
from outergrad.core.model import Choice
from outergrad.core.transport import Work
from outergrad.messages.header import Header, digest
from outergrad.messages.wire import State
from outergrad.planning.plan import Planner
from outergrad.step.buffer_message import BufferMessage
from outergrad.step.captured import Captured
from outergrad.step.groups import on_transport
from outergrad.step.joint import JointStep
from outergrad.step.late import LateStep
from outergrad.step.readiness import Readiness
from outergrad.step.transforming import Transforming


class StartingStep(LateStep):
    """Part of a synchronised step that plans its messages and starts them in their order.

    Attributes:
        captured: factors that this backward captured.
        choice: how every unit travels; None before there is a plan.
        lengths: key of the message lengths, for the message sequence; None if messages of others
            may come between.
    """

    captured: Captured
    choice: Choice | None = None
    lengths: object = None
    _announced: Work
    _goes_on: bool
    _holds_back: bool
    _joint: JointStep
    _planner: Planner
    _readiness: Readiness
    _transforming: Transforming | None

    def on_ready(self, name: str) -> None:
        """Starts messages in their fixed order, as far as they are ready.

        What starts depends on the place in the program alone, never on timing: collectives of
        others on the same group may come between, in the same places on every site. The last
        message waits for the end of backward, so that a site that raises can always still say so.
        All messages wait for it if a transform has to see all layers.
        """
        self._readiness.note(name)
        if self._holds_back:
            return
        if self.choice is None:
            if not self._readiness.are_ready(self._planner.packer.opening):
                return
            self.agreed()
        while len(self._sent) < len(self._buckets) - 1:
            if not self._readiness.are_ready(self._buckets[len(self._sent)].params):
                return
            self._start()

    def agreed(self) -> Sequence[Header]:
        """Returns the headers of all sites, once they have come."""
        if self.choice is None:
            self._adopt()
        return self.context.headers

    def _announce(self, header: Header) -> None:
        words = self._comm.control(header.words())
        self.context.header = header
        self._announced = self._comm.all_gather(words, [len(words)] * self._comm.world_size)

    def _adopt(self) -> None:
        """Makes the plan from the headers of all sites."""
        with self._receiver.waiting():
            words = [part.tolist() for part in self._announced.wait()]
        ours = self.context.header
        headers = [Header.parse(w, ours, rank) for rank, w in enumerate(words)]
        self._ballot.note_sum(digest(words))
        self._plan(headers)
        self._joint.check([header.joint for header in headers])
        self._planner.header_cache.exchanged(headers)

    def _plan(self, headers: list[Header]) -> None:
        self.context.take(headers)
        self.choice = self._planner.adopt(headers, self.context.used)
        self._buckets = self._planner.packer.buckets(self.choice)
        self._is_late = self._may_be_late()
        self._buffers = BufferMessage(self._shared_buffers, self.context)
        alone = all(header.alone for header in headers)  # else others' messages may come between
        if alone and not self._goes_on:
            self._take_turn(self._buffers)

    def _take_turn(self, buffers: BufferMessage) -> None:
        """Posts the receives of this step, and of the next one as if it were like this one."""
        context, own = self.context, (self.context.header.fingerprint, buffers.sizes)
        self.lengths = *own, [bucket.lengths(context) for bucket in self._buckets]
        ahead = *own, [bucket.lengths_ahead(context) for bucket in self._buckets]
        turn, expected = on_transport(self._comm.key).turns.begin(self.lengths, ahead)
        self._comm.take_turn(turn)
        for expected_turn in expected:
            for bucket in self._with_receives():
                expect = bucket.expect if expected_turn == turn else bucket.expect_ahead
                expect(context, expected_turn)
            buffers.expect(expected_turn)
        if self._votes.are_due or not self._is_late:  # votes come behind the messages of this turn
            self._ballot.expect(turn)

    def _with_receives(self) -> Iterator[Bucket]:
        """Yields the buckets whose receives are posted: no sums behind one that has none posted.

        A sum takes the first receive that is posted for sums of its turn. So sketches of two rounds
        would take that of the gradients behind them, which are in messages of their own where they
        have other dtypes or are too large to go along. These lose no time: the second round is
        waited for behind them, and takes as many delays.
        """
        all_expected = True
        for bucket in self._buckets:
            if all_expected or not bucket.adds_up:
                yield bucket
            all_expected = all_expected and bucket.is_expected

    def _start(self) -> None:
        bucket = self._buckets[len(self._sent)]
        if len(self._sent) == len(self._buckets) - 1:
            self._sends_last()
        try:
            self._send(bucket)
        except OverwrittenError as error:  # sent without a gradient; the vote says why
            self._ballot.note_overwritten(error.param)
            self.context.state = State.FAILED
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        if self.context.state == State.GOOD:
            if self._transforming is not None:
                self._transforming.apply(bucket.params)
            for name in bucket.dense_params:
                self.captured.settle(name)
        with torch.no_grad():
            self._sent.append((bucket, bucket.start(self.context)))

    def _start_all(self) -> None:
        """Starts the remaining messages; if that raises here, the others must hear of it."""
        try:
            self._start_rest()
        except ExchangeError:
            raise
        except Exception as error:
            if self.choice is None:  # no site has a plan
                raise
            self._receiver.fail(error)
            self._start_rest()

    def _start_rest(self) -> None:
        self.agreed()
        while len(self._sent) < len(self._buckets):
            self._start()
