"""A mailbox in the store of a group, where sites that abort or end leave texts for the others.

The connections are closed by then, and the store may be gone with the site that held it: a call
that fails, or exceeds its limit, is the last one.
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


class FailureMailbox:
    """A mailbox, where each site of a process group leaves a text when it aborts.

    A site that leaves in order leaves a farewell at the end of each session, and one when its
    process ends. The text of an abort counts before that of the process, and that before the
    session's.

    Args:
        store: of the group.
        rank: of this site.
        sites: number of sites.
        session: fingerprint of the session whose farewells count.
        limit_s: seconds for one call of the store, and for others to read.
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
        """Leaves this site's text for the others, when it aborts."""
        self._found[self._rank] = text
        self._limited(lambda: self._store.set(_WORD.format(self._rank), text))

    def leave_at_end(self, text: str, *, of_process: bool) -> None:
        """Leaves this site's farewell at the end of its session or process, readable on return."""
        key = AT_EXIT.format(self._rank) if of_process else AT_END.format(self._rank, self._session)

        def leave() -> None:
            self._store.set(key, text)
            self._store.check([key])  # a TCPStore sends no reply to `set`: this waits for one

        self._limited(leave)

    def gather(
        self, enough: Enough, patience_s: float, final: str | None = None
    ) -> list[str | None] | None:
        """Returns the texts of all sites, as soon as they are enough or patience ends.

        None if the store is gone: then no site can learn of another.

        Args:
            enough: whether the texts of all sites so far are enough.
            patience_s: seconds to wait for that.
            final: text that this site leaves in place of its own when its patience ends. It reads
                once more after that, so that of two sites at least one learns of the other's end.
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
        self.stay(self._readers)  # the store may end with this site, and they still read it
        return known

    def stay(self, sites: Sequence[int]) -> None:
        """Waits, up to the limit, until these sites have read what was left."""
        end, read = time.monotonic() + self._limit_s, [_READ_BY.format(site) for site in sites]
        while read and not self._gone and time.monotonic() < end and not self._all_there(read):
            time.sleep(_POLL_S)

    def _all_there(self, keys: Sequence[str]) -> bool:
        found: list[bool] = []
        self._limited(lambda: found.append(self._store.check(list(keys))))
        return any(found)

    def _read(self) -> None:
        for site in range(self._sites):
            for kind in (_WORD, AT_EXIT, AT_END):
                key = kind.format(site, self._session)
                if self._found[site] is None and self._store.check([key]):
                    self._found[site] = self._store.get(key).decode(errors="replace")
                    # only a site that aborts reads what others left
                    self._readers += [site] if kind == _WORD else []

    def _limited(self, call: Callable[[], object]) -> None:
        """Calls unless the store is gone, and notes if it is gone by that.

        A store whose server was stopped exceeds its own timeout, so the call has a thread.
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
        except RuntimeError:  # Python is shutting down; a `set` waits for no reply
            run()
        self._gone = not done.wait(self._limit_s) or self._gone
