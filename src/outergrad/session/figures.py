"""Figures that sites exchange now and then, beside the messages of their steps.

An exchange is started after one step and read after the next, so that no site waits for it.
Both happen at fixed steps, so that all sites go by the figures in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence

from outergrad.core.errors import ExchangeError
from outergrad.core.transport import Comm, Work
from outergrad.messages.header import KNOWN, MAGIC, sum_of_words

_LANE = 4
"""Lane of the transport, apart from the messages of steps, as votes are."""
_PER_UNIT = 1e9


class Figures:
    """Exchange of seconds between sites.

    Args:
        comm: the transport.
        fingerprint: of the session, the same on all sites.
    """

    def __init__(self, comm: Comm, fingerprint: int) -> None:
        self._comm, self._fingerprint = comm, fingerprint
        self._said: tuple[int, Work] | None = None

    def say(self, step: int, seconds: Sequence[float]) -> None:
        """Starts an all-gather of seconds, as many on every site, after the same step.

        Raises:
            ExchangeError: another site is lost.
        """
        numbers = [round(_PER_UNIT * s) for s in seconds]
        words = [MAGIC, self._fingerprint, step, self._comm.rank, *numbers]
        words.append(sum_of_words(words[KNOWN:]))
        sizes = [len(words)] * self._comm.world_size
        self._said = step, self._comm.all_gather(self._comm.control(words), sizes, lane=_LANE)

    @property
    def is_silent(self) -> bool:
        """True if no exchange is under way."""
        return self._said is None

    def heard(self) -> list[list[float]]:
        """Waits for the exchange under way; returns the seconds of all sites (S).

        Raises:
            ExchangeError: another site is lost, or sent something else.
        """
        assert self._said is not None
        (step, work), self._said = self._said, None
        parts = enumerate(work.wait())
        return [self._seconds(part.tolist(), step, rank) for rank, part in parts]

    def _seconds(self, words: Sequence[int], step: int, rank: int) -> list[float]:
        known, numbers, total = words[:KNOWN], words[KNOWN:-1], words[-1]
        if list(known) != [MAGIC, self._fingerprint, step, rank] or min(numbers) < 0:
            raise ExchangeError(
                f"site {rank} sent something else than the seconds of its steps till {step}"
            )
        if total != sum_of_words(numbers):
            raise ExchangeError(f"the checksum of the seconds of site {rank} is wrong")
        return [number / _PER_UNIT for number in numbers]
