"""The step that a session is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from outergrad.step.cadence import DueParts
from outergrad.step.step import SharedStep
from outergrad.step.unsynced import UnsyncedStep

if TYPE_CHECKING:
    from outergrad.session.mesh.mesh_step import MeshStep

SyncedStep: TypeAlias = "SharedStep | MeshStep"
"""A step that other sites take part in."""
Step: TypeAlias = "UnsyncedStep | SharedStep | MeshStep"


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
