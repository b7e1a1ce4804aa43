"""Guard around a tap, so that a training outlives it."""

from __future__ import annotations

from collections.abc import Callable

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
        self._tap: Tap | None = tap
        self.follows_steps = isinstance(tap, StepTap)

    def sent(self, sent: Sent) -> None:
        """Tells it of something that leaves this site."""
        self._guarded(lambda tap: tap.sent(sent))

    def attached(self, run: TappedRun) -> None:
        """Tells it what it listens to."""
        self._guarded(lambda tap: tap.attached(run) if isinstance(tap, StepTap) else None)

    def begun(self, step: int) -> None:
        """Tells it that a step begins."""
        self._guarded(lambda tap: tap.begun(step) if isinstance(tap, StepTap) else None)

    def ended(self, step: int) -> None:
        """Tells it that a step has been applied."""
        self._guarded(lambda tap: tap.ended(step) if isinstance(tap, StepTap) else None)

    def _guarded(self, tell: Callable[[Tap], object]) -> None:
        if self._tap is None:
            return
        try:
            tell(self._tap)
        except Exception as error:
            kind, self._tap = type(self._tap).__name__, None
            warn(f"the tap {kind} failed and is dropped: {error!r}")
