"""A board in the store of a process group: write-once slots, with a time limit on each call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from copy import copy
from typing import Any, TypeVar

from outergrad.comm.backends import is_torchs_own
from outergrad.comm.failure_mailbox import AT_END, AT_EXIT
from outergrad.core.errors import BoardGoneError
from outergrad.core.transport import Board

T = TypeVar("T")

_LIMIT_S = 2.0
_SLOT = "outergrad/board/{}"
_PIECE_BYTES = 1 << 18
"""Bytes in which a large content is written: a slow link carries as many within the limit."""
_MOST_PIECES = 1 << 20


def bounded(work: Callable[[], T], limit_s: float) -> T:
    """Runs work in its own thread; raises TimeoutError if it is not done within a limit.

    PyTorch's stores and gloo can hang beyond their own timeouts where a peer is stopped, and Ctrl-C
    would not end them. The thread is not stopped, and ends with the process.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([outcome], limit_s).done:
        raise TimeoutError(f"no answer within {limit_s:.0f} s")
    return outcome.result()


class StoreBoard(Board):
    """Slots in a store, over a connection of its own where the store can be cloned.

    Args:
        store: of the group.
        limit_s: longest time of a call, seconds, if another than usual.
    """

    def __init__(self, store: Any, limit_s: float | None = None) -> None:
        self._connection = _Connection(store)
        self._limit_s: float | None = _LIMIT_S if limit_s is None else limit_s
        self._gone = False

    @property
    def _store(self) -> Any:
        return self._connection.store

    def without_limit(self) -> StoreBoard:
        """Returns a board without a limit, on the same connection, for a thread that may wait."""
        board = copy(self)
        board._limit_s = None
        return board

    def within(self, limit_s: float) -> StoreBoard:
        """Returns a board with this limit on each call, on the same connection.

        A site that is cut off from the store for some seconds is late, and not lost.
        """
        board = copy(self)
        board._limit_s = None if self._limit_s is None else max(limit_s, self._limit_s)
        return board

    def first(self, key: str, text: str) -> str:
        """Writes a text into a slot unless it holds one; returns the text that it then holds."""
        slot = _SLOT.format(key)
        return _text(self._limited(lambda: self._store.compare_set(slot, "", text)))

    def put(self, key: str, content: bytes) -> None:
        """Writes a content in pieces, and then their number, which tells readers it is complete."""
        slot, size = _SLOT.format(key), _PIECE_BYTES
        pieces = [content[at : at + size] for at in range(0, len(content), size)]
        for k, piece in enumerate(pieces):
            self._limited(lambda k=k, piece=piece: self._store.set(f"{slot}/{k}", piece))
        self._limited(lambda: self._store.set(slot, str(len(pieces))))

    def get(self, key: str) -> bytes | None:
        """Returns the content that `put` wrote; None if there is none, or it cannot be read."""
        slot = _SLOT.format(key)
        count = self._read(slot)
        if count is None or not count.isdigit() or int(count) > _MOST_PIECES:
            return None
        pieces = [self._read(f"{slot}/{k}") for k in range(int(count))]
        return None if None in pieces else b"".join(piece or b"" for piece in pieces)

    def drop(self, key: str) -> None:
        """Deletes the pieces that `put` wrote, their number first: no reader finds half of them."""
        slot = _SLOT.format(key)
        count = self._read(slot)
        pieces = range(int(count)) if count is not None and count.isdigit() else ()
        for name in (slot, *(f"{slot}/{k}" for k in pieces)):
            self._limited(lambda name=name: self._store.delete_key(name))

    def slot(self, key: str) -> str | None:
        """Returns the text that `first` wrote; None if there is none."""
        found = self._read(_SLOT.format(key))
        return None if found is None else _text(found)

    def farewell(self, site: int, session: int) -> str | None:
        """Returns a site's farewell, of its process or else of the session; None without one."""
        for key in (AT_EXIT.format(site), AT_END.format(site, session)):
            if (found := self._read(key)) is not None:
                return _text(found)
        return None

    def _read(self, key: str) -> bytes | None:
        def read() -> bytes | None:
            store = self._store
            return store.get(key) if store.check([key]) else None

        return self._limited(read)

    def _limited(self, call: Callable[[], T]) -> T:
        """Returns the result of a call of the store, unless the store is gone.

        Raises:
            BoardGoneError: the store is gone, or has not answered in time.
        """
        try:
            if not self._gone:
                return call() if self._limit_s is None else bounded(call, self._limit_s)
        except (RuntimeError, TimeoutError):  # no thread can start when Python shuts down
            self._gone = True
        raise BoardGoneError("the store of the process group does not answer")


class _Connection:
    """A connection to a store, cloned where possible: others may block on the given one."""

    def __init__(self, store: Any) -> None:
        self._given, self._own = store, None

    @property
    def store(self) -> Any:
        """The clone, which connects at its first use; the given store if it has none."""
        if self._own is None:
            try:
                self._own = self._given.clone() if is_torchs_own(self._given) else self._given
            except (RuntimeError, AttributeError):
                self._own = self._given
        return self._own


def _text(content: bytes) -> str:
    return content.decode(errors="replace")
