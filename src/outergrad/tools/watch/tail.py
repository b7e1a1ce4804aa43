"""What was appended to the files of a run since the last look."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from outergrad.events import Event
from outergrad.record.lines import event_of

PATTERN = "site-*.jsonl"
RECENT_BYTES = 4 << 20
_RUN = b'{"event": "run"'


class Tail:
    """One file that grows.

    Args:
        path: the file.
        recent_bytes: of a larger file the end is read, and before it the lines that begin a run.
    """

    def __init__(self, path: Path, recent_bytes: int = RECENT_BYTES) -> None:
        self._path, self._recent = path, recent_bytes
        self._inode, self._offset, self._rest = 0, 0, b""

    def lines(self) -> tuple[list[bytes], float]:
        """Whole lines that are new, and when the file was written to, in seconds since 1970.

        The half of a line at the end waits for the other half. A file that was replaced or cut is
        read from its beginning.
        """
        with self._path.open("rb") as file:
            now = os.stat(file.fileno())
            if now.st_ino != self._inode or now.st_size < self._offset:
                self._inode, self._offset, self._rest = now.st_ino, 0, b""
            if now.st_size == self._offset:
                return [], now.st_mtime
            older = self._skip(file, now.st_size) if self._offset == 0 else []
            file.seek(self._offset)
            read = file.read()
        self._offset += len(read)
        *lines, self._rest = (self._rest + read).split(b"\n")
        return older + lines, now.st_mtime

    def _skip(self, file: BinaryIO, size: int) -> list[bytes]:
        """Goes to the recent part and returns what runs there were before."""
        runs = []
        while self._offset < size - self._recent and (line := file.readline()).endswith(b"\n"):
            self._offset += len(line)
            if line.startswith(_RUN):
                runs.append(line)
        return runs


class Folder:
    """The files of a run, also those that come later.

    Attributes:
        path: where they are.
        foreign: whole lines so far that were no events.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.foreign = path, 0
        self._tails: dict[Path, Tail] = {}

    def news(self) -> Iterator[tuple[Event, float]]:
        """New events, site after site, and when their file was last written to."""
        for path in sorted(self.path.glob(PATTERN)):
            tail = self._tails.setdefault(path, Tail(path))
            try:
                lines, written = tail.lines()
            except FileNotFoundError:  # taken away since
                continue
            for line in filter(bytes.strip, lines):
                try:
                    yield event_of(json.loads(line)), written
                except ValueError:
                    self.foreign += 1
