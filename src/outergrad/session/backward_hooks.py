"""Autograd's events in a backward of a session's model: what its taps and hooks call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from outergrad.capture.batch import AnySamples
from outergrad.capture.engine import current_task
from outergrad.capture.held_nodes import holds_nodes
from outergrad.capture.kept import Alarm
from outergrad.capture.parameters import WatchedParameter, hold_again
from outergrad.capture.past_autograd import PastAutograd
from outergrad.capture.tapped_layer import TappedLayer
from outergrad.core.blocks import Block
from outergrad.core.errors import ExchangeError
from outergrad.core.transport import Comm
from outergrad.core.types import Factors, Slot
from outergrad.replay.block_tap import TappedBlock
from outergrad.replay.block_use import Use
from outergrad.session.inspect import Inspection
from outergrad.session.settings import Settings
from outergrad.session.stepping import Step, Stepping
from outergrad.step.joint import JointParts, Point
from outergrad.step.repeated import RepeatedStep
from outergrad.step.step import SharedStep


class BackwardHooks(Stepping):
    """Base of a session that passes autograd's events to the step, begun by the first of them."""

    def __init__(
        self, inspection: Inspection, comm: Comm, fingerprint: int, settings: Settings
    ) -> None:
        super().__init__(inspection, comm, fingerprint, settings)
        params, parts = inspection.model.params, inspection.joint_parts
        self._joint = JointParts(parts, self.on_joint) if parts else None
        self._watched = {name: WatchedParameter(name, p, self) for name, p in params.items()}
        captured = {name for slot in inspection.model.slots for name in slot.params}
        self._past_autograd = PastAutograd(self._watched, sorted(captured & params.keys()))
        self._holds_nodes = True
        holds_nodes(self)
        self._group.attached.add(self)
        self._note_end(counted=False)

    def tap(self, inspection: Inspection) -> None:
        """Swaps the classes of layers and blocks for ones that capture activations and deltas."""
        alarm = Alarm()
        for layer in inspection.layers:
            watched = [self._watches(slot.params) for slot in layer.slots]
            batch = self._batch or (AnySamples() if self._reporter.by_sample else None)
            tapped = TappedLayer(layer.module, layer.rule, layer.slots, watched, self, batch, alarm)
            self._next_forward.add(tapped)
            self._header_builder.add(tapped)
        for found in inspection.blocks:  # in the order of the model
            watched = [self._watches(params) for params in found.params_of]
            self._blocks.add(TappedBlock(found, watched, self, alarm))

    def _watches(self, names: Sequence[str]) -> list[WatchedParameter]:
        return [self._watched[name] for name in names]

    # -- nodes of autograd ----------------------------------------------------------------------
    # A node owns its parameter, which Python's collector cannot see: while a session holds one, it
    # and its model are never found to be garbage. So it lets go of them for each collection.

    def let_go_of_nodes(self) -> None:
        """Drops references to autograd nodes, so that Python can collect session and model."""
        self._holds_nodes = False
        for watched in self._watched.values():
            watched.let_go()

    def _hold_nodes(self) -> Sequence[Node | None]:
        """Holds the parameters' nodes for a backward; returns none if they are held already."""
        if self._holds_nodes or not self._watched:
            return ()
        self._holds_nodes = True
        return hold_again(self._watched.values())

    # -- events, which autograd sends through taps and hooks --------------------------------------

    def on_use(self, block: Block, use: Use) -> None:
        """Captures the deltas of a use of a block."""
        self._refuse_detached()
        self._current().captured.add_use(block, use)

    def on_joint(self, point: Point, delta: Tensor) -> Tensor:
        """Averages the delta of an output of an `og.Local` part; returns what flows back."""
        self._refuse_detached()
        with self._giving_up():
            return self._current().on_joint(point, delta)

    def on_factors(self, slot: Slot, factors: Callable[[], Factors]) -> None:
        """Captures the factors of a product, whose delta has arrived."""
        self._refuse_detached()
        self._current()
        step = self._step_of(slot.weight)
        assert not isinstance(step, RepeatedStep)
        step.captured.add(slot, factors)

    def on_gradient(self, name: str) -> None:
        """Notes that autograd itself has a gradient for the parameter."""
        step = self._step_of(name)
        if not isinstance(step, RepeatedStep):
            step.captured.has_autograd_grad.add(name)

    def on_written(self, name: str) -> None:
        """Notes that the backward wrote `param.grad` itself; sums over passes have that anyway."""
        step = self._step_of(name)
        if isinstance(step, SharedStep):
            step.captured.has_autograd_grad.add(name)

    def on_ready(self, name: str) -> None:
        """Tells the step that this backward has nothing more for the parameter."""
        try:
            self._step_of(name).on_ready(name)
        except ExchangeError as error:  # no context manager, as this runs for every parameter
            raise self._lost_by(error) from error

    def _current(self) -> Any:
        """Returns the step of the backward that runs now, as one that takes factors."""
        self._step_of("")
        return self._in_full()

    def _step_of(self, name: str) -> Step:
        """Returns the step that takes a parameter's gradient in the backward that runs now.

        The first event of a backward begins its step. With `every=k` a parameter that is not due
        goes to the step that keeps it for later; blocks and joint averages are due every time.
        """
        step = self._step
        if step is None or step.task != current_task():
            try:
                step = self._begin(current_task())
            except ExchangeError as error:
                raise self._lost_by(error) from error
        if self._due_parts is None or self._due_parts.later is None:
            return step
        later = self._due_parts.later
        return later if name in later.captured.model.params else step

    def _refuse_detached(self) -> None:
        if not self._attached:
            raise RuntimeError("this forward ran before session.detach(): run it again")

    def on_stale(self, name: str) -> None:
        """Refuses a gradient for the parameter that came by another node than the watched one."""
