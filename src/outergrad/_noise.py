"""Gradient noise scale, from the norms of a site's own gradient and of the mean gradient."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from outergrad.events import Layer

RECENT = 16
"""Recorded steps per estimate: that of a single step is mostly noise itself."""


def noise_batches(own: float, mean: float, sites: int) -> float | None:
    """Returns the gradient noise scale in batches of one site; None if it is not known.

    At this scale the mean gradient has as much noise as signal. For S sites whose gradients g are
    means over b samples each, with mean G, the squared signal is
    (S E‖G‖² - E‖g‖²) / (S - 1), without bias. The variance of a site's gradient is
    S (E‖g‖² - E‖G‖²) / (S - 1). Their ratio is the scale, in units of b.

    Args:
        own: ‖g‖², summed over layers and steps: a mean over sites, or that of one site.
        mean: ‖G‖², likewise.
        sites: S.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162,
    appendix A.
    """
    signal = sites * mean - own
    return sites * (own - mean) / signal if sites > 1 and signal > 0 else None


class RecentNoise:
    """Gradient noise scale over the last recorded steps, of one site or of several."""

    def __init__(self) -> None:
        self._squares: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def take(self, layers: Iterable[Layer]) -> None:
        """Adds one step's layers, as far as both their norms are known."""
        pairs = [(e.gradient_norm, e.mean_norm) for e in layers]
        known = [(own**2, mean**2) for own, mean in pairs if own is not None and mean is not None]
        if known:
            self._squares.append((sum(own for own, _ in known), sum(mean for _, mean in known)))

    def batches(self, sites: int) -> float | None:
        """Returns the scale in batches of one site; None where noise leaves no signal."""
        own, mean = map(sum, zip(*self._squares, strict=True)) if self._squares else (0.0, 0.0)
        return noise_batches(own, mean, sites)
