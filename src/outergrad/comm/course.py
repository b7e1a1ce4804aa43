"""A long broadcast in pieces, each confirmed by all sites before the next is sent.

Without confirmations rank 0 could not tell how far a broadcast has come: what it sends is at once
in its own system's buffers, from where it may take minutes on a slow link.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from outergrad.comm.words import words_of_all
from outergrad.comm.work import LEAST_BYTES
from outergrad.core.transport import Comm
from outergrad.core.types import Link

_GROWTH = 4
_MOST_BYTES = 1 << 26
_SHARE = 0.125
"""Part of the timeout that a piece should take: the first ones may pass a slow link in a burst."""


class Course:
    """Broadcasts from rank 0 in pieces, which grow as fast as the link allows.

    Every site learns the time of the slowest one, so that all cut the pieces alike.

    Args:
        comm: the transport.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm, self._next_bytes = comm, LEAST_BYTES
        self._timeout_s = comm.patience_s
        self._pieces: list[tuple[float, int]] = []  # seconds and bytes of each

    def broadcast(self, flat: Tensor) -> None:
        """Overwrites a tensor of bytes with rank 0's."""
        done = 0
        while done < flat.nbytes:
            piece = flat[done : done + self._next_bytes]
            began = time.monotonic()
            self._comm.broadcast(piece)
            self._confirmed(piece.nbytes, time.monotonic() - began)
            done += piece.nbytes

    def _confirmed(self, nbytes: int, own_s: float) -> None:
        # The slowest site and the shortest timeout decide the size of the next piece.
        told = words_of_all(self._comm, [round(1e6 * own_s), round(1e3 * self._timeout_s)])
        took_s = max(max(own for own, _ in told), 1) / 1e6
        self._timeout_s = min(timeout for _, timeout in told) / 1e3
        self._pieces.append((took_s, nbytes))
        wanted = int(nbytes / took_s * self._timeout_s * _SHARE)
        self._next_bytes = min(_GROWTH * self._next_bytes, max(LEAST_BYTES, wanted), _MOST_BYTES)

    def settle(self) -> None:
        """Tells the transport the measured link, if the broadcasts were long enough."""
        all_bytes = sum(nbytes for _, nbytes in self._pieces)
        if all_bytes >= LEAST_BYTES:
            bytes_per_s = all_bytes / sum(took_s for took_s, _ in self._pieces)
            self._comm.settle_pace(Link(_delay_s(self._pieces), bytes_per_s), self._timeout_s)


def _delay_s(pieces: Sequence[tuple[float, int]]) -> float:
    """Returns the seconds that a piece of no bytes would take.

    They are extrapolated along a line (seconds over bytes) that begins at the fastest piece and
    lies below all larger ones: a busy machine makes a piece slower, never faster.
    """
    least_s, least_bytes = min(pieces)
    sizes = {nbytes for _, nbytes in pieces}
    if len(sizes) == 1:  # its bytes may have taken all of it
        return 0.0
    larger = [(s, nbytes) for s, nbytes in pieces if nbytes > least_bytes]
    s_per_byte = min(((s - least_s) / (nbytes - least_bytes) for s, nbytes in larger), default=0.0)
    return max(least_s - least_bytes * s_per_byte, 0.0)
