"""A backward that is shared: collect, start the messages in order, finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from outergrad._accumulated import Earlier
from outergrad._block_message import Blocks
from outergrad._block_use import Use
from outergrad._blocks import Block
from outergrad._bucket import Bucket, Pending, Result, Sender
from outergrad._calls import Calls, accumulate, overwrite
from outergrad._joint import JointStep, Point
from outergrad._model import Choice, Model
from outergrad._plan import Planner
from outergrad._protocols import Comm
from outergrad._types import Factors, Slot, Unit
from outergrad.comm.wire import Header, State
from outergrad.record.gauge import Reading
from outergrad.record.stats import Stats


class StepDiscardedError(RuntimeError):
    """The backward of another site raised: the step is void, on every site."""


class SharedStep:
    """A backward whose gradients become the mean over the sites.

    The plan follows from the headers of all sites. They are exchanged first, or, where the last
    two steps had the same, taken to be the same again; a site whose batch is different then says
    so in every message, all sites throw the messages away and start again with new headers.

    Once it has begun, a site goes through all messages of the step, even if its own backward
    raised: so the sites never get out of step with each other.
    """

    def __init__(
        self,
        task: int,
        model: Model,
        planner: Planner,
        comm: Comm,
        header: Header,
        used: set[str],
        earlier: Earlier,
        blocks: Blocks,
        joint: JointStep,
        reading: Reading | None = None,
    ) -> None:
        self.task, self._joint = task, joint
        self._wait_s = 0.0
        self._sent_before, self._received_before = comm.sent_bytes, comm.received_bytes
        self.choice: Choice | None = None
        self.applied = False
        self._model, self._planner, self._comm = model, planner, comm
        self._calls = Calls(model, used | earlier.params, blocks)
        for slot, parts in earlier.stacked.items():
            for part in parts:
                self._calls.add(slot, lambda part=part: part)
        self._waiting = set(used)
        self._buckets: list[Bucket] = []
        self._pending: list[Pending] = []
        index = {slot: k for k, slot in enumerate(model.slots)}
        rows = self._calls.rows
        own = (comm, model.params, header, index, rows, set[str](), blocks)
        self.sender = Sender(*own, reading=reading)
        foreseen = planner.foresight.foreseen(header.step)
        if foreseen is None:
            self._announce(header)
        else:
            surprised = planner.foresight.surprises(header, foreseen)
            self.sender.state = State.SURPRISED if surprised else State.GOOD
            self._plan(foreseen)

    def _announce(self, header: Header) -> None:
        """Starts the exchange of headers."""
        words = self._comm.control(header.words())
        self.sender.header = header
        self._announced = self._comm.all_gather(words, [len(words)] * self._comm.world_size)

    @property
    def units(self) -> tuple[Unit, ...]:
        """What its choice is about."""
        return self._model.units

    def on_factors(self, slot: Slot, factors: Callable[[], Factors]) -> None:
        """Keeps a captured product until its message is started."""
        self._calls.add(slot, factors)

    def on_use(self, block: Block, use: Use) -> None:
        """Keeps a use of a block until its message is started."""
        self._calls.add_use(block, use)

    def on_joint(self, point: Point, delta: Tensor) -> Tensor:
        """The mean over the sites of a delta below a shared part."""
        if self.choice is None:
            self._adopt()
        began = time.perf_counter()
        mean = self._joint.mean(point, delta)
        self._wait_s += time.perf_counter() - began
        return mean

    def on_gradient(self, name: str) -> None:
        """Notes that autograd has a gradient, besides what taps captured."""
        self.sender.mixed.add(name)

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
        ours = self.sender.header
        headers = [Header.parse(w, ours, rank) for rank, w in enumerate(words)]
        self._plan(headers)
        self._joint.check([header.joint for header in headers])
        self._planner.foresight.exchanged(headers)

    def _plan(self, headers: list[Header]) -> None:
        self.sender.take(headers)
        self.choice = self._planner.choose(headers)
        self._buckets = self._planner.packer.buckets(self.choice)

    def _start(self, bucket: Bucket) -> None:
        if self.sender.state == State.GOOD:
            for name in bucket.dense_params:
                self._calls.settle(name)
        with torch.no_grad():
            self._pending.append(bucket.start(self.sender))

    def finish(self) -> None:
        """Waits for all messages and writes the gradients, each as it comes.

        Raises:
            StepDiscardedError: the backward of some site raised; what is in `param.grad` is void.
        """
        state = self._outcome(write=True)
        if state == State.SURPRISED:  # known from the first message on: nothing was written
            self._start_again()
            state = self._outcome(write=True)
        self.applied = state == State.GOOD
        self._planner.settle(applied=self.applied)
        self._calls.release()
        if state == State.FAILED:
            raise StepDiscardedError(
                f"the backward of another site raised in step {self.sender.header.step}: it must "
                f"not be applied; call optimizer.zero_grad() and go on with the next"
            )

    def stats(self, step: int) -> Stats:
        """What this site did.

        Args:
            step: synchronised steps so far, this one too.
        """
        return Stats(
            step=step,
            sent_bytes=self._comm.sent_bytes - self._sent_before,
            received_bytes=self._comm.received_bytes - self._received_before,
            total_sent_bytes=self._comm.sent_bytes,
            compress_s=self.sender.compress_s,
            replay_s=self.sender.replay_s,
            wait_s=self._wait_s,
            layers=self.sender.layers,
        )

    def abandon(self) -> None:
        """Ends a step whose backward raised on this site, together with the other sites.

        The last message has not gone yet, so all of them see the failure.
        """
        self.sender.state = State.FAILED
        if self.choice is None:
            self._adopt()
        self._joint.give_up()
        self._outcome(write=False)
        self._planner.settle(applied=False)
        self._calls.release()

    def _outcome(self, *, write: bool) -> State:
        """Starts what is left and takes in all messages; the worst state of any site."""
        self._advance(block=True)
        self._start_second_rounds()
        used, state = self.sender.used, State.GOOD
        mixed: dict[str, Tensor] = {}
        for bucket, pending in zip(self._buckets, self._pending, strict=True):
            began, replay_s = time.perf_counter(), self.sender.replay_s
            with torch.no_grad():
                result = pending.wait()
            waited_s = time.perf_counter() - began - (self.sender.replay_s - replay_s)
            self._wait_s += waited_s
            self.sender.add_wait(bucket.params, waited_s)
            state = max(state, result.state)
            if write and state == State.GOOD:
                self._write(bucket, result, used, mixed)
        if write and state == State.GOOD:
            self._share(mixed)
        return state

    def _start_second_rounds(self) -> None:
        """In the order of the messages; those of one round have none."""
        for bucket, pending in zip(self._buckets, self._pending, strict=True):
            began, compress_s = time.perf_counter(), self.sender.compress_s
            with torch.no_grad():
                pending.advance()
            compress_s = self.sender.compress_s - compress_s
            waited_s = time.perf_counter() - began - compress_s
            self._wait_s += waited_s
            self.sender.add_wait(bucket.params, waited_s)

    def _write(
        self, bucket: Bucket, result: Result, used: set[str], mixed: dict[str, Tensor]
    ) -> None:
        means = {name: g for name, g in result.means.items() if name in used}
        self._measure(means)
        overwrite(self._model, means)
        missing = (bucket.params & used) - set(result.additions) - set(means)
        additions = {name: g for name, g in result.additions.items() if name in used}
        additions.update(self._zeros(missing))
        not_yet = {n: additions.pop(n) for n in result.mixed if n in additions}
        self._measure(additions, formed=False, not_yet=not_yet)
        mixed.update(not_yet)
        accumulate(self._model, additions)

    @torch.no_grad()
    def _measure(
        self, means: Mapping[str, Tensor], *, formed: bool = True, not_yet: Collection[str] = ()
    ) -> None:
        """Before `param.grad` is overwritten: what is formed is this site's own gradient."""
        reading = self.sender.reading
        if reading is not None:
            for name in not_yet:
                reading.leave_out(name)
            for name, mean in means.items():
                own = self._model.params[name].grad if formed else None
                reading.mean(name, own, mean)

    def _share(self, mixed: dict[str, Tensor]) -> None:
        """All-reduces what autograd had for parameters whose factors were also sent."""
        if not mixed:
            return
        headers = self.sender.headers
        self._planner.mark_mixed([n for n in mixed if self._planner.captures(n, headers)])
        for name in mixed:
            bucket = self._planner.packer.dense_bucket([name])
            overwrite(self._model, bucket.start(self.sender).wait().means)
        accumulate(self._model, mixed)

    def _start_again(self) -> None:
        """Makes a plan for what the sites really have; what was settled stays in `param.grad`."""
        self._planner.foresight.was_wrong()
        self._planner.settle(applied=False)
        header, settled = self.sender.header, self._calls.settled
        pairs = zip(self._model.slots, header.uses, strict=True)
        uses = tuple(replace(use, tapped=use.tapped and s not in settled) for s, use in pairs)
        members = zip(self._model.blocks, header.blocks, strict=True)
        blocks = tuple(replace(use, tapped=use.tapped and b not in settled) for b, use in members)
        self.choice, self._pending, self.sender.state = None, [], State.GOOD
        self.sender.forget()
        self._announce(replace(header, uses=uses, blocks=blocks))

    def _zeros(self, names: Collection[str]) -> dict[str, Tensor]:
        params = self._model.params
        return {name: torch.zeros_like(params[name], requires_grad=False) for name in names}
