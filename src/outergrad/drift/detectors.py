"""The protocols of a detector of drift: its settings, and one run over a stream of numbers."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Monitor(Protocol):
    """One run of a detector, from one exchange to the next."""

    def has_drifted(self, values: Tensor) -> bool:
        """Takes the next values; True if the stream is not what it was.

        If it raises, all sites raise at this check, and name its site.

        Args:
            values: of one check, in their order, finite, (n,) float64, on the host; n is 1 or more.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Returns what is to be saved: tensors of its own, numbers, strings, lists and dicts."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a saved `state()`, to the bit as without an interruption."""
        ...


class Detector(Protocol):
    """Settings of a detector of drift, as of `og.OnDrift(detector)`.

    Sites compare its repr, so it is best a frozen dataclass. Choose one of your own where you know
    in which way data change; it decides at its site alone, and must not draw random numbers from a
    stream that the training uses.
    """

    def start(self) -> Monitor:
        """Returns a new run that knows nothing yet."""
        ...
