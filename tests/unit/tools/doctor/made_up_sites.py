"""Sites that are made up, and ranks as threads that go through the checks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar

from torch.distributed import HashStore

from outergrad.tools.doctor.course import Diagnosis, agree_on_verdict, examine
from outergrad.tools.doctor.findings import ok
from outergrad.tools.doctor.links import listen
from outergrad.tools.doctor.meeting import Board, Site

T = TypeVar("T")
VERSIONS = {"outergrad": "1.0", "torch": "2.11", "python": "3.12.1", "numpy": "2.0"}


def site(rank: int, sites: int = 2, **changed) -> Site:
    described = {
        "host": f"host{rank}",
        "interface": "eth0",
        "address": f"10.0.0.{rank + 1}",
        "port": 40000 + rank,
        "versions": VERSIONS,
        "findings": [ok("torch", "2.11")],
    }
    return Site(rank=rank, sites=sites, **{**described, **changed})


def in_threads(ranks, body: Callable[[int], T]) -> dict[int, T]:
    """Runs body(rank) for each rank at once."""
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        results[rank] = body(rank)

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}") for r in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), f"{thread.name} hangs"
    assert len(results) == len(threads)
    return results


def boards(sites: int, ranks=None, tell=lambda _: None) -> list[Board]:
    """A board for each of the ranks; all share one store."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=10))
    ranks = range(sites) if ranks is None else ranks
    return [Board(store, rank, sites, tell) for rank in ranks]


def examined(
    sites: int,
    present=None,
    timeout_s: float = 10,
    described: Mapping[int, dict] | None = None,
    clocks: Mapping[int, Callable[[], float]] | None = None,
    instead: Mapping[int, Callable[[Board, Site], None]] | None = None,
) -> dict[int, tuple[Diagnosis, int]]:
    """What each site reports, and its exit code.

    Args:
        sites: How many are expected.
        present: Ranks of those that come; by default all.
        timeout_s: How long they wait.
        described: What is unusual about some sites.
        clocks: Clocks of some sites.
        instead: What some sites do instead of the checks.
    """
    ranks = list(range(sites) if present is None else present)
    board_of = dict(zip(ranks, boards(sites, ranks), strict=True))

    def body(rank: int) -> tuple[Diagnosis, int]:
        with listen("127.0.0.1") as listener:
            changed = {"address": "127.0.0.1", "port": listener.getsockname()[1]}
            me = site(rank, **{"sites": sites, **changed, **(described or {}).get(rank, {})})
            if rank in (instead or {}):
                instead[rank](board_of[rank], me)
                return Diagnosis({}), 0
            options = {"clock": clocks[rank]} if rank in (clocks or {}) else {}
            report = examine(board_of[rank], me, listener, timeout_s, **options)
            return report, agree_on_verdict(board_of[rank], report)[0]

    return in_threads(ranks, body)


def said_at(report: Diagnosis, what: str) -> list[str]:
    """The sentences of a report about one thing."""
    return [f"{f.level.name}: {f.said}" for f in report.findings if f.what == what]
