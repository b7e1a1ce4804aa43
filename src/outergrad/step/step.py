"""A backward that is shared: collect, start the messages in order, finish."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outergrad.buckets.bucket import Bucket, Pending, Result, StepContext
from outergrad.core.blocks import Block
from outergrad.core.errors import ExchangeError, RefusedError
from outergrad.core.model import Choice, Model
from outergrad.core.protocols import Comm
from outergrad.core.types import Factors, Slot, Unit
from outergrad.core.model import Choice
from outergrad.core.types import ExchangeError, RefusedError, Unit
from outergrad.linalg.gradients import scaled
from outergrad.messages.header import Header, digest
from outergrad.messages.vote import MEAN_DELTAS, Subjects, Verdict
from outergrad.messages.wire import State
from outergrad.record.stats import Since, Stats
from outergrad.step import param_grad
from outergrad.step.buffers import BufferMessage
from outergrad.step.captured import Captured
from outergrad.step.commit import Ballot, Decision
from outergrad.step.joint import JointStep, Point
from outergrad.step.spec import StepSpec
from outergrad.step.writing import Writer


class SharedStep:
    """A backward whose gradients become the mean over the sites.

    The plan follows from the headers of all sites. They are exchanged first, or, where the last
    two steps had the same, taken to be the same again; a site whose batch is different then says
    so in every message, all sites throw the messages away and start again with new headers.

    Once it has begun, a site goes through all messages of the step, even if its own backward
    raised: so the sites never get out of step with each other.
    """

    def __init__(self, spec: StepSpec) -> None:
        model, comm, header = spec.model, spec.comm, spec.header
        planner, carried_over = spec.planner, spec.carried_over
        self.task, self._shared_buffers = spec.task, spec.buffers
        self._joint = spec.joint or JointStep((), comm)
        self._sent_buffers: BufferMessage | None = None
        self._wait_s = 0.0
        self._since = Since(comm)
        self.choice: Choice | None = None
        self.decision: Decision | None = None
        self._error: Exception | None = None
        self.place = "the headers"
        """What this site waits for, in words."""
        self._model, self._planner, self._comm = model, planner, comm
        self.captured = Captured(model, spec.used | carried_over.params, spec.blocks)
        for slot, parts in carried_over.stacked.items():
            for part in parts:
                self.captured.add(slot, lambda part=part: part)
        self._waiting = set(spec.used)
        self._buckets: list[Bucket] = []
        self._pending: list[Pending] = []
        self.context = StepContext(
            comm=comm,
            params=model.params,
            header=header,
            slot_index={slot: k for k, slot in enumerate(model.slots)},
            factors_of=self.captured.rows,
            has_autograd_grad=self.captured.has_autograd_grad,
            blocks=spec.blocks,
            reading=spec.reading,
            skips_bad=spec.skips_bad,
        )
        self._writer = Writer(model, planner, self.context)
        self.subjects = Subjects(list(model.params), self._shared_buffers.names)
        self._ballot = Ballot(comm, header, self.subjects)
        foreseen = planner.header_cache.foreseen(header.step)
        if foreseen is None:
            self._announce(header)
        else:
            surprised = planner.header_cache.surprises(header, foreseen)
            self.context.state = State.SURPRISED if surprised else State.GOOD
            self._plan(foreseen)

    def _announce(self, header: Header) -> None:
        """Starts the exchange of headers."""
        words = self._comm.control(header.words())
        self.context.header = header
        self._announced = self._comm.all_gather(words, [len(words)] * self._comm.world_size)

    @property
    def units(self) -> tuple[Unit, ...]:
        """What its choice is about."""
        return self._model.units

    def on_joint(self, point: Point, delta: Tensor) -> Tensor:
        """The mean over the sites of a delta below a shared part."""
        self.agreed()
        began, own = time.perf_counter(), scaled(delta, self.context.scale)
        try:
            return self._joint.mean(point, own)
        except RefusedError as error:
            self._ballot.refuse(error, MEAN_DELTAS)
            return own  # backward goes on to the vote, with what nobody will apply
        finally:
            self._wait_s += time.perf_counter() - began

    def on_ready(self, name: str) -> None:
        """Starts what can be started."""
        self._waiting.discard(name)
        self._advance()

    def _advance(self, *, block: bool = False) -> None:
        """Starts messages in their fixed order, as far as they are ready; all of them if block.

        What starts depends on the place in the program alone, never on timing: collectives of
        others on the same group may come between, in the same places on every site. The last
        message waits for the end of backward: a site that raises can always still say so.
        """
        if self.choice is None:
            if not block and not self._planner.packer.opening.isdisjoint(self._waiting):
                return
            self._adopt()
        while len(self._pending) < len(self._buckets) - (not block):
            bucket = self._buckets[len(self._pending)]
            if not block and not bucket.params.isdisjoint(self._waiting):
                return
            self._start(bucket)

    def _adopt(self) -> None:
        """Takes the plan from the headers of all sites."""
        began = time.perf_counter()
        words = [part.tolist() for part in self._announced.wait()]
        self._wait_s += time.perf_counter() - began
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
        self.choice = self._planner.choose(headers)
        self._buckets = self._planner.packer.buckets(self.choice)
        if self.context.header.alone:  # else messages of other sessions may come between
            for bucket in self._buckets:
                bucket.expect(self.context)
            self._ballot.expect()

    def _start(self, bucket: Bucket) -> None:
        if self.context.state == State.GOOD:
            for name in bucket.dense_params:
                self.captured.settle(name)
        with torch.no_grad():
            self._pending.append(bucket.start(self.context))

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
        decision = self._pass()
        if decision.verdict == Verdict.SURPRISED:
            self._start_again()  # known from the first message on: nothing was written
            decision = self._pass()
        self.settle(decision)
        if self._error is not None:
            raise self._error
        if decision.verdict >= Verdict.REFUSED:
            raise decision.error(self.subjects, self.context.blocks) from self._ballot.cause

    def settle(self, decision: Decision) -> None:
        """The step is over; if it does not count, no gradient is left, nor what was before it."""
        self.decision = decision
        if self._sent_buffers is not None:
            self._sent_buffers.finish(write=decision.good)
        self._planner.commit(applied=decision.good)
        self.captured.release()
        if not decision.good:
            self._joint.clear()
            param_grad.drop(self._model.params[name] for name in self.context.used)

    def stats(self, step: int) -> Stats:
        """What this site did.

        Args:
            step: synchronised steps so far, this one too.
        """
        seconds = {"compress_s": self.context.compress_s, "replay_s": self.context.replay_s}
        return self._since.stats(step, **seconds, wait_s=self._wait_s, layers=self.context.layers)

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

    def _pass(self) -> Decision:
        """Starts what is left, takes in all messages and votes; what is last is written meanwhile.

        A site whose messages all were good votes so even if other sites say that they failed:
        these vote, too.
        """
        self._start_all()
        self._sent_buffers = self._shared_buffers.start(self.context)
        self._start_second_rounds()
        last = self._receive()
        self.place = "the buffers"
        self._receive_buffers(self._sent_buffers)
        self._ballot.note_sum(self._joint.digest)
        try:
            self._ballot.cast(self.context.state, self.context.bad)
        finally:  # another site may have heard the vote, and count the step
            if last is not None:
                self._writer.write(*last)
        self.place = "the other sites' word that they have everything"
        began = time.perf_counter()
        decision = self._ballot.count()
        self._wait_s += time.perf_counter() - began
        return decision

    def _start_all(self) -> None:
        """Starts what is left; if that raises here, the others must hear of it."""
        try:
            self._advance(block=True)
        except ExchangeError:
            raise
        except Exception as error:
            if self.choice is None:  # without a plan, which is the same on all sites
                raise
            self._error, self.context.state = error, State.FAILED
            self._advance(block=True)

    def _receive(self) -> tuple[Bucket, Result] | None:
        """Takes in all messages; writes what they bring, if all is good, but for the last one."""
        state, last = self.context.state, None
        for bucket, pending in zip(self._buckets, self._pending, strict=True):
            result = self._result(bucket, pending)
            if last is not None and state == State.GOOD:
                self._writer.write(*last)
            state, last = max(state, result.state), (bucket, result)
        self._ballot.hear(state)
        if state != State.GOOD:
            return None
        if last is not None and self._writer.mixes(last[1]):
            self._writer.write(*last)
            self._writer.share_autograd_grad()
            return None
        return last

    def _result(self, bucket: Bucket, pending: Pending) -> Result:
        """What a message brings; nothing that may be applied, if it is refused."""
        first = self._wait_for(bucket)
        began, replay_s = time.perf_counter(), self.context.replay_s
        try:
            with torch.no_grad():
                result = pending.wait()
        except RefusedError as error:
            self._ballot.refuse(error, first)
            result = Result(state=State.FAILED)
        except ExchangeError:
            raise
        except Exception as error:
            self._error, self.context.state = error, State.FAILED
            result = Result(state=State.FAILED)
        waited_s = time.perf_counter() - began - (self.context.replay_s - replay_s)
        self._wait_s += waited_s
        self.context.add_wait(bucket.params, waited_s)
        if result.digest is not None:
            self._ballot.note_sum(result.digest)
        return result

    def _receive_buffers(self, buffers: BufferMessage) -> None:
        try:
            self._ballot.note_sum(buffers.receive())
        except RefusedError as error:
            self._ballot.refuse(error, buffers.first)

    def _wait_for(self, bucket: Bucket) -> str:
        """Says that a message is what this site waits for; returns its first parameter."""
        first = next(name for name in self._model.params if name in bucket.params)
        others = len(bucket.params) - 1
        self.place = f"the gradients of {first!r}" + f" and {others} others" * (others > 0)
        return first

    def _start_second_rounds(self) -> None:
        """In the order of the messages; those of one round have none."""
        for bucket, pending in zip(self._buckets, self._pending, strict=True):
            began, compress_s = time.perf_counter(), self.context.compress_s
            self._wait_for(bucket)
            try:
                with torch.no_grad():
                    pending.advance()
            except ExchangeError:
                raise
            except Exception as error:  # the others wait for what can no more be made
                raise ExchangeError(str(error)) from error
            compress_s = self.context.compress_s - compress_s
            waited_s = time.perf_counter() - began - compress_s
            self._wait_s += waited_s
            self.context.add_wait(bucket.params, waited_s)

    def _start_again(self) -> None:
        """Makes a plan for what the sites really have; what was settled stays in `param.grad`."""
        self._planner.header_cache.was_wrong()
        self._planner.commit(applied=False)
        header, settled = self.context.header, self.captured.settled
        pairs = zip(self._model.slots, header.uses, strict=True)
        uses = tuple(replace(use, tapped=use.tapped and s not in settled) for s, use in pairs)
        members = zip(self._model.blocks, header.blocks, strict=True)
        blocks = tuple(replace(use, tapped=use.tapped and b not in settled) for b, use in members)
        self.choice, self._pending, self.context.state = None, [], State.GOOD
        self.context.forget()
        self._ballot = Ballot(self._comm, header, self.subjects)
        self._announce(replace(header, uses=uses, blocks=blocks))
