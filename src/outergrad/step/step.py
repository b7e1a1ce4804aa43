"""A synchronised backward: collect, start the messages in order, finish."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outergrad.buckets.bucket import Bucket, Pending
from outergrad.core.errors import ExchangeError, RefusedError
from outergrad.core.types import Unit
from outergrad.linalg.gradients import scaled
from outergrad.messages.header import Header
from outergrad.messages.vote import MEAN_DELTAS, Subjects, Verdict
from outergrad.messages.wire import State
from outergrad.record.stats import Since, Stats
from outergrad.step import param_grad
from outergrad.step.buffer_message import BufferMessage
from outergrad.step.commit import Ballot
from outergrad.step.decision import Decision
from outergrad.step.joint import JointStep, Point
from outergrad.step.readiness import Readiness
from outergrad.step.receiving import Receiver
from outergrad.step.spec import Begun, StepSpec
from outergrad.step.starting import StartingStep


class SharedStep(StartingStep):
    """A backward whose gradients become the mean over the sites.

    The plan follows from the headers of all sites. They are exchanged first or, if the last two
    steps had the same ones, predicted. A site whose batch differs from the prediction then says so
    in every message, and all sites discard the messages and start again with new headers.

    Once it has begun, a site goes through all messages of the step, even if its own backward
    raised. So the sites never get out of step with each other.
    """

    def __init__(self, spec: StepSpec) -> None:
        model, comm, header, planner = spec.model, spec.comm, spec.header, spec.planner
        super().__init__(comm, spec.pact, spec.votes, spec.joint)
        self.task, self._shared_buffers = spec.task, spec.buffers
        self._joint = spec.joint or JointStep((), comm)
        self._buffers: BufferMessage | None = None
        self._since = Since(comm)
        self.decision: Decision | None = None
        self._model, self._planner = model, planner
        self.captured = spec.captured()
        self._transforming = spec.transforming(self.captured)
        self._holds_back = self._transforming is not None and self._transforming.holds_back
        self._readiness = Readiness(spec.used)
        self._buckets: list[Bucket] = []
        self._sent: list[tuple[Bucket, Pending]] = []
        self._goes_on, self._is_sent = spec.before is not None, False
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
        return [header.of_step(spec.header.step) for header in spec.before.headers]

    def _go_on(self, before: Begun) -> None:
        """Takes over a step that was begun in another way, with its state."""
        self._sent, self.drift, self._lost_by = list(before.sent), before.drift, before.error
        self._since, self.context.layers = before.since, before.context.layers
        self._began = before.began
        self.context.state, self.context.bad = before.context.state, before.context.bad
        self.context.without_grad |= before.context.without_grad
        if before.awaited is not None:
            self._receiver.awaits(before.awaited)
        for name in before.ready:
            self._readiness.note(name)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Messages of the step, once there is a plan."""
        return self._buckets

    @property
    def place(self) -> str:
        """Description of what this site waits for."""
        return self._receiver.place

    @property
    def units(self) -> tuple[Unit, ...]:
        """Units that its choice is about."""
        return self._model.units

    def on_joint(self, point: Point, delta: Tensor) -> Tensor:
        """Returns the mean over the sites of a delta below a shared part."""
        self.agreed()
        own = scaled(delta, self.context.scale)
        try:
            with self._receiver.waiting():
                return self._joint.mean(point, own)
        except RefusedError as error:
            self._ballot.refuse(error, MEAN_DELTAS)
            return own  # backward goes on to the vote; nobody applies this

    @property
    def applied(self) -> bool:
        """True if the step counts: all sites say so."""
        return self.decision is not None and self.decision.good

    @property
    def voted(self) -> bool:
        """True if this site has sent a good vote, which the others may have received."""
        return self._ballot.is_good

    def finish(self) -> None:
        """Waits for all messages, writes each gradient as it comes, and votes.

        Raises:
            StepDiscardedError: on all sites; `param.grad` is None then.
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

    def send(self) -> None:
        """Starts all messages whose gradients are there; `finish` receives their results.

        A step without a backward may call it itself, and compute while they travel.
        """
        self._start_all()
        self._sent_all()
        self._is_sent = True

    def settle(self, decision: Decision) -> None:
        """Ends the step; if it does not count, gradients are dropped, earlier ones included."""
        self.decision = decision
        if self._buffers is not None:
            self._buffers.finish(write=decision.good)
        self._planner.commit(applied=decision.good)
        self.captured.release()
        if self._transforming is not None:
            self._transforming.drop_unused(self.context.used)
        if not decision.good:
            self._joint.clear()
            param_grad.drop(self._model.params[name] for name in self.context.used)

    def stats(self, step: int) -> Stats:
        """Returns the statistics of this site.

        Args:
            step: number of synchronised steps so far, including this one.
        """
        layers, wait_s = self.context.layers, self._receiver.wait_s
        seconds = {"compress_s": layers.compress_s, "replay_s": layers.replay_s, "wait_s": wait_s}
        return self._since.stats(step, **seconds, layers=layers)

    def abandon(self, changed: str | None = None) -> None:
        """Ends, with the other sites, a step whose backward raised here or whose model changed.

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
        """Starts the remaining messages, receives all and votes.

        A site whose messages were all good votes so even if other sites say that they failed: these
        vote, too.
        """
        if not self._is_sent:
            self.send()
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

    def _start_again(self) -> None:
        """Plans for what the sites really have; what was settled stays in `param.grad`."""
        self._planner.header_cache.was_wrong()
        self._planner.commit(applied=False)
        header = self.captured.unsettled(self.context.header)
        self.choice, self._sent, self._buffers, self._is_sent = None, [], None, False
        self.context.state, self._goes_on = State.GOOD, False
        self.context.forget()
        self._ballot = Ballot(self._comm, self.context.header, self.subjects)
        self._announce(header)
