"""A thread at a site that tells people of its line, and finds out why it is down."""

from __future__ import annotations

import logging
import threading

from outergrad._printable import printable
from outergrad.star.authority import Kit
from outergrad.star.line import Line
from outergrad.star.news import news
from outergrad.star.reach import obstacle

_LOG = logging.getLogger("outergrad")
_LOOK_S = 0.25
_DOWN_S, _AGAIN_S = 1.0, 2.0
"""Seconds for which a line is down before the reason is looked for, and between two looks."""


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
        self._looked_at = float("-inf")
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
        if down_s < _DOWN_S or now.at - self._looked_at < _AGAIN_S:
            return
        self._looked_at = now.at
        found = obstacle(self._address, self._kit)
        if found is None:
            return
        self._line.hinder(found.why)
        if found.lasts and not now.names:
            self._line.fail(f"the hub at {self._address}: {found.why}")
