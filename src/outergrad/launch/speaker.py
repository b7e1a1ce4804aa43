"""Lines on the error stream, from a thread of their own."""

from __future__ import annotations

import queue
import threading
import time

from outergrad.launch.console import say

_MOST_WAITING = 1000
_STOP = ""
_END_S = 1.0


class Speaker:
    """Prints lines with the time of day, without holding up who says them.

    A terminal that was stopped by Ctrl-S, or a pipe that nobody reads, would block a hub. If too
    many lines wait, later ones are counted, and their number is printed.
    """

    def __init__(self) -> None:
        self._waiting = queue.Queue[str](_MOST_WAITING)
        self._missing = 0
        self._thread = threading.Thread(target=self._print, name="speaker", daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        """Prints a line soon."""
        try:
            self._waiting.put_nowait(f"{time.strftime('%H:%M:%S')} {line}")
        except queue.Full:
            self._missing += 1

    def close(self) -> None:
        """Waits briefly until all lines are printed."""
        try:
            self._waiting.put(_STOP, timeout=_END_S)
        except queue.Full:
            return
        self._thread.join(_END_S)

    def _print(self) -> None:
        while (line := self._waiting.get()) != _STOP:
            say(line, below_a_bar=False)
            missing, self._missing = self._missing, 0
            if missing:
                say(f"{missing} lines more than could be printed; the log has all")
