"""A long broadcast in pieces, each confirmed by all sites before the next is sent.

The first site could not tell otherwise how far it has come: what it sends is in the buffers of its
own system at once, from where it may take minutes on a slow link.
"""

from __future__ import annotations

import time
from math import inf

from torch import Tensor

from outergrad.comm.pace import LEAST_BYTES
from outergrad.comm.words import words_of_all
from outergrad.core.transport import Comm
from outergrad.core.types import Link

_GROWTH = 4
_MOST_BYTES = 1 << 26
_SHARE = 0.125
"""Of the timeout that a piece is to take: the first ones may pass a slow link in a burst."""


class Course:
    """The pieces of what rank 0 sends to all, which grow as fast as the link allows.

    Every site knows the time of the slowest, so that all cut alike.

    Args:
        comm: the transport.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm, self._next_bytes = comm, LEAST_BYTES
        self._bytes, self._took_s, self._timeout_s = 0, 0.0, comm.patience_s
        self._least_s, self._least_bytes = inf, 0

    def broadcast(self, flat: Tensor) -> None:
        """Overwrites bytes with rank 0's."""
        done = 0
        while done < flat.nbytes:
            piece = flat[done : done + self._next_bytes]
            began = time.monotonic()
            self._comm.broadcast(piece)
            self._confirmed(piece.nbytes, time.monotonic() - began)
            done += piece.nbytes

    def _confirmed(self, nbytes: int, own_s: float) -> None:
        """All have it: the slowest site and the shortest timeout say how much comes next."""
        told = words_of_all(self._comm, [round(1e6 * own_s), round(1e3 * self._timeout_s)])
        took_s = max(max(own for own, _ in told), 1) / 1e6
        self._timeout_s = min(timeout for _, timeout in told) / 1e3
        self._bytes, self._took_s = self._bytes + nbytes, self._took_s + took_s
        self._least_s, self._least_bytes = min((self._least_s, self._least_bytes), (took_s, nbytes))
        wanted = int(nbytes / took_s * self._timeout_s * _SHARE)
        self._next_bytes = min(_GROWTH * self._next_bytes, max(LEAST_BYTES, wanted), _MOST_BYTES)

    def settle(self) -> None:
        """Tells the transport what it has found, if there was enough to send."""
        if self._bytes >= LEAST_BYTES:
            bytes_per_s = self._bytes / self._took_s
            delay_s = max(self._least_s - self._least_bytes / bytes_per_s, 0.0)
            self._comm.settle_pace(Link(delay_s, bytes_per_s), self._timeout_s)
