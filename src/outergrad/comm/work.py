"""Transfers of torch.distributed under way, and the conversion of their errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outergrad.comm.pace import Pace
from outergrad.core.errors import ExchangeError, Failure

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


def room(like: Tensor, size: int, rank: int) -> Tensor:
    """Allocates the tensor that a site announced; its memory is taken as it fills.

    Raises:
        ExchangeError: there is no memory for it.
    """
    try:
        return like.new_empty(size)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ExchangeError(f"site {rank} announced a message of {size} entries") from error


def sum_into(t: Tensor) -> Callable[[Sequence[Tensor]], Tensor]:
    """Returns a function that adds two tensors in rank order, into t, and returns t."""

    def summed(parts: Sequence[Tensor]) -> Tensor:
        torch.add(*parts, out=t.view(-1))
        return t

    return summed
