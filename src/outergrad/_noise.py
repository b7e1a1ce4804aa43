"""How noisy gradients are, from the norms of a site's own and of the mean."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from outergrad.events import Layer

RECENT = 16
"""Recorded steps that are looked at together: a single one's estimate is mostly noise itself."""


def noise_batches(own: float, mean: float, sites: int) -> float | None:
    """Batches of one site whose mean gradient has as much noise as signal; None if not known.

    Of S sites whose gradients g are means over b samples each, and their mean G: the signal squared
    is (S E‖G‖² - E‖g‖²) / (S - 1), without bias, and the variance of a site's gradient
    S (E‖g‖² - E‖G‖²) / (S - 1); their ratio is the scale, in units of b.

    Args:
        own: ‖g‖², summed over layers and steps, a mean over sites or that of one.
        mean: ‖G‖², likewise.
        sites: S.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162,
    appendix A.
    """
    signal = sites * mean - own
    return sites * (own - mean) / signal if sites > 1 and signal > 0 else None


class RecentNoise:
    """The noise scale over the last recorded steps, as one site or a reader of several sees it."""

    def __init__(self) -> None:
        self._squares: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def take(self, layers: Iterable[Layer]) -> None:
        """Takes the layers of one step whose norms are both known."""
        pairs = [(e.gradient_norm, e.mean_norm) for e in layers]
        known = [(own**2, mean**2) for own, mean in pairs if own is not None and mean is not None]
        if known:
            self._squares.append((sum(own for own, _ in known), sum(mean for _, mean in known)))

    def batches(self, sites: int) -> float | None:
        """The scale; None where no signal is left beside the noise."""
        own, mean = map(sum, zip(*self._squares, strict=True)) if self._squares else (0.0, 0.0)
        return noise_batches(own, mean, sites)
