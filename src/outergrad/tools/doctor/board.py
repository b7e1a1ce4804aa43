"""Notes that the sites leave for one another in the store of the rendezvous."""

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
"""Hears what a site does or waits for."""

_ANSWER_S = 10.0
"""Longest time for the store itself to answer."""


class LostError(RuntimeError):
    """The store does not answer any more."""


def bounded(work: Callable[[], T], limit_s: float) -> T:
    """Does some work in a thread of its own, and waits no longer than a limit.

    PyTorch's stores and gloo can hang beyond their own timeouts where a peer is stopped, and
    Ctrl-C would not end them.

    Raises:
        TimeoutError: It is not done; the thread is left to itself, and ends with the process.
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
    """What one site can read and write. Every wait has a limit."""

    def __init__(self, store: Store, rank: int, sites: int) -> None:
        """Opens the board at one of the sites."""
        self.store, self.rank, self.sites = store, rank, sites
        self._lost: LostError | None = None
        store.set_timeout(timedelta(seconds=_ANSWER_S))

    def post(self, key: str, value: Any) -> None:
        """Leaves a note, of what JSON can hold."""
        self._asked(lambda: self.store.set(key, json.dumps(value)))

    def count(self, key: str) -> int:
        """Adds one to a counter, and tells how many it is now."""
        return self._asked(lambda: self.store.add(key, 1))

    def has(self, key: str) -> bool:
        """Whether there is such a note."""
        return self._asked(lambda: self.store.check([key]))

    def read(self, key: str) -> Any:
        """A note; a TimeoutError if it does not come within some seconds."""
        return json.loads(self._asked(lambda: self.store.get(key)))

    def await_note(self, key: str) -> None:
        """Waits some seconds for a note, and reacts at once; a TimeoutError if it does not come."""
        self._asked(lambda: self.store.wait([key], timedelta(seconds=_ANSWER_S)))

    def read_all(self, prefix: str, ranks: Sequence[int]) -> dict[int, Any]:
        """The notes that are there already, as ``prefix/2`` of site 2, by rank."""
        return {r: self.read(key) for r in ranks if self.has(key := f"{prefix}/{r}")}

    def wait(
        self, prefix: str, ranks: Sequence[int], limit_s: float, tell: Tell = lambda _: None
    ) -> list[int]:
        """Waits for a note of every site, as ``prefix/2`` of site 2.

        Returns:
            The sites that have not written.
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
