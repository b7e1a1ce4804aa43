"""Inputs of one synchronised step: everything that `SharedStep` needs, with defaults."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from outergrad.buckets.bucket import StepContext
from outergrad.capture.engine import NO_TASK
from outergrad.commit.deferred_votes import DeferredVotes
from outergrad.commit.participant import CommitParticipant
from outergrad.core.model import Model
from outergrad.core.sent import StepTap
from outergrad.core.transform import Counter, GradientTransform
from outergrad.core.transport import Comm
from outergrad.messages.header import Header
from outergrad.planning.plan import Planner
from outergrad.record.gauge import Reading
from outergrad.replay.block_message import Blocks
from outergrad.step.buffers import SharedBuffers
from outergrad.step.captured import NOTHING_LEFT, Captured, CarriedOver
from outergrad.step.joint import JointStep
from outergrad.step.passes import Passes
from outergrad.step.step_plan import StepPlan
from outergrad.step.transforming import Transforming, refuse_leftover


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Inputs of one synchronised step; by default without a backward, blocks and buffers.

    Attributes:
        model: model, or part of one, that is shared.
        planner: turns the headers of all sites into messages.
        comm: the transport.
        header: this site's header.
        task: backward that the step belongs to; NO_TASK without one.
        used: parameters in which this site's backward leaves a gradient.
        carried_over: rows of earlier passes.
        blocks: blocks that are computed again.
        joint: deltas that are averaged; None if there are none.
        reading: measures the gradients, if the step is recorded.
        buffers: buffers that are synchronised.
        skips_bad: whether the step is skipped if a gradient is not finite.
        transform: changes this site's gradient before it is sent.
        counter: counts what the step releases; it has counted its beginning.
        leftover: name of a parameter with a gradient that is none of this step's.
        passes: units in the passes of this step, for a transform that needs units.
        participant: commit participant of this site; None if there is no board.
        votes: deferred votes of the session, on the steps before.
        plan: plan of the last step, which this one follows; None if it makes its own.
        tap: is told if the step begins again; None without one.
    """

    model: Model
    planner: Planner
    comm: Comm
    header: Header
    task: int = NO_TASK
    used: Set[str] = frozenset()
    carried_over: CarriedOver = NOTHING_LEFT
    blocks: Blocks = field(default_factory=Blocks)
    joint: JointStep | None = None
    reading: Reading | None = None
    buffers: SharedBuffers = field(default_factory=SharedBuffers)
    skips_bad: bool = False
    transform: GradientTransform | None = None
    counter: Counter | None = None
    leftover: str = ""
    passes: Passes | None = None
    participant: CommitParticipant | None = None
    votes: DeferredVotes = field(default_factory=DeferredVotes)
    plan: StepPlan | None = None
    tap: StepTap | None = None

    def captured(self) -> Captured:
        """Returns a store for the factors of the backward, begun with rows of earlier passes."""
        return Captured(self.model, self.used, self.blocks, carried_over=self.carried_over)

    def transforming(self, captured: Captured) -> Transforming | None:
        """Returns the transform for this step; None if there is none."""
        if self.transform is None:
            return None
        known = self.planner.known_of if getattr(self.transform, "sent_only", False) else None
        about = {"sites": self.comm.world_size, "known": known, "passes": self.passes}
        return Transforming(self.transform, captured, self.leftover, **about)

    def refuse_leftover(self) -> None:
        """Raises if the transform would change a gradient that is none of this step's."""
        refuse_leftover(self.leftover, self.transform)

    def context(self, captured: Captured) -> StepContext:
        """Returns the context of the step's messages."""
        if self.reading is not None:
            self.reading.uses_of = captured.uses
        return StepContext(
            comm=self.comm,
            params=self.model.params,
            header=self.header,
            index=self.model.index,
            factors_of=captured.rows,
            has_autograd_grad=captured.has_autograd_grad,
            empty=captured.empty,
            blocks=self.blocks,
            reading=self.reading,
            skips_bad=self.skips_bad,
            owed=self.planner.owed,
            owes=self.planner.owes,
        )
