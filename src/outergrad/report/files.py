"""Events of one file of a run, and the problems in reading it."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from pathlib import Path

from outergrad._event_lines import START, Entry, GrowingFile, parsed, read

_LAYER = re.compile(r'\{"event": "layer", "rank": \d+, "step": (\d+), ')
_NAMED = 3
_CUT = "cut off: the run is still being written, or it died"


class File:
    """One file of a run.

    Attributes:
        name: file name.
        problems: lines of text about what could not be read so far.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.problems: list[str] = []
        self._bad: dict[str, list[int]] = {}
        self._lines: list[str] = []
        file = GrowingFile(path)
        try:
            self._lines = file.lines()[0]
        except OSError as error:
            self.problems.append(f"{path.name}: {error.strerror or error}")
        self._rest = file.rest

    def layer_steps(self) -> set[int]:
        """Returns the steps whose layers were recorded, without parsing whole lines."""
        return {int(found[1]) for found in map(_LAYER.match, self._lines) if found}

    def entries(self, layers_of: Container[int] | None = None) -> list[Entry]:
        """Returns the events of the last run; adds to `problems` what cannot be read.

        Args:
            layers_of: steps whose layers are parsed; None for all.
        """
        lines = [
            (number, line)
            for number, line in enumerate(self._lines, start=1)
            if not _left_out(line, layers_of)
        ]
        last, cut = len(self._lines) + 1, self._rest.strip() and parsed(self._rest) is None
        lines += [] if cut else [(last, self._rest)]
        found = [(number, entry) for number, line in lines if (entry := self._event(number, line))]
        if cut:
            self._bad[_CUT] = [last]
        self.problems += [_told(self.name, why, at) for why, at in self._bad.items()]
        return self._last_run(found)

    def _event(self, number: int, line: str) -> Entry | None:
        entry, problems = read(line)
        for why in problems:
            self._bad.setdefault(why, []).append(number)
        return entry

    def _last_run(self, entries: Iterable[tuple[int, Entry]]) -> list[Entry]:
        """Events of the last run, from all events with their line numbers.

        A `Run` at step 0 starts a new run. One at a later step resumes: events that an earlier
        process recorded beyond that step are dropped, since these steps are trained again.
        """
        kept: list[Entry] = []
        begun = 1
        for number, entry in entries:
            if entry["event"] == "run" and entry["step"] > 0:
                kept = [earlier for earlier in kept if _before(earlier, entry["step"])]
            elif entry["event"] == "run" and kept:
                kept, begun = [], number
            kept.append(entry)
        if begun > 1:
            told = f"the run from line {begun} on is shown, not those before it"
            self.problems.append(f"{self.name}: {told}")
        if kept and kept[0]["event"] != "run":
            told = "does not begin with a run, so its method is not known"
            self.problems.append(f"{self.name}: {told}")
        return kept


def _left_out(line: str, layers_of: Container[int] | None) -> bool:
    if layers_of is None:
        return False
    found = _LAYER.match(line)
    whole = line.endswith("}") and line.find(START, 1) < 0
    return found is not None and whole and int(found[1]) not in layers_of


def _told(name: str, why: str, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{name}, line {numbers[0]}: {why}"
    shown = ", ".join(map(str, numbers[:_NAMED]))
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"{name}, lines {shown}{more}: {why}"


def _before(entry: Entry, step: int) -> bool:
    """True if an entry is of a step before `step`; scalars count steps that are done."""
    return entry["step"] < step or (entry["event"] == "scalars" and entry["step"] == step)


def thin(values: list[int], most: int) -> list[int]:
    """Returns at most `most` of the values, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
