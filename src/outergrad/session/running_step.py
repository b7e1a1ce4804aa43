"""The step that a session is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outergrad.step.cadence import DueParts
from outergrad.step.repeated import RepeatedStep
from outergrad.step.step import SharedStep
from outergrad.step.unsynced import UnsyncedStep

PlannedStep = UnsyncedStep | SharedStep
Step = PlannedStep | RepeatedStep


class RunningStep:
    """The step of the backward pass that runs now, or of one that raised.

    Attributes:
        step: the step; None between two steps.
        planned: the same, if it has a plan of its own; else None.
        repeated: the same, if it repeats the messages of the last one; else None.
        due_parts: the parameters that it shares and keeps; None if it shares nothing.
    """

    def __init__(self) -> None:
        self.step: Step | None = None
        self.planned: PlannedStep | None = None
        self.repeated: RepeatedStep | None = None
        self.due_parts: DueParts | None = None
        self._plans: Callable[[], tuple[PlannedStep, DueParts]] | None = None

    @property
    def shared(self) -> SharedStep | None:
        """The step, if it has a plan of its own and messages to other sites."""
        return None if self.planned is None else self.planned.shared

    def begin(self, step: PlannedStep, due_parts: DueParts | None = None) -> None:
        """Begins a step with a plan of its own, about these parameters."""
        self.step = self.planned = step
        self.due_parts = due_parts

    def begin_repeated(
        self, step: RepeatedStep, plans: Callable[[], tuple[PlannedStep, DueParts]]
    ) -> None:
        """Begins a step that repeats the messages of the last one.

        Args:
            step: the step.
            plans: continues it by a step with a plan of its own.
        """
        self.step = self.repeated = step
        self.planned, self.due_parts, self._plans = None, None, plans

    def escalate(self) -> PlannedStep | None:
        """Replaces a repeated step by one with a plan of its own; returns the step."""
        if self._plans is not None:
            plans, self._plans, self.repeated = self._plans, None, None
            self.planned, self.due_parts = plans()
            self.step = self.planned
        return self.planned

    def end(self) -> DueParts | None:
        """Ends the step; returns the parameters that it was about."""
        due_parts = self.due_parts
        self.step = self.planned = self.repeated = self.due_parts = self._plans = None
        return due_parts

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Sets a planned step aside while another one is ended."""
        aside = self.planned, self.due_parts
        try:
            yield
        finally:
            self.step, self.due_parts = aside
            self.planned = aside[0]
