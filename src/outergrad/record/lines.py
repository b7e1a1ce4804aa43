"""Events as objects of JSON, there and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from outergrad.events import End, Event, Layer, Mishap, Run, Scalars, Step


def line_of(event: Event) -> dict[str, object]:
    """The fields of an event behind its kind: "run", "layer", "step" and so on."""
    return {"event": type(event).__name__.lower(), **vars(event)}


def event_of(line: object) -> Event:
    """The event of a line that was read: the inverse of `line_of`.

    Fields that are not known here, of a later version, are passed over.

    Args:
        line: what `json.loads` made of it.

    Raises:
        ValueError: it is no event; says what is wrong with it.
    """
    if not isinstance(line, Mapping):
        raise ValueError(f"an event is an object with names, not {line!r:.40}")
    kind = _KINDS.get(str(line.get("event")))
    if kind is None:
        raise ValueError(f"event={line.get('event')!r:.40} is none of {', '.join(_KINDS)}")
    told = [field for field in fields(kind) if _is_told(field, line)]
    return kind(**{field.name: _read(line, field.name, str(field.type)) for field in told})


def _is_told(field: Field[Any], line: Mapping[str, object]) -> bool:
    if field.name not in line and field.default is MISSING:
        raise ValueError(f"{line['event']} without {field.name}")
    return field.name in line


def _read(line: Mapping[str, object], name: str, kind: str) -> Any:
    value = line[name]
    if value is None and kind.endswith("| None"):
        return None
    try:
        return _READERS[kind.removesuffix(" | None")](value)
    except (TypeError, AttributeError):
        raise ValueError(f"{line['event']}: {name}={value!r:.40} is no {kind}") from None


def _int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


def _float(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError
    return float(value)


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


_KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind for kind in (Run, Layer, Step, Scalars, Mishap, End)
}
_READERS: dict[str, Callable[[Any], object]] = {
    "int": _int,
    "float": _float,
    "str": _str,
    "tuple[int, ...]": lambda value: tuple(map(_int, value)),
    "tuple[float, ...]": lambda value: tuple(map(_float, value)),
    "Mapping[str, float]": lambda value: {k: _float(v) for k, v in value.items()},
    "Mapping[str, tuple[int, ...]]": lambda value: {
        k: tuple(map(_int, v)) for k, v in value.items()
    },
}
