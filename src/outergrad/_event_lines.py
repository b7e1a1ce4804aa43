"""Events as lines of JSON: written, checked, and read from files that may still grow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, BinaryIO

from outergrad.events import Change, End, Event, Layer, Mishap, Run, Scalars, Step, Trial

Entry = dict[str, Any]
"""A line as JSON has it: the fields of an event, and its kind under "event"."""
Check = Callable[[Any], bool]

START = '{"event"'
_RUN = b'{"event": "run"'
_KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind for kind in (Run, Layer, Step, Scalars, Mishap, Trial, Change, End)
}


def line_of(event: Event) -> dict[str, object]:
    """The fields of an event behind its kind: "run", "layer", "step" and so on."""
    return {"event": type(event).__name__.lower(), **vars(event)}


def event_of(entry: object) -> Event:
    """The event of an entry: the inverse of `line_of`.

    Fields that are not known here, of a later version, are passed over.

    Raises:
        ValueError: it is no event; says why.
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
    return tuple(value) if isinstance(value, list) else value


def objection(entry: Mapping[str, Any]) -> str | None:
    """Why an entry is not an event; None where it is one.

    What this version does not know besides is no reason: a later one may have written it.
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


# A file has millions of values: these checks do as little as can be.


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
    "tuple[int, ...]": _INTS,
    "tuple[str, ...]": _list_of(str),
    "tuple[float, ...] | None": lambda value: value is None or _FLOATS(value),
    "Mapping[str, float]": _values(_FLOATS),
    "Mapping[str, str] | None": lambda value: value is None or _TEXTS(value),
    "Mapping[str, tuple[int, ...]]": _values(lambda lists: all(map(_INTS, lists))),
}
_CHECKS = {
    name: [(f.name, f.default is MISSING, _FITS[str(f.type)]) for f in fields(kind)]
    for name, kind in _KINDS.items()
}


def parsed(line: str) -> Entry | None:
    """The object of JSON in a line; None where there is no whole one."""
    if not line.lstrip().startswith("{"):
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def read(line: str) -> tuple[Entry | None, list[str]]:
    """The event in a line, and what is wrong with the line.

    A run that goes on after it died may have written its first event behind half a line: that one
    is found, too. An empty line is no event, and nothing is wrong with it.
    """
    entry, problems = parsed(line), []
    if entry is None and line.strip():
        problems.append("not a whole line of JSON")
        entry = parsed(line[max(0, line.rfind(START)) :])
    if entry is not None and (why := objection(entry)):
        return None, [*problems, why]
    return entry, problems


class GrowingFile:
    """The lines of a file that may still be written.

    Args:
        path: the file.
        recent_bytes: of a larger file the end is read, and before it the lines that begin a run;
            None: all of it.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path, recent_bytes: int | None = None) -> None:
        self.path, self._recent = path, recent_bytes
        self._inode, self._offset, self._rest = 0, 0, b""

    @property
    def rest(self) -> str:
        """The part of a line that the file ends with so far."""
        return _text(self._rest)

    def lines(self) -> tuple[list[str], float]:
        """Whole lines that are new, and when the file was written to, in seconds since 1970.

        The half of a line at the end waits for the other half. A file that was replaced or cut is
        read from its beginning.

        Raises:
            OSError: it cannot be read.
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
        """Goes to the recent part and returns what runs there were before."""
        runs = []
        end = size - self._recent if self._recent is not None else 0
        while self._offset < end and (line := file.readline()).endswith(b"\n"):
            self._offset += len(line)
            if line.startswith(_RUN):
                runs.append(line)
        return runs


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")
