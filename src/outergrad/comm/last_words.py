"""What sites that gave up or ended have left for each other, in the store by which they once met.

The connections are closed then, and a store may be gone with the site that held it: a call that
fails, or takes longer than its limit, is the last one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from outergrad.core.transport import Enough

_LIMIT_S = 2.0
_POLL_S = 0.02

_WORD = "outergrad/last_words/{}"
AT_EXIT, AT_END, _READ_BY = f"{_WORD}/exit", f"{_WORD}/end/{{}}", f"{_WORD}/read"
"""Keys of the store, by site and session."""


class LastWords:
    """A place where each site of a process group leaves a text when it gives the group up.

    A site that leaves in order leaves one at the end of each session, and one when its process
    ends; of several that a site has left, the first of these counts.

    Args:
        store: of the group.
        rank: this site.
        sites: their number.
        session: the one whose texts count.
        limit_s: for one call of the store, and for others to read.
    """

    def __init__(
        self, store: Any, rank: int, sites: int, session: int = 0, limit_s: float | None = None
    ) -> None:
        self._store, self._rank, self._sites, self._session = store, rank, sites, session
        self._limit_s = _LIMIT_S if limit_s is None else limit_s
        self._found: list[str | None] = [None] * sites
        self._readers: list[int] = []
        self._gone = False

    def leave(self, text: str) -> None:
        """This site's, for the others, when it gives up."""
        self._found[self._rank] = text
        self._limited(lambda: self._store.set(_WORD.format(self._rank), text))

    def leave_at_end(self, text: str, *, of_process: bool) -> None:
        """This site's when it ends the session, or its whole process; others can read it then."""
        key = AT_EXIT.format(self._rank) if of_process else AT_END.format(self._rank, self._session)

        def leave() -> None:
            self._store.set(key, text)
            self._store.check([key])  # a TCPStore does not answer to what is set

        self._limited(leave)

    def gather(
        self, enough: Enough, patience_s: float, final: str | None = None
    ) -> list[str | None] | None:
        """Those of all sites; waits for more until there are enough, or patience ends.

        None if the store is gone: then nobody can learn of anybody.

        Args:
            enough: whether what is known of all sites is.
            patience_s: how long to wait for it.
            final: what this site leaves in place of its text when its patience ends. It looks
                once more after that: of two sites at least one then knows of the other's end.
        """
        end = time.monotonic() + patience_s
        while not self._gone and not enough(self._found) and time.monotonic() < end:
            self._limited(self._read)
            time.sleep(_POLL_S)
        if final is not None and not self._gone and not enough(self._found):
            self.leave(final)
            self._limited(self._read)
        known = None if self._gone else list(self._found)
        self._limited(lambda: self._store.set(_READ_BY.format(self._rank), ""))
        self.stay(self._readers)  # the store may end with this site
        return known

    def stay(self, sites: Sequence[int]) -> None:
        """Waits until these have read what was left."""
        end, read = time.monotonic() + self._limit_s, [_READ_BY.format(site) for site in sites]
        while read and not self._gone and time.monotonic() < end and not self._all_there(read):
            time.sleep(_POLL_S)

    def _all_there(self, keys: Sequence[str]) -> bool:
        found: list[bool] = []
        self._limited(lambda: found.append(self._store.check(list(keys))))
        return any(found)

    def _read(self) -> None:
        """All that is there now."""
        for site in range(self._sites):
            for kind in (_WORD, AT_EXIT, AT_END):
                key = kind.format(site, self._session)
                if self._found[site] is None and self._store.check([key]):
                    self._found[site] = self._store.get(key).decode(errors="replace")
                    self._readers += [site] if kind == _WORD else []

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

        try:
            threading.Thread(target=run, daemon=True).start()
        except RuntimeError:  # Python is shutting down: a word that is set waits for no answer
            run()
        self._gone = not done.wait(self._limit_s) or self._gone
