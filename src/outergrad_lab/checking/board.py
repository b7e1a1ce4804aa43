"""Performs the protocols of `outergrad.commit` on a simulated store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outergrad.commit.board_requests import (
    Asking,
    Farewell,
    First,
    Get,
    Gone,
    Put,
    Request,
    Rest,
    T,
)
from outergrad.commit.board_requests import Slot as Read
from outergrad.core.errors import BoardGoneError
from outergrad_lab.checking.network import Store, StoreGoneError
from outergrad_lab.checking.world import Process, Waiting

CALL_S = 2.0
"""Limit of a call of the store, in seconds."""


def farewell_key(site: int) -> str:
    """Returns the key under which a site that ends in order leaves its farewell."""
    return f"end {site}"


def performed(store: Store, process: Process, asking: Asking[T]) -> Waiting[T]:
    """Runs a protocol to its result; each call of the store takes simulated time."""
    changes, rested = store.changes, True
    try:
        request = next(asking)
        while True:
            if isinstance(request, Rest):
                if store.changes == changes and process.world.now < request.until:
                    yield request.until, lambda seen=changes: store.changes != seen
                rested = True
                request = next(asking)
                continue
            changes, rested = store.changes if rested else changes, False
            if isinstance(request, Gone):  # known without a call
                request = asking.send(request.site in store.gone)
                continue
            try:
                answer = yield from store.call(process, _call(store, request), CALL_S)
            except StoreGoneError as error:
                request = asking.throw(BoardGoneError(str(error)))
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
        case Read(key) | Get(key):
            return lambda: store.values.get(key)
        case Farewell(site):
            return lambda: store.values.get(farewell_key(site))
    raise AssertionError(request)
