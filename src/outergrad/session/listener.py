"""What autograd tells of a model, and the steps that come of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from outergrad.capture.nested import refuse_nested_backward
from outergrad.capture.tap import WatchedParameter, at_end_of_backward, current_task
from outergrad.capture.tapped_layer import GraphTaps, TappedLayer
from outergrad.core.blocks import Block
from outergrad.core.protocols import Comm
from outergrad.core.types import ExchangeError, Factors, Slot, Unit
from outergrad.messages.header import Join
from outergrad.planning.plan import Planner
from outergrad.record.stats import Stats
from outergrad.replay.block_message import Blocks
from outergrad.replay.block_tap import TappedBlock
from outergrad.replay.block_use import Use
from outergrad.session.giving_up import GivingUp
from outergrad.session.inspect import View
from outergrad.session.reporting import Reporter
from outergrad.session.settings import Settings
from outergrad.session.state import Owner
from outergrad.step.accumulated import Accumulated
from outergrad.step.announcing import Announcer, Loop
from outergrad.step.cadence import Cadence, KeepingStep, Share
from outergrad.step.calls import LocalStep
from outergrad.step.groups import end_unfinished, on_group
from outergrad.step.joint import JointParts, JointStep, Point, described
from outergrad.step.mishaps import Mishaps
from outergrad.step.step import SharedStep

_Step = LocalStep | SharedStep | KeepingStep


class Listener(GivingUp):
    """Begins a step at the first event of a backward, tells it the others, and ends it.

    Args:
        view: of the model.
        comm: the transport.
        fingerprint: what the sites have agreed on.
        settings: of the user's.
    """

    def __init__(
        self,
        view: View,
        comm: Comm,
        fingerprint: int,
        settings: Settings,
    ) -> None:
        model, exchanges = view.model, view.exchanges
        self._model, self._comm, self._exchanges = model, comm, exchanges
        self._frozen, self._local, self._number = view.frozen, view.local, fingerprint
        method = settings.method
        self._local_buffers = view.local_buffers
        self._norms_over_sites = view.norms_over_sites
        told = (method, model, exchanges, view.every)
        self._reporter = Reporter(settings.recorders, comm.rank, comm.world_size, *told)
        self._owner = Owner(method, model, comm.rank, comm.world_size, tuple(view.local))
        self._planner = Planner(model, exchanges, comm.world_size)
        self._wanted = dict(zip(model.units, self._planner.first_wanted(), strict=True))
        self._unit_of: dict[Slot | Block, Unit] = {
            part: unit for unit in model.units for part in (*unit.slots, unit.block) if part
        }
        self._layers: list[TappedLayer] = []
        self._graphs = GraphTaps()
        self._blocks = Blocks()
        self._announcer = Announcer(model, fingerprint, comm, self._blocks)
        parts = view.joint_parts
        self._joint = JointParts(parts, self.on_joint) if parts else None
        whole = Share(model, self._planner, self._announcer)
        self._cadence, self._turn = Cadence(whole, view.every), None
        self._watched = {name: WatchedParameter(name, p, self) for name, p in model.params.items()}
        self._step: _Step | None = None
        self._synchronise, self._attached = True, True
        self._several = comm.world_size > 1
        self._unshared: set[str] = set()
        self._accumulated = Accumulated(model, self._planner.pays)
        self._weighting, self._join = settings.weighting, Join.NONE
        self._buffers = settings.buffers
        self._stats = Stats(total_sent_bytes=comm.sent_bytes)
        self._chosen: dict[Unit, str] = {}
        tell = self._reporter.mishap
        self._mishaps = Mishaps(model.params, comm.rank, settings.max_bad_steps, tell)
        on_group(comm.group).attached.add(self)
        self._note_end(counted=False)

    # -- what distribute() calls ----------------------------------------------------------------

    def attach(self, layer: TappedLayer) -> None:
        """Adds a layer whose class was swapped."""
        self._layers.append(layer)
        self._announcer.add(layer)

    def attach_block(self, block: TappedBlock) -> None:
        """Adds a block whose modules' classes were swapped, in the order of the model."""
        self._blocks.add(block)

    def watched(self, names: Sequence[str]) -> list[WatchedParameter]:
        """Parameters by name."""
        return [self._watched[name] for name in names]

    # -- what autograd calls, through the taps --------------------------------------------------

    def taps(self, layer: TappedLayer) -> bool:
        """Whether some product of the layer should travel as factors in the next step."""
        return any(self._wanted[self._unit_of[slot]] for slot in layer.slots)

    def taps_block(self, block: Block) -> bool:
        """Whether the block should be computed again in the next step."""
        return self._wanted[self._unit_of[block]]

    def on_use(self, block: Block, use: Use) -> None:
        """The deltas of a use of a block have arrived."""
        self._refuse_detached()
        try:
            self._due().on_use(block, use)
        except ExchangeError as error:
            raise self._lost_by(error) from error

    def on_joint(self, point: Point, delta: Tensor) -> Tensor:
        """The delta of an output of a part that is each site's own; returns what flows back."""
        self._refuse_detached()
        try:
            return self._due().on_joint(point, delta)
        except ExchangeError as error:
            raise self._lost_by(error) from error

    def on_factors(self, slot: Slot, factors: Callable[[], Factors]) -> None:
        """A product's delta has arrived."""
        self._refuse_detached()
        try:
            self._step_of(slot.weight).on_factors(slot, factors)
        except ExchangeError as error:
            raise self._lost_by(error) from error

    def on_gradient(self, name: str) -> None:
        """Autograd itself has a gradient for the parameter."""
        try:
            self._step_of(name).on_gradient(name)
        except ExchangeError as error:
            raise self._lost_by(error) from error

    def on_ready(self, name: str) -> None:
        """This backward has nothing more for the parameter."""
        try:
            self._step_of(name).on_ready(name)
        except ExchangeError as error:
            raise self._lost_by(error) from error

    def _current(self) -> _Step:
        """The step of the backward that runs now; its first event begins it."""
        task = current_task()
        if self._step is None or self._step.task != task:
            self._begin(task)
        assert self._step is not None
        return self._step

    def _due(self) -> LocalStep | SharedStep:
        """The same; blocks and averages are due every time."""
        step = self._current()
        assert not isinstance(step, KeepingStep)
        return step

    def _step_of(self, name: str) -> _Step:
        """Where a parameter belongs in it."""
        step = self._current()
        later = self._turn.later if self._turn is not None else None
        return later if later is not None and name in later.model.params else step

    def _begin(self, task: int) -> None:
        refuse_nested_backward()
        end_unfinished(self._comm.group)
        self._refuse_lost()
        self._refuse_changed()
        used = {name for name, watched in self._watched.items() if watched.accumulates()}
        begin = self._synchronised if self._synchronise else self._unsynchronised
        step = self._step = begin(task, used)
        at_end_of_backward(lambda: self._finish(step))

    def _unsynchronised(self, task: int, used: set[str]) -> LocalStep:
        several, self._turn = self._several, None
        self._unshared |= used if several else set()
        kept = self._accumulated if several else None
        return LocalStep(task, self._model, used, self._blocks, kept)

    def _synchronised(self, task: int, used: set[str]) -> _Step:
        """Shares what is due; on a single site that needs no messages."""
        alone = self._comm.world_size == 1 and not any(self._wanted.values())
        earlier = self._accumulated.take(used)
        turn = self._turn = self._cadence.turn(task, used, earlier, rows=not alone)
        if turn.due is None:
            assert turn.later is not None
            return turn.later
        model, planner, announcer = turn.due.model, turn.due.planner, turn.due.announcer
        if alone:
            return LocalStep(task, model, turn.used, self._blocks, None)
        waiting = (self._unshared | turn.released) & model.params.keys()
        announced = turn.used | turn.earlier.params
        points, trained = (self._joint.points(), self._joint.params) if self._joint else ([], [])
        agreed = turn.earlier, described(points) if self._joint else None
        loop = Loop(self._weighting.weight, self._join, self._buffers.written())
        header = announcer.header(self._stats.step, announced, waiting, *agreed, loop)
        parts = turn.earlier, self._blocks, JointStep(points, self._comm, header, trained)
        reading = self._reporter.reading(self._stats.step)
        own = (model, planner, self._comm, header, turn.used, *parts, reading, self._buffers)
        step = SharedStep(task, *own, skips_bad=self._mishaps.skips_bad)
        on_group(self._comm.group).running.append(self)
        return step

    def _finish(self, step: _Step) -> None:
        if step is not self._step:  # left over from a backward that raised
            return
        try:
            self._complete(step)
            if self._turn is not None:
                shares = isinstance(step, SharedStep)
                own = step.sender.used if shares else self._turn.used | self._turn.released
                self._cadence.finish(self._turn, own)
                self._unshared.clear()
        finally:
            self._close(step)
            self._take_note(step)

    def _complete(self, step: _Step) -> None:
        if isinstance(step, SharedStep):
            try:
                step.finish()
            except ExchangeError as error:
                if not self._counts_elsewhere(step, error):
                    raise self._lost_error() from error
        elif self._turn is not None and self._mishaps.skips_bad:
            self._mishaps.alone(self._stats.step)

    def _take_note(self, step: _Step) -> None:
        """Of what all sites decided."""
        if isinstance(step, SharedStep) and step.decision is not None:
            self._mishaps.decided(step.decision, step.subjects.names)

    def _close(self, step: _Step) -> None:
        self._step, turn, self._turn = None, self._turn, None
        if isinstance(step, SharedStep):
            on_group(self._comm.group).running.remove(self)
        for layer in self._layers:
            layer.forget_awaited()
        if isinstance(step, SharedStep) or not self._several:  # else they add up
            self._weighting.settle()
            self._blocks.forget()
            for layer in self._layers:
                if turn is None or turn.shares(layer.slots):
                    layer.forget_untapped()
        if isinstance(step, SharedStep) and step.choice is not None:
            self._wanted.update(zip(step.units, step.choice.wanted, strict=True))
            self._graphs.follow({layer: self.taps(layer) for layer in self._layers})
            self._chosen.update(zip(step.units, step.choice.words, strict=True))
            self._stats = step.stats(self._stats.step + 1)
            if step.decision is not None:
                self._note_end(counted=step.applied)
            if step.applied:
                self._reporter.report(step.sender, self._stats)
        if isinstance(step, LocalStep) and turn is not None:  # a single site's
            alone = Stats(self._stats.step + 1, total_sent_bytes=self._stats.total_sent_bytes)
            self._stats = alone
            self._reporter.report_alone(alone)

    # -- when something went wrong --------------------------------------------------------------

    def end_unfinished(self, *, unless: int) -> None:
        """Ends a step whose backward raised here, so that all sites are in step again."""
        step = self._step
        if not isinstance(step, SharedStep) or step.task == unless:
            return  # another session may be in the middle of the same backward
        try:
            step.abandon()
        except ExchangeError as error:
            self._lost_by(error)
        self._close(step)
        self._take_note(step)

    def _refuse_detached(self) -> None:
        if not self._attached:
            raise RuntimeError("this forward ran before session.detach(): run it again")

    def _refuse_changed(self) -> None:
        """Checks that the model is what the sites agreed on."""

    def on_stale(self, name: str) -> None:
        """A gradient for the parameter has come by another node than the one that was watched."""
