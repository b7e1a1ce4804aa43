"""Runs the agreement of `outergrad.commit.agreement` on a simulated store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outergrad.commit.agreement import Agreement, Outcome
from outergrad.commit.board_requests import Farewell, First, Get, Put, Request, Rest, Slot
from outergrad.core.errors import BoardGoneError
from outergrad_lab.checking.network import Store, StoreGoneError
from outergrad_lab.checking.world import Process, Waiting

CALL_S = 2.0
"""Limit of a call of the store, in seconds."""


def farewell_key(site: int) -> str:
    """Returns the key under which a site that ends in order leaves its farewell."""
    return f"end {site}"


def agreed(store: Store, process: Process, agreement: Agreement) -> Waiting[Outcome]:
    """Runs an agreement to its outcome; each call of the store takes simulated time."""
    asking, changes, rested = agreement.reach(), store.changes, True
    try:
        request = next(asking)
        while True:
            if isinstance(request, Rest):
                while store.changes == changes and process.world.now < request.until:
                    yield request.until
                rested = True
                request = next(asking)
                continue
            changes, rested = store.changes if rested else changes, False
            try:
                answer = yield from store.call(process, _call(store, request), CALL_S)
            except StoreGoneError:
                request = asking.throw(BoardGoneError())
            else:
                request = asking.send(answer)
    except StopIteration as end:
        return end.value


def _call(store: Store, request: Request) -> Callable[[], Any]:
    match request:
        case First(key, text):
            return lambda: store.set_first(key, text)
        case Put(key, content):
            return lambda: store.set(key, content)
        case Slot(key) | Get(key):
            return lambda: store.values.get(key)
        case Farewell(site):
            return lambda: store.values.get(farewell_key(site))
    raise AssertionError(request)
