"""Norm of each sample's gradient of a weight, and the samples that are outliers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outergrad.capture.batch import SampledUse
from outergrad.core.types import Factors, Slot
from outergrad.linalg.site_gradient import squared_sample_norms

TIMES = 3.0
"""A sample is an outlier if its norm is above this multiple of the median."""
MOST = 5
"""Maximum number of outliers reported for each weight."""

Uses = Sequence[Callable[[], Factors]]


class SampleNorms:
    """Norms of samples in one step, by weight."""

    def __init__(self) -> None:
        self._squares_B: dict[str, Tensor] = {}
        self._slots: defaultdict[str, list[Slot]] = defaultdict(list)
        self.why: dict[str, str] = {}

    def clear(self) -> None:
        """Drops all norms, for a step that starts again."""
        for of in (self._squares_B, self._slots, self.why):
            of.clear()

    def add(self, slot: Slot, uses: Uses, scale: float) -> None:
        """Adds the rows of one product.

        Args:
            slot: the product.
            uses: its uses in this step.
            scale: factor by which this site's gradient is multiplied.
        """
        name, others = slot.weight, self._slots[slot.weight]
        others.append(slot)
        use = uses[0] if len(uses) == 1 else None
        if any(slot.overlaps(other) for other in others[:-1]):
            self.why[name] = "several products add up to it"
        elif len(uses) > 1:
            self.why[name] = "its layer was used several times"
        elif not isinstance(use, SampledUse) or not use.is_told:
            self.why[name] = "which sample each row is of is not known"
        else:
            self._add(slot, use, scale)

    def _add(self, slot: Slot, use: SampledUse, scale: float) -> None:
        part, total = use.by_sample(), use.samples.total
        squares_B = scale**2 * squared_sample_norms(slot._replace(bias=None), part, total)
        before_B = self._squares_B.get(slot.weight)
        if before_B is not None and len(before_B) != total:
            self.why[slot.weight] = "its products see different numbers of samples"
            return
        self._squares_B[slot.weight] = squares_B if before_B is None else before_B + squares_B

    def measured(self, name: str) -> dict[str, object]:
        """Returns the norms as fields of `events.Layer`; empty where they are not known."""
        if name in self.why or name not in self._squares_B:
            return {}
        norms_B = self._squares_B[name].sqrt()
        norm, places = median_and_outliers(norms_B)
        found = norms_B[places].tolist()
        about = {"samples": len(norms_B), "sample_norm": norm}
        return {**about, "outliers": tuple(places), "outlier_norms": tuple(found)}


def median_and_outliers(norms_B: Tensor) -> tuple[float, list[int]]:
    """Returns the median, and the indices of at most `MOST` norms above `TIMES` it, largest first.

    Norms that are not finite are outliers. Of an even number of norms the median is the lower
    middle one.
    """
    sizes_B = torch.where(norms_B.isfinite(), norms_B, torch.inf)
    median = sizes_B.median()
    largest = sizes_B.topk(min(MOST, len(sizes_B)))
    is_out = (largest.values > TIMES * median) | largest.values.isinf()
    return median.item(), largest.indices[is_out].tolist()
