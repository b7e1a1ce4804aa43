"""The shared part of a model, and the beginning of steps that share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from outergrad.capture.batch import Batch
from outergrad.capture.tapped_layer import TappedLayer
from outergrad.capture.units import Units
from outergrad.commit.deferred_votes import DeferredVotes
from outergrad.core.blocks import Block
from outergrad.core.reasons import Reason
from outergrad.core.transform import Beginning, accumulating, counter_of
from outergrad.core.transport import Comm
from outergrad.core.types import Unit
from outergrad.messages.header import Header, Join
from outergrad.messages.raw import has_elements
from outergrad.planning.plan import Planner
from outergrad.replay.block_message import Blocks
from outergrad.session.attendance import Attendance
from outergrad.session.inspect import Inspection
from outergrad.session.made_equal import ReplicaState
from outergrad.session.membership import Membership
from outergrad.session.next_forward import NextForward
from outergrad.session.ranks import OneRank
from outergrad.session.reporting import Reporter
from outergrad.session.running_step import Step, SyncedStep
from outergrad.session.settings import Settings
from outergrad.session.state import Owner
from outergrad.step import param_grad
from outergrad.step.accumulator import Accumulator
from outergrad.step.cadence import Cadence, DueParts, Share
from outergrad.step.captured import NOTHING_LEFT, Captured
from outergrad.step.header_builder import Announced, HeaderBuilder, Loop
from outergrad.step.joint import JointParts, JointStep, Point, described
from outergrad.step.mishaps import Mishaps
from outergrad.step.passes import Passes
from outergrad.step.spec import StepSpec
from outergrad.step.step_plan import StepPlan

if TYPE_CHECKING:
    from outergrad.session.data_drift import DataDrift
from outergrad.step.transforming import Transforming, leftover, refuse_leftover
from outergrad.step.unsynced import UnsyncedStep


class Exchange:
    """The shared part of a model, its methods and buffers, and the steps that share it.

    Args:
        inspection: of the model.
        at: the session's membership.
        settings: the user's.
        ranks: how the ranks of this site come together.
        reporter: measures recorded steps.
        mishaps: says whether steps with bad gradients are skipped.
        on_joint: is given a delta below a shared part, and returns the mean over the sites.

    Attributes:
        model: its shared part.
        frozen: parameters without gradients, by name.
        local: parameters that each site keeps to itself (`og.Local`), by name.
        local_buffers: names of the buffers that each site keeps to itself.
        compressors: the method of every unit.
        planner: turns headers into messages.
        next_forward: says what layers do in the next forward.
        blocks: blocks that are computed again.
        accumulator: keeps gradients that are not due.
        drift: says when data have drifted; None if no exchange waits for that.
        cadence: says which parameters a backward shares.
        weighting: how much this site's gradient counts.
        buffers: how buffers are shared.
        transform: changes this site's gradient before it is sent; None without one.
        counter: counts what shared steps release; None if nothing does.
        batch: tells samples apart, for a transform that needs this; None without one.
        units: ids of the next batch's samples, for a transform that needs these; else None.
        passes: units in the passes of a step, for the same; else None.
        joint: parts of the model whose outputs' deltas are averaged; None without such.
        attendance: this site's part in a joined loop.
        votes: deferred votes on the last steps.
        owner: what saved states say of this session.
        unshared: parameters with gradients of backward passes that were not shared.
        plan: the plan of the last step, for a next one that announces the same; None without one.
        chosen: the reason for each unit's method.
        several: True if gradients travel, or a transform changes them.
    """

    def __init__(
        self,
        inspection: Inspection,
        at: Membership,
        settings: Settings,
        ranks: OneRank,
        reporter: Reporter,
        mishaps: Mishaps,
        on_joint: Callable[[Point, Tensor], Tensor],
    ) -> None:
        self._at, self._ranks, self._reporter, self._mishaps = at, ranks, reporter, mishaps
        model, compressors = inspection.model, inspection.compressors
        self.model, self.compressors = model, compressors
        self.frozen, self.local = inspection.frozen, inspection.local
        self.local_buffers = inspection.local_buffers
        self.weighting, self.buffers = settings.weighting, settings.buffers
        self.transform = transform = settings.transform
        self.counter = counter_of(transform)
        self._beginning = transform if isinstance(transform, Beginning) else None
        self._tap = settings.tap
        self.several = ranks.several or transform is not None
        whole = Planner(model, compressors, at.comm.cost)
        self.next_forward = NextForward(model.units, whole.first_tap_next())
        self.accumulator = Accumulator(model, whole.pays)
        self.blocks = Blocks()
        self.header_builder = HeaderBuilder(model, at.number, at.comm, self.blocks)
        self.planner = ranks.planner(inspection, whole)
        self.drift: DataDrift | None = None
        if settings.drift is not None:
            from outergrad.session.data_drift import DataDrift

            self.drift = DataDrift(settings.drift, at, reporter)
        self.cadence = Cadence(self.whole, inspection.every, self.accumulator, self.drift)
        needs_units = getattr(transform, "needs_units", False)
        self.units = Units() if needs_units else None
        self.passes = Passes() if needs_units else None
        needs_samples = transform is not None and transform.needs_samples
        self.batch = Batch(self.units) if needs_samples else None
        self.joint = (
            JointParts(inspection.joint_parts, on_joint) if inspection.joint_parts else None
        )
        self.attendance, self.votes = Attendance(), DeferredVotes()
        self.unshared: set[str] = set()
        self.plan: StepPlan | None = None
        self.chosen: dict[Unit, Reason] = {}
        self.owner = Owner(
            settings.method, model, at.comm.rank, at.me.called, at.comm.world_size, (*self.local,)
        )
        self._may_owe = False

    @property
    def whole(self) -> Share:
        """The share of the whole model."""
        return Share(self.model, self.planner, self.header_builder)

    # -- what layers do in the next forward -------------------------------------------------------

    def taps(self, layer: TappedLayer) -> bool:
        """True if some product of the layer should travel as factors in the next step."""
        if self.batch is not None:  # rows alone tell samples apart, whatever travels
            return True
        return self.next_forward.taps(layer.slots)

    def taps_block(self, block: Block) -> bool:
        """True if the block should be computed again in the next step."""
        return self.next_forward.taps([block])

    # -- how steps begin ------------------------------------------------------------------------

    def unsynchronised(self, task: int, used: set[str]) -> UnsyncedStep:
        """Begins a backward pass that shares nothing.

        Args:
            task: autograd's number of the backward pass.
            used: parameters that get a gradient in it.
        """
        refuse_leftover(self.leftover, self.transform)
        self.unshared |= used if self.several else set()
        if self.transform is not None and accumulating(self.transform):
            captured = Captured(self.model, used, self.blocks)
            about = {"sites": self._at.comm.world_size, "passes": self.passes}
            partly = Transforming(self.transform, captured, **about)
            return UnsyncedStep(task, captured, at_end=partly.apply_partly)
        write = self.accumulator.write if self.several else None
        captured = Captured(self.model, used, self.blocks, write)
        return UnsyncedStep(task, captured, captured.settle)

    def synchronised(self, task: int, used: set[str]) -> tuple[Step, DueParts]:
        """Begins a backward pass that shares what is due; a single site sends no messages.

        Args:
            task: autograd's number of the backward pass.
            used: parameters that get a gradient in it.
        """
        plan = self._plan_again(used)
        if plan is not None:
            due_parts = self.cadence.due_parts(task, used, NOTHING_LEFT, rows=True)
            header = plan.own.of_step(self._at.stats.step)
            return self.new_step(header, task=task, used=used, plan=plan), due_parts
        alone, left = self._is_alone(), self.leftover
        carried_over = self.accumulator.take(used)
        due_parts = self.cadence.due_parts(task, used, carried_over, rows=not alone)
        if due_parts.due is None:
            assert due_parts.later is not None
            refuse_leftover(left, self.transform)
            return due_parts.later, due_parts
        model = due_parts.due.model
        if alone:
            captured = Captured(model, due_parts.used, self.blocks)
            return UnsyncedStep(task, captured, captured.settle), due_parts
        points, trained = (self.joint.points(), self.joint.params) if self.joint else ([], [])
        header = self._header(due_parts, points)
        step = self.new_step(
            header,
            task=task,
            model=model,
            planner=due_parts.due.planner,
            used=due_parts.used,
            carried_over=due_parts.carried_over,
            joint=JointStep(points, self._at.comm, header, trained) if self.joint else None,
            transform=self.transform,
            leftover=left,
            passes=self.passes,
        )
        return step, due_parts

    def _plan_again(self, used: set[str]) -> StepPlan | None:
        """Returns the plan of the last step if a backward pass follows it, or None."""
        plan, self.plan = self.plan, None
        if plan is None or used != plan.trained or self.unshared:
            return None
        alone = len(self._at.group.attached) == 1
        if not alone or self.attendance.join != Join.NONE:
            return None
        if plan.own.buffers and self.buffers.written() != plan.own.buffers:
            return None
        again = plan.choice, plan.headers, plan.used, self._at.stats.step
        if not self.planner.repeats(*again):
            return None
        rests = plan.rests and self.next_forward.rests and not self.model.blocks
        return plan if rests or self.header_builder.uses_as(plan.own, used) else None

    def keep_plan(self, step: SyncedStep) -> None:
        """Keeps the plan of a step that is over, for the next one that announces the same."""
        rests = False
        if step.plan is None:
            self.plan, layers = None, self.next_forward.layers
            changes = self.transform is not None or self.joint is not None
            even = self.cadence.always and self.weighting.is_even
            if changes or not even:
                return
            rests = all(layer.is_known(k) for layer in layers for k, _ in enumerate(layer.slots))
        self.plan = step.as_plan(self.planner.header_cache.known, rests=rests)

    def _header(self, due_parts: DueParts, points: Sequence[Point]) -> Header:
        share = due_parts.due
        assert share is not None
        waiting = (self.unshared | due_parts.released) & share.model.params.keys()
        announced = due_parts.used | due_parts.carried_over.params
        agreed = due_parts.carried_over, described(points) if self.joint else None
        loop = Loop(self.weighting.take(), self.attendance.join, self.buffers.written())
        about = (announced, waiting, *agreed, loop, due_parts.used)
        header = share.header_builder.header(Announced(self._at.stats.step, *about))
        if not getattr(self.transform, "forms", False):
            return header
        uses = [replace(use, tapped=False) for use in header.uses]
        if getattr(self.transform, "adds_up", False):  # a batch's size tells of its samples
            for k, slot in enumerate(share.model.slots):
                most = slot.outputs + slot.inputs  # from so many rows on all travels dense
                uses[k] = replace(uses[k], rows=most if slot.weight in announced else 0)
        return replace(header, uses=tuple(uses))

    def new_step(self, header: Header, **about: Any) -> SyncedStep:
        """Begins a step with the other sites, of the whole model by default.

        It is counted before anything of it is sent, whatever becomes of it.

        Args:
            header: what this site announces.
            **about: attributes of the `StepSpec` that are not the session's own.

        Raises:
            BudgetSpentError: on all sites: the budget of privacy has no room for the step.
        """
        if self.counter is not None:
            self.counter.begin(self._at.comm)
        if self._tap is not None:
            self._tap.begun(header.step)
        if self._beginning is not None:
            self._beginning.begin_step()
        own: dict[str, Any] = {
            "model": self.model,
            "planner": self.planner,
            "blocks": self.blocks,
            "reading": self._reporter.reading(self._at.stats.step),
            "buffers": self.buffers,
            "skips_bad": self._mishaps.skips_bad,
            "participant": self._at.participant,
            "votes": self.votes,
            "counter": self.counter,
            "tap": self._tap,
        }
        spec = StepSpec(comm=self._at.comm, header=header, **(own | about))
        return self._ranks.step(spec, self.unshared)

    def _is_alone(self) -> bool:
        """True if nothing travels, and nothing is owed to sites that there were before."""
        if self.several or any(self.next_forward.tap_next.values()):
            return False
        self._may_owe = self._may_owe and self.compressors.owe
        return not self._may_owe

    @property
    def leftover(self) -> str:
        """Name of a parameter with an unshared gradient, which a transform must not change."""
        return leftover(self.transform, self.model.params, self.unshared)

    # -- how steps end --------------------------------------------------------------------------

    def forget_pass(self, due_parts: DueParts | None) -> None:
        """Clears what layers and blocks have counted since the last shared backward."""
        self.weighting.settle()
        self.blocks.forget()
        parts = due_parts
        if parts is not None and parts.due is not None and parts.later is None:
            parts = None  # all of the model
        for layer in () if self.next_forward.rests else self.next_forward.layers:
            if parts is None or parts.shares(layer.slots):
                layer.forget_untapped()

    def forget_awaited(self) -> None:
        """Clears what layers still waited for in the backward that is over."""
        for layer in self.next_forward.layers:
            layer.forget_awaited()

    def forget_gradients(self, *, own: bool = True) -> None:
        """Drops all gradients that were not shared.

        Args:
            own: False to keep those of parameters that are each site's own.
        """
        self.accumulator.clear()
        self.unshared.clear()
        param_grad.drop(self.model.params.values())
        if own:
            param_grad.drop(self.local.values())

    # -- the replica ----------------------------------------------------------------------------

    @property
    def replicated(self) -> dict[str, nn.Parameter]:
        """Trained parameters that are equal on all sites; with a mesh those of a site go along."""
        return {name: p for name, p in self.model.params.items() if name not in self.local}

    @property
    def names(self) -> Mapping[int, str]:
        """Names of the shared parameters, by identity."""
        return {id(p): name for name, p in {**self.replicated, **self.frozen}.items()}

    @property
    def frozen_with_elements(self) -> dict[str, nn.Parameter]:
        """Frozen parameters that hold values, by name."""
        return {name: p for name, p in self.frozen.items() if has_elements(p)}

    def replica(
        self, buffers: Sequence[Tensor], optimizers: Mapping[str, Optimizer], remedy: str
    ) -> ReplicaState:
        """Returns what must be equal on all sites.

        Args:
            buffers: the tensors to compare beside the parameters.
            optimizers: whose states to compare, by the first parameter that they hold.
            remedy: what the user can do about an optimizer that another site has not seen.
        """
        parameters = [*self.replicated.values(), *self.frozen_with_elements.values()]
        return ReplicaState(parameters, buffers, optimizers, self.names, remedy)

    def remember_debts(self) -> None:
        """Notes that loaded states may owe what other sites had not sent."""
        self._may_owe = True

    def move(self, comm: Comm) -> None:
        """Continues on another transport."""
        self.owner = replace(self.owner, rank=comm.rank, sites=comm.world_size)
        self.planner.begin_anew(comm.cost)
        self.header_builder.move(comm)
        self.plan = None
        if self.counter is not None:
            self.counter.restart()
        self.votes.restart()
