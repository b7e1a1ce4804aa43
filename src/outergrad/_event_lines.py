"""Events as lines of JSON: written, checked, and read from files that may still grow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, BinaryIO, get_args

from outergrad.events import Event

Entry = dict[str, Any]
"""A parsed line: the fields of an event, and its kind under the key "event"."""
Check = Callable[[Any], bool]

START = '{"event"'
_RUN = b'{"event": "run"'
_KINDS: dict[str, type[Event]] = {kind.__name__.lower(): kind for kind in get_args(Event)}


def line_of(event: Event) -> dict[str, object]:
    """Returns the entry of an event: its kind ("run", "layer", "step", …), then its fields."""
    return {"event": type(event).__name__.lower(), **vars(event)}


def event_of(entry: object) -> Event:
    """Returns the event of an entry: the inverse of `line_of`.

    Unknown fields, as of a later version, are ignored.

    Raises:
        ValueError: the entry is no event; the message says why.
    """
    if not isinstance(entry, Mapping):
        raise ValueError("not an event")
    if why := objection(entry):
        raise ValueError(why)
    kind = _KINDS[entry["event"]]
    return kind(**{f.name: _frozen(entry[f.name]) for f in fields(kind) if f.name in entry})


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _frozen(inner) for name, inner in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def objection(entry: Mapping[str, Any]) -> str | None:
    """Returns why an entry is no event, or None if it is one.

    Unknown fields are no reason: a later version may have written them.
    """
    kind = entry.get("event")
    checks = _CHECKS.get(kind) if isinstance(kind, str) else None
    if checks is None:
        return f"an unknown event, {kind!r}" if "event" in entry else "not an event"
    for name, required, fits in checks:
        if name not in entry:
            if required:
                return f"a {kind} without {name!r}"
        elif not fits(entry[name]):
            return f"a {kind} whose {name!r} cannot be read"
    return None


# A file has millions of values, so that these checks must be cheap.


def _is_int(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _list_of(*types: type) -> Check:
    known = frozenset(types)
    return lambda value: type(value) in (list, tuple) and known.issuperset(map(type, value))


def _values(fit: Check) -> Check:
    return lambda value: type(value) is dict and fit([*value.values()])


_INTS, _FLOATS = _list_of(int), _list_of(int, float)
_TEXTS = _values(_list_of(str))
_FITS: dict[str, Check] = {
    "int": _is_int,
    "float": lambda value: type(value) is float or _is_int(value),
    "float | None": lambda value: type(value) is float or value is None or _is_int(value),
    "str": lambda value: type(value) is str,
    "str | None": lambda value: type(value) is str or value is None,
    "tuple[int, ...]": _INTS,
    "tuple[str, ...]": _list_of(str),
    "tuple[tuple[float, ...], ...]": lambda value: (
        type(value) in (list, tuple) and all(map(_FLOATS, value))
    ),
    "tuple[float, ...] | None": lambda value: value is None or _FLOATS(value),
    "Mapping[str, float]": _values(_FLOATS),
    "Mapping[str, int] | None": lambda value: value is None or _values(_INTS)(value),
    "Mapping[str, tuple[float, ...]] | None": lambda value: (
        value is None or _values(lambda lists: all(map(_FLOATS, lists)))(value)
    ),
    "Mapping[str, str] | None": lambda value: value is None or _TEXTS(value),
    "Mapping[str, tuple[str, ...]]": _values(lambda lists: all(map(_list_of(str), lists))),
    "Mapping[str, tuple[float, ...]]": _values(lambda lists: all(map(_FLOATS, lists))),
    "Mapping[str, tuple[int, ...]]": _values(lambda lists: all(map(_INTS, lists))),
}
_CHECKS = {
    name: [(f.name, f.default is MISSING, _FITS[str(f.type)]) for f in fields(kind)]
    for name, kind in _KINDS.items()
}


def parsed(line: str) -> Entry | None:
    """Returns the JSON object in a line; None if the line holds no complete one."""
    if not line.lstrip().startswith("{"):
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def read(line: str) -> tuple[Entry | None, list[str]]:
    """Returns the event in a line, or None, and the problems found in the line.

    A run that is resumed after a crash may have written its first event behind half a line. That
    event is found, too. An empty line holds no event and counts as no problem.
    """
    entry, problems = parsed(line), []
    if entry is None and line.strip():
        problems.append("not a whole line of JSON")
        entry = parsed(line[max(0, line.rfind(START)) :])
    if entry is not None and (why := objection(entry)):
        return None, [*problems, why]
    return entry, problems


class GrowingFile:
    """Reader of the lines of a file that may still be written.

    Args:
        path: the file.
        recent_bytes: how many bytes at the end of a larger file are read. Of the part before them
            only the lines that begin a run are read. None: the whole file.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path, recent_bytes: int | None = None) -> None:
        self.path, self._recent = path, recent_bytes
        self._inode, self._offset, self._rest = 0, 0, b""

    @property
    def rest(self) -> str:
        """Unfinished line at the end of the file so far."""
        return _text(self._rest)

    def lines(self) -> tuple[list[str], float]:
        """Returns the new whole lines, and the file's modification time in seconds since 1970.

        Half a line at the end is held back until the other half is there. A file that was replaced
        or truncated is read from its beginning.

        Raises:
            OSError: the file cannot be read.
        """
        with self.path.open("rb") as file:
            now = os.stat(file.fileno())
            if now.st_ino != self._inode or now.st_size < self._offset:
                self._inode, self._offset, self._rest = now.st_ino, 0, b""
            if now.st_size == self._offset:
                return [], now.st_mtime
            older = self._skip(file, now.st_size) if self._offset == 0 else []
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [_text(line) for line in older + lines], now.st_mtime

    def _skip(self, file: BinaryIO, size: int) -> list[bytes]:
        """Moves the offset to the recent part; returns the lines before it that begin a run."""
        runs = []
        end = size - self._recent if self._recent is not None else 0
        while self._offset < end and (line := file.readline()).endswith(b"\n"):
            self._offset += len(line)
            if line.startswith(_RUN):
                runs.append(line)
        return runs


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")
