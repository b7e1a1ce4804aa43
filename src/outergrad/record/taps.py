"""Guard around a tap, so that a training outlives it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from outergrad.core.sent import Sent, StepTap, Tap, TappedRun
from outergrad.record.recorders import warn


class GuardedTap(StepTap):
    """Tells a tap what it asks for, until it raises: then it is dropped, with a warning.

    A bucket that raised where it sends would leave the other sites waiting for its message.

    Args:
        tap: the user's.

    Attributes:
        follows_steps: True if it asks for steps, too.
    """

    def __init__(self, tap: Tap) -> None:
        self._name = type(tap).__name__
        self._tap: Tap | None = tap
        self._of_steps = tap if isinstance(tap, StepTap) else None
        self.follows_steps = self._of_steps is not None

    def sent(self, sent: Sent) -> None:
        """Tells it of something that leaves this site."""
        if self._tap is not None:
            with self._guarded():
                self._tap.sent(sent)

    def attached(self, run: TappedRun) -> None:
        """Tells it what it listens to."""
        if self._of_steps is not None:
            with self._guarded():
                self._of_steps.attached(run)

    def begun(self, step: int) -> None:
        """Tells it that a step begins."""
        if self._of_steps is not None:
            with self._guarded():
                self._of_steps.begun(step)

    def ended(self, step: int) -> None:
        """Tells it that a step has been applied."""
        if self._of_steps is not None:
            with self._guarded():
                self._of_steps.ended(step)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._tap = self._of_steps = None
            warn(f"the tap {self._name} failed and is dropped: {error!r}")
