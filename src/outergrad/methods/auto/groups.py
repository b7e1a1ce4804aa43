"""Groups of similar layers, which get one method together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from outergrad.core.types import Unit

MOST_GROUPS = 4
_GRAIN_BITS = 2
"""Layers may count as similar if one has less than four times the other's elements."""


def grouped(units: Sequence[Unit]) -> list[tuple[Unit, ...]]:
    """Returns few groups of units of similar kind and size, the largest in total size first.

    The last group has all remaining units. Groups depend on the units alone: all sites agree.
    """
    found: defaultdict[tuple[str, int], list[Unit]] = defaultdict(list)
    for unit in units:
        found[_kind(unit), unit.dense_numel.bit_length() // _GRAIN_BITS].append(unit)
    ordered = sorted(found.values(), key=lambda group: -sum(unit.dense_numel for unit in group))
    first, rest = ordered[: MOST_GROUPS - 1], ordered[MOST_GROUPS - 1 :]
    return [tuple(group) for group in [*first, [unit for group in rest for unit in group]] if group]


def _kind(unit: Unit) -> str:
    if not unit.slots:
        return "no layer"
    if any(slot.lookup for slot in unit.slots):
        return "embedding"
    return "convolution" if any(slot.patches for slot in unit.slots) else "matrix"
