"""A synchronised backward: collect, start the messages in order, finish, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from types import MappingProxyType

import torch
from torch import Tensor

from outergrad.buckets.bucket import Bucket, Pending
from outergrad.capture.engine import NO_TASK
from outergrad.commit.ballot import Ballot, Decision
from outergrad.commit.participant import refuse_if_given_up
from outergrad.commit.step_result import StepResult
from outergrad.core.errors import (
    DriftError,
    ExchangeError,
    OverwrittenError,
    RefusedError,
)
from outergrad.core.model import Choice
from outergrad.core.transport import Work
from outergrad.core.types import Unit
from outergrad.linalg.gradients import scaled
from outergrad.messages.checksum import combined
from outergrad.messages.header import Header, Join, digest
from outergrad.messages.vote import MEAN_DELTAS, Subjects, Verdict
from outergrad.messages.wire import State
from outergrad.record.stats import Since, Stats
from outergrad.step import param_grad
from outergrad.step.bucket_view import BucketView
from outergrad.step.buffer_message import BufferMessage
from outergrad.step.joint import JointStep, Point
from outergrad.step.receiving import BUFFERS_PLACE, Last, Receiver, only
from outergrad.step.spec import StepSpec
from outergrad.step.step_plan import StepPlan
from outergrad.step.transport_state import MessageSequence, on_transport

_NO_BUFFERS, _NO_MEAN_DELTAS = combined(()), combined(())
"""Digests of what was received where no buffers travelled, and no deltas."""


class SharedStep:
    """A backward whose gradients become the mean over the sites.

    The plan follows from the headers of all sites. They are exchanged first or, if the last two
    steps had the same ones, predicted. A site whose batch differs from the prediction then says so
    in every message, and all sites discard the messages and start again with new headers. If this
    site announces the same as in the last step, too, the step follows the plan of the last one.

    Once it has begun, a site goes through all messages of the step, even if its own backward
    raised. So the sites never get out of step with each other.

    Args:
        spec: what the step is about.

    Attributes:
        captured: factors that this backward captured.
        choice: how every unit travels; None before there is a plan.
        lengths: key of the message lengths, for the message sequence; None if messages of others
            may come between.
        drift: error that sites have applied different results, if that was found.
        decision: whether the step counts; None before it is known.
        is_taken: whether its result came from another site in the end.
        plan: plan of the last step, which it follows; None if it makes its own.
    """

    choice: Choice | None = None
    plan: StepPlan | None = None
    lengths: object = None
    drift: DriftError | None = None
    decision: Decision | None = None
    is_taken = _is_optimistic = _is_sent = False
    _buckets: Sequence[Bucket] = ()
    _expected: Sequence[Bucket] = ()
    _place: Mapping[str, int] = MappingProxyType({})
    _buffers: BufferMessage | None = None
    _lost_by: ExchangeError | None = None
    _announced: Work

    def __init__(self, spec: StepSpec) -> None:
        model, comm, header, planner = spec.model, spec.comm, spec.header, spec.planner
        self._comm, self._participant, self._votes = comm, spec.participant, spec.votes
        self._began = time.monotonic()
        self.task, self._trained, self._shared_buffers = spec.task, spec.used, spec.buffers
        self._joint, self._since = spec.joint, Since(comm)
        self._model, self._planner, self.plan = model, planner, spec.plan
        self.captured = spec.captured()
        transforming = None if spec.transform is None else spec.transforming(self.captured)
        self._transforming, self._counter = transforming, spec.counter
        self._tap = spec.tap
        self._holds_back = transforming is not None and transforming.holds_back
        self._waiting = set(spec.used)
        """Parameters that the backward has still to reach."""
        self._left: list[int] = []
        """Number of parameters in each message that the backward has still to reach."""
        self._sent: list[tuple[Bucket, Pending]] = []
        self.context = spec.context(self.captured)
        self._receiver = Receiver(planner, self.context)
        if spec.participant is not None:
            spec.participant.begins(self)
        if spec.plan is not None:
            self._follow(spec.plan)
            return
        self.subjects = Subjects(list(model.params), self._shared_buffers.names)
        self._ballot = Ballot(comm, header, self.subjects)
        planner.begin(header.step)
        foreseen = planner.header_cache.foreseen(header.step)
        if foreseen is None:
            self._announce(header)
        else:
            if planner.header_cache.surprises(header, foreseen):
                self.context.state = State.SURPRISED
            self._adopt(foreseen)

    @property
    def shared(self) -> SharedStep | None:
        """The step itself."""
        return self

    def note_gradient(self, name: str) -> None:
        """Notes that a parameter has a gradient besides its factors."""
        self.captured.has_autograd_grad.add(name)

    def note_written(self, name: str) -> None:
        """Notes that a backward wrote to `param.grad` itself."""
        self.captured.has_autograd_grad.add(name)

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
        assert self._joint is not None
        self.agreed()
        own = scaled(delta, self.context.scale)
        try:
            with self._receiver.waiting():
                return self._joint.mean(point, own)
        except RefusedError as error:
            self._ballot.refuse(error, MEAN_DELTAS)
            return own  # backward goes on to the vote; nobody applies this

    # -- messages start -------------------------------------------------------------------------

    def ready_sink(self) -> Callable[[str], object]:
        """Returns what takes names of ready parameters: `on_ready`, or less where that suffices."""
        if self.choice is not None and len(self._buckets) == 1:
            return self._waiting.discard  # the last message, here the only one, waits for the end
        return self.on_ready

    def on_ready(self, name: str) -> None:
        """Starts messages in their fixed order, as far as they are ready.

        What starts depends on the place in the program alone, never on timing: collectives of
        others on the same group may come between, in the same places on every site. The last
        message waits for the end of backward, so that a site that raises can always still say so.
        All messages wait for it if a transform has to see all layers. A failed exchange is raised
        at the end of the step.
        """
        waiting, left = self._waiting, self._left
        if name in waiting:
            waiting.discard(name)
            if left:
                left[self._place[name]] -= 1
        if self._holds_back or self._lost_by is not None:
            return
        try:
            if self.choice is None:
                if not waiting.isdisjoint(self._planner.packer.opening):
                    return
                self.agreed()
                left = self._left
            while len(self._sent) < len(left) - 1 and not left[len(self._sent)]:
                self._start()
        except ExchangeError as error:
            self._lost_by = error

    def agreed(self) -> Sequence[Header]:
        """Returns the headers of all sites, once they have come."""
        if self.choice is None:
            self._agree()
        return self.context.headers

    def _announce(self, header: Header) -> None:
        words = self._comm.control(header.words())
        self.context.header = header
        self._announced = self._comm.all_gather(words, [len(words)] * self._comm.world_size)

    def _agree(self) -> None:
        """Receives the headers of all sites, and makes the plan from them."""
        with self._receiver.waiting():
            words = [part.tolist() for part in self._announced.wait()]
        ours = self.context.header
        pairs = zip(words, self._comm.sites, strict=True)
        headers = [Header.parse(w, ours, site) for w, site in pairs]
        self._ballot.note_sums(digest(words))
        self._adopt(headers)
        (self._joint or JointStep((), self._comm)).check([header.joint for header in headers])
        self._planner.header_cache.exchanged(headers)

    def _adopt(self, headers: list[Header]) -> None:
        """Makes the plan from these headers."""
        self.context.take(headers)
        self.choice = self._planner.adopt(headers, self.context.used)
        packer = self._planner.packer
        self._buckets, self._place = packer.buckets(self.choice), packer.place
        self._expected = _with_receives(self._buckets)
        self._left = [len(self._waiting & bucket.params) for bucket in self._buckets]
        self._is_optimistic = self._may_be_optimistic()
        self._plan_buffers()
        if all(header.alone for header in headers):  # else others' messages may come between
            self._take_turn(on_transport(self._comm.key).turns)

    def _plan_buffers(self) -> None:
        context = self.context
        message = BufferMessage(self._shared_buffers, context, context.header.step)
        self._buffers = message if message.sizes else None

    def _follow(self, plan: StepPlan) -> None:
        """Takes over the plan of the last step, from which nothing differs."""
        context = self.context
        context.headers = [*plan.headers]  # a list of its own, as buckets look anew in each step
        context.used, context.share, context.scale = plan.used, plan.share, plan.scale
        self.choice, self._buckets, self._place = plan.choice, plan.buckets, plan.place
        self._left, self._is_optimistic = [*plan.counts], plan.is_optimistic
        self._expected = plan.expected
        self.subjects = plan.subjects
        self._ballot = Ballot(self._comm, context.header, plan.subjects)
        if context.reading is None:
            self._receiver.views = plan.views
        if context.header.buffers:
            self._plan_buffers()
        self._take_turn(plan.turns)

    def as_plan(self, headers: Sequence[Header], *, rests: bool) -> StepPlan | None:
        """Returns the plan for the next step; None if that one has to make its own.

        Args:
            headers: predicted headers of all sites.
            rests: as in `StepPlan`.
        """
        context, own = self.context, self.context.header
        usual = self.applied and self.drift is None and self._receiver.may_count
        if not usual or self.task == NO_TASK or self.lengths is None or self.choice is None:
            return None
        if self.plan is not None:
            if self._receiver.views or not self.plan.views:
                return self.plan
            return replace(self.plan, views=self._views())  # a recorded step went without them
        if set(compress(context.params, own.used)) != self._trained:
            return None
        if len(headers) != len(context.headers) or headers[context.comm.rank].facts != own.facts:
            return None
        if any(h.join != Join.NONE or not h.alone for h in headers):
            return None
        return StepPlan(
            headers=headers,
            own=own,
            trained=frozenset(self._trained),
            rests=rests,
            choice=self.choice,
            buckets=self._buckets,
            place=self._place,
            counts=[len(bucket.params.intersection(self._trained)) for bucket in self._buckets],
            used=context.used,
            share=context.share,
            scale=context.scale,
            subjects=self.subjects,
            is_optimistic=self._is_optimistic,
            views=self._views(),
            expected=self._expected,
            turns=on_transport(context.comm.key).turns,
        )

    def _views(self) -> Sequence[BucketView | None]:
        """Returns new views for the messages; none if gradients are written before the votes."""
        if not self._is_optimistic:
            return ()
        return [BucketView() if bucket.is_view else None for bucket in self._buckets]

    def _take_turn(self, turns: MessageSequence) -> None:
        """Posts the receives of this step, and of the next one as if it were like this one."""
        context, buffers, buckets = self.context, self._buffers, self._buckets
        own = context.header.fingerprint, () if buffers is None else tuple(buffers.sizes)
        lengths = [bucket.lengths(context) for bucket in buckets]
        pairs = zip(buckets, lengths, strict=True)
        ahead = [b.lengths_ahead(context) if b.looks_ahead else length for b, length in pairs]
        self.lengths = *own, lengths
        turn, expected = turns.begin(self.lengths, (*own, ahead))
        self._comm.take_turn(turn)
        for expected_turn in expected:
            for bucket in self._expected:
                is_ahead = bucket.looks_ahead and expected_turn != turn
                expect = bucket.expect_ahead if is_ahead else bucket.expect
                expect(context, expected_turn)
            if buffers is not None:
                buffers.expect(expected_turn)
        if self._votes.are_due or not self._is_optimistic:  # votes follow these messages
            self._ballot.expect(turn)

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
            self.captured.settle_all(bucket.dense_params)
        had_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as in `_pass`
        try:
            self._sent.append((bucket, bucket.start(self.context)))
        finally:
            torch._C._set_grad_enabled(had_grad)

    def _start_rest(self) -> None:
        self.agreed()
        while len(self._sent) < len(self._buckets):
            self._start()

    # -- the end --------------------------------------------------------------------------------

    @property
    def applied(self) -> bool:
        """True if the step counts: all sites say so."""
        return self.decision is not None and self.decision.good

    @property
    def voted(self) -> bool:
        """True if this site has sent a good vote, which the others may have received."""
        return self._ballot.is_good

    @property
    def active_here(self) -> Sequence[int]:
        """Ranks of this site that have a batch in a joined loop; of several ranks alone."""
        return ()

    def clear(self) -> None:
        """Drops gradients that an aborted step has left inside the site; of several ranks alone."""

    def finish(self) -> None:
        """Waits for all messages, writes each gradient as it comes, and votes.

        Raises:
            StepDiscardedError: on all sites; `param.grad` is None then.
        """
        if self._lost_by is not None:
            raise self._lost_by
        decision = self._pass()
        if decision.verdict == Verdict.SURPRISED:
            self._show_parts()
            self._start_again()  # known from the first message on: nothing was written
            decision = self._pass()
        self.settle(decision)
        self._raise_drift(decision)
        if self._receiver.error is not None:
            raise self._receiver.error
        if decision.verdict >= Verdict.REFUSED:
            sites = self._comm.sites
            raise decision.error(self.subjects, self.context.blocks, sites) from self._ballot.cause

    def send(self) -> None:
        """Starts all messages whose gradients are there; `finish` receives their results.

        A step without a backward may call it itself, and compute while they travel.
        """
        try:
            self._start_rest()
        except ExchangeError:
            raise
        except Exception as error:  # the others must hear of it
            if self.choice is None:  # no site has a plan
                raise
            self._receiver.fail(error)
            self._start_rest()
        if self._is_optimistic and self._participant is not None:
            # Of the participant: a method of this step would tie it and its buffers into a cycle.
            self._receiver.ask_again = partial(self._participant.ask_again, self._comm)
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
            self._show_parts()
            if self._joint is not None:
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

        Raises:
            ExchangeError: an exchange failed.
        """
        if self._lost_by is not None:
            raise self._lost_by
        self.context.state = State.FAILED
        if changed is not None:
            self._ballot.note_change(changed)
        self.agreed()
        if self._joint is not None:
            self._joint.give_up()
        self.decision = self._pass()
        self._show_parts()
        self._planner.commit(applied=False)
        self.captured.release()
        self._raise_drift(self.decision)

    def _show_parts(self) -> None:
        """Has it counted that some sites have added nothing to sums of this step."""
        if self._counter is not None:
            self._counter.show_parts()

    def _pass(self) -> Decision:
        """Goes through the step once; messages between steps belong to no turn."""
        had_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as torch.no_grad(), in one call
        try:
            return self._gone_through()
        finally:
            torch._C._set_grad_enabled(had_grad)
            self._comm.take_turn(0)

    def _gone_through(self) -> Decision:
        """Starts the remaining messages, receives all and votes.

        A site whose messages were all good votes so even if other sites say that they failed: these
        vote, too.
        """
        receiver, ballot = self._receiver, self._ballot
        if not self._is_sent:
            self.send()
        if self._buffers is not None:
            self._buffers.start()
        if receiver.views:
            self._prepare_views()
        receiver.start_further_rounds(self._sent)
        last = receiver.receive(self._sent, ballot)
        deltas = _NO_MEAN_DELTAS if self._joint is None else self._joint.digest
        if self._buffers is not None:
            receiver.receive_buffers(self._buffers, ballot)
            ballot.note_sums(deltas)
        else:
            ballot.note_sums(_NO_BUFFERS, deltas)
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
        self.plan, self._receiver.views = None, ()
        self.context.state = State.GOOD
        self.context.forget()
        self._ballot = Ballot(self._comm, self.context.header, self.subjects)
        if self._tap is not None:
            self._tap.begun(header.step)
        self._announce(header)

    # -- whether it counts ----------------------------------------------------------------------

    @property
    def waits_s(self) -> float:
        """Seconds of this site's longest wait in the step, the current one included."""
        return self._receiver.waits_s

    def _may_be_optimistic(self) -> bool:
        """True if no site can refuse the step once all its messages have arrived.

        Then it is committed before the votes, which are counted at the end of the next step. The
        plan decides this, so it is the same on all sites.
        """
        kept = bool(self._buckets) and all(bucket.is_kept for bucket in self._buckets)
        averages = self._joint is not None and self._joint.averages
        return self._participant is not None and kept and not averages

    def _prepare_views(self) -> None:
        """Does what needs none of the sums while these travel."""
        self._votes.digest = int(self._votes.digest)  # of the steps before: computed now
        for view, (_, pending) in zip(self._receiver.views, self._sent, strict=True):
            if view is not None:
                view.prepare(self.context.params, only(pending.sums, self.context.used))

    @property
    def needs_no_votes(self) -> bool:
        """True if it is applied before the votes; known once its messages have arrived."""
        return self._is_optimistic and self.drift is None and self._receiver.may_count

    def _sends_last(self) -> None:
        """Records that the last message goes: a site that has it, too, may apply the step."""
        if self._participant is not None and self._is_optimistic:
            self._participant.sends()

    def _count_before(self) -> None:
        """Counts the votes on the step before, which this site has applied without them."""
        receiver, step = self._receiver, self.context.header.step
        receiver.place = "the other sites' votes on the step before"
        self.drift = self.drift or self._votes.count(step, receiver.waiting)

    def _applied_at_once(self, last: Last | None) -> Decision:
        assert self._participant is not None
        refuse_if_given_up(self._comm, self._began)
        if last is not None:
            self._receiver.write(*last)
        self._receiver.lend()
        # After the writes: from now on others may ask for the step, and are given what was written.
        self._votes.make(self._ballot, self, self._participant)
        return Decision.all_good(self.context.header)

    def _voted_on(self, last: Last | None) -> Decision:
        """Votes and waits for all votes; writes the last message while they travel."""
        if self.drift is not None:
            self._ballot.note_drift()
        elif self._participant is not None and self.context.state == State.GOOD:
            self._participant.sends()
        try:
            self._ballot.cast(self.context.state, self.context.bad)
        finally:  # another site may have the vote, and count the step
            if last is not None:
                self._receiver.write(*last)
                self._receiver.lend(copies=True)
        self._receiver.place = "the other sites' word that they have everything"
        with self._receiver.waiting():
            decision = self._ballot.count()
        if decision.good:
            self._ballot.note_part()
        if self._participant is not None and decision.verdict != Verdict.SURPRISED:
            refuse_if_given_up(self._comm, self._began)
            own = self.context.header.fingerprint
            self._participant.makes(own, None, applied=decision.good)
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
        if self._is_optimistic and decision.verdict == Verdict.REFUSED:
            self._votes.keep_apart(self._ballot, self)  # the others find it out in the next step
            self.drift = decision.drift(self._comm.sites)
            raise self.drift

    # -- requests of sites that lack a message or the step --------------------------------------

    def message_to(self, site: int, place: int) -> bytes | None:
        """Returns the bytes that this site sent in a message; None if they are no longer there."""
        if place == BUFFERS_PLACE:
            gathered = None if self._buffers is None else self._buffers.gathered
        else:
            gathered = self._sent[place][1].gathered if 0 <= place < len(self._sent) else None
        return None if gathered is None else gathered.own.cpu().numpy().tobytes()

    def brought(self) -> StepResult | None:
        """Returns the result once more; None if a gradient that is a bucket view was changed."""
        self.context.reading = None
        means, additions = {}, {}
        for bucket, pending in self._sent:
            found = self._receiver.effects(bucket, pending.wait())
            means.update(
                {n: t.clone() for n, t in found[0].items()} if bucket.is_view else found[0]
            )
            additions.update(found[1])
            if not pending.is_as_received:  # after the copies: the loop may write meanwhile
                return None
        buffers = {} if self._buffers is None else self._buffers.values()
        named = {place.name: t for place, t in buffers.items() if t is not None}
        return StepResult(True, means, additions, named)

    def take(self, brought: StepResult) -> None:
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


def _with_receives(buckets: Sequence[Bucket]) -> Sequence[Bucket]:
    """Returns the buckets whose receives are posted: no sums behind one that has none posted.

    A sum takes the first receive that is posted for sums of its turn. So sketches of two rounds
    would take that of the gradients behind them, which are in messages of their own where they
    have other dtypes or are too large to go along. These lose no time: the second round is
    waited for behind them, and takes as many delays.
    """
    found, all_expected = [], True
    for bucket in buckets:
        if all_expected or not bucket.adds_up:
            found.append(bucket)
        all_expected = all_expected and bucket.is_expected
    return found
