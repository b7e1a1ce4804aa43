"""What sites that gave up have left for each other, in the store by which they once met.

The connections are closed then, and a store may be gone with the site that held it: a call that
fails, or takes longer than its limit, is the last one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

Enough = Callable[[Sequence[str | None]], bool]
"""Whether what is known of all sites is enough; None of those that have left nothing yet."""

_LIMIT_S = 2.0
_POLL_S = 0.02


class LastWords:
    """A place where each site of a process group leaves one text.

    Args:
        store: of the group.
        rank: this site.
        sites: their number.
    """

    def __init__(self, store: Any, rank: int, sites: int) -> None:
        self._store, self._rank, self._sites = store, rank, sites
        self._found: list[str | None] = [None] * sites
        self._gone = False

    def leave(self, text: str) -> None:
        """This site's, for the others."""
        self._found[self._rank] = text
        self._limited(lambda: self._store.set(_word(self._rank), text))

    def gather(self, enough: Enough, patience_s: float) -> list[str | None] | None:
        """Those of all sites; waits for more until there are enough, or patience ends.

        None if the store is gone: then nobody can learn of anybody.
        """
        end = time.monotonic() + patience_s
        while not self._gone and not enough(self._found) and time.monotonic() < end:
            self._limited(self._read)
            time.sleep(_POLL_S)
        known = None if self._gone else list(self._found)
        self._stay()
        return known

    def _stay(self) -> None:
        """Until all who have left word have read the others': the store may end with this site."""
        end = time.monotonic() + _LIMIT_S
        left = [site for site, text in enumerate(self._found) if text is not None]
        read = [_read_by(site) for site in left]
        self._limited(lambda: self._store.set(_read_by(self._rank), ""))
        while not self._gone and time.monotonic() < end and not self._all_there(read):
            time.sleep(_POLL_S)

    def _all_there(self, keys: Sequence[str]) -> bool:
        found: list[bool] = []
        self._limited(lambda: found.append(self._store.check(list(keys))))
        return any(found)

    def _read(self) -> None:
        """All that is there now."""
        for site in range(self._sites):
            if self._found[site] is None and self._store.check([_word(site)]):
                self._found[site] = self._store.get(_word(site)).decode()

    def _limited(self, call: Callable[[], object]) -> None:
        """Does it unless the store is gone, or notes that it is.

        One whose server was stopped does not keep to its own timeout.
        """
        if self._gone:
            return
        done = threading.Event()

        def run() -> None:
            try:
                call()
            except RuntimeError:
                self._gone = True
            finally:
                done.set()

        threading.Thread(target=run, daemon=True).start()
        self._gone = not done.wait(_LIMIT_S) or self._gone


def _word(site: int) -> str:
    return f"outergrad/last_words/{site}"


def _read_by(site: int) -> str:
    return f"outergrad/last_words/{site}/read"
