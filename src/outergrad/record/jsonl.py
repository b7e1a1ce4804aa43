"""Events as lines of JSON, for `outergrad report` and `outergrad watch`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import IO

from outergrad._event_lines import line_of
from outergrad.events import Event
from outergrad.record.recorders import checked


class JSONL:
    """Writes the events of this site into a folder, a line of JSON each.

    Every site has its own file there, `site-0.jsonl` and so on. Sites of several machines may
    write into a shared folder, or into one each, to be copied together later. An existing file is
    appended to, so a resumed training stays one run.

    Args:
        path: the folder of the run; made if there is none.
        every: k: record every k-th step.
        budget: share of the time of a step that measuring and writing a recorded one may take:
            layers that do not fit take turns, at least one per recorded step. `math.inf`
            measures all.
        samples: record norms of single samples, too, and which stand out (`Layer.outliers`):
            every reader of the files sees them.
        groups: record singular values by group of samples, too (`Layer.group_gradient`), as
            `session.groups` labels them: every reader of the files sees the labels.

    Raises:
        ValueError: a setting out of its range, or the path is a file.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        every: int = 10,
        budget: float = 0.04,
        samples: bool = False,
        groups: bool = False,
    ) -> None:
        self.path = Path(path)
        self.every, self.budget = checked(every, budget)
        self.samples, self.groups = samples, groups
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"JSONL: path={str(path)!r} is a file; name a folder for the run")
        self._files: dict[int, IO[str]] = {}

    def record(self, event: Event) -> None:
        """Writes a line at once, so that the file of a run that dies is readable.

        Raises:
            OSError: the folder or the file cannot be written; names it.
        """
        path = self.path / f"site-{event.rank}.jsonl"
        try:
            if event.rank not in self._files:
                self._files[event.rank] = open_to_append(path)
            self._files[event.rank].write(json.dumps(line_of(event)) + "\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                self.close()
            self._files.clear()
            what = f"JSONL cannot write: {error.strerror}"
            raise OSError(error.errno, what, str(path)) from error

    def close(self) -> None:
        """Closes the file; a later event opens it again."""
        while self._files:
            self._files.popitem()[1].close()


def open_to_append(path: Path) -> IO[str]:
    """Opens a file to append lines; ends an incomplete last line of a writer that died."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", buffering=1, encoding="utf-8")
    if path.stat().st_size:
        with path.open("rb") as written:
            written.seek(-1, 2)
            if written.read() != b"\n":
                file.write("\n")
    return file
