"""The step that a session is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outergrad.step.cadence import DueParts
from outergrad.step.repeated import RepeatedStep
from outergrad.step.step import SharedStep
from outergrad.step.unsynced import UnsyncedStep

Step = UnsyncedStep | SharedStep | RepeatedStep
Planned = tuple[Step, DueParts]
"""A step with a plan of its own, and the parameters that it shares and keeps."""


class RunningStep:
    """The step of the backward pass that runs now, or of one that raised.

    Attributes:
        step: the step; None between two steps.
        due_parts: the parameters that it shares and keeps; None if it shares nothing.
    """

    def __init__(self) -> None:
        self.step: Step | None = None
        self.due_parts: DueParts | None = None
        self._planned: Callable[[], Planned] | None = None

    @property
    def shared(self) -> SharedStep | None:
        """The step, if it has a plan of its own and messages to other sites."""
        return self.step if isinstance(self.step, SharedStep) else None

    def begin(
        self,
        step: Step,
        due_parts: DueParts | None = None,
        planned: Callable[[], Planned] | None = None,
    ) -> None:
        """Begins a step.

        Args:
            step: the step.
            due_parts: the parameters that it shares and keeps.
            planned: continues a repeated step by one with a plan of its own.
        """
        self.step, self.due_parts, self._planned = step, due_parts, planned

    def escalate(self) -> Step | None:
        """Replaces a repeated step by one with a plan of its own; returns the step."""
        if self._planned is not None:
            planned, self._planned = self._planned, None
            self.step, self.due_parts = planned()
        return self.step

    def end(self) -> DueParts | None:
        """Ends the step; returns the parameters that it was about."""
        due_parts = self.due_parts
        self.step = self.due_parts = self._planned = None
        return due_parts

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Sets the step aside while another one is ended."""
        aside = self.step, self.due_parts, self._planned
        try:
            yield
        finally:
            self.step, self.due_parts, self._planned = aside
