"""Layers alike, which are chosen for together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from outergrad.core.types import Unit

MOST_GROUPS = 4
_GRAIN_BITS = 2
"""Layers of which one has less than four times the other's elements may count as alike."""


def grouped(units: Sequence[Unit]) -> list[tuple[Unit, ...]]:
    """Few groups of units alike in kind and size, the largest in sum first.

    What is left, of many kinds, makes the last one. The same for the same units, on every site.
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
