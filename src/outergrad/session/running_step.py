"""The step that a session is in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from outergrad.buckets.bucket import StepContext
from outergrad.commit.ballot import Decision
from outergrad.commit.step_result import StepResult
from outergrad.core.errors import DriftError
from outergrad.core.model import Choice
from outergrad.core.types import Unit
from outergrad.messages.header import Header
from outergrad.messages.vote import Subjects
from outergrad.record.stats import Stats
from outergrad.step.cadence import DueParts
from outergrad.step.captured import Captured
from outergrad.step.joint import Point
from outergrad.step.step_plan import StepPlan
from outergrad.step.unsynced import UnsyncedStep


class SyncedStep(Protocol):
    """Protocol of a step that other sites take part in: `SharedStep`, and `MeshStep` of a mesh.

    Attributes:
        task: autograd's number of the backward pass; NO_TASK without one.
        captured: factors that this backward captured.
        choice: how every unit travels; None before there is a plan.
        decision: whether the step counts; None before it is known.
        subjects: parameters and buffers that votes can be about.
        plan: plan of the last step, which it follows; None if it makes its own.
    """

    task: int
    captured: Captured
    choice: Choice | None
    decision: Decision | None
    subjects: Subjects
    plan: StepPlan | None

    @property
    def shared(self) -> SyncedStep | None:
        """The step itself."""
        ...

    @property
    def context(self) -> StepContext:
        """Context of the messages to other sites."""
        ...

    @property
    def units(self) -> Sequence[Unit]:
        """Units that the choice is about."""
        ...

    @property
    def drift(self) -> DriftError | None:
        """Error that sites have applied different results, if that was found."""
        ...

    @property
    def place(self) -> str:
        """Description, for error messages, of what this site waits for."""
        ...

    @property
    def applied(self) -> bool:
        """True if the step counts: all sites say so."""
        ...

    @property
    def voted(self) -> bool:
        """True if this site has sent a good vote, which the others may have received."""
        ...

    @property
    def active_here(self) -> Sequence[int]:
        """Ranks of this site that have a batch in a joined loop; of several ranks alone."""
        ...

    def note_gradient(self, name: str) -> None:
        """Notes that a parameter has a gradient besides its factors."""
        ...

    def note_written(self, name: str) -> None:
        """Notes that a backward wrote to `param.grad` itself."""
        ...

    def on_ready(self, name: str) -> None:
        """Starts messages whose parameters are all ready."""
        ...

    def on_joint(self, point: Point, delta: Tensor) -> Tensor:
        """Returns the mean over the sites of a delta below a shared part."""
        ...

    def agreed(self) -> Sequence[Header]:
        """Returns the headers of all sites, once they have come."""
        ...

    def send(self) -> None:
        """Starts all messages whose gradients are there; `finish` receives their results."""
        ...

    def finish(self) -> None:
        """Makes the gradients the mean over the sites; raises on all sites if it does not count."""
        ...

    def abandon(self, changed: str | None = None) -> None:
        """Ends, with the other sites, a step whose backward raised here or whose model changed."""
        ...

    def clear(self) -> None:
        """Drops gradients that an aborted step has left inside the site."""
        ...

    def settle(self, decision: Decision) -> None:
        """Ends the step by what another site knows of it."""
        ...

    def take(self, brought: StepResult) -> None:
        """Applies the step's result of another site."""
        ...

    def stats(self, step: int) -> Stats:
        """Returns the statistics of this site."""
        ...

    def as_plan(self, headers: Sequence[Header], *, rests: bool) -> StepPlan | None:
        """Returns the plan for the next step; None if that one has to make its own."""
        ...


Step = UnsyncedStep | SyncedStep


class RunningStep:
    """The step of the backward pass that runs now, or of one that raised.

    Attributes:
        step: the step; None between two steps.
        due_parts: the parameters that it shares and keeps; None if it shares nothing.
    """

    def __init__(self) -> None:
        self.step: Step | None = None
        self.due_parts: DueParts | None = None

    @property
    def shared(self) -> SyncedStep | None:
        """The step, if it sends messages to other sites."""
        return None if self.step is None else self.step.shared

    def begin(self, step: Step, due_parts: DueParts | None = None) -> None:
        """Begins a step about these parameters."""
        self.step, self.due_parts = step, due_parts

    def end(self) -> DueParts | None:
        """Ends the step; returns the parameters that it was about."""
        due_parts, self.step, self.due_parts = self.due_parts, None, None
        return due_parts

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Sets the step aside while another one is ended."""
        aside = self.step, self.due_parts
        try:
            yield
        finally:
            self.step, self.due_parts = aside
