"""A filter before the hub's log: repeated events are written a few times, and then counted."""

from __future__ import annotations

import threading
import time
from typing import Any

from outergrad.star.run import Told

_COUNTED = frozenset({"refused", "away", "back"})
"""Events that a stranger, or a site with a broken line, can cause hundreds of times a second."""
_AT_FIRST, _PERIOD_S = 5, 60.0
_MOST_KINDS = 256
_OTHERS = "others"


class Repeats:
    """A filter before a log.

    Refusals, and lines that break and come back, are counted for each site or address. The first
    few of a period are written as they happen; of the others only their number is written, with
    the facts of the last.

    Args:
        write: writes to the log.
        at_first: number of events that are written as they happen.
        period_s: seconds for which the others are counted before their number is written.
    """

    def __init__(self, write: Told, at_first: int = _AT_FIRST, period_s: float = _PERIOD_S) -> None:
        self._write, self._at_first, self._period_s = write, at_first, period_s
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def write(self, what: str, **facts: Any) -> None:
        """Writes an event with its facts, or counts it."""
        if what not in _COUNTED or self._is_early(what, facts):
            self._write(what, **facts)

    def _is_early(self, what: str, facts: dict[str, Any]) -> bool:
        who = str(facts.get("site") or facts.get("host") or "")
        with self._lock:
            is_full = "site" not in facts and len(self._kinds) >= _MOST_KINDS
            key = what, _OTHERS if is_full and (what, who) not in self._kinds else who
            kind = self._kinds.setdefault(key, _Kind(time.monotonic()))
            kind.count += 1
            kind.last = facts
            return kind.count <= self._at_first

    def flush(self, everything: bool = False) -> None:
        """Writes the counts whose period is over, or `everything`; to be called now and then."""
        now = time.monotonic()
        with self._lock:
            over = [
                key
                for key, kind in self._kinds.items()
                if everything or now - kind.began_at > self._period_s
            ]
            ended = [(key, self._kinds.pop(key)) for key in over]
        for (what, who), kind in ended:
            more = kind.count - self._at_first
            if more > 0:
                about = {"site": _OTHERS, **kind.last} if who == _OTHERS else kind.last
                self._write(what, **about, times=more, within_s=round(now - kind.began_at, 1))


class _Kind:
    """The count of one event of one site or address, since a moment."""

    def __init__(self, began_at: float) -> None:
        self.began_at, self.count = began_at, 0
        self.last: dict[str, Any] = {}
