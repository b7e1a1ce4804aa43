"""How long to wait for a message: as long as something arrives, however large it is."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor

AN_INSTANT = timedelta(milliseconds=1)
LEAST_BYTES = 1 << 12
"""Of a part of a message: what the slowest link must carry within the timeout."""

_PARTS = 64
"""How many parts the link that was measured carries in a timeout: so much slower may it become."""
_MARGIN = 2.0
"""How much slower than measured it may be for what this site has sent itself."""


class Pace:
    """The timeout of a transport, and what follows from the rate of its link.

    A message is received in parts, each of which has the timeout for itself. Nothing tells a site
    how far what it sends has come, but it may have to be there before an answer comes: the timeout
    begins when it should be, at the rate that was measured.

    Args:
        timeout: T, without anything having arrived; None to leave it to the process group.

    Attributes:
        all_sent: when all that this site has sent should have arrived.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self.timeout = timeout
        self._part_bytes, self._bytes_per_s = sys.maxsize, math.inf
        self.all_sent = 0.0
        self._sent_bytes = self._sent_before = 0

    def settle(self, bytes_per_s: float, timeout_s: float, others: int) -> None:
        """Takes note of the slowest link and the shortest timeout, the same on all sites.

        Args:
            bytes_per_s: what a site can send.
            timeout_s: T.
            others: sites that it sends to at a time.
        """
        self._bytes_per_s = bytes_per_s / _MARGIN
        self._part_bytes = max(LEAST_BYTES, int(bytes_per_s * timeout_s / _PARTS / others))

    def parts(self, t: Tensor) -> Sequence[Tensor]:
        """What a 1-D tensor is sent as; the same for all tensors of its size."""
        if t.nbytes <= self._part_bytes:
            return [t]
        return t.split(max(self._part_bytes // t.element_size(), 1))

    def sends(self, nbytes: int) -> float:
        """This site begins to send so much; returns when what it sent before has arrived."""
        before = max(time.monotonic(), self.all_sent)
        self._sent_bytes += nbytes
        if math.isfinite(self._bytes_per_s):
            self.all_sent = before + nbytes / self._bytes_per_s
        return before

    def confirmed(self) -> None:
        """An exchange is over which nobody began before it had all that was sent to it before.

        So what this site had sent until the last such exchange has arrived, whatever the rate that
        was measured: that of a small model is a rate of delays, and far too low.
        """
        nbytes, self._sent_before = self._sent_bytes - self._sent_before, self._sent_bytes
        if math.isfinite(self._bytes_per_s):
            self.all_sent = min(self.all_sent, time.monotonic() + nbytes / self._bytes_per_s)

    def left(self, since: float) -> timedelta | None:
        """What is left of the timeout.

        Args:
            since: when something last arrived, or the first could have.
        """
        if self.timeout is None:
            return None
        return max(self.timeout - timedelta(seconds=time.monotonic() - since), AN_INSTANT)
