"""What was appended to the files of a run since the last look."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from outergrad._event_lines import GrowingFile, event_of, read
from outergrad.events import Event

PATTERN = "site-*.jsonl"
RECENT_BYTES = 4 << 20


class Folder:
    """The files of a run, also those that come later.

    Attributes:
        path: where they are.
        foreign: whole lines so far that were no events.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.foreign = path, 0
        self._files: dict[Path, GrowingFile] = {}

    def news(self) -> Iterator[tuple[Event, float]]:
        """New events, site after site, and when their file was last written to."""
        for path in sorted(self.path.glob(PATTERN)):
            file = self._files.setdefault(path, GrowingFile(path, RECENT_BYTES))
            try:
                lines, written = file.lines()
            except FileNotFoundError:  # taken away since
                continue
            for line in lines:
                entry, problems = read(line)
                self.foreign += bool(problems)
                if entry is not None:
                    yield event_of(entry), written
