"""Helpers that methods share: checks of settings, bytes on the wire, tied weights, ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_type_hints

from outergrad.core.coding import Codecs, Wire, nbytes, stacked
from outergrad.core.cost import CostModel
from outergrad.core.types import Factors, Route, Slot, Unit, overlapping
from outergrad.drift.on_drift import OnDrift

FLOAT_BYTES = 4
"""Bytes of a number that is not encoded: routes are compared as if all numbers were float32."""

_ID_BYTES = 8


def row_bytes(slot: Slot, codecs: Codecs = ()) -> int:
    """Returns the bytes on the wire of one row: its deltas, and its activations or its id."""
    deltas = nbytes(codecs, (slot.groups, 1, slot.outputs))
    if slot.lookup:
        return deltas + _ID_BYTES
    return deltas + nbytes(codecs, (slot.groups, 1, slot.inputs))


def bias_bytes(slots: Iterable[Slot]) -> int:
    """Returns the bytes on the wire of the slots' bias gradients."""
    numel = sum(slot.groups * slot.outputs for slot in slots if slot.bias is not None)
    return FLOAT_BYTES * numel


def dense_bytes(unit: Unit, cost: CostModel) -> float:
    """Returns the bytes whose all-gather costs as much as an all-reduce of the unit."""
    return cost.share(FLOAT_BYTES * unit.dense_numel, Route.DENSE)


def used_slots(unit: Unit, rows_K: Sequence[int]) -> list[tuple[Slot, int]]:
    """Returns the slots (K) of a unit that have rows, each with its number of rows."""
    return [(slot, rows) for slot, rows in zip(unit.slots, rows_K, strict=True) if rows]


def tied_in_use(unit: Unit, rows_SK: Sequence[Sequence[int]]) -> bool:
    """True if several products of one step add to the same rows of a weight."""
    rows_KS = zip(*rows_SK, strict=True)
    return overlapping(
        [slot for slot, rows_S in zip(unit.slots, rows_KS, strict=True) if any(rows_S)]
    )


def without_silent_ids(factors: Factors) -> Factors:
    """Replaces ids of zero deltas by 0: the gradient does not show that they were looked up.

    Args:
        factors: Deltas d_GRO, (1, R, O), and ids a_GRI, (R,).
    """
    silent = (factors.d_GRO[0] == 0).all(dim=1)
    return factors._replace(a_GRI=factors.a_GRI.masked_fill(silent, 0))


_LEAST = {
    "rank": "1 or more",
    "min_ratio": "1 or more",
    "bucket_bytes": "a positive number",
    "every": "1 or more",
}
"""Settings of several methods that must be at least 1, and the range that an error names."""
_PLAIN: Mapping[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    NoneType: (NoneType, "None"),
    OnDrift: (OnDrift, "og.OnDrift(...)"),
}
"""Annotations of settings that are checked: the accepted type, and what an error asks for."""


def is_method(value: object) -> bool:
    """True if the object is a method; a class such as `og.DAD`, without `()`, is not."""
    return not isinstance(value, type) and callable(getattr(value, "compressor", None))


@dataclass(frozen=True, kw_only=True, repr=False)
class Settings:
    """Base class of the methods' settings, each a frozen dataclass of its own."""

    def __post_init__(self) -> None:
        """Checks the settings, and turns codecs into tuples so that equal settings compare equal.

        Raises:
            ValueError: Names the method, the setting and its valid values.
        """
        for name, value in list(vars(self).items()):
            self._check_type(name, value)
            if name in _LEAST:
                require(_is_1_or_more(value), self, name, _LEAST[name])
            if name in ("wire", "vectors"):
                object.__setattr__(self, name, self._stacked(name, value))

    def _check_type(self, name: str, value: object) -> None:
        plain = _plain_settings(type(self)).get(name)
        if plain is not None:
            is_flag = isinstance(value, bool) and bool not in plain
            known = isinstance(value, tuple(_PLAIN[kind][0] for kind in plain)) and not is_flag
            require(known, self, name, ", or ".join(_PLAIN[kind][1] for kind in plain))

    def _stacked(self, name: str, wire: Wire) -> Codecs:
        try:
            return stacked(wire, name)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: {error}") from None

    def __repr__(self) -> str:
        """Shows the rank or the budget, and the settings that differ from the defaults."""
        always = "rank" if getattr(self, "budget", None) is None else "budget"
        told = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name == always or getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(told)})"


def _is_1_or_more(value: Any) -> bool:
    return isinstance(value, OnDrift) or value >= 1


@cache
def _plain_settings(kind: type) -> dict[str, tuple[Any, ...]]:
    """Maps settings whose options are numbers, flags or None alone to these options."""
    hints = get_type_hints(kind)
    options = {name: get_args(hint) or (hint,) for name, hint in hints.items()}
    return {name: kinds for name, kinds in options.items() if set(kinds) <= _PLAIN.keys()}


def require(holds: bool, method: object, name: str, wanted: str) -> None:
    """Raises ValueError if `holds` is False; it names the method, the setting and `wanted`."""
    if not holds:
        kind, value = type(method).__name__, getattr(method, name)
        raise ValueError(f"{kind}: {name}={value!r}; use {wanted}")
