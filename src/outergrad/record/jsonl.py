"""Events as lines of JSON, for `outergrad report` and `outergrad watch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

from outergrad.events import Event


class JSONL:
    """Writes the events of this site into a folder, a line of JSON each.

    Every site has a file of its own there, `site-0.jsonl` and so on: sites of several machines
    may write into a shared folder, or into one each, to be brought together later. A file that is
    there already is appended to: so a training that goes on is one run.

    Args:
        path: the folder of the run; made if there is none.
        every: record every so many-th step.
        budget: share of the time of a step that measuring a recorded one may take: layers that do
            not fit are measured another time, in turn, at least one. `math.inf` measures all.

    Raises:
        ValueError: a setting out of its range.
    """

    def __init__(self, path: str | Path, *, every: int = 10, budget: float = 0.1) -> None:
        self.path = Path(path)
        self.every, self.budget = checked(every, budget)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"JSONL: path={str(path)!r} is a file; name a folder for the run")
        self._file: IO[str] | None = None

    def record(self, event: Event) -> None:
        """Writes a line, at once: what there is of a run that dies can be read."""
        if self._file is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = (self.path / f"site-{event.rank}.jsonl").open("a", buffering=1)
        self._file.write(json.dumps(line_of(event)) + "\n")

    def close(self) -> None:
        """Closes the file; a later event opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def line_of(event: Event) -> dict[str, object]:
    """The fields of an event behind its kind: "run", "layer", "step" or "scalars"."""
    return {"event": type(event).__name__.lower(), **vars(event)}


def checked(every: int, budget: float) -> tuple[int, float]:
    """Returns the settings of a recorder.

    Raises:
        ValueError: one is out of its range.
    """
    if every < 1:
        raise ValueError(f"every={every!r}; use 1 or more: record every so many-th step")
    if not budget > 0:
        raise ValueError(f"budget={budget!r}; use a share of a step above 0, or math.inf")
    return every, budget
