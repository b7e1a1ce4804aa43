"""Timeouts of messages: a receive may take as long as something arrives, however large it is."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor

AN_INSTANT = timedelta(milliseconds=1)
LEAST_BYTES = 1 << 12
"""Least bytes of a part of a message: the slowest link must carry them within the timeout."""

_PARTS = 64
"""Parts that the measured link carries in a timeout: it may become slower by this factor."""
_MARGIN = 2.0
"""Factor by which the link may be slower than measured for what this site sends itself."""


class Pace:
    """The timeout of a transport, and what follows from the rate of its link.

    A message is received in parts, each of which has the timeout for itself. A site is not told
    when its own messages arrive, but they may have to arrive before an answer comes. So the timeout
    begins when they should have arrived, at the measured rate.

    Args:
        timeout: T, in which nothing arrives; None to leave it to the process group.

    Attributes:
        all_sent: when all that this site has sent should have arrived, by the monotonic clock.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self.timeout = timeout
        self._part_bytes, self._bytes_per_s = sys.maxsize, math.inf
        self.all_sent = 0.0
        self._sent_bytes = self._sent_before = 0

    def settle(self, bytes_per_s: float, timeout_s: float, others: int) -> None:
        """Sets the rate of the slowest link and the shortest timeout, the same on all sites.

        Args:
            bytes_per_s: rate at which a site can send.
            timeout_s: T.
            others: number of sites that a site sends to at a time.
        """
        self._bytes_per_s = bytes_per_s / _MARGIN
        self._part_bytes = max(LEAST_BYTES, int(bytes_per_s * timeout_s / _PARTS / others))

    def parts(self, t: Tensor) -> Sequence[Tensor]:
        """Returns the parts in which a 1-D tensor is sent, the same for all tensors of its size."""
        if t.nbytes <= self._part_bytes:
            return [t]
        return t.split(max(self._part_bytes // t.element_size(), 1))

    def sends(self, nbytes: int) -> float:
        """Notes that this site starts to send; returns when its earlier messages should arrive."""
        before = max(time.monotonic(), self.all_sent)
        self._sent_bytes += nbytes
        if math.isfinite(self._bytes_per_s):
            self.all_sent = before + nbytes / self._bytes_per_s
        return before

    def confirmed(self) -> None:
        """Notes the end of an exchange that no site began before it had all earlier messages.

        So all that this site had sent up to the previous such exchange has arrived, whatever rate
        was measured: the rate measured with a small model is one of delays, and far too low.
        """
        nbytes, self._sent_before = self._sent_bytes - self._sent_before, self._sent_bytes
        if math.isfinite(self._bytes_per_s):
            self.all_sent = min(self.all_sent, time.monotonic() + nbytes / self._bytes_per_s)

    def left(self, since: float) -> timedelta | None:
        """Returns the rest of the timeout, at least an instant; None without a timeout.

        Args:
            since: when something last arrived, or could first have, by the monotonic clock.
        """
        if self.timeout is None:
            return None
        return max(self.timeout - timedelta(seconds=time.monotonic() - since), AN_INSTANT)
