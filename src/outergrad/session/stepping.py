"""Steps of a session: one begins with each backward, and is finished at its end."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from functools import partial
from typing import Any

from outergrad.capture.batch import Batch
from outergrad.capture.engine import (
    NO_TASK,
    at_end_of_backward,
    refuse_nested_backward,
    untraced,
)
from outergrad.capture.parameters import WatchedParameter, accumulating
from outergrad.capture.past_autograd import PastAutograd
from outergrad.capture.tapped_layer import TappedLayer
from outergrad.core.blocks import Block
from outergrad.core.errors import ExchangeError
from outergrad.core.reasons import Reason
from outergrad.core.transform import GradientTransform
from outergrad.core.transport import Comm
from outergrad.core.types import Unit
from outergrad.messages.header import Header, Join
from outergrad.planning.plan import Planner
from outergrad.record.stats import Stats
from outergrad.replay.block_message import Blocks
from outergrad.session.choosing import choosing_of
from outergrad.session.inspect import Inspection
from outergrad.session.next_forward import NextForward
from outergrad.session.repeating import Repeating
from outergrad.session.reporting import Reporter
from outergrad.session.settings import Settings
from outergrad.session.state import Owner
from outergrad.step.accumulator import Accumulator
from outergrad.step.cadence import Cadence, DueParts, Share
from outergrad.step.captured import Captured
from outergrad.step.groups import on_transport
from outergrad.step.header_builder import Announced, HeaderBuilder, Loop
from outergrad.step.joint import JointStep, described
from outergrad.step.late_votes import LateVotes
from outergrad.step.mishaps import Mishaps
from outergrad.step.repeated import Pattern, RepeatedStep
from outergrad.step.spec import StepSpec
from outergrad.step.step import SharedStep
from outergrad.step.tentative import Tentative
from outergrad.step.transforming import leftover, refuse_leftover
from outergrad.step.unsynced import UnsyncedStep

Step = UnsyncedStep | SharedStep | RepeatedStep
LOOKS, LOOKS_EVERY = 3, 16
"""In the first `LOOKS` of every `LOOKS_EVERY` steps gradients are compared once backward has ended:
that takes a microsecond per parameter, and code that overwrites them does so in every step."""


def _batch(transform: GradientTransform | None) -> Batch | None:
    return Batch() if transform is not None and transform.needs_samples else None


class Stepping(Repeating):
    """Base of a session that makes a step of every backward, by the decision of all sites.

    Args:
        inspection: of the model.
        comm: the transport.
        fingerprint: of the description that the sites have agreed on.
        settings: the user's settings.
    """

    _watched: dict[str, WatchedParameter]
    _past_autograd: PastAutograd

    def __init__(
        self, inspection: Inspection, comm: Comm, fingerprint: int, settings: Settings
    ) -> None:
        super().__init__()
        model, compressors = inspection.model, inspection.compressors
        self._model, self._comm, self._compressors = model, comm, compressors
        self._group = on_transport(comm.key)
        self._frozen, self._local, self._number = inspection.frozen, inspection.local, fingerprint
        method = settings.method
        self._local_buffers = inspection.local_buffers
        self._norms_over_sites = inspection.norms_over_sites
        told = (method, model, compressors, inspection.every)
        self._reporter = Reporter(settings.recorders, comm.rank, comm.world_size, *told)
        self._reporter.take_part(comm)
        self._owner = Owner(method, model, comm.rank, comm.world_size, tuple(inspection.local))
        self._planner = Planner(model, compressors, comm.cost)
        self._next_forward = NextForward(model.units, self._planner.first_tap_next())
        self._blocks = Blocks()
        self._header_builder = HeaderBuilder(model, fingerprint, comm, self._blocks)
        whole = Share(model, self._planner, self._header_builder)
        self._accumulator = Accumulator(model, self._planner.pays)
        self._cadence = Cadence(whole, inspection.every, self._accumulator)
        self._due_parts: DueParts | None = None
        self._step: Step | None = None
        self._pattern: Pattern | None = None
        self._synchronise, self._attached = True, True
        self._transform, self._not_auto = settings.transform, settings.not_auto
        self._batch = _batch(settings.transform)
        self._several = comm.world_size > 1 or settings.transform is not None
        self._may_owe = False
        self._tentative = Tentative(model.params, compressors, lambda: self._comm.rank)
        self._unshared: set[str] = set()
        self._weighting, self._join = settings.weighting, Join.NONE
        self._buffers = settings.buffers
        self._stats = Stats(total_sent_bytes=comm.sent_bytes)
        self._chosen: dict[Unit, Reason] = {}
        tell = self._reporter.mishap
        self._votes = LateVotes()
        self._choosing = choosing_of(compressors, model, comm, fingerprint)
        self._mishaps = Mishaps(model.params, comm.rank, settings.max_bad_steps, tell)

    def taps(self, layer: TappedLayer) -> bool:
        """True if some product of the layer is to be tapped in the next forward."""
        if self._batch is not None:  # samples are told apart by rows alone, however these travel
            return True
        return self._next_forward.taps(layer.slots)

    def taps_block(self, block: Block) -> bool:
        """True if the block is to be computed again by all sites in the next step."""
        return self._next_forward.taps([block])

    def _begin(self, task: int) -> Step:
        refuse_nested_backward()
        self._require_step()
        self._hold_nodes()
        used = accumulating(self._watched)
        self._refuse_changed(used)
        self._tentative.begin()
        step: Step | None = self._repeated(task, used)
        if step is None:
            begin = self._synchronised if self._synchronise else self._unsynchronised
            written = set(self._past_autograd.written()) - self._unshared
            step = begin(task, used)
            if isinstance(step, SharedStep):
                step.captured.has_autograd_grad |= written
            self._past_autograd.begin(used)
        self._step = step
        at_end_of_backward(partial(self._end, task))
        return step

    def _unsynchronised(self, task: int, used: set[str]) -> UnsyncedStep:
        several, self._due_parts = self._several, None
        refuse_leftover(self._leftover(), self._transform)
        self._unshared |= used if several else set()
        write = self._accumulator.write if several else None
        captured = Captured(self._model, used, self._blocks, write)
        return UnsyncedStep(task, captured, captured.settle)

    def _synchronised(self, task: int, used: set[str], **more: Any) -> Step:
        """Begins the step of a backward outside of `no_sync`; a single site needs no messages.

        Args:
            task: autograd's id of the backward.
            used: parameters that the backward leaves a gradient in.
            **more: as for `_new_step`.
        """
        alone = self._alone()
        left = self._leftover()
        carried_over = self._accumulator.take(used)
        due_parts = self._due_parts = self._cadence.due_parts(
            task, used, carried_over, rows=not alone
        )
        if due_parts.due is None:
            assert due_parts.later is not None
            refuse_leftover(left, self._transform)
            return due_parts.later
        model = due_parts.due.model
        if alone:
            captured = Captured(model, due_parts.used, self._blocks)
            return UnsyncedStep(task, captured, captured.settle)
        waiting = (self._unshared | due_parts.released) & model.params.keys()
        announced = due_parts.used | due_parts.carried_over.params
        points, trained = (self._joint.points(), self._joint.params) if self._joint else ([], [])
        agreed = due_parts.carried_over, described(points) if self._joint else None
        loop = Loop(self._weighting.take(), self._join, self._buffers.written())
        about = Announced(self._stats.step, announced, waiting, *agreed, loop, due_parts.used)
        header = due_parts.due.header_builder.header(about)
        if getattr(self._transform, "forms", False):
            uses = tuple(replace(use, tapped=False) for use in header.uses)
            header = replace(header, uses=uses)
        return self._new_step(
            header,
            task=task,
            model=model,
            planner=due_parts.due.planner,
            used=due_parts.used,
            carried_over=due_parts.carried_over,
            joint=JointStep(points, self._comm, header, trained),
            transform=self._transform,
            leftover=left,
            **more,
        )

    def _alone(self) -> bool:
        """True if nothing travels, and no residuals are left of sites that there were before."""
        if self._several or any(self._next_forward.tap_next.values()):
            return False
        self._may_owe = self._may_owe and self._compressors.owe
        return not self._may_owe

    def _leftover(self) -> str:
        return leftover(self._transform, self._model.params, self._unshared)

    def _new_step(self, header: Header, **about: Any) -> SharedStep:
        """Begins a step with the other sites, of the whole model unless `about` says otherwise.

        Args:
            header: of this site.
            **about: attributes of the `StepSpec` that differ from the session's defaults.
        """
        own: dict[str, Any] = {
            "model": self._model,
            "planner": self._planner,
            "blocks": self._blocks,
            "reading": self._reporter.reading(self._stats.step),
            "buffers": self._buffers,
            "skips_bad": self._mishaps.skips_bad,
            "pact": self._pact(),
            "votes": self._votes,
        }
        step = self._step_of_spec(StepSpec(comm=self._comm, header=header, **(own | about)))
        self._group.running.append(self)
        return step

    def _step_of_spec(self, spec: StepSpec) -> SharedStep:
        return SharedStep(spec)

    @untraced
    def _end(self, task: int) -> None:
        """Finishes the step of a backward that has succeeded here; called by autograd."""
        step = self._step
        if step is None or step.task != task:  # left over from a backward that raised
            return
        number, change = self._stats.step, self._past_autograd.refused()
        if change is not None:  # the others hear of it as of any backward that raised
            raise change.error(self._comm.rank)
        if isinstance(step, RepeatedStep) and self._succeeds(step):
            self._finish_repeated(step)
        else:
            self._finish(self._in_full())
        if number % LOOKS_EVERY < LOOKS and self._stats.step > number:
            self._look_at_end()

    def _look_at_end(self) -> None:
        raise NotImplementedError

    def _finish(self, step: Step) -> None:
        if step is not self._step:
            return
        try:
            self._complete(step)
            if self._due_parts is not None:
                used = self._due_parts.used | self._due_parts.released
                shared = step.context.used if isinstance(step, SharedStep) else used
                self._cadence.finish(self._due_parts, shared)
                self._unshared.clear()
            self._keep_tentatively(step)
        finally:
            self._close(step)
            self._take_note(step)

    def _keep_tentatively(self, step: Step) -> None:
        """Keeps residuals tentatively until an optimizer uses the gradients.

        The gradients of a step without a backward are used at once.
        """
        if not (isinstance(step, SharedStep) and step.applied):
            return
        if step.task == NO_TASK:
            self._tentative.nothing_left()
        else:
            self._tentative.left(step.context.used)

    def _complete(self, step: Step) -> None:
        if isinstance(step, SharedStep):
            try:
                step.finish()
            except ExchangeError as error:
                if not self._counts_elsewhere(step, error):
                    raise self._lost_error() from error
        elif self._due_parts is not None and self._mishaps.skips_bad:
            self._mishaps.alone(self._stats.step)

    def _close(self, step: Step) -> None:
        self._step, due_parts, self._due_parts = None, self._due_parts, None
        shared = isinstance(step, SharedStep)
        if shared:
            self._group.running.remove(self)
        for layer in self._next_forward.layers:
            layer.forget_awaited()
        if shared or not self._several:  # else counts add up until the next shared step
            self._forget_pass(due_parts)
        if shared:
            self._follow_up(step)
        elif due_parts is not None and due_parts.due is not None:  # a step of a single site
            total = self._stats.total_sent_bytes
            self._stats = Stats(self._stats.step + 1, total_sent_bytes=total)
            self._reporter.report_alone(self._stats)

    def _forget_pass(self, due_parts: DueParts | None) -> None:
        """Resets what layers and blocks have counted since the last shared backward."""
        self._weighting.settle()
        self._blocks.forget()
        for layer in self._next_forward.layers:
            if not layer.rests and (due_parts is None or due_parts.shares(layer.slots)):
                layer.forget_untapped()

    # -- failures -------------------------------------------------------------------------------

    def end_unfinished(self, *, unless: int) -> None:
        """Ends a step whose backward raised here, so that all sites are in step again."""
        if self._step is None or self._step.task == unless:
            return  # another session may be in the middle of the same backward
        step = self._in_full()
        if not isinstance(step, SharedStep):
            return
        self._hear_of_end()
        try:
            if self._group.lost is None:
                step.abandon()
        except ExchangeError as error:
            self._give_up(error)
        finally:
            self._group.untold = None  # the loop knows that this step is void
            self._close(step)
            self._take_note(step)

    def _hold_nodes(self) -> Any:
        raise NotImplementedError

    def _refuse_changed(self, used: Set[str]) -> None:
        """Raises if the model is not what the sites agreed on; here nothing is checked.

        Args:
            used: parameters that the backward, which begins, leaves a gradient in.
        """
