"""The events in one file of a run, and what in it cannot be read."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from outergrad.report._fields import objection

Entry = dict[str, Any]
_START = '{"event"'
_LAYER = re.compile(r'\{"event": "layer", "rank": \d+, "step": (\d+), ')
_NAMED = 3


class File:
    """One file of a run.

    Args:
        path: where it is.

    Attributes:
        path: where it is.
        problems: what could not be read so far, a line of text each.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self._lines, self._rest = self._read()
        self._bad: dict[str, list[int]] = {}

    def _read(self) -> tuple[list[str], str]:
        try:
            *lines, rest = self.path.read_bytes().decode("utf-8", errors="replace").split("\n")
        except OSError as error:
            self.problems.append(f"{self.path.name}: {error.strerror or error}")
            return [], ""
        return lines, rest

    def layer_steps(self) -> set[int]:
        """The steps whose layers were recorded, without reading more of the lines than that."""
        return {int(found[1]) for found in map(_LAYER.match, self._lines) if found}

    def entries(self, layers_of: Container[int] | None = None) -> list[tuple[int, Entry]]:
        """Events with the numbers of their lines, and adds what cannot be read to `problems`.

        Args:
            layers_of: read the layers of these steps alone; None: of all.
        """
        found = [
            (number, entry)
            for number, line in enumerate(self._lines, start=1)
            if not _left_out(line, layers_of)
            for entry in self._events(number, line)
        ]
        last = len(self._lines) + 1
        if self._rest.strip():
            found += [(last, entry) for entry in self._events(last, self._rest, cut=True)]
        self.problems += [_told(self.path.name, why, at) for why, at in self._bad.items()]
        return found

    def _events(self, number: int, line: str, *, cut: bool = False) -> Iterator[Entry]:
        entry = _parsed(line)
        if entry is None and line.strip():
            if cut:
                self._tell("cut off: the run is still being written, or it died", number)
                return
            self._tell("not a whole line of JSON", number)
            # A run that goes on after it died writes its first event behind half a line.
            entry = _parsed(line[max(0, line.rfind(_START)) :])
        if entry is None:
            return
        why = objection(entry)
        if why is None:
            yield entry
        else:
            self._tell(why, number)

    def _tell(self, why: str, number: int) -> None:
        self._bad.setdefault(why, []).append(number)


def _left_out(line: str, layers_of: Container[int] | None) -> bool:
    if layers_of is None:
        return False
    found = _LAYER.match(line)
    whole = line.endswith("}") and line.find(_START, 1) < 0
    return found is not None and whole and int(found[1]) not in layers_of


def _parsed(line: str) -> Entry | None:
    if not line.lstrip().startswith("{"):
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _told(name: str, why: str, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{name}, line {numbers[0]}: {why}"
    shown = ", ".join(map(str, numbers[:_NAMED]))
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"{name}, lines {shown}{more}: {why}"


def thin(values: list[int], most: int) -> list[int]:
    """At most so many of them, evenly, with the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
