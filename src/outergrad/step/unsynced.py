"""A backward, or a part of one, that sends nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from outergrad.step.captured import Captured
from outergrad.step.joint import Point


def _nothing(*_: str) -> None:
    pass


class UnsyncedStep:
    """A backward under `no_sync`, on a single site, or of parameters that are not due.

    Args:
        task: id of the backward's graph task.
        captured: keeps the factors that it captures.
        sink: is given each parameter for which the backward has nothing more: `captured.settle`
            puts its gradient where autograd would.
        at_end: is called once the backward has succeeded.
    """

    def __init__(
        self,
        task: int,
        captured: Captured,
        sink: Callable[[str], None] = _nothing,
        at_end: Callable[[], None] = _nothing,
    ) -> None:
        self.task, self.captured = task, captured
        self._sink, self._at_end = sink, at_end

    @property
    def shared(self) -> None:
        """None: it sends other sites no messages."""

    def note_gradient(self, name: str) -> None:
        """Notes that autograd itself has a gradient for a parameter."""
        self.captured.has_autograd_grad.add(name)

    def note_written(self, name: str) -> None:
        """Notes nothing: what a backward wrote itself is in the sum of several passes."""

    def ready_sink(self) -> Callable[[str], object]:
        """Returns what takes names of parameters for which the backward has nothing more."""
        return self._sink

    def on_ready(self, name: str) -> None:
        """Reports that the backward has nothing more for a parameter."""
        self._sink(name)

    def on_joint(self, point: Point, delta: Tensor) -> Tensor:
        """Returns this site's own delta."""
        return delta

    def finish(self) -> None:
        """Ends a backward that has succeeded."""
        self._at_end()
