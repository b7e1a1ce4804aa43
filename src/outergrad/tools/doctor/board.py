"""Notes between sites, kept in the store of the rendezvous."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistStoreError, Store  # pyright: ignore[reportPrivateImportUsage]

from outergrad.tools.doctor.findings import named

T = TypeVar("T")
Tell = Callable[[str], None]
"""Callback for progress: called with what a site does or waits for."""

_ANSWER_S = 10.0
"""Longest time for the store to answer."""


class LostError(RuntimeError):
    """The store does not answer any more."""


def bounded(work: Callable[[], T], limit_s: float) -> T:
    """Runs work in its own thread, and waits no longer than a limit.

    PyTorch's stores and gloo can hang beyond their own timeouts where a peer is stopped, and Ctrl-C
    would not end them.

    Raises:
        TimeoutError: It is not done; the thread is not stopped, and ends with the process.
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


class Board:
    """A site's access to the notes. Every wait has a limit."""

    def __init__(self, store: Store, rank: int, sites: int) -> None:
        self.store, self.rank, self.sites = store, rank, sites
        self._lost: LostError | None = None
        store.set_timeout(timedelta(seconds=_ANSWER_S))

    def post(self, key: str, value: Any) -> None:
        """Writes a note, whose value is of JSON's types."""
        self._asked(lambda: self.store.set(key, json.dumps(value)))

    def count(self, key: str) -> int:
        """Increments a counter, and returns its new value."""
        return self._asked(lambda: self.store.add(key, 1))

    def has(self, key: str) -> bool:
        """True if there is such a note."""
        return self._asked(lambda: self.store.check([key]))

    def read(self, key: str) -> Any:
        """Returns a note; raises TimeoutError if it does not come within some seconds."""
        return json.loads(self._asked(lambda: self.store.get(key)))

    def await_note(self, key: str) -> None:
        """Waits for a note, without polling; raises TimeoutError after some seconds."""
        self._asked(lambda: self.store.wait([key], timedelta(seconds=_ANSWER_S)))

    def read_all(self, prefix: str, ranks: Sequence[int]) -> dict[int, Any]:
        """Returns the notes that exist, by rank; the note of site 2 is ``prefix/2``."""
        return {r: self.read(key) for r in ranks if self.has(key := f"{prefix}/{r}")}

    def wait(
        self, prefix: str, ranks: Sequence[int], limit_s: float, tell: Tell = lambda _: None
    ) -> list[int]:
        """Waits for a note of each site; the note of site 2 is ``prefix/2``.

        Returns:
            The ranks of sites that have not written.
        """
        until_s = time.monotonic() + limit_s
        missing = list(ranks)
        while missing := [rank for rank in missing if not self.has(f"{prefix}/{rank}")]:
            tell(f"waiting for {named(missing)}")
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            time.sleep(min(left_s, 0.02 + 0.02 * (limit_s - left_s), 0.2))
        return missing

    def _asked(self, ask: Callable[[], T]) -> T:
        if self._lost:
            raise self._lost
        try:
            return bounded(ask, _ANSWER_S + 1)
        except DistStoreError as error:
            raise TimeoutError(f"no note within {_ANSWER_S:.0f} s") from error
        except (RuntimeError, TimeoutError) as error:
            self._lost = LostError(str(error).splitlines()[0])
            raise self._lost from error
