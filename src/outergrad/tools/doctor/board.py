"""Notes that the sites leave for one another in the store of the rendezvous."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistStoreError, Store  # pyright: ignore[reportPrivateImportUsage]

from outergrad.tools.doctor.bounded import bounded

T = TypeVar("T")

_ANSWER_S = 10.0
"""Longest time for the store itself to answer."""


class LostError(RuntimeError):
    """The store does not answer any more."""


class SilentError(RuntimeError):
    """Some sites did not do what the others waited for.

    Attributes:
        ranks: Of these sites.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"no word of {list(ranks)}")
        self.ranks = list(ranks)


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
        """A note; waits some seconds for it.

        Raises:
            TimeoutError: It did not come.
        """
        return json.loads(self._asked(lambda: self.store.get(key)))

    def await_note(self, key: str) -> None:
        """Waits some seconds for a note, and reacts at once.

        Raises:
            TimeoutError: It did not come.
        """
        self._asked(lambda: self.store.wait([key], timedelta(seconds=_ANSWER_S)))

    def wait(
        self,
        prefix: str,
        ranks: Sequence[int],
        limit_s: float,
        tell: Callable[[list[int]], None] = lambda _: None,
    ) -> None:
        """Waits for a note of every site, as ``prefix/2`` of site 2.

        Args:
            prefix: What the notes' names begin with.
            ranks: Sites whose notes are waited for.
            limit_s: How long.
            tell: Hears now and then who has not written yet.

        Raises:
            SilentError: Some did not write.
        """
        until_s = time.monotonic() + limit_s
        missing = list(ranks)
        while missing := [rank for rank in missing if not self.has(f"{prefix}/{rank}")]:
            tell(missing)
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise SilentError(missing)
            time.sleep(min(left_s, 0.02 + 0.02 * (limit_s - left_s), 0.2))

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
