"""Ranks as threads: each has its own gloo group, so a test over two sites costs milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from math import inf
from time import monotonic
from typing import TypeVar

import torch.distributed as dist

from outergrad.launch.simulate import first_calls, forget_active_ddp, gloo_group, share_generator
from outergrad.step.transport_state import on_transport

first_calls()
share_generator()

T = TypeVar("T")
TIMEOUT = timedelta(seconds=20)


def run_ranks(
    sites: int, body: Callable[[int, dist.ProcessGroup], T], timeout: timedelta = TIMEOUT
) -> list[T]:
    """Runs body(rank, group) on every rank and returns the results; raises the first error."""
    return raise_first(try_ranks(sites, body, timeout))


def raise_first(results: list[T | BaseException]) -> list[T]:
    """The results, unless some are errors: then the first that was raised."""
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise min(errors, key=lambda error: getattr(error, "raised_at", inf))
    return results  # type: ignore[return-value]


def try_ranks(
    sites: int, body: Callable[[int, dist.ProcessGroup], T], timeout: timedelta = TIMEOUT
) -> list[T | BaseException]:
    """Like run_ranks, but an error of a rank is its result."""
    store = dist.HashStore()
    groups = [lambda r=r: gloo_group(store, r, sites, timeout) for r in range(sites)]
    return _in_threads(groups, body)


@cache
def lasting_groups(sites: int) -> tuple[dist.ProcessGroup, ...]:
    """Groups that the whole test session shares, for tests after which they are as before."""
    store = dist.HashStore()
    create = [lambda rank=rank: gloo_group(store, rank, sites, TIMEOUT) for rank in range(sites)]
    return tuple(_in_threads(create, lambda rank, group: group))


def run_on_lasting_groups(sites: int, body: Callable[[int, dist.ProcessGroup], T]) -> list[T]:
    """Like run_ranks, without the tenth of a second that new groups cost."""
    groups = [lambda group=group: group for group in lasting_groups(sites)]
    results = _in_threads(groups, body)
    used = [on_transport(group) for group in lasting_groups(sites)]
    unfinished = any(sessions.running or sessions.lost for sessions in used)
    for sessions in used:
        sessions.attached.clear()  # of sessions that a test left there
    if unfinished or any(isinstance(result, BaseException) for result in results):
        lasting_groups.cache_clear()  # some site may wait in the middle of an exchange
    return raise_first(results)


def _in_threads(
    groups: Sequence[Callable[[], dist.ProcessGroup]],
    body: Callable[[int, dist.ProcessGroup], T],
) -> list[T | BaseException]:
    sites = len(groups)
    results: list[T | BaseException] = [RuntimeError("did not finish")] * sites
    # A group whose last holder is DDP's reducer is destroyed with the interpreter's lock held, and
    # waits for a thread of gloo's that may wait for the lock: all groups live until all are done.
    alive: dict[int, dist.ProcessGroup] = {}

    def run(rank: int) -> None:
        try:
            alive[rank] = groups[rank]()
            results[rank] = body(rank, alive[rank])
        except BaseException as error:
            error.raised_at = monotonic()  # type: ignore[attr-defined]
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}") for r in range(sites)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
        assert not thread.is_alive(), f"{thread.name} hangs"
    for group in alive.values():
        if isinstance(group, dist.ProcessGroup):  # and not a mesh of several
            on_transport(group).end_watching()  # no rank is left that could ask
    forget_active_ddp()
    return results
