"""A thread at a site that tells people of its line, and finds out why it is down."""

from __future__ import annotations

import logging
import threading

from outergrad._printable import printable
from outergrad.star.authority import Kit
from outergrad.star.line import Line
from outergrad.star.news import news
from outergrad.star.reach import Obstacle, obstacle

_LOG = logging.getLogger("outergrad")
_LOOK_S = 0.25
_DOWN_S, _AGAIN_S = 1.0, 2.0
"""Seconds for which a line is down before the reason is looked for, and between two looks."""
_ENDS = (
    "it answers, but ends this site's connections: their certificate may be of another authority, "
    "or a proxy stands between"
)


class LineWatch:
    """Looks at a line a few times per second, and logs what has changed.

    Args:
        line: of this process.
        address: host and port of the hub.
        kit: of the site.
        limit_s: seconds that the hub may be out of reach.
    """

    def __init__(self, line: Line, address: str, kit: Kit, limit_s: float) -> None:
        self._line, self._about, self._kit = line, (kit.site, address, limit_s), kit
        self._address, self._before = address, line.snapshot()
        self._looked_at, self._answers = float("-inf"), 0
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="star news", daemon=True).start()

    def end(self) -> None:
        """Ends the thread, after a last look."""
        self._ended.set()

    def _run(self) -> None:
        while not (self._ended.wait(_LOOK_S) or self._line.has_failed):
            self._find_obstacle()
            self._tell()
        self._tell()

    def _tell(self) -> None:
        before, self._before = self._before, self._line.snapshot()
        for level, told in news(*self._about, before, self._before):
            _LOG.log(level, "%s", printable(told))

    def _find_obstacle(self) -> None:
        """Calls the hub in vain once more, to learn why; gives up if it will always be in vain."""
        now = self._line.snapshot()
        down_s = 0.0 if now.down_since is None else now.at - now.down_since
        if down_s < _DOWN_S:
            self._answers = 0
        elif now.at - self._looked_at >= _AGAIN_S:
            self._looked_at = now.at
            self._take(obstacle(self._address, self._kit), has_been_up=bool(now.names))

    def _take(self, found: Obstacle | None, *, has_been_up: bool) -> None:
        """Notes an obstacle, or that the hub answers this call, and only not the line's."""
        if found is not None:
            self._answers = 0
            self._line.hinder(found.why)
            if found.lasts and not has_been_up:
                self._line.fail(f"the hub at {self._address}: {found.why}")
            return
        self._answers += 1
        if self._answers > 1:  # after the first time the line may be up in a moment
            self._line.hinder(_ENDS)
