"""What happens again and again is written a few times, and then counted."""

from __future__ import annotations

import threading
import time
from typing import Any

from outergrad.star.run import Told

_COUNTED = frozenset({"refused", "away", "back"})
"""A stranger, or a site with a broken line, can make these happen hundreds of times a second."""
_AT_FIRST, _PERIOD_S = 5, 60.0
_MOST_KINDS = 256
_OTHERS = "others"


class Repeats:
    """Stands before a log.

    Of what is refused, and of lines that break and come back, the first few of a minute are
    written as they happen, for each site or address; of the others only how many there were, with
    the facts of the last.

    Args:
        write: of the log.
        at_first: how many are written as they happen.
        period_s: how long the others are counted before that is written.
    """

    def __init__(self, write: Told, at_first: int = _AT_FIRST, period_s: float = _PERIOD_S) -> None:
        self._write, self._at_first, self._period_s = write, at_first, period_s
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def write(self, what: str, **facts: Any) -> None:
        """Writes it, or counts it.

        Args:
            what: happened.
            **facts: of it.
        """
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
        """Writes how many there were, when their time is over; to be called now and then.

        Args:
            everything: whether their time is over anyhow.
        """
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
    """What happened to one site, or address, since a moment."""

    def __init__(self, began_at: float) -> None:
        self.began_at, self.count = began_at, 0
        self.last: dict[str, Any] = {}
