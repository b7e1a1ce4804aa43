"""What the methods have in common: checks of settings, numbers on the wire, ties, ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outergrad._types import Factors, Slot, Unit


def row_numel(slot: Slot) -> int:
    """Numbers on the wire for one row."""
    if slot.lookup:
        return slot.outputs + 2  # an int64 id counts as two float32
    return slot.groups * (slot.inputs + slot.outputs)


def bias_numel(slots: Iterable[Slot]) -> int:
    """Numbers on the wire for bias gradients."""
    return sum(slot.groups * slot.outputs for slot in slots if slot.bias is not None)


def used_slots(unit: Unit, rows_K: Sequence[int]) -> list[tuple[Slot, int]]:
    """The slots (K) of a unit with rows, and how many."""
    return [(slot, rows) for slot, rows in zip(unit.slots, rows_K, strict=True) if rows]


def tied_in_use(unit: Unit, rows_SK: Sequence[Sequence[int]]) -> bool:
    """Whether products that add to the same weight are used in one step."""
    used = [slot for k, slot in enumerate(unit.slots) if any(rows_K[k] for rows_K in rows_SK)]
    return any(a.overlaps(b) for i, a in enumerate(used) for b in used[i + 1 :])


def without_silent_ids(factors: Factors) -> Factors:
    """Hides ids without a gradient: that they were looked up, the gradient does not say.

    Args:
        factors: d_GRO, (1, R, O), and the ids a_GRI, (R,).
    """
    silent = (factors.d_GRO[0] == 0).all(dim=1)
    return factors._replace(a_GRI=factors.a_GRI.masked_fill(silent, 0))


def require(holds: bool, method: object, name: str, wanted: str) -> None:
    """Checks a setting.

    Raises:
        ValueError: names the method, the setting and what it may be.
    """
    if not holds:
        kind, value = type(method).__name__, getattr(method, name)
        raise ValueError(f"{kind}: {name}={value!r}; use {wanted}")
