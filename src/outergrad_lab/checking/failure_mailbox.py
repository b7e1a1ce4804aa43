"""A model of `outergrad.comm.failure_mailbox.FailureMailbox`, one call of the store at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outergrad.commit.lost import FAREWELL_S
from outergrad.core.transport import Enough
from outergrad_lab.checking.network import Store, StoreGoneError
from outergrad_lab.checking.world import Process, Waiting

LIMIT_S, BRIEFLY_S = 2.0, 1.0
_POLL_S = 0.02
_GAVE_UP = "gave up"


class FailureMailbox:
    """A mailbox where sites leave texts for each other when they abort or end.

    Args:
        store: store of the group.
        process: process of this site.
        sites: number of sites.
        session: session whose texts count.
        limit_s: seconds for one call.
    """

    def __init__(
        self, store: Store, process: Process, sites: int, session: int, limit_s: float = LIMIT_S
    ) -> None:
        self._store, self._process, self._limit_s = store, process, limit_s
        self._rank, self._session, self._world = process.rank, session, process.world
        self._found: list[str | None] = [None] * sites
        self._readers: list[int] = []
        self._gone = False

    def leave(self, text: str) -> Waiting[None]:
        """Leaves this site's text when it aborts."""
        self._found[self._rank] = text
        yield from self._limited(lambda: self._store.set(f"{_GAVE_UP} {self._rank}", text))

    def leave_at_end(self, text: str, *, of_process: bool) -> Waiting[None]:
        """Leaves this site's text when it ends its session or its process."""
        kind = "exit" if of_process else f"end {self._session}"
        yield from self._limited(lambda: self._store.set(f"{kind} {self._rank}", text))

    def gather(
        self, enough: Callable[[float], Enough], patience_s: float, final: str
    ) -> Waiting[list[str | None] | None]:
        """Gathers the texts of all sites; None if the store is gone.

        Args:
            enough: returns the test whether the known texts suffice, given the seconds waited.
            patience_s: seconds to wait for that.
            final: text that this site leaves when its patience ends.
        """
        world, began = self._world, self._world.now
        is_enough = lambda: enough(world.now - began)(self._found)  # noqa: E731
        while not self._gone and not is_enough() and world.now < began + patience_s:
            changes = self._store.changes
            yield from self._read()
            yield from self._until_changed(changes, began, patience_s)
        if not self._gone and not is_enough():
            yield from self.leave(final)
            yield from self._read()
        known = None if self._gone else list(self._found)
        yield from self._limited(lambda: self._store.set(f"read by {self._rank}", ""))
        yield from self.stay(self._readers)
        return known

    def _until_changed(self, changes: int, began: float, patience_s: float) -> Waiting[None]:
        """Waits for a change of the store, where the library polls every 20 ms."""
        now = self._world.now
        first = began + FAREWELL_S + _POLL_S * self._world.dice.random()
        until = first if now < first else began + patience_s
        while self._store.changes == changes and self._world.now < until:
            yield until

    def stay(self, sites: Sequence[int]) -> Waiting[None]:
        """Waits, up to the limit, until these sites have read what was left."""
        end, keys = self._world.now + self._limit_s, [f"read by {site}" for site in sites]
        while keys and not self._gone and self._world.now < end:
            changes = self._store.changes
            there = yield from self._limited(lambda: all(key in self._store.values for key in keys))
            if there:
                return
            while self._store.changes == changes and self._world.now < end:
                yield end

    def _read(self) -> Waiting[None]:
        for site in range(len(self._found)):
            if self._found[site] is not None:
                continue
            for kind in (_GAVE_UP, "exit", f"end {self._session}"):
                key = f"{kind} {site}"
                text = yield from self._limited(lambda key=key: self._store.values.get(key))
                if text is not None and self._found[site] is None:
                    self._found[site] = text
                    self._readers += [site] if kind == _GAVE_UP else []

    def _limited(self, do: Callable[[], Any]) -> Waiting[Any]:
        if self._gone:
            return None
        try:
            return (yield from self._store.call(self._process, do, self._limit_s))
        except StoreGoneError:
            self._gone = True
            return None
