"""Whether a line of JSON is an event: what its fields must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from outergrad.events import End, Event, Layer, Mishap, Run, Scalars, Step

_KINDS: tuple[type[Event], ...] = (Run, Layer, Step, Scalars, Mishap, End)
_JSON: dict[Any, set[type]] = {
    int: {int},
    float: {int, float},
    str: {str},
    NoneType: {NoneType},
    tuple: {list},
    Mapping: {dict},
}
_INT64 = 2**63


def objection(entry: Mapping[str, Any]) -> str | None:
    """Why a line of JSON is not an event; None where it is one.

    What this version does not know besides is no reason: a later one may have written it.
    """
    kind = entry.get("event")
    checks = _CHECKS.get(kind) if isinstance(kind, str) else None
    if checks is None:
        return f"an unknown event, {kind!r}" if "event" in entry else "not an event"
    for check in checks:
        if check.name not in entry:
            if check.required:
                return f"a {kind} without {check.name!r}"
        elif not check.fits(entry[check.name]):
            return f"a {kind} whose {check.name!r} cannot be read"
    return None


@dataclass(frozen=True)
class _Check:
    name: str
    required: bool
    fits: Callable[[Any], bool]


def _checks(kind: type[Event]) -> Iterator[_Check]:
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield _Check(field.name, field.default is MISSING, _fits(hints[field.name]))


def _fits(hint: Any) -> Callable[[Any], bool]:
    """A check of a value; a file has millions of them."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    types = frozenset().union(*(_JSON[get_origin(part) or part] for part in parts))
    items = [item for part in parts if (item := _items(part))]
    if items:
        return lambda value: type(value) in types and (not value or items[0](value))
    if int in types:
        return lambda value: (
            type(value) in types and (type(value) is not int or -_INT64 <= value < _INT64)
        )
    return lambda value: type(value) in types


def _items(hint: Any) -> Callable[[Any], bool] | None:
    """A check of what a list or a dict holds."""
    if get_origin(hint) is tuple:
        return _all(get_args(hint)[0])
    if get_origin(hint) is Mapping:
        fits = _all(get_args(hint)[1])
        return lambda value: fits(value.values())
    return None


def _all(hint: Any) -> Callable[[Any], bool]:
    types = _JSON.get(hint)
    if types is not None:
        return lambda values: types.issuperset(map(type, values))
    fits = _fits(hint)
    return lambda values: all(map(fits, values))


_CHECKS = {kind.__name__.lower(): tuple(_checks(kind)) for kind in _KINDS}
