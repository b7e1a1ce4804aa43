"""A session: the life of one distributed model, from `distribute` to `detach`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from outergrad._accumulated import Accumulated
from outergrad._announcing import Announcer
from outergrad._block_message import Blocks
from outergrad._block_tap import TappedBlock
from outergrad._block_use import Use
from outergrad._blocks import Block
from outergrad._cadence import Cadence, KeepingStep, Share
from outergrad._calls import LocalStep
from outergrad._groups import end_unfinished, on_group
from outergrad._inspect import View
from outergrad._joint import JointParts, JointStep, Point, described
from outergrad._plan import Planner
from outergrad._protocols import Comm, Recorder
from outergrad._reporting import Reporter
from outergrad._state import Owner, Progress, resumed, saved
from outergrad._step import SharedStep
from outergrad._tap import (
    NO_TASK,
    WatchedParameter,
    at_end_of_backward,
    current_task,
    refuse_nested_backward,
)
from outergrad._tapped_layer import TappedLayer
from outergrad._types import ExchangeError, Factors, Slot, StateDict, Unit
from outergrad.record.coverage import Coverage, coverage
from outergrad.record.stats import Stats

_Step = LocalStep | SharedStep | KeepingStep


class Session:
    """What `distribute` returns: the model's gradients are shared as long as it is attached."""

    def __init__(
        self,
        view: View,
        comm: Comm,
        fingerprint: int,
        recorder: Recorder | None,
        method: str,
    ) -> None:
        model, exchanges = view.model, view.exchanges
        self._model, self._comm, self._exchanges = model, comm, exchanges
        self._frozen, self._local = view.frozen, view.local
        self._reporter = Reporter(recorder)
        self._owner = Owner(method, model, comm.rank, comm.world_size, tuple(view.local))
        self._planner = Planner(model, exchanges, comm.world_size)
        self._wanted = dict(zip(model.units, self._planner.first_wanted(), strict=True))
        self._unit_of: dict[Slot | Block, Unit] = {
            part: unit for unit in model.units for part in (*unit.slots, unit.block) if part
        }
        self._layers: list[TappedLayer] = []
        self._blocks = Blocks()
        self._announcer = Announcer(model, fingerprint, comm, self._blocks)
        parts = view.joint_parts
        self._joint = JointParts(parts, self.on_joint) if parts else None
        whole = Share(model, self._planner, self._announcer)
        self._cadence, self._turn = Cadence(whole, view.every), None
        self._watched = {name: WatchedParameter(name, p, self) for name, p in model.params.items()}
        self._step: _Step | None = None
        self._synchronise, self._attached = True, True
        self._unshared: set[str] = set()
        self._accumulated = Accumulated(model, self._planner.pays)
        self._lost: Exception | None = None
        self._stats = Stats(total_sent_bytes=comm.sent_bytes)
        self._chosen: dict[Unit, str] = {}
        on_group(comm.group).attached.add(self)

    # -- what users call ------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside leave this site's gradients in `param.grad`, unshared.

        The first backward outside shares all that has been accumulated, as with DDP: as factors
        while all their rows pay and nobody else wrote to `param.grad` since it was None.
        """
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def flush(self) -> None:
        """Shares what the last steps of `og.LocalSteps` changed; does nothing for gradients."""

    def coverage(self) -> Coverage:
        """How each parameter travels and why; `print(session.coverage())` shows a table."""
        model = self._model
        params = {**model.params, **self._frozen, **self._local}
        exchanges = [self._exchanges[unit] for unit in model.units]
        sites, chosen = self._comm.world_size, [self._chosen.get(u, "") for u in model.units]
        return self._cadence.noted(
            coverage(params, self._local, model.units, model.reasons, exchanges, sites, chosen)
        )

    def stats(self) -> Stats:
        """Bytes and seconds of the last synchronised step, per layer and in total."""
        return self._stats

    def state_dict(self) -> StateDict:
        """What the session remembers, to be saved beside the model and the optimizer.

        Every site saves its own, after the same step: what it has not sent yet is known to no
        other. Nor are its `og.Local()` parameters, listed under "local": with these, each site
        saves its own model, too. Plain tensors, numbers, strings, lists and dicts:
        `torch.load(weights_only=True)` reads it. A step whose backward raised is first ended with
        the other sites.

        Raises:
            RuntimeError: this site lost the others in the middle of a step.
        """
        end_unfinished(self._comm.group)
        self._refuse_lost()
        progress = Progress(self._stats.step, self._wanted, self._planner.mixed)
        state = saved(self._owner, progress, self._exchanges)
        return {**state, "cadence": self._cadence.state()}

    def load_state_dict(self, state: StateDict | Sequence[StateDict]) -> None:
        """Goes on from what the sites saved. Call it on every site: they check it together.

        At the same number of sites training goes on to the bit as if it had not been interrupted.
        At another, what the sites have not sent yet is shared out so that none of it is lost.
        Load the model after `distribute`, which makes its buffers equal to rank 0's.

        Args:
            state: what this site's `state_dict()` returned, or a list of what it returned on all
                sites, in the order of their ranks: that is needed if their number has changed.

        Raises:
            ValueError: on all sites, and nothing is changed: a state is of another version,
                method, model, site or number of sites, or the states are of different steps.
            RuntimeError: the session is detached, or lost the other sites, or is in backward.
        """
        if not self._attached or current_task() != NO_TASK:
            raise RuntimeError("load a state into an attached session, and not during backward")
        end_unfinished(self._comm.group)
        self._refuse_lost()
        progress, inheritances = resumed(state, self._owner, self._comm)
        self._exchanges.load(inheritances)
        self._planner.resume(progress.mixed)
        self._cadence.load(state, self._comm.rank, self._comm.world_size)
        self._wanted = dict(progress.wanted)
        self._stats = Stats(step=progress.step, total_sent_bytes=self._comm.sent_bytes)

    def detach(self) -> None:
        """Ends the session: the model is plain again and keeps its parameters and gradients.

        Call it on every site. A step whose backward raised is first ended with the other sites.
        """
        if not self._attached:
            return
        self._attached = False
        on_group(self._comm.group).attached.discard(self)
        end_unfinished(self._comm.group)
        for layer in [*self._layers, *self._blocks]:
            layer.restore()
        for watched in [*self._watched.values(), *([self._joint] if self._joint else [])]:
            watched.remove()
        self._accumulated.clear()
        self._cadence.kept.clear()

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
        self._refuse_unfrozen()
        used = {name for name, watched in self._watched.items() if watched.accumulates()}
        begin = self._synchronised if self._synchronise else self._unsynchronised
        step = self._step = begin(task, used)
        at_end_of_backward(lambda: self._finish(step))

    def _unsynchronised(self, task: int, used: set[str]) -> LocalStep:
        several, self._turn = self._comm.world_size > 1, None
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
        points = self._joint.points() if self._joint else []
        agreed = turn.earlier, described(points) if self._joint else None
        header = announcer.header(self._stats.step, announced, waiting, *agreed)
        parts = turn.earlier, self._blocks, JointStep(points, self._comm)
        step = SharedStep(task, model, planner, self._comm, header, turn.used, *parts)
        on_group(self._comm.group).running.append(self)
        return step

    def _finish(self, step: _Step) -> None:
        if step is not self._step:  # left over from a backward that raised
            return
        try:
            if isinstance(step, SharedStep):
                step.finish()
            if self._turn is not None:
                shares = isinstance(step, SharedStep)
                own = step.sender.used if shares else self._turn.used | self._turn.released
                self._cadence.finish(self._turn, own)
                self._unshared.clear()
        except ExchangeError as error:
            raise self._lost_by(error) from error
        finally:
            self._close(step)

    def _close(self, step: _Step) -> None:
        self._step, turn, self._turn = None, self._turn, None
        if isinstance(step, SharedStep):
            on_group(self._comm.group).running.remove(self)
        if isinstance(step, SharedStep) or self._comm.world_size == 1:  # else they add up
            self._blocks.forget()
            for layer in self._layers:
                if turn is None or turn.shares(layer.slots):
                    layer.forget_untapped()
        if isinstance(step, SharedStep) and step.choice is not None:
            self._wanted.update(zip(step.units, step.choice.wanted, strict=True))
            self._chosen.update(zip(step.units, step.choice.words, strict=True))
            self._stats = step.stats(self._stats.step + 1)
            self._reporter.report(step.sender, self._stats)

    # -- when something went wrong --------------------------------------------------------------

    def end_unfinished(self, *, unless: int) -> None:
        """Ends a step whose backward raised here, so that all sites are in step again."""
        step = self._step
        if not isinstance(step, SharedStep) or step.task == unless:
            return  # another session may be in the middle of the same backward
        try:
            step.abandon()
        except ExchangeError as error:
            self._lost = error
        self._close(step)

    def _lost_by(self, error: ExchangeError) -> RuntimeError:
        """Remembers that the transport failed: its group must not be used again."""
        self._lost = error
        return self._lost_error()

    def _refuse_detached(self) -> None:
        if not self._attached:
            raise RuntimeError("this forward ran before session.detach(): run it again")

    def _refuse_lost(self) -> None:
        if self._lost is not None:
            raise self._lost_error() from self._lost

    def _lost_error(self) -> RuntimeError:
        return RuntimeError(
            f"site {self._comm.rank} lost the other sites in step {self._stats.step}: "
            f"{self._lost}. What is in param.grad must not be applied. The process group cannot "
            f"be used any more: start the processes again from the last checkpoint"
        )

    def _refuse_unfrozen(self) -> None:
        for name, p in self._frozen.items():
            if p.requires_grad:
                raise RuntimeError(
                    f"{name!r} was frozen when the model was distributed and would not be shared: "
                    f"call session.detach() and og.distribute(model, ...) again on every site"
                )
