"""A backward that is shared: collect, start the messages in order, finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outergrad.buckets.bucket import Bucket, Pending
from outergrad.core.errors import ExchangeError, RefusedError
from outergrad.core.model import Choice
from outergrad.core.types import Unit
from outergrad.linalg.gradients import scaled
from outergrad.messages.header import Header, digest
from outergrad.messages.vote import MEAN_DELTAS, Subjects, Verdict
from outergrad.messages.wire import State
from outergrad.record.stats import Since, Stats
from outergrad.step import param_grad
from outergrad.step.buffer_message import BufferMessage
from outergrad.step.commit import Ballot
from outergrad.step.decision import Decision
from outergrad.step.groups import on_transport
from outergrad.step.joint import JointStep, Point
from outergrad.step.late import LateStep
from outergrad.step.readiness import Readiness
from outergrad.step.receiving import Receiver
from outergrad.step.spec import Begun, StepSpec


class SharedStep(LateStep):
    """A backward whose gradients become the mean over the sites.

    The plan follows from the headers of all sites. They are exchanged first, or, where the last
    two steps had the same, taken to be the same again; a site whose batch is different then says
    so in every message, all sites throw the messages away and start again with new headers.

    Once it has begun, a site goes through all messages of the step, even if its own backward
    raised: so the sites never get out of step with each other.
    """

    def __init__(self, spec: StepSpec) -> None:
        model, comm, header, planner = spec.model, spec.comm, spec.header, spec.planner
        super().__init__(comm, spec.pact, spec.votes, spec.joint)
        self.task, self._shared_buffers = spec.task, spec.buffers
        self._joint = spec.joint or JointStep((), comm)
        self._buffers: BufferMessage | None = None
        self._since = Since(comm)
        self.choice: Choice | None = None
        self.decision: Decision | None = None
        self._model, self._planner = model, planner
        self.captured = spec.captured()
        self._transforming = spec.transforming(self.captured)
        self._holds_back = self._transforming is not None and self._transforming.holds_back
        self._readiness = Readiness(spec.used)
        self._buckets: list[Bucket] = []
        self._sent: list[tuple[Bucket, Pending]] = []
        self._goes_on = spec.before is not None
        self.lengths: object = None
        """Of its messages, by which sites take turns; None where others' may come between."""
        self._lost_by: ExchangeError | None = None
        self.context = spec.context(self.captured)
        self._receiver = Receiver(planner, self.context)
        if spec.before is not None:
            self._go_on(spec.before)
        self.subjects = Subjects(list(model.params), self._shared_buffers.names)
        self._ballot = Ballot(comm, header, self.subjects)
        planner.begin(header.step)
        foreseen = self._foreseen(spec)
        if spec.pact is not None:
            spec.pact.begins(self)
        if foreseen is None:
            self._announce(header)
        else:
            if planner.header_cache.surprises(header, foreseen):
                self.context.state = State.SURPRISED
            self._plan(foreseen)

    def _foreseen(self, spec: StepSpec) -> list[Header] | None:
        if spec.before is None:
            return spec.planner.header_cache.foreseen(spec.header.step)
        return [replace(header, step=spec.header.step) for header in spec.before.headers]

    def _go_on(self, before: Begun) -> None:
        """What was begun of the step stays as it is."""
        self._sent, self.drift, self._lost_by = list(before.sent), before.drift, before.error
        self._since, self.context.layers = before.since, before.context.layers
        self.context.state, self.context.bad = before.context.state, before.context.bad
        if before.awaited is not None:
            self._receiver.awaits(before.awaited)
        for name in before.ready:
            self._readiness.note(name)

    def _announce(self, header: Header) -> None:
        """Starts the exchange of headers."""
        words = self._comm.control(header.words())
        self.context.header = header
        self._announced = self._comm.all_gather(words, [len(words)] * self._comm.world_size)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Its messages, once there is a plan."""
        return self._buckets

    @property
    def place(self) -> str:
        """What this site waits for, in words."""
        return self._receiver.place

    @property
    def units(self) -> tuple[Unit, ...]:
        """What its choice is about."""
        return self._model.units

    def on_joint(self, point: Point, delta: Tensor) -> Tensor:
        """The mean over the sites of a delta below a shared part."""
        self.agreed()
        own = scaled(delta, self.context.scale)
        try:
            with self._receiver.waiting():
                return self._joint.mean(point, own)
        except RefusedError as error:
            self._ballot.refuse(error, MEAN_DELTAS)
            return own  # backward goes on to the vote, with what nobody will apply

    def on_ready(self, name: str) -> None:
        """Starts messages in their fixed order, as far as they are ready.

        What starts depends on the place in the program alone, never on timing: collectives of
        others on the same group may come between, in the same places on every site. The last
        message waits for the end of backward: a site that raises can always still say so. All
        wait for it where a transform has to see all layers.
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

    def _adopt(self) -> None:
        """Takes the plan from the headers of all sites."""
        with self._receiver.waiting():
            words = [part.tolist() for part in self._announced.wait()]
        ours = self.context.header
        headers = [Header.parse(w, ours, rank) for rank, w in enumerate(words)]
        self._ballot.note_sum(digest(words))
        self._plan(headers)
        self._joint.check([header.joint for header in headers])
        self._planner.header_cache.exchanged(headers)

    def agreed(self) -> Sequence[Header]:
        """The headers of all sites, once they have come."""
        if self.choice is None:
            self._adopt()
        return self.context.headers

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
        """Posts the receives of this step, and of the next as if its messages had these lengths."""
        of_buckets = [bucket.lengths(self.context) for bucket in self._buckets]
        self.lengths = self.context.header.fingerprint, of_buckets, buffers.sizes
        turn, expected = on_transport(self._comm.key).turns.begin(self.lengths)
        self._comm.take_turn(turn)
        for expected_turn in expected:
            for bucket in self._buckets:
                bucket.expect(self.context, expected_turn)
            buffers.expect(expected_turn)
        if self._votes.are_due or not self._is_late:  # votes follow what comes in this turn
            self._ballot.expect(turn)

    def _start(self) -> None:
        """Starts the next message."""
        bucket = self._buckets[len(self._sent)]
        if len(self._sent) == len(self._buckets) - 1:
            self._sends_last()
        if self.context.state == State.GOOD:
            if self._transforming is not None:
                self._transforming.apply(bucket.params)
            for name in bucket.dense_params:
                self.captured.settle(name)
        with torch.no_grad():
            self._sent.append((bucket, bucket.start(self.context)))

    @property
    def applied(self) -> bool:
        """Whether it counts: all sites say so."""
        return self.decision is not None and self.decision.good

    @property
    def voted(self) -> bool:
        """Whether this site has said that it may count, and the others may have heard it."""
        return self._ballot.is_good

    def finish(self) -> None:
        """Waits for all messages, writes the gradients, each as it comes, and votes.

        Raises:
            StepDiscardedError: on all sites: what is in `param.grad` is void.
        """
        if self._lost_by is not None:
            raise self._lost_by
        decision = self._pass()
        if decision.verdict == Verdict.SURPRISED:
            self._start_again()  # known from the first message on: nothing was written
            decision = self._pass()
        self.settle(decision)
        self._raise_drift(decision)
        if self._receiver.error is not None:
            raise self._receiver.error
        if decision.verdict >= Verdict.REFUSED:
            raise decision.error(self.subjects, self.context.blocks) from self._ballot.cause

    def settle(self, decision: Decision) -> None:
        """The step is over; if it does not count, no gradient is left, nor what was before it."""
        self.decision = decision
        if self._buffers is not None:
            self._buffers.finish(write=decision.good)
        self._planner.commit(applied=decision.good and not self.is_taken)
        self.captured.release()
        if self._transforming is not None:
            self._transforming.drop_unused(self.context.used)
        if not decision.good:
            self._joint.clear()
            param_grad.drop(self._model.params[name] for name in self.context.used)

    def stats(self, step: int) -> Stats:
        """What this site did.

        Args:
            step: synchronised steps so far, this one too.
        """
        layers, wait_s = self.context.layers, self._receiver.wait_s
        seconds = {"compress_s": layers.compress_s, "replay_s": layers.replay_s, "wait_s": wait_s}
        return self._since.stats(step, **seconds, layers=layers)

    def abandon(self, changed: str | None = None) -> None:
        """Ends a step whose backward raised here, or whose model changed, with the other sites.

        The last message has not gone yet, so all of them see the failure.
        """
        self.context.state = State.FAILED
        if changed is not None:
            self._ballot.note_change(changed)
        self.agreed()
        self._joint.give_up()
        self.decision = self._pass()
        self._planner.commit(applied=False)
        self.captured.release()
        self._raise_drift(self.decision)

    def _pass(self) -> Decision:
        """Goes through the step once; messages between steps belong to no turn."""
        try:
            return self._gone_through()
        finally:
            self._comm.take_turn(0)

    def _gone_through(self) -> Decision:
        """Starts what is left, takes in all messages and votes.

        A site whose messages all were good votes so even if other sites say that they failed:
        these vote, too.
        """
        self._begins_to_end()
        self._start_all()
        self._sent_all()
        assert self._buffers is not None
        self._buffers.start()
        self._receiver.start_second_rounds(self._sent)
        last = self._receiver.receive(self._sent, self._ballot)
        self._receiver.receive_buffers(self._buffers, self._ballot)
        self._ballot.note_sum(self._joint.digest)
        self._count_before()
        if self.needs_no_votes:
            return self._applied_at_once(last)
        return self._voted_on(last)

    def _start_all(self) -> None:
        """Starts what is left; if that raises here, the others must hear of it."""
        try:
            self._start_rest()
        except ExchangeError:
            raise
        except Exception as error:
            if self.choice is None:  # without a plan, which is the same on all sites
                raise
            self._receiver.fail(error)
            self._start_rest()

    def _start_rest(self) -> None:
        self.agreed()
        while len(self._sent) < len(self._buckets):
            self._start()

    def _start_again(self) -> None:
        """Makes a plan for what the sites really have; what was settled stays in `param.grad`."""
        self._planner.header_cache.was_wrong()
        self._planner.commit(applied=False)
        header = self.captured.unsettled(self.context.header)
        self.choice, self._sent, self._buffers = None, [], None
        self.context.state, self._goes_on = State.GOOD, False
        self.context.forget()
        self._ballot = Ballot(self._comm, self.context.header, self.subjects)
        self._announce(header)
