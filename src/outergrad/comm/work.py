"""Transfers of torch.distributed under way, and the conversion of their errors."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outergrad.core.errors import ExchangeError, Failure
from outergrad.core.sites import Site

_TAG = 0x6F67
"""First tag without a turn, apart from the user's point-to-point messages on the same group."""
CLOSING_TAG = _TAG - 1
"""Tag of a receive that is never answered (`TorchComm.close`)."""
_FIRST_TURN_TAG, _LANES = 1 << 30, 9
"""First tag of messages with a turn; each turn has one tag per lane."""
SUMS_LANE, ADDED_LANE = 6, 7
"""Lanes of what sites send each other to add up, and of the sums that they send each other then."""
RELAY_LANE = 8
"""Lane of the pieces of other sites' messages that a site passes on."""


def tag_of(turn: int, lane: int) -> int:
    """Returns the tag of a turn's messages in a lane, which no other turn or lane has."""
    assert 0 <= lane < _LANES
    return _FIRST_TURN_TAG + _LANES * turn + lane if turn else _TAG + lane


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


_ENDS = ("closed by peer", "reset by peer", "pair closure", "roken pipe")


class transport:  # noqa: N801  # a context manager, around every call
    """Converts RuntimeErrors of the transport into ExchangeErrors."""

    def __init__(self, sites: Sequence[int] = ()) -> None:
        self._sites = sites

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError):
            raise failed(error, self._sites) from error


def failed(error: RuntimeError, sites: Sequence[int]) -> ExchangeError:
    """Returns a transport's error as ExchangeError, with fewer calls than by `transport`."""
    kind = _kind(str(error))
    told = str(error) if kind == Failure.TRANSPORT else kind.value
    return ExchangeError(told, sites, kind=kind)


def _kind(error: str) -> Failure:
    """Classifies an error by gloo's message; only this function reads the words of one."""
    if "imed out" in error:
        return Failure.TIMEOUT
    return Failure.CLOSED if any(words in error for words in _ENDS) else Failure.TRANSPORT


@contextmanager
def if_open() -> Iterator[None]:
    """Ignores that a site has closed its connection, around transfers that are only started."""
    try:
        yield
    except ExchangeError as error:
        if error.kind != Failure.CLOSED:
            raise


class Ready:
    """Work that is done already, as with a single site."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        """Returns the result at once."""
        return self._result


class TorchWork:
    """Transfers of torch.distributed under way.

    Args:
        works: transfers, each with the ranks that it depends on, as far as these are known.
        result: call that makes the result of `wait`.
        pace: timeouts of the transfers.
        ready: when they could begin to arrive, by the monotonic clock: other sites may first have
            to receive what this site has sent before.
        sends: transfers from this site. Their failure is ignored: the site that waits for them
            reports it, and what this site has received is valid all the same.
    """

    def __init__(
        self,
        works: Sequence[tuple[dist.Work, Sequence[int]]],
        result: Callable[[], Any],
        pace: Pace,
        ready: float = 0.0,
        sends: Sequence[dist.Work] = (),
    ) -> None:
        self._works, self._result, self._pace = works, result, pace
        self._ready, self._sends = ready, sends

    def wait(self) -> Any:
        """Blocks until the transfers are done (on CUDA: orders the current stream behind them)."""
        began = time.monotonic()
        since = max(began, self._ready)
        for work, sites in self._works:
            try:
                self._wait(work, since)
            except RuntimeError as error:
                lost = failed(error, sites)
                lost.waited_s = time.monotonic() - began
                raise lost from error
            since = max(time.monotonic(), self._ready)  # the next part has the timeout for itself
        for work in self._sends:
            with suppress(RuntimeError):
                self._wait(work, since)
            since = time.monotonic()
        return self._result()

    def _wait(self, work: dist.Work, since: float) -> None:
        left = self._pace.left(since)
        if left is None:
            work.wait()
        else:
            work.wait(left)


def room(like: Tensor, size: int, site: Site) -> Tensor:
    """Allocates the tensor that a site announced; its memory is taken as it fills.

    Raises:
        ExchangeError: there is no memory for it.
    """
    try:
        return like.new_empty(size)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ExchangeError(f"{site.called} announced a message of {size} entries") from error


def sum_into(t: Tensor) -> Callable[[Sequence[Tensor]], Tensor]:
    """Returns a function that adds two tensors in rank order, into t, and returns t."""

    def summed(parts: Sequence[Tensor]) -> Tensor:
        torch.add(*parts, out=t.view(-1))
        return t

    return summed
