"""Live view of a run, until Ctrl-C."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live

from outergrad._amounts import amount, plain, short, times
from outergrad._event_lines import GrowingFile, event_of, read
from outergrad._printable import printable
from outergrad.core.run_figures import Watched, scalars, silence, speed
from outergrad.events import Event
from outergrad.tools.watch.picture import View, picture, waiting

PATTERN = "site-*.jsonl"
RECENT_BYTES = 4 << 20
LOOK_EVERY_S = 0.25
DRAW_EVERY_S = 1.0
LINE_EVERY_S = 10.0


class Folder:
    """Files of a run, including those that appear later.

    Attributes:
        path: their folder.
        foreign: number of complete lines so far that are not events.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.foreign = path, 0
        self._files: dict[Path, GrowingFile] = {}

    def news(self) -> Iterator[tuple[Event, float]]:
        """Yields new events, site after site, each with the time of the last write to its file."""
        for path in sorted(self.path.glob(PATTERN)):
            file = self._files.setdefault(path, GrowingFile(path, RECENT_BYTES))
            try:
                lines, written = file.lines()
            except FileNotFoundError:  # deleted after the listing
                continue
            for line in lines:
                entry, problems = read(line)
                self.foreign += bool(problems)
                if entry is not None:
                    yield event_of(entry), written


class Watch:
    """View of a run, as far as it is written.

    Args:
        path: folder of the run.
        console: console that shows it.
    """

    def __init__(self, path: Path, console: Console) -> None:
        self.watched, self._folder, self._console = Watched(), Folder(path), console

    def read(self) -> bool:
        """Reads new lines; True if there were any."""
        before, any_new = self._folder.foreign, False
        for event, heard in self._folder.news():
            self.watched.take(event, heard)
            any_new = True
        return any_new or self._folder.foreign > before

    def view(self, spared_lines: int = 0) -> View:
        """Returns the view: limited to the terminal's height, unlimited without a terminal."""
        width, height = self._console.size
        shown = height - spared_lines if self._console.is_terminal else None
        return View(self._folder.path, self._folder.foreign, time.time(), width, shown)

    def show(self) -> None:
        """Prints the picture once, with room for the prompt below."""
        shown = picture(self.watched, self.view(spared_lines=2))
        self._console.print(shown, no_wrap=True, crop=False, highlight=False)

    def follow(self) -> None:
        """Shows the run until Ctrl-C: as a picture in a terminal, else as lines."""
        with contextlib.suppress(KeyboardInterrupt):
            if self._console.is_terminal and not self._console.is_dumb_terminal:
                self._live()
            else:
                self._lines()

    def _live(self) -> None:
        """Redraws the picture, and prints the last one at the end."""
        try:
            self._redraw()
        finally:
            self.show()

    def _redraw(self) -> None:
        drawn_for, drawn_at = None, 0.0
        with Live(console=self._console, screen=True, auto_refresh=False) as shown:
            while True:
                news, size, now = self.read(), self._console.size, time.monotonic()
                if news or size != drawn_for or now - drawn_at >= DRAW_EVERY_S:
                    shown.update(picture(self.watched, self.view()), refresh=True)
                    drawn_for, drawn_at = size, now
                time.sleep(LOOK_EVERY_S)

    def _lines(self) -> None:
        said = ""
        while True:
            self.read()
            line = summary_line(self.watched, self.view())
            if line != said:
                print(line, flush=True)
                said = line
            time.sleep(LINE_EVERY_S if self.watched.sites else LOOK_EVERY_S)


def summary_line(watched: Watched, view: View) -> str:
    """Returns the main figures in one line; silence as a time, since a duration would change it."""
    if not watched.sites:
        return waiting(view).plain.strip()
    told = speed(watched)
    parts = [f"step {max(site.step for site in watched.sites):,}"]
    parts += [f"{name} {plain(values[-1])}" for name, values in scalars(watched).items()]
    if told.step_s:
        parts += [f"{short(1 / told.step_s)} steps/s"]
    if told.sent_bytes:
        parts += [f"{amount(told.sent_bytes)}/step"]
    if told.fewer:
        parts += [f"{times(told.fewer)}x fewer than DDP"]
    if all(site.ended for site in watched.sites):
        parts += ["ended"]
    quiet = silence(watched, view.now)
    if quiet is not None:
        parts += [f"no news since {time.strftime('%H:%M:%S', time.localtime(view.now - quiet))}"]
    return printable("  ".join(parts))
