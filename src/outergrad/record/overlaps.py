"""Share of the directions of this site's rows that other sites' rows have, too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from outergrad.core.payload import Arrived
from outergrad.core.types import Factors, Slot
from outergrad.linalg.overlap import shared_directions

MOST_ROWS = 256
"""Rows of all sites up to which overlaps are measured; larger Gram matrices cost too much."""


class Overlaps:
    """Overlap of the rows of all sites in one step, by weight."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self.why: dict[str, str] = {}

    def clear(self) -> None:
        """Drops all overlaps, for a step that starts again."""
        self._sums.clear()
        self.why.clear()

    def add(self, slot: Slot, parts_S: Sequence[Arrived | None], rank: int) -> None:
        """Adds one product.

        Args:
            slot: the product.
            parts_S: each site's part; None where it has no rows.
            rank: rank of this site.
        """
        rows_S = [part.a_GRI if isinstance(part, Factors) else None for part in parts_S]
        own = rows_S[rank]
        others = [rows for site, rows in enumerate(rows_S) if site != rank and rows is not None]
        whole = sum(part.d_GRO.shape[1] for part in parts_S if isinstance(part, Factors))
        if any(part is not None and not isinstance(part, Factors) for part in parts_S):
            self.why[slot.weight] = "entries arrive, not rows"
        elif own is None:
            self.why[slot.weight] = "this site sent no rows"
        elif slot.lookup:
            self._sums[slot.weight].append(_ids(own, others))
        elif whole > MOST_ROWS:
            self.why[slot.weight] = f"more than {MOST_ROWS} rows arrive"
        else:
            none = own.new_zeros(own.shape[0], 0, own.shape[2])
            self._sums[slot.weight].append(shared_directions(own, torch.cat([none, *others], 1)))

    def measured(self, name: str) -> dict[str, object]:
        """Returns the overlap as a field of `events.Layer`; empty where it is not known."""
        if name in self.why or name not in self._sums:
            return {}
        squares, count = map(sum, zip(*self._sums[name], strict=True))
        return {"duplicates": squares / count if count else 0.0}


def _ids(own_R: Tensor, others: Sequence[Tensor]) -> tuple[float, float]:
    """Number of this site's ids that others have, and of all; ids are orthogonal directions."""
    if not others:
        return 0.0, float(len(own_R))
    return float(torch.isin(own_R, torch.cat([*others])).sum()), float(len(own_R))
