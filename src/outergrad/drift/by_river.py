"""Page-Hinkley and ADWIN, as the package river has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from outergrad.core.packages import require


@dataclass(frozen=True, kw_only=True)
class PageHinkley:
    """Drift is where the sum of what values exceed their mean by is far above its least so far.

    At each check it takes the mean of the values since the last one. The test is river's:
    `pip install 'river>=0.22'`. Source: Page, "Continuous inspection schemes", 1954.

    Choose it where a shift of the mean should be found early, of values whose scale you know:
    `delta` and `threshold` are in their units.

    Attributes:
        min_instances: Checks before any drift is told.
        delta: What the mean may change by without being drift.
        threshold: Sum above which it is drift; higher ones make fewer false alarms, later.
        alpha: Weight of the sum so far in the next one: 1 forgets nothing.
        mode: "up": only larger values are drift, as losses that get worse; "down": only smaller
            ones, as confidences; "both".
    """

    min_instances: int = 30
    delta: float = 0.005
    threshold: float = 50.0
    alpha: float = 0.9999
    mode: Literal["up", "down", "both"] = "both"

    def __post_init__(self) -> None:
        """Checks that river is there.

        Raises:
            ImportError: it is not; the message says how to install it.
            ValueError: the mode is unknown.
        """
        require("river")
        if self.mode not in ("up", "down", "both"):
            raise ValueError(f"PageHinkley: mode={self.mode!r}; use 'up', 'down' or 'both'")

    def start(self) -> MonitorByRiver:
        """Returns a new run that knows nothing yet."""
        from river import drift  # it takes two seconds to load

        return MonitorByRiver(lambda: drift.PageHinkley(**asdict(self)))


@dataclass(frozen=True, kw_only=True)
class ADWIN:
    """Drift is where two parts of a window that grows by itself have different means.

    At each check it takes the mean of the values since the last one. The test is river's:
    `pip install 'river>=0.22'`. Source: Bifet and Gavaldà, "Learning from time-changing data with
    adaptive windowing", 2007.

    Choose it where neither the scale of the values nor the size of a window is known. It needs more
    values than the others: it looks at every `clock`-th check alone.

    Attributes:
        delta: Probability of a false alarm, above 0 and below 1.
        clock: Checks from one look to the next.
        max_buckets: Sums of one size that are kept before two are joined.
        min_window_length: Least values of a part.
        grace_period: Checks before any drift is told.
    """

    delta: float = 0.002
    clock: int = 32
    max_buckets: int = 5
    min_window_length: int = 5
    grace_period: int = 10

    def __post_init__(self) -> None:
        """Checks that river is there.

        Raises:
            ImportError: it is not; the message says how to install it.
            ValueError: delta is no probability.
        """
        require("river")
        if type(self.delta) is not float or not 0 < self.delta < 1:
            raise ValueError(f"ADWIN: delta={self.delta!r}; use a float above 0 and below 1")

    def start(self) -> MonitorByRiver:
        """Returns a new run that knows nothing yet."""
        from river import drift  # it takes two seconds to load

        return MonitorByRiver(lambda: drift.ADWIN(**asdict(self)))


class MonitorByRiver:
    """A detector of river over the means of checks.

    Its state is the stream since it began, 8 bytes per check: river's own state can be saved by
    pickle alone, which loading a checkpoint must not run.

    Args:
        make: returns a new detector of river.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._detector = make, make()
        self._means: list[float] = []

    def has_drifted(self, values: Tensor) -> bool:
        """Takes the mean of the values; True if river calls it drift."""
        self._means.append(float(values.mean()))
        self._detector.update(self._means[-1])
        return bool(self._detector.drift_detected)

    def state(self) -> dict[str, Any]:
        """Returns the means of all checks so far."""
        return {"means": torch.tensor(self._means, dtype=torch.float64)}

    def load(self, state: dict[str, Any]) -> None:
        """Gives a new detector the same stream again."""
        self._detector, self._means = self._make(), state["means"].tolist()
        for mean in self._means:
            self._detector.update(mean)
